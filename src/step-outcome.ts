import { RawJson, SPAN } from './json-scanner.ts'
import { Problem } from './problems.ts'
import { present, requireMembers, requireRawString } from './raw-members.ts'

/** How the scanner treats the two ways in which a step or a job can end. */
export const OUTCOME_SHAPES = {
  result: 'raw',
  error: { members: { name: 'raw', message: 'raw' }, span: true },
} as const

export type StepOutcome = { result: RawJson } | { error: RawJson; message: RawJson }

/** Exactly one of `result` and `error` of a body. `place` begins the error's text: '' or 'steps.3: '. */
export function readOutcome(body: { result?: unknown; error?: unknown }, place = ''): StepOutcome {
  const hasResult = body.result !== undefined
  const error = present(body.error)
  if (hasResult === (error !== undefined)) {
    throw new Problem(
      'invalid_request',
      `${place}Exactly one of result and error must be given, not ${hasResult ? 'both' : 'neither'}.`,
    )
  }
  if (hasResult) return { result: body.result as RawJson }
  const members = requireMembers(error, `${place}error`)
  requireRawString(members.name, `${place}error.name`)
  return { error: members[SPAN] as RawJson, message: requireRawString(members.message, `${place}error.message`) }
}

/**
 * The failure marker of the Windmill SDKs around an error, so that every reader meets one form of failure. The error's
 * text is kept as it came. `key` is undefined for a job.
 */
export function failureMarker(
  { error, message }: { error: RawJson; message: RawJson },
  key: string | undefined,
): RawJson {
  const stepKey = key === undefined ? '' : `,"step_key":${JSON.stringify(key)}`
  const text = `{"__wmill_error":true,"message":${message.text()}${stepKey},"result":{"error":${error.text()}}}`
  const bytes = Buffer.from(text)
  return new RawJson({ bytes }, { start: 0, end: bytes.length, kind: 'object', isFailure: true })
}
