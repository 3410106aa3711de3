import assert from 'node:assert/strict'
import test from 'node:test'
import { assertProblem, assertUnchanged, post, readResult, record, recorded, request, stepBody } from '../support.ts'
import { contract, shareService } from './target.ts'

const MAX_BODY_BYTES = 64 * 1024
const MAX_RESULT_DEPTH = 20

/** A body of exactly `length` bytes. */
function bodyOf(length: number): Buffer {
  const empty = '{"key":"k","result":""}'
  return Buffer.from(empty.replace('""', `"${'x'.repeat(length - empty.length)}"`))
}

/** In pieces, so that it is sent chunked. */
function pieces(body: Buffer, size = 10_000): Buffer[] {
  return Array.from({ length: Math.ceil(body.length / size) }, (_, n) => body.subarray(n * size, (n + 1) * size))
}

contract('Bodies', (target) => {
  const start = shareService(target, { limits: { maxBodyBytes: MAX_BODY_BYTES, maxResultDepth: MAX_RESULT_DEPTH } })

  async function freshJob() {
    const service = await start()
    return { service, jobId: await target.newJob(service) }
  }

  test('one leading BOM is as if absent, two are not JSON', async () => {
    const { service, jobId } = await freshJob()
    const version = await recorded(post(service, jobId, { body: '{"key":"a","result":1}' }))
    assert.equal(await recorded(post(service, jobId, { body: '\ufeff{"key":"a","result":1}' })), version)
    const reply = await assertUnchanged(service, jobId, () =>
      post(service, jobId, { body: '\ufeff\ufeff{"key":"a","result":2}' }),
    )
    assertProblem(reply, 'invalid_json')
  })

  test('bytes that are not UTF-8 are refused, with Content-Length and chunked, wherever they stand', async () => {
    const { service, jobId } = await freshJob()
    for (const bytes of ['ff', 'c080', 'eda080', 'f4908080', 'e282', '80', 'fe']) {
      for (const [before, after] of [
        ['{"key":"a","result":"', '"}'],
        ['{"key":"a', '","result":1}'],
        ['{"key":"a","result":1,"other":"', '"}'],
        ['{"key":"a","result":{"', '":1}}'],
        ['{"key":"a","result":1}', ''],
      ] as const) {
        const body = Buffer.concat([Buffer.from(before), Buffer.from(bytes, 'hex'), Buffer.from(after)])
        for (const sent of [body, pieces(body, 1)]) {
          const reply = await post(service, jobId, { body: sent })
          assertProblem(reply, 'invalid_json')
        }
      }
    }
    assertProblem(await request(service, `GET /jobs/${jobId}/steps/a`), 'step_not_found')
  })

  test('what is no JSON is refused with the place', async () => {
    const { service, jobId } = await freshJob()
    for (const body of [
      '{"key":"a","result":NaN}',
      '{"key":"a","result":Infinity}',
      '{"key":"a","result":-Infinity}',
      '{"key":"a","result":[1,]}',
      '{"key":"a","result":01}',
      '{"key":"a","result":1.}',
      '{"key":"a","result":+1}',
      '{"key":"a","result":\'x\'}',
      '{"key":"a","result":"\n"}',
      '{"key":"a","result":"\\x"}',
      '{"key":"a","result":undefined}',
      '{"key":"a","result":1',
      '{"key":"a","result":1}}',
      '{"key":"a","result":1} {}',
      '{"key":"a","result":1}\u00a0',
      '{key:"a","result":1}',
      '{"key":"a","result":/* */1}',
      '\u0000',
    ]) {
      const reply = await assertUnchanged(service, jobId, () => post(service, jobId, { body }))
      assertProblem(reply, 'invalid_json', /\d/)
    }
  })

  test('an empty body, and JSON that is no object, are refused', async () => {
    const { service, jobId } = await freshJob()
    for (const body of ['', ' ', '\ufeff']) {
      const reply = await assertUnchanged(service, jobId, () => post(service, jobId, { body }))
      assert.equal(reply.status, 400, reply.text)
      assertProblem(reply, 'invalid_json')
    }
    for (const body of ['null', '1', '"{}"', 'true', '[]', '[{"key":"a","result":1}]']) {
      const reply = await assertUnchanged(service, jobId, () => post(service, jobId, { body }))
      assertProblem(reply, 'invalid_request')
    }
  })

  test('application/json is taken in any case, with or without a charset', async () => {
    const { service, jobId } = await freshJob()
    for (const type of [
      'application/json',
      'application/json; charset=utf-8',
      'application/json;charset=UTF-8',
      'Application/JSON; Charset="Utf-8"',
      'application/json ; charset=utf-8',
    ]) {
      const reply = await post(service, jobId, { body: '{"key":"a","result":1}', headers: { 'content-type': type } })
      assert.equal(reply.status, 200, `${type}: ${reply.text}`)
    }
  })

  test('any other media type, none at all, and an encoded body are refused', async () => {
    const { service, jobId } = await freshJob()
    await assertUnchanged(service, jobId, async () => {
      for (const type of [
        'text/plain',
        'application/x-www-form-urlencoded',
        'application/jsonx',
        'text/json',
        'json',
        '*/*',
      ]) {
        const body = '{"key":"a","result":1}'
        const reply = await post(service, jobId, { body, headers: { 'content-type': type } })
        assertProblem(reply, 'unsupported_media_type')
      }
      const untyped = await request(service, `POST /jobs/${jobId}/inline-checkpoint`, {
        body: '{"key":"a","result":1}',
      })
      assertProblem(untyped, 'unsupported_media_type')
      for (const encoding of ['gzip', 'br', 'deflate', 'GZIP', 'gzip, identity']) {
        const headers = { 'content-encoding': encoding }
        assertProblem(
          await post(service, jobId, { body: '{"key":"a","result":1}', headers }),
          'unsupported_media_type',
          new RegExp(encoding),
        )
      }
    })
    const headers = { 'content-encoding': 'identity' }
    assert.equal((await post(service, jobId, { body: '{"key":"a","result":1}', headers })).status, 200)
  })

  test('a GET may carry a JSON content type', async () => {
    const { service, jobId } = await freshJob()
    const headers = { 'content-type': 'application/json' }
    assert.equal((await request(service, `GET /jobs/${jobId}/checkpoint`, { headers })).status, 200)
  })

  test('a body may have MAX_BODY_BYTES and not one more, with Content-Length and chunked', async () => {
    const { service, jobId } = await freshJob()
    for (const length of [MAX_BODY_BYTES - 1, MAX_BODY_BYTES]) {
      await recorded(post(service, jobId, { body: bodyOf(length) }))
      await recorded(post(service, jobId, { body: pieces(bodyOf(length)) }))
      assert.equal((await readResult(service, jobId, 'k')).length, length - '{"key":"k","result":}'.length)
    }
    await assertUnchanged(service, jobId, async () => {
      for (const body of [bodyOf(MAX_BODY_BYTES + 1), pieces(bodyOf(MAX_BODY_BYTES + 1))])
        assertProblem(await post(service, jobId, { body }), 'payload_too_large', new RegExp(String(MAX_BODY_BYTES)))
    })
  })

  test('a client that sends far too much before it reads gets the answer, not a reset', async () => {
    const { service, jobId } = await freshJob()
    const huge = bodyOf(8 * 1024 * 1024)
    for (const body of [huge, pieces(huge, 100_000)])
      assertProblem(await post(service, jobId, { body }), 'payload_too_large')
    assert.equal((await record(service, jobId, { key: 'k', result: '1' })).status, 200)
  })

  test('a body that is refused early is refused readably, however much of it follows', async () => {
    const { service, jobId } = await freshJob()
    const rest = 'x'.repeat(MAX_BODY_BYTES - 100)
    for (const body of [Buffer.from(`{"key":nonsense${rest}`), pieces(Buffer.from(`{"key":nonsense${rest}`))])
      assertProblem(await post(service, jobId, { body }), 'invalid_json')
  })

  test('a result may be nested MAX_RESULT_DEPTH deep and not one deeper', async () => {
    const { service, jobId } = await freshJob()
    const nested = (depth: number, [open, close]: readonly [string, string]) => open.repeat(depth) + close.repeat(depth)
    for (const pair of [
      ['[', ']'],
      [' [ ', ' ] '],
    ] as const) {
      await recorded(record(service, jobId, { key: 'k', result: nested(MAX_RESULT_DEPTH, pair) }))
      assert.equal(await readResult(service, jobId, 'k'), nested(MAX_RESULT_DEPTH, pair).trim())
      const body = stepBody({ key: 'k', result: nested(MAX_RESULT_DEPTH + 1, pair) })
      const reply = await assertUnchanged(service, jobId, () => post(service, jobId, { body }))
      assert.equal(reply.status, 400)
      assertProblem(reply, 'invalid_json', new RegExp(String(MAX_RESULT_DEPTH)))
    }
    const objects = `${'{"a":'.repeat(MAX_RESULT_DEPTH)}1${'}'.repeat(MAX_RESULT_DEPTH)}`
    await recorded(record(service, jobId, { key: 'k', result: objects }))
    assertProblem(await record(service, jobId, { key: 'k', result: `[${objects}]` }), 'invalid_json')
  })

  test('brackets in strings nest nothing', async () => {
    const { service, jobId } = await freshJob()
    await recorded(record(service, jobId, { key: 'k', result: `"${'['.repeat(500)}\\"${'{'.repeat(500)}"` }))
  })

  test('a result of 50,000 levels is refused at once, in any member', async () => {
    const { service, jobId } = await freshJob()
    const deep = '['.repeat(25_000) + ']'.repeat(25_000)
    for (const body of [
      stepBody({ key: 'k', result: deep }),
      `{"other":${deep},"key":"k","result":1}`,
      `{"key":${deep},"result":1}`,
      deep,
      '{"result":'.repeat(5_000),
    ]) {
      const reply = await assertUnchanged(service, jobId, () => post(service, jobId, { body }))
      assert.equal(reply.status, 400, reply.text)
    }
  })
})
