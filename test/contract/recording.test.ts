import assert from 'node:assert/strict'
import test from 'node:test'
import {
  assertProblem,
  assertUnchanged,
  json,
  observe,
  post,
  readCheckpoint,
  readResult,
  readTimeline,
  record,
  recorded,
  request,
  stepBody,
} from '../support.ts'
import { contract, shareService } from './target.ts'

const STARTED_AT = '2026-12-01T01:45:06.357Z'
/** Design, section 2, word for word. */
const REFUSAL =
  'Workflow source code changed between replays. Cannot safely resume from checkpoint — step keys may have shifted. Please restart this workflow.'

contract('Recording a step', (target) => {
  const start = shareService(target)

  async function freshJob() {
    const service = await start()
    return { service, jobId: await target.newJob(service) }
  }

  test('the answer names the job, the key and the version that the checkpoint then has', async () => {
    const { service, jobId } = await freshJob()
    const reply = await record(service, jobId, { key: 'greet', result: '"hello"' })
    assert.equal(reply.status, 200)
    assert.match(String(reply.headers['content-type']), /^application\/json/)
    const { version, ...rest } = json(reply)
    assert.deepEqual(rest, { job_id: jobId, key: 'greet' })
    assert.equal((await readCheckpoint(service, jobId)).headers.etag, `"${version}"`)
    assert.notEqual(version, '0')
  })

  test('the path that the Windmill SDKs call records the same step', async () => {
    const { service, jobId } = await freshJob()
    const reply = await request(service, `POST /api/w/any%20team/jobs/wac/inline_checkpoint/${jobId}`, {
      headers: { 'content-type': 'application/json' },
      body: stepBody({ key: 'greet', result: '{"a": 1}' }),
    })
    const { version, ...rest } = json(reply)
    assert.equal(reply.status, 200)
    assert.deepEqual(rest, { job_id: jobId, key: 'greet' })
    assert.equal(await readResult(service, jobId, 'greet'), '{"a": 1}')
    // Sent again by the other path it is known.
    assert.equal(await recorded(record(service, jobId, { key: 'greet', result: '{"a": 1}' })), version)
  })

  test('the checkpoint has the steps in the order of their first writes', async () => {
    const { service, jobId } = await freshJob()
    for (const [key, result] of Object.entries({ zebra: '1', ape: '2', 10: '3', 9: '4' }))
      await recorded(record(service, jobId, { key, result }))
    await recorded(record(service, jobId, { key: 'zebra', result: '5' }))
    const keys = (await readTimeline(service, jobId)).map((entry) => entry.key)
    // JavaScript puts the whole numbers first when it iterates above; they were sent in that order.
    assert.deepEqual(keys, ['9', '10', 'zebra', 'ape'])
    const { text } = await readCheckpoint(service, jobId)
    assert.match(text, /"completed_steps":\{"9":4,"10":3,"zebra":5,"ape":2\}/)
  })

  test('a step sent twice changes nothing, not even the version', async () => {
    const { service, jobId } = await freshJob()
    const step = { key: 'a', result: '{"b": [1, 2.0]}', started_at: STARTED_AT, duration_ms: 12 }
    const version = await recorded(record(service, jobId, step))
    const before = await observe(service, jobId)
    assert.equal(await recorded(record(service, jobId, step)), version)
    assert.deepEqual(await observe(service, jobId), before)
  })

  test('a repeat that leaves out times changes nothing, whatever is stored for them', async () => {
    const { service, jobId } = await freshJob()
    const full = { key: 'a', result: '1', started_at: STARTED_AT, duration_ms: 12 }
    const version = await recorded(record(service, jobId, full))
    assert.equal(await recorded(record(service, jobId, { key: 'a', result: '1' })), version)
    assert.equal(await recorded(record(service, jobId, { key: 'a', result: '1', duration_ms: 12 })), version)
    assert.equal(await recorded(record(service, jobId, { key: 'a', result: '1', started_at: STARTED_AT })), version)
    const [entry] = await readTimeline(service, jobId)
    assert.equal(entry?.started_at, STARTED_AT)
  })

  test('a step without times sent twice keeps the time of the first', async () => {
    const { service, jobId } = await freshJob()
    const version = await recorded(record(service, jobId, { key: 'a', result: '1' }))
    const before = await observe(service, jobId)
    assert.equal(await recorded(record(service, jobId, { key: 'a', result: '1' })), version)
    assert.deepEqual(await observe(service, jobId), before)
  })

  test('another time or duration of the same result is a change', async () => {
    const { service, jobId } = await freshJob()
    const step = { key: 'a', result: '1', started_at: STARTED_AT, duration_ms: 12 }
    const first = await recorded(record(service, jobId, step))
    const second = await recorded(record(service, jobId, { ...step, duration_ms: 13 }))
    const third = await recorded(record(service, jobId, { ...step, started_at: '2026-12-01T01:45:06.358Z' }))
    assert.equal(new Set([first, second, third]).size, 3)
    const [entry] = await readTimeline(service, jobId)
    assert.deepEqual([entry?.started_at, entry?.duration_ms], ['2026-12-01T01:45:06.358Z', 12])
  })

  test('a key that is there gets the later result, and keeps its place', async () => {
    const { service, jobId } = await freshJob()
    const first = await recorded(record(service, jobId, { key: 'a', result: '"one"' }))
    await recorded(record(service, jobId, { key: 'b', result: '2' }))
    const last = await recorded(record(service, jobId, { key: 'a', result: '{"three": 3}' }))
    assert.notEqual(first, last)
    const { text } = await readCheckpoint(service, jobId)
    assert.match(text, /"completed_steps":\{"a":\{"three": 3\},"b":2\}/)
    const job = json(await request(service, `GET /jobs/${jobId}`))
    assert.deepEqual([job.step_count, job.bytes], [2, '{"three": 3}'.length + 1])
  })

  test('whitespace inside a result makes it another result', { skip: !target.differences.keepsText }, async () => {
    const { service, jobId } = await freshJob()
    const first = await recorded(record(service, jobId, { key: 'a', result: '[1,2]' }))
    const second = await recorded(record(service, jobId, { key: 'a', result: '[1, 2]' }))
    assert.notEqual(first, second)
    assert.equal(await readResult(service, jobId, 'a'), '[1, 2]')
  })

  test('the version differs after every change and never comes back', async () => {
    const { service, jobId } = await freshJob()
    const versions = new Set<string>(['0'])
    for (let turn = 0; turn < 10; turn++)
      versions.add(await recorded(record(service, jobId, { key: 'a', result: String(turn % 2) })))
    assert.equal(versions.size, 11)
  })

  test('the timeline entry has the times that the client sent, verbatim', async () => {
    const { service, jobId } = await freshJob()
    for (const started_at of [
      '2026-12-01T01:45:06.357Z',
      '2026-07-28T10:11:12.123456+05:30',
      '2026-07-28T10:11:12',
      '2026-07-28T10:11-00:00',
      '2024-02-29T23:59:59.000000001Z',
    ]) {
      await recorded(record(service, jobId, { key: started_at, result: '1', started_at, duration_ms: 7 }))
      const { position, ...entry } = (await readTimeline(service, jobId)).at(-1) ?? assert.fail()
      assert.ok(position > 0)
      assert.deepEqual(entry, {
        kind: 'step',
        key: started_at,
        name: started_at,
        status: 'completed',
        scheduled_for: started_at,
        started_at,
        duration_ms: 7,
        bytes: 1,
      })
    }
  })

  test('a step without a time has that of the server, and no duration', async () => {
    const { service, jobId } = await freshJob()
    const before = Date.now()
    await recorded(record(service, jobId, { key: 'a', result: '1' }))
    const after = Date.now()
    const [entry] = await readTimeline(service, jobId)
    const time = Date.parse(entry?.started_at ?? '')
    assert.ok(time >= before - 1 && time <= after + 1, `${entry?.started_at}`)
    assert.match(entry?.started_at ?? '', /^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3,6}Z$/)
    assert.equal(entry?.scheduled_for, entry?.started_at)
    assert.equal(entry !== undefined && 'duration_ms' in entry, false)
  })

  test('durations of 0, beyond 32 bits and up to 2^53-1 are kept', async () => {
    const { service, jobId } = await freshJob()
    const durations = [0, 2147483648, Number.MAX_SAFE_INTEGER]
    for (const duration_ms of durations)
      await recorded(record(service, jobId, { key: `d${duration_ms}`, result: '1', duration_ms }))
    const entries = await readTimeline(service, jobId)
    assert.deepEqual(
      entries.map((entry) => entry.duration_ms),
      durations,
    )
  })

  test('a negative duration, of a clock that stepped back, counts as absent', async () => {
    const { service, jobId } = await freshJob()
    const version = await recorded(record(service, jobId, { key: 'a', result: '1', duration_ms: -1 }))
    const [entry] = await readTimeline(service, jobId)
    assert.equal(entry !== undefined && 'duration_ms' in entry, false)
    assert.equal(await recorded(record(service, jobId, { key: 'a', result: '1', duration_ms: -5 })), version)
  })

  test('null is a result like any other: first, later, and over another result', async () => {
    const { service, jobId } = await freshJob()
    await recorded(record(service, jobId, { key: 'first', result: 'null' }))
    await recorded(record(service, jobId, { key: 'second', result: '{"x":1}' }))
    await recorded(record(service, jobId, { key: 'third', result: 'null' }))
    assert.match((await readCheckpoint(service, jobId)).text, /\{"first":null,"second":\{"x":1\},"third":null\}/)
    await recorded(record(service, jobId, { key: 'second', result: 'null' }))
    assert.equal(await readResult(service, jobId, 'second'), 'null')
    assert.equal(json(await request(service, `GET /jobs/${jobId}`)).step_count, 3)
  })

  test('falsy results and strings that look like JSON are kept as they are', async () => {
    const { service, jobId } = await freshJob()
    for (const result of ['""', '0', 'false', '[]', '{}', '"42"', '"{\\"a\\":1}"', '"null"', '" "']) {
      await recorded(record(service, jobId, { key: result, result }))
      assert.equal(await readResult(service, jobId, result), result)
    }
  })
})

contract('Source hashes', (target) => {
  const start = shareService(target)
  const adopts = { skip: !target.differences.adoptsHash }

  async function freshJob() {
    const service = await start()
    return { service, jobId: await target.newJob(service) }
  }

  async function hashOf(service: Awaited<ReturnType<typeof start>>, jobId: string) {
    return json(await readCheckpoint(service, jobId)).source_hash
  }

  test('a job has no hash until a step names one that is not empty', adopts, async () => {
    const { service, jobId } = await freshJob()
    await recorded(record(service, jobId, { key: 'a', result: '1' }))
    await recorded(record(service, jobId, { key: 'b', result: '1', source_hash: '' }))
    await recorded(record(service, jobId, { key: 'c', result: '1', source_hash: null }))
    assert.equal(await hashOf(service, jobId), '')
    await recorded(record(service, jobId, { key: 'd', result: '1', source_hash: 'h1' }))
    assert.equal(await hashOf(service, jobId), 'h1')
  })

  test('the first hash is adopted by the very first step', adopts, async () => {
    const { service, jobId } = await freshJob()
    await recorded(record(service, jobId, { key: 'a', result: '1', source_hash: '-77 é "quoted"' }))
    assert.equal(await hashOf(service, jobId), '-77 é "quoted"')
  })

  test(
    'a step under another hash is refused with the sentence that users know, and changes nothing',
    adopts,
    async () => {
      const { service, jobId } = await freshJob()
      await recorded(record(service, jobId, { key: 'a', result: '1', source_hash: 'h1' }))
      await assertUnchanged(service, jobId, async () => {
        for (const step of [
          { key: 'b', result: '2' },
          { key: 'a', result: '2' },
          { key: 'a', result: '1' },
        ]) {
          const reply = await record(service, jobId, { ...step, source_hash: 'H1' })
          assertProblem(reply, 'source_changed')
          assert.equal(json(reply).detail, REFUSAL)
        }
      })
    },
  )

  test('a step without a hash is recorded whatever hash the job has, and leaves it', adopts, async () => {
    const { service, jobId } = await freshJob()
    await recorded(record(service, jobId, { key: 'a', result: '1', source_hash: 'h1' }))
    await recorded(record(service, jobId, { key: 'b', result: '1' }))
    await recorded(record(service, jobId, { key: 'c', result: '1', source_hash: '' }))
    await recorded(record(service, jobId, { key: 'd', result: '1', source_hash: 'h1' }))
    assert.equal(await hashOf(service, jobId), 'h1')
  })

  test('a repeat that names a hash for the first time loses nothing', adopts, async () => {
    const { service, jobId } = await freshJob()
    await recorded(record(service, jobId, { key: 'a', result: '1' }))
    await recorded(record(service, jobId, { key: 'a', result: '1', source_hash: 'h1' }))
    assert.equal(await readResult(service, jobId, 'a'), '1')
  })

  test('a hash that cannot be stored as text is refused', async () => {
    const { service, jobId } = await freshJob()
    for (const source_hash of ['a\u0000b', '\ud800', 'x'.repeat(1025), 17, true, {}, []]) {
      const body = JSON.stringify({ key: 'a', result: 1, source_hash })
      const reply = await assertUnchanged(service, jobId, () => post(service, jobId, { body }))
      assertProblem(reply, 'invalid_request', /source_hash/)
    }
  })
})

contract('Failed steps', (target) => {
  const start = shareService(target)
  const text = { skip: !target.differences.keepsText }

  async function freshJob() {
    const service = await start()
    return { service, jobId: await target.newJob(service) }
  }

  const marker =
    '{ "__wmill_error" : true, "message":"no\\u0000 \\ud83e card", "step_key":"pay",\n "result":{"error":{"name":"E","message":"m","n":1.0}}}'

  test(
    'the answer to a failed step carries the record verbatim, and so does the answer to its repeat',
    text,
    async () => {
      const { service, jobId } = await freshJob()
      for (let turn = 0; turn < 2; turn++) {
        const reply = await record(service, jobId, { key: 'pay', result: marker })
        assert.equal(reply.status, 200)
        assert.match(String(reply.headers['content-type']), /json/)
        assert.ok(reply.text.includes(`"failure":${marker}`), reply.text)
        assert.deepEqual(json(reply).failure, JSON.parse(marker))
      }
      assert.equal(await readResult(service, jobId, 'pay'), marker)
    },
  )

  test('a failed step is counted and shown as failed, until a success replaces it', text, async () => {
    const { service, jobId } = await freshJob()
    const counts = async () => {
      const job = json(await request(service, `GET /jobs/${jobId}`))
      const [entry] = await readTimeline(service, jobId)
      return [job.step_count, job.failed_count, entry?.status]
    }
    await recorded(record(service, jobId, { key: 'pay', result: marker }))
    assert.deepEqual(await counts(), [1, 1, 'failed'])
    await recorded(record(service, jobId, { key: 'pay', result: '"paid"' }))
    assert.deepEqual(await counts(), [1, 0, 'completed'])
    await recorded(record(service, jobId, { key: 'pay', result: marker }))
    assert.deepEqual(await counts(), [1, 1, 'failed'])
  })

  test('only an object whose last member __wmill_error is exactly true is a failure', async () => {
    const { service, jobId } = await freshJob()
    const cases: [string, boolean][] = [
      ['{"__wmill_error":true}', true],
      ['{"\\u005f_wmill_error":true}', true],
      ['{"__wmill_error":false,"__wmill_error":true}', true],
      ['{"__wmill_error":true,"__wmill_error":false}', false],
      ['{"__wmill_error":"true"}', false],
      ['{"__wmill_error":1}', false],
      ['{"__wmill_error":[true]}', false],
      ['{"a":{"__wmill_error":true}}', false],
      ['[{"__wmill_error":true}]', false],
      ['{"__wmill_error ":true}', false],
      ['"__wmill_error"', false],
    ]
    for (const [result, failed] of cases) {
      const reply = await record(service, jobId, { key: 'x', result })
      assert.equal('failure' in json(reply), failed, result)
      const [entry] = await readTimeline(service, jobId)
      assert.equal(entry?.status, failed ? 'failed' : 'completed', result)
    }
  })
})
