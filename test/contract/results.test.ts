import assert from 'node:assert/strict'
import test from 'node:test'
import fc from 'fast-check'
import { post, readCheckpoint, readResult, record, recorded, request, type Service, stepBody } from '../support.ts'
import { contract, shareService } from './target.ts'

const blank = fc.stringMatching(/^[ \t\n\r]{0,3}$/)

const character = fc.oneof(
  fc.string({ unit: 'grapheme', minLength: 1, maxLength: 2 }).map((text) => JSON.stringify(text).slice(1, -1)),
  fc.constantFrom(
    '\\u0000',
    '\\ud83e',
    '\\udc00',
    '\\ud83d\\ude00',
    '😀',
    '\\/',
    '/',
    '\\"',
    '\\\\',
    '\\b',
    '\\t',
    '{',
    '}',
  ),
  fc.stringMatching(/^[0-9a-fA-F]{4}$/).map((digits) => `\\u${digits}`),
)
const string = fc.array(character, { maxLength: 6 }).map((parts) => `"${parts.join('')}"`)

const number = fc
  .tuple(
    fc.constantFrom('', '-'),
    fc.oneof(fc.constant('0'), fc.stringMatching(/^[1-9]\d{0,40}$/)),
    fc.oneof(fc.constant(''), fc.stringMatching(/^\.\d{1,40}$/)),
    fc.oneof(fc.constant(''), fc.stringMatching(/^[eE][+-]?\d{1,4}$/)),
  )
  .map((parts) => parts.join(''))

/** JSON as text, with blanks anywhere and members in any number: `JSON.stringify` would never write most of it. */
const { value: jsonText } = fc.letrec<{ value: string; array: string; object: string }>((tie) => ({
  value: fc
    .tuple(
      fc.oneof(
        { depthSize: 'small' },
        number,
        string,
        fc.constantFrom('null', 'true', 'false'),
        tie('array'),
        tie('object'),
      ),
      blank,
    )
    .map(([text]) => text),
  array: fc
    .array(fc.tuple(blank, tie('value'), blank), { maxLength: 4 })
    .chain((items) => blank.map((empty) => `[${items.length ? items.map((item) => item.join('')).join(',') : empty}]`)),
  object: fc
    .array(
      fc.tuple(
        blank,
        fc.oneof(string, fc.constantFrom('"a"', '"__proto__"', '"__wmill_error"')),
        blank,
        fc.constant(':'),
        blank,
        tie('value'),
        blank,
      ),
      { maxLength: 4 },
    )
    .chain((members) => blank.map((empty) => `{${members.length ? members.map((m) => m.join('')).join(',') : empty}}`)),
}))

contract('Results', (target) => {
  const start = shareService(target)
  const exact = { skip: !(target.differences.keepsText && target.differences.storesEveryJson) }

  /** All three ways to read it give the text, and the repeat is recognised. */
  async function assertKept(service: Service, result: string) {
    const jobId = await target.newJob(service)
    const version = await recorded(record(service, jobId, { key: 'k', result }))
    assert.equal(await readResult(service, jobId, 'k'), result)
    const several = await request(service, `GET /jobs/${jobId}/steps?key=k`)
    assert.equal(several.text, `{"steps":[{"key":"k","result":${result}}]}`)
    const { text } = await readCheckpoint(service, jobId)
    assert.ok(text.includes(`"completed_steps":{"k":${result}}`), text)
    JSON.parse(text)
    assert.equal(await recorded(record(service, jobId, { key: 'k', result })), version)
  }

  test('any JSON comes back byte for byte', exact, async () => {
    const service = await start()
    const results = fc.array(jsonText, { minLength: 10, maxLength: 30 })
    await fc.assert(
      fc.asyncProperty(results, async (texts) => {
        const jobId = await target.newJob(service)
        const steps = texts.map((result, index) => ({ key: `k${index}`, result }))
        await Promise.all(steps.map((step) => recorded(record(service, jobId, step))))
        const query = steps.map(({ key }) => `key=${key}`).join('&')
        const expected = steps.map(({ key, result }) => `{"key":"${key}","result":${result}}`).join(',')
        assert.equal((await request(service, `GET /jobs/${jobId}/steps?${query}`)).text, `{"steps":[${expected}]}`)
        const { text } = await readCheckpoint(service, jobId)
        for (const { key, result } of steps) assert.ok(text.includes(`"${key}":${result}`), text)
        JSON.parse(text)
      }),
      { numRuns: 20 },
    )
  })

  test('every digit, escape, duplicate and blank of known hard results comes back', exact, async () => {
    const service = await start()
    for (const result of [
      '12345678901234567890',
      '0.1000000000000000055511151231257827',
      '1.0',
      '-0',
      '1e400',
      '1E-400',
      `1${'0'.repeat(5000)}`,
      '"a\\u0000b"',
      '{"a\\u0000b":1}',
      '"\\ud83e"',
      '"\\udd14\\ud83e"',
      '"\\ud83e\\udd14"',
      '"🤔"',
      '{"b":1,"a":2,"b":3,"a":2}',
      '{"__proto__":{"polluted":true},"constructor":{"prototype":1}}',
      '{ "a" :\t[ ] ,\r\n"b": { } }',
      '"\\u0061\\/\\u00e9é"',
      '"\u2028\u2029\u007f\ufeff\uffff"',
      '"\\ufeff"',
      '"$1 {} \\\\N NULL \',\\"},{\\""',
    ])
      await assertKept(service, result)
  })

  test('blanks around a result are not part of it', exact, async () => {
    const service = await start()
    const jobId = await target.newJob(service)
    const body = '\n { "key" : "k" ,\t"result" :  [ 1 ,2 ] \r\n} \n'
    await recorded(post(service, jobId, { body }))
    assert.equal(await readResult(service, jobId, 'k'), '[ 1 ,2 ]')
  })

  test('a result survives wherever the chunks of its body are cut', exact, async () => {
    const service = await start()
    const result = '{"é":"\\u0000🤔\\ud83e", "n":-1.50e+3, "__wmill_error" :true}'
    const body = Buffer.from(stepBody({ key: 'kéy', result, started_at: '2026-12-01T01:45:06Z' }))
    const jobId = await target.newJob(service)
    for (let cut = 1; cut < body.length; cut++) {
      await recorded(post(service, jobId, { body: [body.subarray(0, cut), body.subarray(cut)] }))
    }
    const bytewise = Array.from(body, (_, index) => body.subarray(index, index + 1))
    const version = await recorded(post(service, jobId, { body: bytewise }))
    assert.equal(await readResult(service, jobId, 'kéy'), result)
    // Every one of them was the same step: the version is that of the first.
    assert.match(version, /\.1$/)
  })

  test('a result of several megabytes comes back byte for byte', exact, async () => {
    const service = await start()
    const jobId = await target.newJob(service)
    const result = `[${Array.from({ length: 40_000 }, (_, n) => `{"n": ${n}.0, "text":"line ${n} — \\u0000 é 🤔"}`).join(',\n')}]`
    assert.ok(result.length > 1_500_000)
    await recorded(record(service, jobId, { key: 'k', result }))
    assert.equal(await readResult(service, jobId, 'k'), result)
    assert.ok((await readCheckpoint(service, jobId)).text.endsWith(`"completed_steps":{"k":${result}}}`))
  })

  test('a member called __proto__ reaches no prototype', async () => {
    const service = await start()
    const jobId = await target.newJob(service)
    await recorded(record(service, jobId, { key: 'k', result: '{"__proto__":{"polluted":1}}' }))
    await recorded(post(service, jobId, { body: '{"key":"l","result":1,"__proto__":{"polluted":1}}' }))
    assert.equal(({} as { polluted?: number }).polluted, undefined)
    const fresh = await target.newJob(service)
    assert.equal((await request(service, `GET /jobs/${fresh}/steps/polluted`)).status, 404)
  })
})
