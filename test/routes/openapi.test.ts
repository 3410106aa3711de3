import assert from 'node:assert/strict'
import { readFileSync, writeFileSync } from 'node:fs'
import test, { after, before } from 'node:test'
import pino from 'pino'
import type { Store } from '../../db/store.ts'
import { type App, buildApp } from '../../src/app.ts'
import { PROBLEM_CODES, problemStatus } from '../../src/problems.ts'

const COMMITTED = new URL('../../openapi.yaml', import.meta.url)
const METHODS = ['get', 'put', 'post', 'delete', 'patch']
const SCALARS_AND_BRANCHES = ['string', 'integer', 'number', 'boolean', 'null', 'object', 'array']

interface Parameter {
  name: string
  in: string
  required?: boolean
  schema: unknown
}

interface Operation {
  operationId: string
  summary: string
  tags: string[]
  parameters?: Parameter[]
  requestBody?: { content: Record<string, unknown> }
  responses: Record<string, { description: string; content?: Record<string, { schema: { $ref?: string } }> }>
}

let app: App
/** As clients get it: through JSON. */
let document: { tags: { name: string }[]; paths: Record<string, Record<string, Operation>>; components: unknown }
let operations: { name: string; path: string; operation: Operation }[]

before(async () => {
  const limits = { maxBodyBytes: 1024, maxResultDepth: 8 }
  app = await buildApp({ store: {} as Store, limits, logger: pino({ level: 'silent' }) })
  await app.ready()
  document = JSON.parse(JSON.stringify(app.swagger()))
  operations = Object.entries(document.paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, operation]) => ({ name: `${method} ${path}`, path, operation })),
  )
})
after(() => app.close())

/** Every object inside `value`, with the way to it. */
function* objectsIn(value: unknown, place = '#'): Generator<[string, Record<string, unknown>]> {
  if (typeof value !== 'object' || value === null) return
  if (!Array.isArray(value)) yield [place, value as Record<string, unknown>]
  for (const [name, member] of Object.entries(value)) yield* objectsIn(member, `${place}/${name}`)
}

test('openapi.yaml is what the routes say (UPDATE_OPENAPI=1 rewrites it)', () => {
  const text = app.swagger({ yaml: true })
  if (process.env.UPDATE_OPENAPI === '1') writeFileSync(COMMITTED, text)
  const committed = readFileSync(COMMITTED, 'utf8')
  if (committed === text) return
  // Only where they part: the whole of both would fill the screen.
  const [lines, ours] = [committed.split('\n'), text.split('\n')]
  const differs = ours.findIndex((line, n) => line !== lines[n])
  const at = differs === -1 ? ours.length : differs
  const around = (of: string) =>
    of
      .split('\n')
      .slice(Math.max(0, at - 3), at + 4)
      .join('\n')
  assert.equal(around(committed), around(text), `Line ${at + 1}: run UPDATE_OPENAPI=1 npm test -- test/routes/openapi`)
})

test('each operation has a verb of its own, a summary, and a tag that is described', () => {
  const ids = operations.map(({ operation }) => operation.operationId)
  assert.equal(new Set(ids).size, ids.length)
  const tags = document.tags.map(({ name }) => name)
  for (const { name, operation } of operations) {
    assert.match(operation.operationId, /^[a-z]+([A-Z][a-z]+)*$/, name)
    assert.ok(operation.summary.length > 10, name)
    assert.equal(operation.tags.length, 1, name)
    assert.ok(tags.includes(operation.tags[0] as string), name)
    assert.ok(METHODS.includes(name.split(' ')[0] as string), name)
  }
})

test('each operation has an example', () => {
  for (const { name, operation } of operations) {
    const examples = [...objectsIn(operation)].filter(([, object]) => 'example' in object || 'examples' in object)
    assert.ok(examples.length > 0, name)
  }
})

test('each operation lists the problems that it can end in, by status and code', () => {
  for (const { name, operation } of operations) {
    const listed: string[] = []
    for (const [status, response] of Object.entries(operation.responses)) {
      assert.ok(response.description, `${name} ${status}`)
      if (Number(status) < 400) continue
      assert.deepEqual(
        response.content,
        { 'application/problem+json': { schema: { $ref: '#/components/schemas/Problem' } } },
        `${name} ${status}`,
      )
      for (const code of response.description.split(', ')) {
        assert.ok((PROBLEM_CODES as string[]).includes(code), `${name}: ${code}`)
        assert.equal(problemStatus(code as (typeof PROBLEM_CODES)[number]), Number(status))
        listed.push(code)
      }
    }
    for (const code of ['invalid_request', 'internal', 'unavailable'])
      assert.ok(listed.includes(code), `${name}: ${code}`)
    if (operation.requestBody)
      for (const code of ['invalid_json', 'payload_too_large', 'unsupported_media_type'])
        assert.ok(listed.includes(code), `${name}: ${code}`)
    assert.ok(
      Object.keys(operation.responses).some((status) => Number(status) < 300),
      `${name} can succeed`,
    )
  }
})

test('the parameters of a path are those that it names', () => {
  for (const { name, path, operation } of operations) {
    const inPath = (operation.parameters ?? []).filter((parameter) => parameter.in === 'path')
    const named = [...path.matchAll(/\{(\w+)\}/g)].map(([, parameter]) => parameter)
    assert.deepEqual(inPath.map((parameter) => parameter.name).sort(), named.sort(), name)
    assert.ok(
      inPath.every((parameter) => parameter.required),
      name,
    )
  }
})

test('every reference leads somewhere, and every type is one of JSON Schema', () => {
  for (const [place, object] of objectsIn(document)) {
    if (typeof object.$ref === 'string') {
      const target = object.$ref
        .slice(2)
        .split('/')
        .reduce<unknown>((at, name) => (at as Record<string, unknown> | undefined)?.[name], document)
      assert.ok(object.$ref.startsWith('#/') && target, `${place}: ${object.$ref}`)
    }
    assert.equal('$id' in object, false, place)
    const isSchema = /\/(schema|schemas\/\w+|items|additionalProperties)$|\/properties\/[^/]+$/.test(place)
    const isExample = /\/examples?(\/|$)/.test(place)
    if (isSchema && !isExample && 'type' in object)
      for (const type of [object.type].flat())
        assert.ok(SCALARS_AND_BRANCHES.includes(type as string), `${place}: ${type}`)
  }
})

test('required members are described', () => {
  for (const [place, object] of objectsIn(document)) {
    if (!Array.isArray(object.required) || typeof object.properties !== 'object') continue
    for (const name of object.required) assert.ok(name in (object.properties as object), `${place}: ${name}`)
  }
})
