import assert from 'node:assert/strict'
import test from 'node:test'
import {
  assertProblem,
  assertUnchanged,
  json,
  post,
  readCheckpoint,
  readResult,
  readTimeline,
  recorded,
  request,
} from '../support.ts'
import { contract, shareService } from './target.ts'

contract('Members of a step', (target) => {
  const start = shareService(target)

  async function freshJob() {
    const service = await start()
    return { service, jobId: await target.newJob(service) }
  }

  async function assertRefused(body: string, detail: RegExp) {
    const { service, jobId } = await freshJob()
    const reply = await assertUnchanged(service, jobId, () => post(service, jobId, { body }))
    assertProblem(reply, 'invalid_request', detail)
  }

  test('a step without a result is refused', async () => {
    await assertRefused('{"key":"a"}', /result/)
    await assertRefused('{}', /key|result/)
  })

  test('a time that is not a real date and time is refused, with the text at fault', async () => {
    for (const started_at of [
      '2026-02-30T10:00:00Z',
      '2025-02-29T10:00:00Z',
      '2026-12-01T10:00:60Z',
      '2026-12-01T24:00:00Z',
      '2026-12-01 10:00:00Z',
      '2026-12-01',
      '',
      'tomorrow',
      '\u0000',
      1764554400000,
      true,
      [],
      {},
    ])
      await assertRefused(JSON.stringify({ key: 'a', result: 1, started_at }), /started_at/)
    await assertRefused('{"key":"a","result":1,"started_at":"tomorrow"}', /"tomorrow"/)
  })

  test('a duration that is not a whole number up to 2^53-1 is refused', async () => {
    for (const duration of [
      '1.5',
      '"12"',
      'true',
      '1e21',
      '9007199254740992',
      '12345678901234567890',
      '[]',
      '""',
      '1e999',
    ])
      await assertRefused(`{"key":"a","result":1,"duration_ms":${duration}}`, /duration_ms/)
  })

  test('a whole number is one however it is written', async () => {
    const { service, jobId } = await freshJob()
    await recorded(post(service, jobId, { body: '{"key":"a","result":1,"duration_ms":1.20e2}' }))
    assert.equal((await readTimeline(service, jobId))[0]?.duration_ms, 120)
  })

  test('null for an optional member is as if it were absent', async () => {
    const { service, jobId } = await freshJob()
    const body = '{"key":"a","result":1,"started_at":null,"duration_ms":null,"source_hash":null}'
    const version = await recorded(post(service, jobId, { body }))
    assert.equal(await recorded(post(service, jobId, { body: '{"key":"a","result":1}' })), version)
    const [entry] = await readTimeline(service, jobId)
    assert.ok(!Number.isNaN(Date.parse(entry?.started_at ?? '')))
    assert.equal(entry !== undefined && 'duration_ms' in entry, false)
  })

  test('members that are not known are ignored, whatever they hold', async () => {
    const { service, jobId } = await freshJob()
    const body = '{"x":{"key":"no"},"key":"a","Result":2,"result":1,"error":[1e999,"\\u0000"],"__proto__":{},"":null}'
    await recorded(post(service, jobId, { body }))
    assert.equal(await readResult(service, jobId, 'a'), '1')
  })

  test('of a member given twice the last counts', async () => {
    const { service, jobId } = await freshJob()
    const body =
      '{"key":"no","result":{"deep":[1,2]},"started_at":"bad","duration_ms":1.5,"source_hash":7,' +
      '"key":"a","result": "last" ,"started_at":"2026-12-01T01:45:06Z","duration_ms":5,"source_hash":null}'
    await recorded(post(service, jobId, { body }))
    assert.deepEqual(json(await readCheckpoint(service, jobId)).completed_steps, { a: 'last' })
    const [entry] = await readTimeline(service, jobId)
    assert.deepEqual([entry?.started_at, entry?.duration_ms], ['2026-12-01T01:45:06Z', 5])
    await assertRefused('{"key":"a","result":1,"key":""}', /key/)
    await assertRefused('{"key":"a","result":1,"duration_ms":5,"duration_ms":"x"}', /duration_ms/)
  })
})

contract('Job ids', (target) => {
  const start = shareService(target)

  test('upper case, lower case and a mixture name the same job', async () => {
    const service = await start()
    const jobId = await target.newJob(service)
    const mixed = jobId.replace(/[a-f]/g, (letter, at: number) => (at % 2 ? letter.toUpperCase() : letter))
    for (const [index, id] of [jobId.toUpperCase(), jobId, mixed].entries()) {
      const reply = await post(service, id, { body: `{"key":"k${index}","result":1}` })
      assert.equal(json(reply).job_id, jobId)
      assert.equal(
        Object.keys(json(await readCheckpoint(service, jobId.toUpperCase())).completed_steps).length,
        index + 1,
      )
    }
    assert.equal(json(await request(service, `GET /jobs/${mixed}`)).id, jobId)
    assert.equal((await request(service, `GET /jobs/${mixed}/steps/k0`)).text, '1')
    assert.equal((await readTimeline(service, mixed)).length, 3)
  })

  test('what is no UUID is refused by every route', async () => {
    const service = await start()
    const jobId = await target.newJob(service)
    for (const id of [
      'x',
      '17',
      'x'.repeat(200),
      jobId.slice(1),
      `${jobId}0`,
      `{${jobId}}`,
      jobId.replaceAll('-', ''),
      jobId.replace('-', '_'),
      `${jobId.slice(0, -1)}g`,
      `%20${jobId}`,
      `${jobId}%0A`,
      `${jobId}%00`,
      '%C0',
      '%ED%A0%80',
      '__proto__',
      '%2e%2e',
    ]) {
      for (const line of [
        `POST /jobs/${id}/inline-checkpoint`,
        `POST /api/w/w/jobs/wac/inline_checkpoint/${id}`,
        `GET /jobs/${id}/checkpoint`,
        `GET /jobs/${id}/steps/a`,
        `GET /jobs/${id}/steps?key=a`,
        `GET /jobs/${id}/timeline`,
        `GET /jobs/${id}`,
      ]) {
        const options = line.startsWith('POST')
          ? { body: '{"key":"a","result":1}', headers: { 'content-type': 'application/json' } }
          : {}
        assertProblem(await request(service, line, options), 'invalid_request')
      }
    }
  })
})
