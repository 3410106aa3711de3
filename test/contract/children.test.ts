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
import {
  answered,
  completeChild,
  dispatched,
  engineContract,
  putCheckpoint,
  readJob,
  send,
  startChild,
} from './engine-target.ts'
import { shareService } from './target.ts'

const STARTED_AT = '2026-07-28T10:11:12.123456+05:30'

engineContract('The news of a child', (target) => {
  const start = shareService(target)

  async function parkedJob() {
    const service = await start()
    const [jobId, child, sibling] = [await target.newJob(service), newJobId(), newJobId()]
    await dispatched(service, jobId, { job_ids: { a: child, b: sibling } })
    return { service, jobId, child, sibling }
  }

  async function entryOf(service: Service, jobId: string, key: string) {
    return (await readTimeline(service, jobId)).find((entry) => entry.key === key)
  }

  test('its start puts the time into its entry, verbatim or by the server', async () => {
    const { service, jobId, child, sibling } = await parkedJob()
    const { version, ...answer } = await answered(
      200,
      startChild(service, jobId, child.toUpperCase(), `{"started_at":"${STARTED_AT}"}`),
    )
    assert.deepEqual(answer, { job_id: jobId, key: 'a', pending_keys: ['a', 'b'] })
    assert.equal((await readCheckpoint(service, jobId)).headers.etag, `"${version}"`)
    assert.equal((await entryOf(service, jobId, 'a'))?.started_at, STARTED_AT)
    await answered(200, startChild(service, jobId, sibling))
    const entry = await entryOf(service, jobId, 'b')
    assert.equal(entry?.status, 'running')
    assert.ok(Date.parse(entry?.started_at ?? '') >= Date.parse(entry?.scheduled_for ?? ''))
  })

  test('a start sent again, without a time or with the same, changes nothing; one after the end neither', async () => {
    const { service, jobId, child } = await parkedJob()
    const body = `{"started_at":"${STARTED_AT}"}`
    await answered(200, startChild(service, jobId, child, body))
    await assertUnchanged(service, jobId, async () => {
      for (const again of [body, '{}', undefined, '{"started_at":null}'])
        await answered(200, startChild(service, jobId, child, again))
    })
    await answered(200, completeChild(service, jobId, child, '{"result":1}'))
    await assertUnchanged(service, jobId, () =>
      answered(200, startChild(service, jobId, child, '{"started_at":"2026-01-01T00:00Z"}')),
    )
  })

  test('its result is recorded under its key, verbatim, with its times in its own entry', async () => {
    const { service, jobId, child } = await parkedJob()
    const result = '{"x": 1.0, "x":"\\u0000"}'
    const body = `{"result":${result},"started_at":"${STARTED_AT}","duration_ms":120}`
    const { version, ...answer } = await answered(200, completeChild(service, jobId, child, body))
    assert.deepEqual(answer, { job_id: jobId, key: 'a', pending_keys: ['a', 'b'] })
    assert.equal((await readCheckpoint(service, jobId)).headers.etag, `"${version}"`)
    assert.equal(await readResult(service, jobId, 'a'), result)
    const entries = await readTimeline(service, jobId)
    assert.equal(entries.length, 2)
    const { kind, status, started_at, duration_ms } = entries[0] ?? assert.fail()
    assert.deepEqual([kind, status, started_at, duration_ms], ['child', 'completed', STARTED_AT, 120])
    const { step_count, bytes } = await readJob(service, jobId)
    assert.deepEqual([step_count, bytes], [1, Buffer.byteLength(result)])
  })

  test('its error is recorded as the failure marker of the Windmill SDKs', async () => {
    const { service, jobId, child } = await parkedJob()
    const error = '{"name":"E", "message":"no","n":1.0}'
    await answered(200, completeChild(service, jobId, child, `{"error":${error}}`))
    const marker = `{"__wmill_error":true,"message":"no","step_key":"a","result":{"error":${error}}}`
    assert.equal(await readResult(service, jobId, 'a'), marker)
    assert.equal((await entryOf(service, jobId, 'a'))?.status, 'failed')
    assert.equal((await readJob(service, jobId)).failed_count, 1)
  })

  test('its end sent again changes nothing; another end replaces the first, and keeps its place', async () => {
    const { service, jobId, child, sibling } = await parkedJob()
    const body = '{"result":1,"duration_ms":5}'
    const first = await answered(200, completeChild(service, jobId, child, body))
    await assertUnchanged(service, jobId, async () => {
      assert.deepEqual(await answered(200, completeChild(service, jobId, child, body)), first)
      await answered(200, completeChild(service, jobId, child, '{"result":1}'))
    })
    await answered(200, completeChild(service, jobId, sibling, '{"result":2}'))
    await answered(200, completeChild(service, jobId, child, '{"error":{"name":"E","message":"m"}}'))
    assert.deepEqual(Object.keys(json(await readCheckpoint(service, jobId)).completed_steps), ['a', 'b'])
    const { step_count, failed_count } = await readJob(service, jobId)
    assert.deepEqual([step_count, failed_count], [2, 1])
    const { duration_ms, status } = (await entryOf(service, jobId, 'a')) ?? assert.fail()
    assert.deepEqual([duration_ms, status], [5, 'failed'])
  })

  test('a child that no key maps to is stale: nothing is changed, nothing created', async () => {
    const { service, jobId, child } = await parkedJob()
    const successor = newJobId()
    await dispatched(service, jobId, { job_ids: { a: successor } })
    for (const stale of [child, newJobId(), jobId]) {
      await assertUnchanged(service, jobId, async () => {
        assertProblem(await startChild(service, jobId, stale), 'stale_child')
        assertProblem(await completeChild(service, jobId, stale, '{"result":1}'), 'stale_child')
      })
    }
    await answered(200, completeChild(service, jobId, successor, '{"result":2}'))
    assert.equal(await readResult(service, jobId, 'a'), '2')
    const former = (await readTimeline(service, jobId)).find(({ name, key }) => name === 'a' && key === undefined)
    assert.equal(former?.status, 'running')
  })

  test('a child of a job that is not known, or is known no more, is stale, and the job stays unknown', async () => {
    const { service, jobId, child } = await parkedJob()
    await answered(204, request(service, `DELETE /jobs/${jobId}?force=true`))
    for (const unknown of [jobId, newJobId()]) {
      assertProblem(await startChild(service, unknown, child), 'stale_child')
      assertProblem(await completeChild(service, unknown, child, '{"result":1}'), 'stale_child')
      assertProblem(await request(service, `GET /jobs/${unknown}`), 'job_not_found')
    }
  })

  test('a finished job takes no news of its children, but repeats', async () => {
    const { service, jobId, child, sibling } = await parkedJob()
    await answered(200, completeChild(service, jobId, child, '{"result":1}'))
    await answered(200, send(service, `POST /jobs/${jobId}/complete`, '{"result":1}'))
    await assertUnchanged(service, jobId, async () => {
      await answered(200, completeChild(service, jobId, child, '{"result":1}'))
      assertProblem(await completeChild(service, jobId, child, '{"result":2}'), 'job_finished')
      assertProblem(await completeChild(service, jobId, sibling, '{"result":2}'), 'job_finished')
      assertProblem(await startChild(service, jobId, sibling), 'job_finished')
    })
  })

  test('a child whose result was forgotten runs anew when it is dispatched again', async () => {
    const { service, jobId, child, sibling } = await parkedJob()
    const times = `"started_at":"${STARTED_AT}","duration_ms":9`
    await answered(200, completeChild(service, jobId, child, `{"result":1,${times}}`))
    await answered(200, completeChild(service, jobId, sibling, '{"result":1}'))
    await answered(204, request(service, `DELETE /jobs/${jobId}/steps/a`))
    await dispatched(service, jobId, { job_ids: { a: child } })
    const { status, started_at, duration_ms } = (await entryOf(service, jobId, 'a')) ?? assert.fail()
    assert.deepEqual([status, started_at, duration_ms], ['running', undefined, undefined])
    assertProblem(await request(service, `DELETE /jobs/${jobId}`), 'job_parked')
  })

  for (const [title, path, body, detail] of [
    ['a start with a bad time', 'start', '{"started_at":"tomorrow"}', /started_at/],
    ['an end with both', 'complete', '{"result":1,"error":{"name":"E","message":"m"}}', /both/],
    ['an end with neither', 'complete', '{}', /neither/],
    ['an end with a bad duration', 'complete', '{"result":1,"duration_ms":"5"}', /duration_ms/],
    ['an end whose error has no message', 'complete', '{"error":{"name":"E"}}', /error\.message/],
  ] as const) {
    test(`${title}: refused, and everything is as it was`, async () => {
      const { service, jobId, child } = await parkedJob()
      const reply = await assertUnchanged(service, jobId, () =>
        send(service, `POST /jobs/${jobId}/children/${child}/${path}`, body),
      )
      assertProblem(reply, 'invalid_request', detail)
    })
  }

  test('a child id that is no UUID is refused', async () => {
    const { service, jobId } = await parkedJob()
    assertProblem(await startChild(service, jobId, 'no-uuid'), 'invalid_request', /child_id.*UUID/)
    assertProblem(await completeChild(service, jobId, 'no-uuid', '{"result":1}'), 'invalid_request', /child_id.*UUID/)
  })
})

engineContract("A child's checkpoint", (target) => {
  const start = shareService(target)

  async function parentAndChild() {
    const service = await start()
    const [parent, child, sibling] = [await target.newJob(service), newJobId(), newJobId()]
    await recorded(record(service, parent, { key: 'a', result: '{"a": 1.0}' }))
    await recorded(record(service, parent, { key: 'b', result: '2' }))
    await dispatched(service, parent, { job_ids: { run: child, other: sibling } })
    return { service, parent, child, sibling }
  }

  const completedText = async (service: Service, jobId: string) =>
    /"completed_steps":(.*)\}$/.exec((await readCheckpoint(service, jobId)).text)?.[1]

  test("has the parent's steps as of the dispatch and the key to run, nothing else", async () => {
    const { service, child } = await parentAndChild()
    const { text } = await readCheckpoint(service, child)
    assert.deepEqual(json({ text } as never), {
      source_hash: '',
      completed_steps: { a: { a: 1 }, b: 2 },
      input_args: {},
      job_ids: {},
      _executing_key: 'run',
    })
    assert.ok(text.includes('{"a":{"a": 1.0},"b":2}'), text)
    assert.deepEqual(await readTimeline(service, child), [])
    assert.equal((await readJob(service, child)).step_count, 0)
  })

  test('never shows what the parent or a sibling records later', async () => {
    const { service, parent, child, sibling } = await parentAndChild()
    await assertUnchanged(service, child, async () => {
      await recorded(record(service, parent, { key: 'c', result: '3' }))
      await answered(200, completeChild(service, parent, sibling, '{"error":{"name":"E","message":"m"}}'))
    })
  })

  test('never shows a sleep that was scheduled before the dispatch and ended after', async () => {
    const service = await start()
    const [parent, child] = [newJobId(), newJobId()]
    await dispatched(service, parent, { mode: 'sleep', keys: ['nap'], entries: { nap: {} } })
    await dispatched(service, parent, { keys: ['nap', 'run'], job_ids: { run: child } })
    await assertUnchanged(service, child, () => recorded(record(service, parent, { key: 'nap', result: '1' })))
  })

  test('takes steps of its own, over those it inherits; the parent has none of them', async () => {
    const { service, parent, child } = await parentAndChild()
    await recorded(record(service, child, { key: 'own', result: '5' }))
    await recorded(record(service, child, { key: 'a', result: '"mine"' }))
    assert.equal(await completedText(service, child), '{"b":2,"own":5,"a":"mine"}')
    assert.equal(await readResult(service, child, 'a'), '"mine"')
    assert.equal(await completedText(service, parent), '{"a":{"a": 1.0},"b":2}')
    assert.equal((await readJob(service, child)).step_count, 2)
    await answered(204, request(service, `DELETE /jobs/${child}/steps/a`))
    assert.equal(await completedText(service, child), '{"a":{"a": 1.0},"b":2,"own":5}')
  })

  test('gives what it inherits by key as well, and it stands against a first write', async () => {
    const { service, child } = await parentAndChild()
    assert.equal(await readResult(service, child, 'a'), '{"a": 1.0}')
    const several = await request(service, `GET /jobs/${child}/steps?key=b&key=a&key=run`)
    assert.equal(several.text, '{"steps":[{"key":"b","result":2},{"key":"a","result":{"a": 1.0}}]}')
    const late = await send(service, `POST /jobs/${child}/steps`, '{"key":"a","result":9}')
    assert.equal(late.status, 200, late.text)
    assert.ok(late.text.includes('"recorded":false,"result":{"a": 1.0}}'), late.text)
  })

  for (const [title, finish] of [
    ['one step', (service: Service, child: string) => recorded(record(service, child, { key: 'm', result: '1' }))],
    [
      'one of several',
      (service: Service, child: string) => {
        const body = '{"steps":[{"key":"m","result":1},{"key":"n","result":1}]}'
        return answered(200, send(service, `POST /jobs/${child}/steps`, body))
      },
    ],
    [
      'a child of its own',
      (service: Service, child: string, grandchild: string) =>
        answered(200, completeChild(service, child, grandchild, '{"result":1}')),
    ],
  ] as const) {
    test(`counts inherited steps as completed when it waits: ${title} more, and nothing is pending`, async () => {
      const { service, child } = await parentAndChild()
      const grandchild = newJobId()
      await dispatched(service, child, { keys: ['a', 'm'], job_ids: { m: grandchild } })
      assert.deepEqual((await readJob(service, child)).pending_keys, ['a', 'm'])
      await finish(service, child, grandchild)
      assert.deepEqual((await readJob(service, child)).pending_keys, [])
    })
  }

  test('changes its version with what it shows when the parent replaces or forgets an inherited step', async () => {
    const { service, parent, child } = await parentAndChild()
    const versions = new Set<unknown>()
    const look = async () => versions.add((await readCheckpoint(service, child)).headers.etag)
    await look()
    await recorded(record(service, parent, { key: 'a', result: '"new"' }))
    await look()
    assert.equal(await completedText(service, child), '{"a":"new","b":2}')
    await answered(204, request(service, `DELETE /jobs/${parent}/steps/b?force=true`))
    await look()
    assert.equal(await completedText(service, child), '{"a":"new"}')
    await recorded(record(service, parent, { key: 'b', result: '2' }))
    assert.equal(await completedText(service, child), '{"a":"new"}')
    await answered(204, request(service, `DELETE /jobs/${parent}?force=true`))
    await look()
    assert.equal(await completedText(service, child), '{}')
    assert.equal(versions.size, 4)
    await recorded(record(service, parent, { key: 'a', result: '"another life"' }))
    assert.equal(await completedText(service, child), '{}')
  })

  test('a grandchild sees both, each as of its dispatch, the nearer over the farther', async () => {
    const { service, parent, child } = await parentAndChild()
    const grandchild = newJobId()
    await recorded(record(service, child, { key: 'b', result: '"child"' }))
    await recorded(record(service, child, { key: 'c', result: '3' }))
    await dispatched(service, child, { job_ids: { deep: grandchild } })
    await assertUnchanged(service, grandchild, async () => {
      await recorded(record(service, child, { key: 'a', result: '"too late"' }))
      await recorded(record(service, parent, { key: 'd', result: '4' }))
    })
    assert.equal(await completedText(service, grandchild), '{"a":{"a": 1.0},"b":"child","c":3}')
    await recorded(record(service, grandchild, { key: 'c', result: '"own"' }))
    assert.equal(await completedText(service, grandchild), '{"a":{"a": 1.0},"b":"child","c":"own"}')
    const before = (await readCheckpoint(service, grandchild)).headers.etag
    await recorded(record(service, parent, { key: 'a', result: '1' }))
    assert.equal(await completedText(service, grandchild), '{"a":1,"b":"child","c":"own"}')
    assert.notEqual((await readCheckpoint(service, grandchild)).headers.etag, before)
  })

  test('a job that is there already keeps the checkpoint that it has when it is dispatched as a child', async () => {
    const service = await start()
    const [parent, child] = [newJobId(), newJobId()]
    await recorded(record(service, parent, { key: 'a', result: '1' }))
    await recorded(record(service, child, { key: 'mine', result: '2' }))
    await assertUnchanged(service, child, () => dispatched(service, parent, { job_ids: { run: child } }))
  })

  test('a whole checkpoint that is put detaches the child from its parent', async () => {
    const { service, parent, child } = await parentAndChild()
    const inherited = await readCheckpoint(service, child)
    await answered(200, putCheckpoint(service, child, inherited.text))
    assert.deepEqual(json(await readCheckpoint(service, child)), json(inherited))
    await assertUnchanged(service, child, async () => {
      await recorded(record(service, parent, { key: 'a', result: '"new"' }))
      await answered(204, request(service, `DELETE /jobs/${parent}?force=true`))
    })
    assert.equal((await readJob(service, child)).step_count, 2)
  })

  test('more inherited steps than one page holds are all there', async () => {
    const service = await start()
    const [parent, child] = [newJobId(), newJobId()]
    for (let page = 0; page < 5; page++) {
      const steps = Array.from({ length: 1000 }, (_, n) => ({ key: `k${page * 1000 + n}`, result: 'x'.repeat(300) }))
      await answered(200, send(service, `POST /jobs/${parent}/steps`, JSON.stringify({ steps })))
    }
    await dispatched(service, parent, { job_ids: { run: child } })
    await recorded(record(service, child, { key: 'k4500', result: '"own"' }))
    const steps = json(await readCheckpoint(service, child)).completed_steps
    const expected = Array.from({ length: 5000 }, (_, n) => `k${n}`).filter((key) => key !== 'k4500')
    assert.deepEqual(Object.keys(steps), [...expected, 'k4500'])
    assert.equal(steps.k4500, 'own')
  })
})
