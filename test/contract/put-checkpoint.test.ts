import assert from 'node:assert/strict'
import test from 'node:test'
import {
  assertProblem,
  assertUnchanged,
  json,
  newJobId,
  readCheckpoint,
  readResult,
  readTimeline,
  record,
  recorded,
  request,
  type Service,
} from '../support.ts'
import { answered, completeChild, dispatched, engineContract, putCheckpoint, readJob, send } from './engine-target.ts'
import { contract, shareService } from './target.ts'

const STARTED_AT = '2026-12-01T01:45:06.357Z'

contract('Replacing a checkpoint', (target) => {
  const start = shareService(target)
  const text = { skip: !target.differences.keepsText }

  async function knownJob() {
    const service = await start()
    const jobId = await target.newJob(service)
    await recorded(record(service, jobId, { key: 'a', result: '1', started_at: STARTED_AT, duration_ms: 4 }))
    await recorded(record(service, jobId, { key: 'b', result: '2' }))
    return { service, jobId }
  }

  async function put(service: Service, jobId: string, body: unknown, headers?: Record<string, string>) {
    return answered(200, putCheckpoint(service, jobId, JSON.stringify(body), headers))
  }

  test('the checkpoint is then what was put, with a new version that the answer tells', async () => {
    const { service, jobId } = await knownJob()
    const before = (await readCheckpoint(service, jobId)).headers.etag
    const checkpoint = {
      source_hash: 'h1',
      completed_steps: { x: 1, b: 2 },
      pending_steps: { mode: 'parallel', keys: ['y'], job_ids: { y: newJobId() } },
      input_args: { n: 1 },
      job_ids: { y: newJobId(), z: newJobId() },
      _executing_key: 'y',
      consumed_resume_row_ids: [1, 2],
    }
    const reply = await putCheckpoint(service, jobId, JSON.stringify(checkpoint))
    assert.equal(reply.status, 200, reply.text)
    const { version, ...rest } = json(reply)
    assert.deepEqual(rest, { job_id: jobId })
    const after = await readCheckpoint(service, jobId)
    assert.equal(after.headers.etag, `"${version}"`)
    assert.equal(reply.headers.etag, `"${version}"`)
    assert.notEqual(after.headers.etag, before)
    assert.deepEqual(json(after), checkpoint)
  })

  test(
    'results, arguments and unknown members come back byte for byte; of duplicate members the last counts',
    text,
    async () => {
      const { service, jobId } = await knownJob()
      const result = '{"z": 1.0, "z":"\\u0000 \\ud83e"}'
      const body = `{"completed_steps":{"__proto__":${result},"d":1,"d": [1.50]},"completed_steps":{"__proto__":${result},"d":1,"d": [1.50]},
      "input_args":{"n": 2e400},"constructor":{"m": 1.0},"plain":null}`
      await answered(200, putCheckpoint(service, jobId, body))
      const { text: checkpoint } = await readCheckpoint(service, jobId)
      assert.ok(checkpoint.includes(`"completed_steps":{"__proto__":${result},"d":[1.50]}`), checkpoint)
      for (const member of ['"input_args":{"n": 2e400}', '"constructor":{"m": 1.0}', '"plain":null'])
        assert.ok(checkpoint.includes(member), `${checkpoint} lacks ${member}`)
      assert.equal(await readResult(service, jobId, '__proto__'), result)
    },
  )

  test('members that are absent or null become empty', async () => {
    const { service, jobId } = await knownJob()
    await put(service, jobId, { source_hash: 'h', input_args: { n: 1 }, _executing_key: 'k', more: 1 })
    const nulls =
      '{"source_hash":null,"completed_steps":null,"pending_steps":null,"input_args":null,"job_ids":null,"_executing_key":null}'
    for (const body of ['{}', nulls]) {
      await put(service, jobId, { source_hash: 'h', completed_steps: { k: 1 } })
      await answered(200, putCheckpoint(service, jobId, body))
      const empty = { source_hash: '', completed_steps: {}, input_args: {}, job_ids: {} }
      assert.deepEqual(json(await readCheckpoint(service, jobId)), empty)
    }
  })

  test('no hash is checked, and the one that is put takes the place of the old one', {
    skip: !target.differences.adoptsHash,
  }, async () => {
    const { service, jobId } = await knownJob()
    await put(service, jobId, { source_hash: 'h1' })
    await put(service, jobId, { source_hash: 'h2' })
    assertProblem(await record(service, jobId, { key: 'c', result: '1', source_hash: 'h1' }), 'source_changed')
    await put(service, jobId, {})
    await recorded(record(service, jobId, { key: 'c', result: '1', source_hash: 'h3' }))
  })

  test('no timeline entry is touched: those of steps that are gone stay, and steps that are put have none', async () => {
    const { service, jobId } = await knownJob()
    const [a, b] = await readTimeline(service, jobId)
    await put(service, jobId, { completed_steps: { b: 2, c: 3 } })
    const entries = await readTimeline(service, jobId)
    const { bytes: _, ...rest } = a ?? assert.fail()
    assert.deepEqual(entries, [{ ...rest, status: 'running' }, b])
    await recorded(record(service, jobId, { key: 'a', result: '7', started_at: STARTED_AT }))
    assert.deepEqual(
      (await readTimeline(service, jobId)).map(({ key }) => key),
      ['b', 'a'],
    )
    assert.deepEqual(json(await readCheckpoint(service, jobId)).completed_steps, { b: 2, c: 3, a: 7 })
  })

  test('the counts are those of what was put', async () => {
    const { service, jobId } = await knownJob()
    await put(service, jobId, { completed_steps: { a: 'é', x: { __wmill_error: true } } })
    const { step_count, failed_count, bytes } = await readJob(service, jobId)
    assert.deepEqual([step_count, failed_count, bytes], [2, 1, Buffer.byteLength('"é"{"__wmill_error":true}')])
  })

  test('put again, it changes nothing, not even the version', async () => {
    const { service, jobId } = await knownJob()
    const body = { completed_steps: { a: 1, c: [1] }, job_ids: { y: newJobId() }, input_args: { n: 1 }, more: {} }
    const { version } = await put(service, jobId, body)
    await assertUnchanged(service, jobId, async () => assert.equal((await put(service, jobId, body)).version, version))
  })

  test('what was read can be put back, and changes nothing', async () => {
    const { service, jobId } = await knownJob()
    const { text } = await readCheckpoint(service, jobId)
    await assertUnchanged(service, jobId, () => answered(200, putCheckpoint(service, jobId, text)))
  })

  test('a job that is not known is created by it', { skip: !target.differences.takesAnyJob }, async () => {
    const service = await start()
    const jobId = newJobId()
    await put(service, jobId, {})
    assert.equal((await readJob(service, jobId)).step_count, 0)
  })

  test('pending_steps without keys stays until the next write', async () => {
    const { service, jobId } = await knownJob()
    const pending_steps = { mode: 'parallel', keys: [], job_ids: {} }
    await put(service, jobId, { pending_steps })
    assert.deepEqual(json(await readCheckpoint(service, jobId)).pending_steps, pending_steps)
    await recorded(record(service, jobId, { key: 'c', result: '1' }))
    assert.equal('pending_steps' in json(await readCheckpoint(service, jobId)), false)
  })

  test('under If-Match it is done only at the version that the client has', async () => {
    const { service, jobId } = await knownJob()
    const first = String((await readCheckpoint(service, jobId)).headers.etag)
    const { version } = await put(service, jobId, { completed_steps: { a: 2 } }, { 'if-match': first })
    await assertUnchanged(service, jobId, async () => {
      for (const tag of [first, `W/"${version}"`, '"0"', '"*"', '""', `"${version}x"`]) {
        const reply = await putCheckpoint(service, jobId, '{}', { 'if-match': tag })
        assertProblem(reply, 'precondition_failed')
      }
    })
    await put(service, jobId, { completed_steps: { a: 3 } }, { 'if-match': `"x" ,${first}, "${version}"` })
    await put(service, jobId, {}, { 'if-match': '*' })
  })

  test('If-Match "0" is a job that is not known yet, * one that is', {
    skip: !target.differences.takesAnyJob,
  }, async () => {
    const service = await start()
    const jobId = newJobId()
    for (const tag of ['*', 'W/"0"', '"x"'])
      assertProblem(await putCheckpoint(service, jobId, '{}', { 'if-match': tag }), 'precondition_failed')
    assertProblem(await request(service, `GET /jobs/${jobId}`), 'job_not_found')
    await put(service, jobId, {}, { 'if-match': '"0"' })
    assertProblem(await putCheckpoint(service, jobId, '{}', { 'if-match': '"0"' }), 'precondition_failed')
  })

  test('an If-Match that is none is refused', async () => {
    const { service, jobId } = await knownJob()
    for (const tag of ['', '17', "'a'", '"a', '"a" "b"', ',']) {
      const reply = await assertUnchanged(service, jobId, () =>
        putCheckpoint(service, jobId, '{}', { 'if-match': tag }),
      )
      assertProblem(reply, 'invalid_request', /If-Match/)
    }
  })

  const uuid = newJobId()
  const faults: [title: string, body: unknown, detail: RegExp][] = [
    ['a hash that is no text', { source_hash: 17 }, /source_hash/],
    ['steps that are a list', { completed_steps: [] }, /completed_steps/],
    ['steps that are a text', { completed_steps: 'a' }, /completed_steps/],
    ['an empty key', { completed_steps: { '': 1 } }, /completed_steps/],
    ['a key with U+0000', { completed_steps: { 'a\u0000': 1 } }, /completed_steps/],
    ['arguments that are a list', { input_args: [] }, /input_args/],
    ['job_ids that are a list', { job_ids: [] }, /job_ids/],
    ['a child that is no UUID', { job_ids: { a: 'no-uuid' } }, /job_ids\.a/],
    ['a child that is a number', { job_ids: { a: 17 } }, /job_ids\.a/],
    ['one child under two keys', { job_ids: { a: uuid, b: uuid } }, /job_ids.*twice/],
    ['pending_steps that are a list', { pending_steps: [] }, /pending_steps/],
    ['pending_steps without mode', { pending_steps: { keys: [], job_ids: {} } }, /pending_steps\.mode/],
    ['pending_steps without keys', { pending_steps: { mode: 'sleep', job_ids: {} } }, /pending_steps\.keys/],
    ['pending_steps without job_ids', { pending_steps: { mode: 'sleep', keys: [] } }, /pending_steps\.job_ids/],
    ['a mode that is a number', { pending_steps: { mode: 1, keys: [], job_ids: {} } }, /pending_steps\.mode/],
    [
      'a pending key that is a number',
      { pending_steps: { mode: 'sleep', keys: [1], job_ids: {} } },
      /pending_steps\.keys\.0/,
    ],
    [
      'a pending child that is no UUID',
      { pending_steps: { mode: 'sleep', keys: [], job_ids: { a: 1 } } },
      /pending_steps\.job_ids\.a/,
    ],
    ['an executing key that is a number', { _executing_key: 1 }, /_executing_key/],
    ['an empty executing key', { _executing_key: '' }, /_executing_key/],
    ['a list', [], /object/],
  ]
  for (const [title, body, detail] of faults) {
    test(`${title}: refused naming the member, and everything is as it was`, async () => {
      const { service, jobId } = await knownJob()
      const reply = await assertUnchanged(service, jobId, () => putCheckpoint(service, jobId, JSON.stringify(body)))
      assertProblem(reply, 'invalid_request', detail)
    })
  }
})

engineContract('Replacing the checkpoint of a job with children', (target) => {
  const start = shareService(target)

  async function parkedJob() {
    const service = await start()
    const [jobId, child] = [await target.newJob(service), newJobId()]
    await dispatched(service, jobId, { job_ids: { a: child } })
    return { service, jobId, child }
  }

  test('is refused while a dispatched child is pending, unless force=true insists', async () => {
    const { service, jobId, child } = await parkedJob()
    await assertUnchanged(service, jobId, async () => {
      assertProblem(await putCheckpoint(service, jobId, '{}'), 'job_parked')
      assertProblem(await send(service, `PUT /jobs/${jobId}/checkpoint?force=false`, '{}'), 'job_parked')
      assertProblem(await send(service, `PUT /jobs/${jobId}/checkpoint?force=yes`, '{}'), 'invalid_request', /force/)
      assertProblem(await putCheckpoint(service, jobId, '{}', { 'if-match': '"x"' }), 'precondition_failed')
    })
    await answered(200, send(service, `PUT /jobs/${jobId}/checkpoint?force=true`, '{}'))
    assertProblem(await completeChild(service, jobId, child, '{"result":1}'), 'stale_child')
    const entry = (await readTimeline(service, jobId))[0] ?? assert.fail()
    assert.deepEqual([entry.kind, entry.name, 'key' in entry], ['child', 'a', false])
  })

  test('is let in once the child is done, and in a job that merely sleeps', async () => {
    const { service, jobId, child } = await parkedJob()
    await answered(200, completeChild(service, jobId, child, '{"result":1}'))
    await answered(200, putCheckpoint(service, jobId, '{}'))
    await dispatched(service, jobId, { mode: 'sleep', keys: ['nap'], entries: { nap: {} } })
    await answered(200, putCheckpoint(service, jobId, '{}'))
  })

  test('maps keys to children anew: the mapped one can finish, and its entry opens then', async () => {
    const service = await start()
    const [jobId, child] = [newJobId(), newJobId()]
    await answered(200, putCheckpoint(service, jobId, `{"job_ids":{"a":"${child.toUpperCase()}"}}`))
    assert.deepEqual(json(await readCheckpoint(service, jobId)).job_ids, { a: child })
    assert.deepEqual(await readTimeline(service, jobId), [])
    await answered(200, completeChild(service, jobId, child, `{"result":1,"started_at":"${STARTED_AT}"}`))
    const [entry] = await readTimeline(service, jobId)
    assert.deepEqual([entry?.kind, entry?.status, entry?.started_at], ['child', 'completed', STARTED_AT])
  })

  test('that never were dispatched leaves them free for other keys', async () => {
    const service = await start()
    const [jobId, child] = [newJobId(), newJobId()]
    await answered(200, putCheckpoint(service, jobId, `{"job_ids":{"a":"${child}"}}`))
    await answered(200, putCheckpoint(service, jobId, '{}'))
    await dispatched(service, jobId, { job_ids: { b: child } })
    assert.equal((await readTimeline(service, jobId))[0]?.name, 'b')
  })

  test('can swap the keys of two children', async () => {
    const service = await start()
    const [jobId, one, other] = [newJobId(), newJobId(), newJobId()]
    await dispatched(service, jobId, { job_ids: { a: one, b: other } })
    const swapped = JSON.stringify({ job_ids: { a: other, b: one } })
    await answered(200, send(service, `PUT /jobs/${jobId}/checkpoint?force=true`, swapped))
    assert.deepEqual(json(await readCheckpoint(service, jobId)).job_ids, { a: other, b: one })
    await answered(200, completeChild(service, jobId, one, '{"result":1}'))
    assert.equal(await readResult(service, jobId, 'b'), '1')
  })

  test('is refused once the job is finished, an identical one too', async () => {
    const service = await start()
    const jobId = newJobId()
    await answered(200, putCheckpoint(service, jobId, '{}'))
    await answered(200, send(service, `POST /jobs/${jobId}/complete`, '{"result":1}'))
    await assertUnchanged(service, jobId, async () => {
      assertProblem(await putCheckpoint(service, jobId, '{}'), 'job_finished')
    })
  })
})

contract('Replacing near the limits', (target) => {
  const start = shareService(target, { limits: { maxStepsPerJob: 3, maxCheckpointBytes: 100, maxBodyBytes: 400 } })

  test('more steps or bytes than allowed are refused; the body has its own limit', async () => {
    const service = await start()
    const jobId = await target.newJob(service)
    await answered(200, putCheckpoint(service, jobId, '{"completed_steps":{"a":1,"b":2,"c":3}}'))
    await assertUnchanged(service, jobId, async () => {
      const many = '{"completed_steps":{"a":1,"b":2,"c":3,"d":4}}'
      assertProblem(await putCheckpoint(service, jobId, many), 'checkpoint_full')
      const long = `{"completed_steps":{"a":"${'x'.repeat(99)}"}}`
      assertProblem(await putCheckpoint(service, jobId, long), 'checkpoint_full')
      assertProblem(
        await putCheckpoint(service, jobId, `{"completed_steps":{"a":"${'x'.repeat(400)}"}}`),
        'payload_too_large',
      )
    })
    await answered(200, putCheckpoint(service, jobId, `{"completed_steps":{"a":"${'x'.repeat(98)}"}}`))
  })
})
