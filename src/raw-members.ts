import { INPUT_FORMATS, type InputFormat } from './input-formats.ts'
import { JsonMap, RawJson, SPAN } from './json-scanner.ts'
import { Problem, shown } from './problems.ts'

// What the scanner keeps unparsed is checked here: each function gives the member, or names it and what it is instead.

/** Undefined for a member that is absent or null: for an optional member these are the same. */
export function present(value: unknown): unknown {
  return value === null || (value instanceof RawJson && value.kind === 'null') ? undefined : value
}

/** A text in one of the input formats. */
export function requireFormat(value: unknown, format: InputFormat, name: string): string {
  const { validate, rule } = INPUT_FORMATS[format]
  if (typeof value !== 'string' || !validate(value))
    throw new Problem('invalid_request', `${name} ${rule}, not ${shown(value)}.`)
  return value
}

/** A JSON object that is kept as it is. */
export function requireRawObject(value: unknown, name: string): RawJson {
  if (value instanceof RawJson && value.kind === 'object') return value
  throw wrongKind(name, 'a JSON object', value)
}

/** An object with arbitrary names. */
export function requireMap(value: unknown, name: string): JsonMap {
  if (value instanceof JsonMap) return value
  throw wrongKind(name, 'a JSON object', value)
}

/** An object whose members the scanner knew. */
export function requireMembers(value: unknown, name: string): Record<string | typeof SPAN, unknown> {
  if (value !== null && typeof value === 'object' && !(value instanceof RawJson) && SPAN in value) {
    return value as Record<string | typeof SPAN, unknown>
  }
  throw wrongKind(name, 'a JSON object', value)
}

/** A JSON string that is kept as it is. */
export function requireRawString(value: unknown, name: string): RawJson {
  if (value instanceof RawJson && value.kind === 'string') return value
  throw wrongKind(name, 'a JSON string', value)
}

function wrongKind(name: string, wanted: string, value: unknown): Problem {
  if (value === undefined) return new Problem('invalid_request', `The member ${name} is missing.`)
  return new Problem('invalid_request', `${name} must be ${wanted}, not ${shown(value)}.`)
}

/** Children's ids by key: each key a step key, each id a UUID, none twice. */
export function requireChildren(value: unknown, name: string): { key: string; childId: string }[] {
  const seen = new Set<string>()
  return requireMap(value, name).entries.map(([key, id]) => {
    requireFormat(key, 'step-key', `A key of ${name}`)
    const childId = requireFormat(id, 'job-id', `${name}.${key}`).toLowerCase()
    if (seen.has(childId)) throw new Problem('invalid_request', `${name} names the child ${childId} twice.`)
    seen.add(childId)
    return { key, childId }
  })
}
