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
import { answered, completeChild, dispatched, engineContract, readJob, send } from './engine-target.ts'
import { shareService } from './target.ts'

const describeJob = (service: Service, jobId: string, body: unknown) =>
  send(service, `PUT /jobs/${jobId}`, typeof body === 'string' ? body : JSON.stringify(body))
const complete = (service: Service, jobId: string, body: string) => send(service, `POST /jobs/${jobId}/complete`, body)
const reopen = (service: Service, jobId: string) => send(service, `POST /jobs/${jobId}/reopen`)

engineContract('Describing a job', (target) => {
  const start = shareService(target)

  test('a job can be created before its first step: 201, then 200', async () => {
    const service = await start()
    const jobId = newJobId()
    const body = { name: 'order', labels: { tenant: 'acme', __proto__x: 'é' }, input_args: { n: 1 }, source_hash: 'h1' }
    const { version, ...rest } = await answered(201, describeJob(service, jobId, body))
    assert.deepEqual(rest, { job_id: jobId })
    const job = await readJob(service, jobId)
    assert.deepEqual([job.name, job.labels, job.source_hash, job.version], [body.name, body.labels, 'h1', version])
    assert.equal((await readCheckpoint(service, jobId)).headers.etag, `"${version}"`)
    assert.deepEqual(json(await readCheckpoint(service, jobId)).input_args, { n: 1 })
    await assertUnchanged(service, jobId, () => answered(200, describeJob(service, jobId, body)))
  })

  test('what is absent stays; labels that are given replace the old ones', async () => {
    const service = await start()
    const jobId = newJobId()
    await answered(201, describeJob(service, jobId, { name: 'order', labels: { a: '1', b: '2' } }))
    await answered(200, describeJob(service, jobId, { labels: { b: '3' } }))
    await answered(200, describeJob(service, jobId, { name: null, labels: null, input_args: null, source_hash: null }))
    const job = await readJob(service, jobId)
    assert.deepEqual([job.name, job.labels], ['order', { b: '3' }])
    await answered(200, describeJob(service, jobId, { labels: {} }))
    assert.deepEqual((await readJob(service, jobId)).labels, {})
  })

  test('the hash of a job cannot be changed by it', async () => {
    const service = await start()
    const jobId = newJobId()
    await answered(201, describeJob(service, jobId, { source_hash: 'h1' }))
    await assertUnchanged(service, jobId, async () => {
      assertProblem(await describeJob(service, jobId, { source_hash: 'h2', name: 'x' }), 'source_changed')
    })
  })

  test('a finished job can still be given a name and labels', async () => {
    const service = await start()
    const jobId = newJobId()
    await answered(200, complete(service, jobId, '{"result":1}'))
    await answered(200, describeJob(service, jobId, { labels: { seen: 'yes' } }))
    assert.deepEqual((await readJob(service, jobId)).labels, { seen: 'yes' })
  })

  const many = Object.fromEntries(Array.from({ length: 65 }, (_, n) => [`l${n}`, 'x']))
  for (const [title, body, detail] of [
    ['a name that is no text', { name: 17 }, /name/],
    ['an empty name', { name: '' }, /name/],
    ['a name that is too long', { name: 'x'.repeat(1025) }, /name/],
    ['a name with U+0000', { name: 'a\u0000' }, /name/],
    ['labels that are a list', { labels: [] }, /labels/],
    ['a label that is no text', { labels: { a: 1 } }, /labels\.a/],
    ['a label that is null', { labels: { a: null } }, /labels\.a/],
    ['a label with a colon in its name', { labels: { 'a:b': 'x' } }, /colon/],
    ['a label without a name', { labels: { '': 'x' } }, /label/],
    ['a label without a value', { labels: { a: '' } }, /labels\.a/],
    ['65 labels', { labels: many }, /64/],
    ['input_args that are a text', { input_args: 'x' }, /input_args/],
    ['a hash that is a number', { source_hash: 1 }, /source_hash/],
    ['a list', [], /object/],
  ] as const) {
    test(`${title}: refused, and the job stays unknown`, async () => {
      const service = await start()
      const jobId = newJobId()
      assertProblem(await describeJob(service, jobId, body), 'invalid_request', detail)
      assertProblem(await request(service, `GET /jobs/${jobId}`), 'job_not_found')
    })
  }
})

engineContract('Finishing a job', (target) => {
  const start = shareService(target)

  async function workedJob() {
    const service = await start()
    const jobId = await target.newJob(service)
    await recorded(record(service, jobId, { key: 'a', result: '1' }))
    return { service, jobId }
  }

  test('with a result it is completed, and gives it verbatim', async () => {
    const { service, jobId } = await workedJob()
    const before = Date.now()
    const { version, ...rest } = await answered(200, complete(service, jobId, '{"result":{"a": 1.0, "a":"\\u0000"}}'))
    assert.deepEqual(rest, { job_id: jobId })
    const reply = await request(service, `GET /jobs/${jobId}`)
    assert.ok(reply.text.endsWith(',"result":{"a": 1.0, "a":"\\u0000"}}'), reply.text)
    const { status, finished_at, version: read } = json(reply)
    assert.deepEqual([status, read], ['completed', version])
    assert.ok(Date.parse(finished_at) >= before - 1 && Date.parse(finished_at) <= Date.now() + 1)
  })

  test('with an error or a failure marker it is failed', async () => {
    const { service, jobId } = await workedJob()
    const error = '{"name":"E", "message":"no"}'
    await answered(200, complete(service, jobId, `{"error":${error}}`))
    const reply = await request(service, `GET /jobs/${jobId}`)
    const marker = `{"__wmill_error":true,"message":"no","result":{"error":${error}}}`
    assert.ok(reply.text.endsWith(`,"result":${marker}}`), reply.text)
    assert.equal(json(reply).status, 'failed')
    await assertUnchanged(service, jobId, () => answered(200, complete(service, jobId, `{"result":${marker}}`)))
  })

  test('a result of null counts as one', async () => {
    const { service, jobId } = await workedJob()
    await answered(200, complete(service, jobId, '{"result":null}'))
    const job = await readJob(service, jobId)
    assert.deepEqual([job.status, job.result], ['completed', null])
  })

  test('finished once more with the same changes nothing; with another is refused', async () => {
    const { service, jobId } = await workedJob()
    const first = await answered(200, complete(service, jobId, '{"result":[1]}'))
    await assertUnchanged(service, jobId, async () => {
      assert.deepEqual(await answered(200, complete(service, jobId, '{"result":[1]}')), first)
      assertProblem(await complete(service, jobId, '{"result":[2]}'), 'job_finished')
      assertProblem(await complete(service, jobId, '{"error":{"name":"E","message":"m"}}'), 'job_finished')
    })
  })

  test('a job that is not known is created finished', async () => {
    const service = await start()
    const jobId = newJobId()
    await answered(200, complete(service, jobId, '{"result":1}'))
    assert.equal((await readJob(service, jobId)).status, 'completed')
  })

  test('a finished job takes no new steps, answers repeats, and gives what stands', async () => {
    const { service, jobId } = await workedJob()
    await answered(200, complete(service, jobId, '{"result":1}'))
    await assertUnchanged(service, jobId, async () => {
      await recorded(record(service, jobId, { key: 'a', result: '1' }))
      const late = await answered(200, send(service, `POST /jobs/${jobId}/steps`, '{"key":"a","result":2}'))
      assert.deepEqual([late.recorded, late.result], [false, 1])
      assertProblem(await record(service, jobId, { key: 'a', result: '2' }), 'job_finished')
      assertProblem(await record(service, jobId, { key: 'b', result: '1' }), 'job_finished')
      const several = '{"steps":[{"key":"a","result":1},{"key":"b","result":1}]}'
      assertProblem(await send(service, `POST /jobs/${jobId}/steps`, several), 'job_finished')
    })
  })

  test('opened again it has no result and takes steps; opening an open one changes nothing', async () => {
    const { service, jobId } = await workedJob()
    const finished = await answered(200, complete(service, jobId, '{"result":1}'))
    const { version, ...rest } = await answered(200, reopen(service, jobId))
    assert.deepEqual(rest, { job_id: jobId })
    assert.notEqual(version, finished.version)
    const job = await readJob(service, jobId)
    assert.deepEqual([job.status, job.finished_at, 'result' in job, job.version], ['open', null, false, version])
    await assertUnchanged(service, jobId, async () =>
      assert.equal((await answered(200, reopen(service, jobId))).version, version),
    )
    await recorded(record(service, jobId, { key: 'b', result: '1' }))
  })

  test('a job that is not known cannot be opened again, and stays unknown', async () => {
    const service = await start()
    const jobId = newJobId()
    assertProblem(await reopen(service, jobId), 'job_not_found')
    assertProblem(await request(service, `GET /jobs/${jobId}`), 'job_not_found')
  })

  for (const body of ['{}', '{"result":1,"error":{"name":"E","message":"m"}}', '{"error":{"name":"E"}}', '[]', '']) {
    test(`${body || 'an empty body'} as its end: refused, and everything is as it was`, async () => {
      const { service, jobId } = await workedJob()
      const reply = await assertUnchanged(service, jobId, () => complete(service, jobId, body))
      assert.equal(reply.status, 400, reply.text)
    })
  }
})

engineContract('Forgetting', (target) => {
  const start = shareService(target)

  test('a forgotten step is gone with its entry and its counts, and runs again at the end', async () => {
    const service = await start()
    const jobId = await target.newJob(service)
    await recorded(record(service, jobId, { key: 'a/b', result: '{"__wmill_error":true}' }))
    await recorded(record(service, jobId, { key: 'c', result: '22' }))
    const before = (await readCheckpoint(service, jobId)).headers.etag
    const reply = await request(service, `DELETE /jobs/${jobId}/steps/a%2Fb`)
    assert.deepEqual([reply.status, reply.text], [204, ''])
    assert.notEqual((await readCheckpoint(service, jobId)).headers.etag, before)
    const { step_count, failed_count, bytes } = await readJob(service, jobId)
    assert.deepEqual([step_count, failed_count, bytes], [1, 0, 2])
    assertProblem(await request(service, `GET /jobs/${jobId}/steps/a%2Fb`), 'step_not_found')
    await recorded(record(service, jobId, { key: 'a/b', result: '1' }))
    assert.deepEqual(
      (await readTimeline(service, jobId)).map(({ key }) => key),
      ['c', 'a/b'],
    )
  })

  test('what is not there can be forgotten: 204, and nothing changes', async () => {
    const service = await start()
    const jobId = await target.newJob(service)
    await recorded(record(service, jobId, { key: 'a', result: '1' }))
    await assertUnchanged(service, jobId, () => answered(204, request(service, `DELETE /jobs/${jobId}/steps/b`)))
    const unknown = newJobId()
    await answered(204, request(service, `DELETE /jobs/${unknown}/steps/a`))
    await answered(204, request(service, `DELETE /jobs/${unknown}`))
    assertProblem(await request(service, `GET /jobs/${unknown}`), 'job_not_found')
  })

  test('a forgotten job is unknown, and one made anew under its id has none of its steps and versions', async () => {
    const service = await start()
    const jobId = newJobId()
    const versions = new Set<string>()
    for (let life = 0; life < 3; life++) {
      versions.add(await recorded(record(service, jobId, { key: `k${life}`, result: '1', source_hash: `h${life}` })))
      assert.deepEqual(json(await readCheckpoint(service, jobId)).completed_steps, { [`k${life}`]: 1 })
      const [entry, ...more] = await readTimeline(service, jobId)
      assert.deepEqual([entry?.key, more.length], [`k${life}`, 0])
      await answered(204, request(service, `DELETE /jobs/${jobId}`))
      assert.equal((await readCheckpoint(service, jobId)).headers.etag, '"0"')
      assert.deepEqual(await readTimeline(service, jobId), [])
      assertProblem(await request(service, `GET /jobs/${jobId}`), 'job_not_found')
    }
    assert.equal(versions.size, 3)
  })

  test('while a dispatched child is pending, neither the job nor its steps are forgotten, unless force=true insists', async () => {
    const service = await start()
    const [jobId, child] = [await target.newJob(service), newJobId()]
    await recorded(record(service, jobId, { key: 'a', result: '1' }))
    await dispatched(service, jobId, { job_ids: { run: child } })
    await assertUnchanged(service, jobId, async () => {
      assertProblem(await request(service, `DELETE /jobs/${jobId}`), 'job_parked')
      assertProblem(await request(service, `DELETE /jobs/${jobId}?force=false`), 'job_parked')
      assertProblem(await request(service, `DELETE /jobs/${jobId}?force=1`), 'invalid_request', /force/)
      assertProblem(await request(service, `DELETE /jobs/${jobId}/steps/a`), 'job_parked')
      await answered(204, request(service, `DELETE /jobs/${jobId}/steps/none`))
    })
    await answered(204, request(service, `DELETE /jobs/${jobId}/steps/a?force=true`))
    await answered(204, request(service, `DELETE /jobs/${jobId}?force=true`))
    // The child is a job of its own, and stays.
    assert.equal((await readJob(service, child)).id, child)
  })

  test('once the child is done, or the job only sleeps, nothing keeps them', async () => {
    const service = await start()
    const [jobId, child] = [await target.newJob(service), newJobId()]
    await dispatched(service, jobId, { job_ids: { run: child } })
    await answered(200, completeChild(service, jobId, child, '{"result":1}'))
    await answered(204, request(service, `DELETE /jobs/${jobId}/steps/run`))
    await dispatched(service, jobId, { mode: 'sleep', keys: ['nap'], entries: { nap: {} } })
    await answered(204, request(service, `DELETE /jobs/${jobId}/steps/nap`))
    assert.equal(
      (await readTimeline(service, jobId)).some(({ kind }) => kind === 'step'),
      false,
    )
    await answered(204, request(service, `DELETE /jobs/${jobId}`))
  })

  test('steps of a finished job and the job itself can be forgotten', async () => {
    const service = await start()
    const jobId = await target.newJob(service)
    await recorded(record(service, jobId, { key: 'a', result: '1' }))
    await recorded(record(service, jobId, { key: 'b', result: '2' }))
    await answered(200, complete(service, jobId, '{"result":1}'))
    await answered(204, request(service, `DELETE /jobs/${jobId}/steps/a`))
    assert.equal(await readResult(service, jobId, 'b'), '2')
    assert.equal((await readJob(service, jobId)).status, 'completed')
    await answered(204, request(service, `DELETE /jobs/${jobId}`))
  })
})

engineContract('Listing jobs', (target) => {
  const start = shareService(target)

  async function list(service: Service, query: string): Promise<{ ids: string[]; next: string | null }> {
    const { jobs, next_cursor } = await answered(200, request(service, `GET /jobs?${query}`))
    return { ids: jobs.map((job: { id: string }) => job.id), next: next_cursor }
  }

  test('the newest created come first, however they were changed since; each as GET /jobs/:id gives it', async () => {
    const service = await start()
    const name = newJobId()
    const ids = Array.from({ length: 5 }, newJobId)
    for (const id of ids) await answered(201, describeJob(service, id, { name }))
    await recorded(record(service, ids[1] as string, { key: 'a', result: '1' }))
    const { jobs, next_cursor } = await answered(200, request(service, `GET /jobs?name=${name}`))
    assert.equal(next_cursor, null)
    assert.deepEqual(jobs, await Promise.all([...ids].reverse().map((id) => readJob(service, id))))
  })

  test('pages follow each other by their cursors, without gap or repeat while jobs are created and forgotten', async () => {
    const service = await start()
    const name = newJobId()
    const ids = Array.from({ length: 9 }, newJobId)
    for (const id of ids) await answered(201, describeJob(service, id, { name }))
    const seen: string[] = []
    let cursor = ''
    for (let page = 0; page < 5; page++) {
      const { ids: found, next } = await list(service, `name=${name}&limit=2${cursor}`)
      seen.push(...found)
      assert.equal(next === null, page === 4)
      cursor = `&cursor=${next}`
      await answered(201, describeJob(service, newJobId(), { name }))
      if (page === 1) await answered(204, request(service, `DELETE /jobs/${found.at(-1)}`))
    }
    assert.deepEqual(seen, ids.reverse())
  })

  test('by status: open ones, completed ones, failed ones; results are not in lists', async () => {
    const service = await start()
    const name = newJobId()
    const [open, completed, failed] = [newJobId(), newJobId(), newJobId()]
    for (const id of [open, completed, failed]) await answered(201, describeJob(service, id, { name }))
    await answered(200, complete(service, completed, '{"result":1}'))
    await answered(200, complete(service, failed, '{"error":{"name":"E","message":"m"}}'))
    for (const [status, id] of Object.entries({ open, completed, failed })) {
      const { jobs } = await answered(200, request(service, `GET /jobs?status=${status}&name=${name}`))
      assert.deepEqual(
        jobs.map((job: { id: string }) => job.id),
        [id],
      )
      assert.equal('result' in jobs[0], false)
    }
  })

  test('by label, whose value may have a colon and any other text', async () => {
    const service = await start()
    const mark = newJobId()
    const [one, other] = [newJobId(), newJobId()]
    await answered(201, describeJob(service, one, { labels: { mark, url: 'http://é?&"\\' } }))
    await answered(201, describeJob(service, other, { labels: { mark, __proto__x: 'y' } }))
    assert.deepEqual((await list(service, `label=mark:${mark}`)).ids, [other, one])
    assert.deepEqual((await list(service, `label=${encodeURIComponent('url:http://é?&"\\')}`)).ids, [one])
    assert.deepEqual((await list(service, 'label=url:http')).ids, [])
    assert.deepEqual((await list(service, `label=other:${mark}`)).ids, [])
  })

  test('by the beginning of the id, in any case; filters hold together', async () => {
    const service = await start()
    const ids = ['0000abcd-1111-4111-8111-111111111111', '0000abce-1111-4111-8111-111111111111']
    const name = newJobId()
    for (const id of ids) await answered(201, describeJob(service, id, { name }))
    assert.deepEqual((await list(service, `prefix=0000ABC&name=${name}`)).ids, [...ids].reverse())
    assert.deepEqual((await list(service, 'prefix=0000abcd-1')).ids, [ids[0]])
    assert.deepEqual((await list(service, `prefix=${ids[1]}`)).ids, [ids[1]])
    assert.deepEqual((await list(service, `prefix=0000abcd&name=${newJobId()}`)).ids, [])
    assert.deepEqual((await list(service, `prefix=0000abcd&name=${name}&status=failed`)).ids, [])
  })

  test('a query that is not valid is refused, naming what is wrong', async () => {
    const service = await start()
    for (const [query, detail] of [
      ['status=done', /status/],
      ['name=', /name/],
      ['label=nocolon', /label/],
      ['label=:x', /label/],
      ['label=x:', /label/],
      ['prefix=xyz', /prefix/],
      ['prefix=0000-', /prefix/],
      [`prefix=${newJobId()}0`, /prefix/],
      ['limit=0', /limit/],
      ['limit=1001', /limit/],
      ['limit=x', /limit/],
      ['limit=-1', /limit/],
      ['cursor=x', /cursor/],
      ['cursor=', /cursor/],
      [`cursor=${Buffer.from('9.no-uuid').toString('base64url')}`, /cursor/],
      ['name=a&name=b', /name/],
    ] as const) {
      assertProblem(await request(service, `GET /jobs?${query}`), 'invalid_request', detail)
    }
  })
})
