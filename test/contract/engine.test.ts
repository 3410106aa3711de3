import assert from 'node:assert/strict'
import test from 'node:test'
import {
  assertProblem,
  assertUnchanged,
  json,
  newJobId,
  openSql,
  readCheckpoint,
  readTimeline,
  record,
  recorded,
  request,
} from '../support.ts'
import { answered, completeChild, dispatch, dispatched, engineContract, readJob, send } from './engine-target.ts'
import { shareService } from './target.ts'

engineContract('Dispatch', (target) => {
  const start = shareService(target)

  async function freshJob() {
    const service = await start()
    return { service, jobId: await target.newJob(service), child: newJobId(), sibling: newJobId() }
  }

  test('a dispatched job waits for its children: pending_steps and job_ids name them', async () => {
    const { service, jobId, child, sibling } = await freshJob()
    const answer = await dispatched(service, jobId, { mode: 'parallel', job_ids: { b: sibling, a: child } })
    const { version, ...rest } = answer as unknown as Record<string, unknown>
    assert.deepEqual(rest, { job_id: jobId, pending_keys: ['a', 'b'] })
    const checkpoint = await readCheckpoint(service, jobId)
    assert.equal(checkpoint.headers.etag, `"${version}"`)
    assert.deepEqual(json(checkpoint), {
      source_hash: '',
      completed_steps: {},
      pending_steps: { mode: 'parallel', keys: ['a', 'b'], job_ids: { a: child, b: sibling } },
      input_args: {},
      job_ids: { a: child, b: sibling },
    })
    assert.deepEqual((await readJob(service, jobId)).pending_keys, ['a', 'b'])
  })

  test('keys default to those of job_ids in text order, which is that of code points', async () => {
    const { service, jobId } = await freshJob()
    const keys = ['\u{1f600}', '\uffff', '__proto__', 'a', '10', '9']
    const job_ids = `{${keys.map((key) => `${JSON.stringify(key)}:"${newJobId()}"`).join(',')}}`
    const body = `{"mode":"parallel","job_ids":${job_ids}}`
    const answer = await answered(200, send(service, `POST /jobs/${jobId}/dispatch`, body))
    assert.deepEqual(answer.pending_keys, ['10', '9', '__proto__', 'a', '\uffff', '\u{1f600}'])
  })

  test('keys keep the order in which they are given, and may name more than the children', async () => {
    const { service, jobId, child } = await freshJob()
    const answer = await dispatched(service, jobId, { keys: ['z', 'sleep', 'a'], job_ids: { a: child } })
    assert.deepEqual(answer.pending_keys, ['z', 'sleep', 'a'])
  })

  test('the timeline has an entry for each child that is running', async () => {
    const { service, jobId, child, sibling } = await freshJob()
    const before = Date.now()
    await dispatched(service, jobId, { job_ids: { b: sibling, a: child } })
    const entries = await readTimeline(service, jobId)
    for (const { scheduled_for, position } of entries) {
      assert.ok(Date.parse(scheduled_for) >= before - 1 && Date.parse(scheduled_for) <= Date.now() + 1)
      assert.ok(position > 0)
    }
    const told = entries.map(({ scheduled_for: _, position: __, ...entry }) => entry)
    assert.deepEqual(told, [
      { kind: 'child', key: 'a', child_job_id: child, name: 'a', status: 'running' },
      { kind: 'child', key: 'b', child_job_id: sibling, name: 'b', status: 'running' },
    ])
  })

  test('a sleep has an entry as a step, whose further members SQL readers find beside it, also once it is done', async (t) => {
    const { service, jobId } = await freshJob()
    const entry = { sleep_duration_s: 60, approval: { users: ['a'] }, form: null }
    await dispatched(service, jobId, { mode: 'sleep', keys: ['nap'], entries: { nap: entry } })
    const [running] = await readTimeline(service, jobId)
    assert.deepEqual([running?.kind, running?.key, running?.status], ['step', 'nap', 'running'])
    await recorded(record(service, jobId, { key: 'nap', result: 'null', duration_ms: 60_000 }))
    const [done] = await readTimeline(service, jobId)
    assert.deepEqual([done?.status, done?.duration_ms], ['completed', 60_000])
    assert.equal('pending_steps' in json(await readCheckpoint(service, jobId)), false)
    const [row] = await openSql(t, service.databaseUrl)`
      select workflow_as_code_status->'_step/nap' as entry from cairn.v2_job_status where id = ${jobId}`
    const { scheduled_for, started_at, ...rest } = row?.entry ?? assert.fail()
    assert.equal(scheduled_for, started_at)
    assert.deepEqual(rest, { name: 'nap', duration_ms: 60_000, ...entry })
  })

  test('a step that was only scheduled takes its place in the order when it completes', async () => {
    const { service, jobId } = await freshJob()
    await dispatched(service, jobId, { mode: 'sleep', keys: ['nap'], entries: { nap: {} } })
    await recorded(record(service, jobId, { key: 'a', result: '1' }))
    await recorded(record(service, jobId, { key: 'nap', result: '2' }))
    await recorded(record(service, jobId, { key: 'nap', result: '3' }))
    assert.deepEqual(
      (await readTimeline(service, jobId)).map(({ key }) => key),
      ['a', 'nap'],
    )
    assert.match((await readCheckpoint(service, jobId)).text, /"completed_steps":\{"a":1,"nap":3\}/)
  })

  test('input_args are replaced if they are given, and kept to the digit', async () => {
    const { service, jobId, child } = await freshJob()
    const body = `{"mode":"parallel","job_ids":{"a":"${child}"},"input_args":{"n":1.50,"n":2e400}}`
    await answered(200, send(service, `POST /jobs/${jobId}/dispatch`, body))
    await dispatched(service, jobId, { mode: 'sleep', keys: ['nap'] })
    assert.ok((await readCheckpoint(service, jobId)).text.includes('"input_args":{"n":1.50,"n":2e400}'))
  })

  test('a dispatch adopts a hash, and is refused under another', async () => {
    const { service, jobId, child } = await freshJob()
    await dispatched(service, jobId, { job_ids: { a: child }, source_hash: 'h1' })
    assert.equal(json(await readCheckpoint(service, jobId)).source_hash, 'h1')
    await assertUnchanged(service, jobId, async () => {
      const reply = await dispatch(service, jobId, { job_ids: { b: newJobId() }, source_hash: 'h2' })
      assertProblem(reply, 'source_changed')
    })
  })

  test('a dispatch sent again changes nothing, not even the version', async () => {
    const { service, jobId, child, sibling } = await freshJob()
    const body = { job_ids: { a: child, b: sibling }, input_args: { n: 1 }, entries: { a: { form: 1 } } }
    const first = await dispatched(service, jobId, body)
    await assertUnchanged(service, child, () =>
      assertUnchanged(service, jobId, async () => assert.deepEqual(await dispatched(service, jobId, body), first)),
    )
  })

  test('a dispatch sent again after its children are done changes nothing: nothing is pending', async () => {
    const { service, jobId, child } = await freshJob()
    await dispatched(service, jobId, { job_ids: { a: child } })
    await answered(200, completeChild(service, jobId, child, '{"result":1}'))
    await assertUnchanged(service, jobId, async () => {
      assert.deepEqual((await dispatched(service, jobId, { job_ids: { a: child } })).pending_keys, [])
    })
  })

  test('a later dispatch replaces pending_steps as a whole and adds to job_ids', async () => {
    const { service, jobId, child, sibling } = await freshJob()
    await dispatched(service, jobId, { job_ids: { a: child } })
    await dispatched(service, jobId, { mode: 'sequential', job_ids: { b: sibling } })
    const checkpoint = json(await readCheckpoint(service, jobId))
    assert.deepEqual(checkpoint.pending_steps, { mode: 'sequential', keys: ['b'], job_ids: { b: sibling } })
    assert.deepEqual(checkpoint.job_ids, { a: child, b: sibling })
  })

  test('keys that are completed already do not park the job', async () => {
    const { service, jobId } = await freshJob()
    await recorded(record(service, jobId, { key: 'nap', result: '1' }))
    const answer = await dispatched(service, jobId, { mode: 'sleep', keys: ['nap'], entries: { nap: {} } })
    assert.deepEqual(answer.pending_keys, [])
    assert.equal('pending_steps' in json(await readCheckpoint(service, jobId)), false)
  })

  test('pending_steps stays until the last of its keys is completed, by whatever way', async () => {
    const { service, jobId, child } = await freshJob()
    await dispatched(service, jobId, { keys: ['a', 'b', 'c'], job_ids: { a: child } })
    const pending = async () => (await readJob(service, jobId)).pending_keys
    await recorded(record(service, jobId, { key: 'b', result: '1' }))
    await answered(201, send(service, `POST /jobs/${jobId}/steps`, '{"key":"c","result":1}'))
    assert.deepEqual(await pending(), ['a', 'b', 'c'])
    const answer = await answered(200, completeChild(service, jobId, child, '{"result":1}'))
    assert.deepEqual(answer.pending_keys, [])
    assert.deepEqual(await pending(), [])
  })

  test('a finished job is not parked any more, while a repeat is still answered', async () => {
    const { service, jobId, child } = await freshJob()
    const body = { job_ids: { a: child } }
    await dispatched(service, jobId, body)
    await answered(200, send(service, `POST /jobs/${jobId}/complete`, '{"result":1}'))
    await assertUnchanged(service, jobId, async () => {
      await dispatched(service, jobId, body)
      assertProblem(await dispatch(service, jobId, { job_ids: { b: newJobId() } }), 'job_finished')
    })
  })
})

engineContract('A dispatch that is not valid', (target) => {
  const start = shareService(target)
  const one = newJobId()

  const faults: [title: string, body: Record<string, unknown> | string, detail: RegExp][] = [
    ['a key twice', { keys: ['a', 'a'] }, /"a" twice/],
    ['no keys at all', { keys: [] }, /at least one/],
    ['neither keys nor children', {}, /at least one/],
    ['an empty job_ids', { job_ids: {} }, /at least one/],
    ['an empty key', { keys: ['a', ''] }, /keys\.1/],
    ['an empty key of a child', { job_ids: { '': one } }, /job_ids/],
    ['a key that is no text', { keys: [17] }, /keys\.0/],
    ['keys that are no list', { keys: 'a' }, /keys/],
    ['keys without that of a child', { keys: ['b'], job_ids: { a: one } }, /"a"/],
    ['one child under two keys', { job_ids: { a: one, b: one.toUpperCase() } }, /twice/],
    ['a malformed UUID', { job_ids: { a: one, b: 'no-uuid' } }, /job_ids\.b.*UUID/],
    ['a child that is no text', { job_ids: { a: 17 } }, /job_ids\.a/],
    ['a child that is null', { job_ids: { a: null } }, /job_ids\.a/],
    ['job_ids that are a list', { job_ids: [one] }, /job_ids/],
    ['no mode', { mode: undefined, keys: ['a'] }, /mode/],
    ['a mode that is not known', { mode: 'later', keys: ['a'] }, /mode/],
    ['input_args that are no object', { keys: ['a'], input_args: [1] }, /input_args/],
    ['entries that are a list', { keys: ['a'], entries: [] }, /entries/],
    ['an entry that is no object', { keys: ['a'], entries: { a: 1 } }, /entries\.a/],
    ['an entry under a key that is not waited for', { keys: ['a'], entries: { b: {} } }, /"b"/],
    ['an entry with a time of its own', { keys: ['a'], entries: { a: { started_at: 1 } } }, /started_at/],
    ['a hash that is no text', { keys: ['a'], source_hash: 17 }, /source_hash/],
    ['a body that is a list', '[1]', /object/],
  ]
  for (const [title, body, detail] of faults) {
    test(`${title}: refused, and everything is as it was`, async () => {
      const service = await start()
      const jobId = await target.newJob(service)
      await dispatched(service, jobId, { job_ids: { waiting: newJobId() } })
      const reply = await assertUnchanged(service, jobId, () =>
        typeof body === 'string'
          ? send(service, `POST /jobs/${jobId}/dispatch`, body)
          : dispatch(service, jobId, { mode: 'parallel', ...body }),
      )
      assertProblem(reply, 'invalid_request', detail)
      assertProblem(await request(service, `GET /jobs/${one}`), 'job_not_found')
    })
  }

  test('the job itself as its child: refused, in upper case too, and the job stays unknown', async () => {
    const service = await start()
    const jobId = newJobId()
    for (const child of [jobId, jobId.toUpperCase()]) {
      const reply = await dispatch(service, jobId, { job_ids: { a: child } })
      assertProblem(reply, 'invalid_request', /itself/)
    }
    assert.equal((await readCheckpoint(service, jobId)).headers.etag, '"0"')
  })

  test("another job's child: refused with its name, and neither job nor any new child is touched", async () => {
    const service = await start()
    const [owner, thief, child, unborn] = [newJobId(), newJobId(), newJobId(), newJobId()]
    await dispatched(service, owner, { job_ids: { a: child } })
    await assertUnchanged(service, owner, async () => {
      const reply = await dispatch(service, thief, { job_ids: { a: child, b: unborn } })
      assertProblem(reply, 'invalid_request', new RegExp(child))
    })
    for (const jobId of [thief, unborn]) assertProblem(await request(service, `GET /jobs/${jobId}`), 'job_not_found')
    await answered(204, request(service, `DELETE /jobs/${owner}?force=true`))
    await dispatched(service, thief, { job_ids: { a: child } })
  })

  test('a child of another key of the same job, or one that lost its key, is refused', async () => {
    const service = await start()
    const [jobId, first, second] = [newJobId(), newJobId(), newJobId()]
    await dispatched(service, jobId, { job_ids: { a: first } })
    await dispatched(service, jobId, { job_ids: { a: second } })
    await assertUnchanged(service, jobId, async () => {
      assertProblem(await dispatch(service, jobId, { job_ids: { b: second } }), 'invalid_request', new RegExp(second))
      // A repeat of the first dispatch that arrives late must not bring the first child back.
      assertProblem(await dispatch(service, jobId, { job_ids: { a: first } }), 'stale_child', new RegExp(first))
    })
  })
})

engineContract('A dispatch repeated late', (target) => {
  const start = shareService(target)

  test('changes nothing of what the job waits for since, nor its arguments', async () => {
    const service = await start()
    const [jobId, first, second] = [newJobId(), newJobId(), newJobId()]
    const early = { job_ids: { x: first }, input_args: { round: 1 } }
    await dispatched(service, jobId, early)
    await answered(200, completeChild(service, jobId, first, '{"result":1}'))
    await dispatched(service, jobId, { job_ids: { y: second }, input_args: { round: 2 } })
    await assertUnchanged(service, jobId, async () => {
      const { pending_keys } = await dispatched(service, jobId, early)
      assert.deepEqual(pending_keys, ['y'])
    })
  })

  test('gives an awaited child whose job was deleted its checkpoint again, and a child that is done none', async () => {
    const service = await start()
    const [jobId, awaited, done] = [newJobId(), newJobId(), newJobId()]
    await recorded(record(service, jobId, { key: 'before', result: '"seen"' }))
    await dispatched(service, jobId, { job_ids: { x: awaited, y: done } })
    await answered(200, completeChild(service, jobId, done, '{"result":1}'))
    for (const child of [awaited, done]) await answered(204, request(service, `DELETE /jobs/${child}`))
    await assertUnchanged(service, jobId, () => dispatched(service, jobId, { job_ids: { x: awaited, y: done } }))
    const checkpoint = json(await readCheckpoint(service, awaited))
    assert.equal(checkpoint._executing_key, 'x')
    assert.deepEqual(Object.keys(checkpoint.completed_steps), ['before', 'y'])
    assertProblem(await request(service, `GET /jobs/${done}`), 'job_not_found')
  })
})
