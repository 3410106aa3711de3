import assert from 'node:assert/strict'
import test from 'node:test'
import fc from 'fast-check'
import {
  assertProblem,
  assertUnchanged,
  json,
  post,
  readCheckpoint,
  readTimeline,
  record,
  recorded,
  request,
} from '../support.ts'
import { contract, shareService } from './target.ts'

/** Names that mean something to JavaScript, SQL, URLs, templates or the checkpoint itself. */
const HARD_KEYS = [
  '__proto__',
  'constructor',
  'hasOwnProperty',
  'toString',
  'a.b',
  'a',
  '{x}',
  'x"y',
  "x'y",
  'back\\slash',
  '0',
  '00',
  '-1',
  'a/b',
  '/',
  '//',
  '%41',
  'A',
  '%2F',
  '%',
  '%zz',
  '?',
  '#',
  '&key=b',
  '+',
  'a b',
  'a+b',
  ' ',
  '  ',
  '\n',
  '\t',
  '\r\n',
  '\u0001',
  '\u007f',
  '_checkpoint',
  '_step/a',
  'completed_steps',
  'source_hash',
  'NULL',
  'null',
  '{}',
  '{NULL}',
  '","',
  ',',
  '\\',
  '\\\\"',
  '$1',
  ':key',
  '*',
  'é',
  'e\u0301',
  '名前',
  '🤔',
  '\ufeff',
  '\uffff',
  '\u2028',
  '…',
  '...',
  'name#2',
  'name#retry2',
  'x'.repeat(1024),
  'é'.repeat(512),
  '🤔'.repeat(256),
]

const key = fc
  .string({ unit: 'binary', minLength: 1, maxLength: 40 })
  .filter((text) => !text.includes('\u0000') && text.isWellFormed() && text !== '.' && text !== '..')

contract('Step keys', (target) => {
  const start = shareService(target)

  async function freshJob() {
    const service = await start()
    return { service, jobId: await target.newJob(service) }
  }

  /** Records one step for each key, then finds each by every way to read it. */
  async function assertDistinctSteps(keys: readonly string[]) {
    const { service, jobId } = await freshJob()
    await Promise.all(keys.map((key, index) => recorded(record(service, jobId, { key, result: String(index) }))))
    const { completed_steps } = json(await readCheckpoint(service, jobId))
    // JSON.parse makes own members of all names, __proto__ too.
    assert.deepEqual(new Map(Object.entries(completed_steps)), new Map(keys.map((key, index) => [key, index])))
    await Promise.all(
      keys.map(async (key, index) => {
        const byPath = await request(service, `GET /jobs/${jobId}/steps/${encodeURIComponent(key)}`)
        assert.equal(byPath.text, String(index), `${JSON.stringify(key)} in a path`)
        const byQuery = json(await request(service, `GET /jobs/${jobId}/steps?key=${encodeURIComponent(key)}`))
        assert.deepEqual(byQuery, { steps: [{ key, result: index }] })
      }),
    )
    const entries = await readTimeline(service, jobId)
    assert.deepEqual(new Set(entries.map((entry) => entry.key)), new Set(keys))
    assert.ok(entries.every((entry) => entry.name === entry.key))
  }

  test('a key is data: no name means anything but itself', () => assertDistinctSteps(HARD_KEYS))

  test('any text is a key, in the body, in a path and in a query', async () => {
    await fc.assert(fc.asyncProperty(fc.uniqueArray(key, { minLength: 5, maxLength: 20 }), assertDistinctSteps), {
      numRuns: 15,
    })
  })

  test('a fresh job has none of the names of a prototype completed', async () => {
    const { service, jobId } = await freshJob()
    for (const key of ['__proto__', 'constructor', 'hasOwnProperty', 'toString'])
      assertProblem(await request(service, `GET /jobs/${jobId}/steps/${key}`), 'step_not_found', new RegExp(key))
  })

  test('the answer to a step gives its key back', async () => {
    const { service, jobId } = await freshJob()
    for (const key of ['x"y', '\n', '__proto__', '🤔', '\u2028'])
      assert.equal(json(await record(service, jobId, { key, result: '1' })).key, key)
  })

  test('a key is known by its characters, however its JSON spells them', async () => {
    const { service, jobId } = await freshJob()
    const version = await recorded(post(service, jobId, { body: '{"key":"a/é🤔","result":1}' }))
    const spelled = '{"k\\u0065y":"\\u0061\\/\\u00e9\\ud83e\\udd14","result":1}'
    assert.equal(await recorded(post(service, jobId, { body: spelled })), version)
  })

  test('keys that URLs rewrite are reached by the query, with a plus or %20 as the blank', async () => {
    const { service, jobId } = await freshJob()
    for (const key of ['.', '..', 'a b', 'a+b']) await recorded(record(service, jobId, { key, result: '1' }))
    const { steps } = json(await request(service, `GET /jobs/${jobId}/steps?key=..&key=.&key=a+b&key=a%2Bb&key=a%20b`))
    assert.deepEqual(
      steps.map((step: { key: string }) => step.key),
      ['..', '.', 'a b', 'a+b'],
    )
  })

  test('a key that is empty, too long, or no storable text is refused', async () => {
    const { service, jobId } = await freshJob()
    await recorded(record(service, jobId, { key: 'a', result: '1' }))
    for (const key of [
      '',
      'x'.repeat(1025),
      `${'é'.repeat(512)}x`,
      `${'🤔'.repeat(256)}x`,
      'x'.repeat(60_000),
      'a\u0000b',
      '\ud83e',
      'a\udc00',
      '\udd14\ud83e',
      null,
      17,
      true,
      ['a'],
      { a: 1 },
    ]) {
      const body = JSON.stringify({ key, result: 1 })
      const reply = await assertUnchanged(service, jobId, () => post(service, jobId, { body }))
      assertProblem(reply, 'invalid_request', /key/)
    }
    const withoutKey = await assertUnchanged(service, jobId, () => post(service, jobId, { body: '{"result":1}' }))
    assertProblem(withoutKey, 'invalid_request', /key/)
  })

  test('a key in a URL that cannot be one is refused, not unknown', async () => {
    const { service, jobId } = await freshJob()
    for (const bad of ['%00', '%ED%A0%80', '%FF', '%C0%80', '%E2%82', '%', '%G1', 'x'.repeat(1025)]) {
      assertProblem(await request(service, `GET /jobs/${jobId}/steps/a${bad}`), 'invalid_request')
      assertProblem(await request(service, `GET /jobs/${jobId}/steps?key=b&key=a${bad}`), 'invalid_request')
    }
    assertProblem(await request(service, `GET /jobs/${jobId}/steps?key=`), 'invalid_request', /key/)
    assertProblem(await request(service, `GET /jobs/${jobId}/steps`), 'invalid_request', /key/)
  })
})
