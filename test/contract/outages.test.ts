import assert from 'node:assert/strict'
import test from 'node:test'
import {
  assertProblem,
  createMigratedDatabase,
  json,
  openProxy,
  openScope,
  openSql,
  readCheckpoint,
  record,
  recorded,
  request,
  type Scope,
  waitUntil,
} from '../support.ts'
import { contract } from './target.ts'

/** The SDKs give up after ten seconds; the design leaves one of them to the network. */
const PATIENCE_MS = 9000

contract('A database that cannot be reached', (target) => {
  async function startBehindProxy(scope: Scope) {
    const proxy = await openProxy(scope, await createMigratedDatabase(scope))
    const service = await target.start(scope, { databaseUrl: proxy.url })
    const jobId = await target.newJob(service)
    await recorded(record(service, jobId, { key: 'before', result: '1' }))
    await readCheckpoint(service, jobId)
    assert.equal((await request(service, 'GET /readyz')).status, 200)
    return { proxy, service, jobId }
  }

  test('a write waits for it and is recorded when it comes back; reads are 503 meanwhile', async (t) => {
    const { proxy, service, jobId } = await startBehindProxy(t)
    proxy.cut()
    const waiting = ['a', 'b', 'c'].map((key) => recorded(record(service, jobId, { key, result: '1' })))
    assertProblem(await request(service, 'GET /readyz'), 'unavailable')
    assert.equal((await request(service, 'GET /livez')).status, 200)
    for (const path of ['checkpoint', 'steps/before', 'steps?key=before', 'timeline'])
      assertProblem(await request(service, `GET /jobs/${jobId}/${path}`), 'unavailable')
    assertProblem(await request(service, `GET /jobs/${jobId}`), 'unavailable')
    proxy.restore()
    await Promise.all(waiting)
    await waitUntil(async () => (await request(service, 'GET /readyz')).status === 200, 'readiness')
    const { completed_steps } = json(await readCheckpoint(service, jobId))
    assert.deepEqual(Object.keys(completed_steps).sort(), ['a', 'b', 'before', 'c'])
  })

  test('where nothing passes any more, all is answered in time, and is well again after', async () => {
    const scope = openScope()
    try {
      const { proxy, service, jobId } = await startBehindProxy(scope)
      proxy.stall()
      const from = performance.now()
      const [write, read, ready] = await Promise.all([
        record(service, jobId, { key: 'a', result: '1' }),
        readCheckpoint(service, jobId),
        request(service, 'GET /readyz'),
      ])
      assert.ok(performance.now() - from < PATIENCE_MS, `${performance.now() - from} ms`)
      for (const reply of [write, read, ready]) assertProblem(reply, 'unavailable')
      proxy.restore()
      await recorded(record(service, jobId, { key: 'a', result: '1' }))
      assert.ok('a' in json(await readCheckpoint(service, jobId)).completed_steps)
      assert.equal((await request(service, 'GET /readyz')).status, 200)
    } finally {
      await scope.close()
    }
  })

  test('a database that takes no writes makes the service not ready, and steps are refused with 503', async (t) => {
    const { service, jobId } = await startBehindProxy(t)
    const sql = openSql(t, service.databaseUrl)
    const [database] = await sql`select current_database() as name`
    const endSessions = () => sql`
      select pg_terminate_backend(pid) from pg_stat_activity
      where datname = current_database() and pid <> pg_backend_pid()`
    await sql.unsafe(`alter database ${database?.name} set default_transaction_read_only = on`)
    await endSessions()
    const write = record(service, jobId, { key: 'a', result: '1' })
    await waitUntil(async () => {
      const reply = await request(service, 'GET /readyz')
      assertProblem(reply, 'unavailable')
      return /takes no writes/.test(json(reply).detail)
    }, 'the reason')
    assert.equal((await readCheckpoint(service, jobId)).status, 200)
    await sql.unsafe('set default_transaction_read_only = off')
    await sql.unsafe(`alter database ${database?.name} reset default_transaction_read_only`)
    await endSessions()
    await recorded(write)
    await waitUntil(async () => (await request(service, 'GET /readyz')).status === 200, 'readiness')
  })
})
