import assert from 'node:assert/strict'
import http from 'node:http'
import test from 'node:test'
import fc from 'fast-check'
import type postgres from 'postgres'
import {
  assertProblem,
  json,
  newJobId,
  openSql,
  type Reply,
  readCheckpoint,
  readTimeline,
  record,
  recorded,
  request,
  type Service,
  stepBody,
  waitForLockWaiters,
  waitUntil,
} from '../support.ts'
import { contract, shareService } from './target.ts'

contract('Writers at the same time', (target) => {
  const start = shareService(target)
  const startSecond = shareSecond(start)

  /** Another service on the database of the first, as a second replica is. */
  function shareSecond(first: typeof start) {
    const second = shareService({
      ...target,
      start: async (scope, options) => target.start(scope, { ...options, databaseUrl: (await first()).databaseUrl }),
    })
    return second
  }

  async function completedSteps(service: Service, jobId: string): Promise<Record<string, unknown>> {
    return json(await readCheckpoint(service, jobId)).completed_steps
  }

  test('of sixteen first writes with three hashes one hash wins, and all its steps are there', {
    skip: !target.differences.adoptsHash,
  }, async () => {
    const service = await start()
    for (let round = 0; round < 12; round++) {
      const jobId = newJobId()
      const hashes = Array.from({ length: 16 }, (_, n) => `hash ${n % 3}`)
      const replies = await Promise.all(
        hashes.map((source_hash, n) => record(service, jobId, { key: `k${n}`, result: `${n}`, source_hash })),
      )
      const checkpoint = json(await readCheckpoint(service, jobId))
      const expected: Record<string, number> = {}
      for (const [n, reply] of replies.entries()) {
        if (n === 0 || hashes[n] === checkpoint.source_hash) {
          assert.equal(reply.status, 200, reply.text)
          expected[`k${n}`] = n
        } else {
          assertProblem(reply, 'source_changed')
        }
      }
      assert.deepEqual(checkpoint.completed_steps, expected)
      assert.equal((await readTimeline(service, jobId)).length, Object.keys(expected).length)
    }
  })

  test('64 steps of one job that come at once are all there', async () => {
    const service = await start()
    const jobId = await target.newJob(service)
    const keys = Array.from({ length: 64 }, (_, n) => `k${n}`)
    await Promise.all(keys.map((key) => recorded(record(service, jobId, { key, result: `"${key}"` }))))
    assert.deepEqual(await completedSteps(service, jobId), Object.fromEntries(keys.map((key) => [key, key])))
    const positions = (await readTimeline(service, jobId)).map((entry) => entry.position)
    assert.equal(new Set(positions).size, 64)
    assert.equal(json(await request(service, `GET /jobs/${jobId}`)).step_count, 64)
  })

  test('of 64 results for one key that come at once one stands, and the counts are those of one step', async () => {
    const service = await start()
    const jobId = await target.newJob(service)
    const results = Array.from({ length: 64 }, (_, n) => 10 ** (n % 10) + n)
    await Promise.all(results.map((n) => recorded(record(service, jobId, { key: 'k', result: `${n}` }))))
    const { k } = (await completedSteps(service, jobId)) as { k: number }
    assert.ok(results.includes(k))
    const job = json(await request(service, `GET /jobs/${jobId}`))
    assert.deepEqual([job.step_count, job.bytes], [1, String(k).length])
  })

  test('64 copies of one POST that come at once are one change', async () => {
    const service = await start()
    const jobId = await target.newJob(service)
    const versions = await Promise.all(
      Array.from({ length: 64 }, () => recorded(record(service, jobId, { key: 'k', result: '1' }))),
    )
    assert.equal(new Set(versions).size, 1)
  })

  test('two replicas write to one job at once, the first write included, and no step is lost', async () => {
    const replicas = [await start(), await startSecond()] as const
    for (let round = 0; round < 15; round++) {
      const jobId = await target.newJob(replicas[0])
      const keys = Array.from({ length: 24 }, (_, n) => `k${n}`)
      await Promise.all(
        keys.map((key, n) => recorded(record(replicas[n % 2] as Service, jobId, { key, result: `"${key}"` }))),
      )
      assert.deepEqual(await completedSteps(replicas[0], jobId), Object.fromEntries(keys.map((key) => [key, key])))
      assert.equal((await readCheckpoint(replicas[0], jobId)).text, (await readCheckpoint(replicas[1], jobId)).text)
    }
  })

  test('two replicas with many jobs in different orders neither lose a step nor block each other', async () => {
    const replicas = [await start(), await startSecond()] as const
    const jobs = await Promise.all(Array.from({ length: 8 }, () => target.newJob(replicas[0])))
    await fc.assert(
      fc.asyncProperty(
        fc.shuffledSubarray(jobs, { minLength: 8 }),
        fc.shuffledSubarray(jobs, { minLength: 8 }),
        async (a, b) => {
          const turn = newJobId()
          await Promise.all(
            [a, b].flatMap((order, replica) =>
              order.map((jobId) =>
                recorded(record(replicas[replica] as Service, jobId, { key: `${turn}/${replica}`, result: '1' })),
              ),
            ),
          )
        },
      ),
      { numRuns: 15 },
    )
    for (const jobId of jobs) assert.equal(Object.keys(await completedSteps(replicas[0], jobId)).length % 2, 0)
  })
})

contract('A job that somebody else holds', (target) => {
  const start = shareService(target)

  test('its steps wait and are recorded once it is released; other jobs are answered meanwhile', async (t) => {
    const service = await start()
    const sql = openSql(t, service.databaseUrl)
    const watch = openSql(t, service.databaseUrl)
    const jobId = await target.newJob(service)
    await recorded(record(service, jobId, { key: 'before', result: '1' }))
    await sql`begin`
    await target.lockJob(sql, jobId)
    const waiting = ['a', 'b', 'c'].map((key) => recorded(record(service, jobId, { key, result: '1' })))
    await waitForLockWaiters(watch, 1)
    for (let n = 0; n < 50; n++) {
      const other = await target.newJob(service)
      const from = performance.now()
      await recorded(record(service, other, { key: 'k', result: '1' }))
      assert.ok(performance.now() - from < 1000)
    }
    assert.equal((await request(service, 'GET /readyz')).status, 200)
    assert.equal(Object.keys(json(await readCheckpoint(service, jobId)).completed_steps).length, 1)
    await sql`rollback`
    await Promise.all(waiting)
    assert.deepEqual(Object.keys(json(await readCheckpoint(service, jobId)).completed_steps).sort(), [
      'a',
      'b',
      'before',
      'c',
    ])
  })

  test('many jobs that are held do not delay the others', async (t) => {
    const service = await start()
    const sql = openSql(t, service.databaseUrl)
    const held = await Promise.all(Array.from({ length: 20 }, () => target.newJob(service)))
    const free = await Promise.all(Array.from({ length: 20 }, () => target.newJob(service)))
    const write = (jobs: readonly string[], key: string) =>
      jobs.map((jobId) => recorded(record(service, jobId, { key, result: '1' })))
    await Promise.all([...write(held, 'before'), ...write(free, 'before')])
    await sql`begin`
    for (const jobId of held) await target.lockJob(sql, jobId)
    const waiting = write(held, 'a')
    const from = performance.now()
    for (let n = 0; n < 5; n++) await Promise.all(write(free, `k${n}`))
    const took = performance.now() - from
    await sql`rollback`
    await Promise.all(waiting)
    // Waiting for one lock alone, 250 ms each, the two connections of the slow lane would need 2.5 s a round.
    assert.ok(took < 2000, `${took} ms`)
  })

  test('its steps are refused with 503 before the SDKs give up, and all is well after', async (t) => {
    const service = await start()
    const sql = openSql(t, service.databaseUrl)
    const jobId = await target.newJob(service)
    await recorded(record(service, jobId, { key: 'before', result: '1' }))
    await sql`begin`
    await target.lockJob(sql, jobId)
    const from = performance.now()
    const replies = await Promise.all(['a', 'b'].map((key) => record(service, jobId, { key, result: '1' })))
    assert.ok(performance.now() - from < 9000)
    for (const reply of replies) assertProblem(reply, 'unavailable')
    await sql`rollback`
    await recorded(record(service, jobId, { key: 'a', result: '1' }))
    assert.ok('a' in json(await readCheckpoint(service, jobId)).completed_steps)
  })
})

contract('Lost connections', (target) => {
  const start = shareService(target)

  test('every step that was acknowledged is there although backends die all the while', async (t) => {
    const service = await start()
    const sql = openSql(t, service.databaseUrl)
    const jobs = await Promise.all(Array.from({ length: 4 }, () => target.newJob(service)))
    const acknowledged: { jobId: string; key: string; value: string }[] = []
    let writing = true
    let failures = 0

    async function write(writer: number) {
      for (let n = 0; writing; n++) {
        const jobId = jobs[(writer + n) % jobs.length] as string
        const key = `${writer}/${n}`
        const value = `${jobId} ${key}`
        const reply = await record(service, jobId, { key, result: JSON.stringify(value) })
        if (reply.status === 200) acknowledged.push({ jobId, key, value })
        else {
          assertProblem(reply, 'unavailable')
          failures += 1
        }
      }
    }
    async function read() {
      while (writing) {
        const reply = await readCheckpoint(service, jobs[0] as string)
        if (reply.status === 200) assert.ok(json(reply).completed_steps)
        else assertProblem(reply, 'unavailable')
      }
    }

    const work = [...Array.from({ length: 16 }, (_, writer) => write(writer)), read().catch(ignoreBrokenReply)]
    let killed = 0
    for (let round = 0; round < 25; round++) {
      const before = acknowledged.length
      await waitUntil(async () => acknowledged.length > before + 10, 'ten more steps')
      const gone = await sql`
        select pg_terminate_backend(pid) from pg_stat_activity
        where datname = current_database() and pid <> pg_backend_pid()`
      killed += gone.length
    }
    writing = false
    await Promise.all(work)
    assert.ok(killed > 25, `only ${killed} backends were killed`)
    const checkpoints = new Map(
      await Promise.all(
        jobs.map(async (jobId) => [jobId, json(await readCheckpoint(service, jobId)).completed_steps] as const),
      ),
    )
    for (const { jobId, key, value } of acknowledged) assert.equal(checkpoints.get(jobId)[key], value)
    t.diagnostic(`${killed} backends killed, ${acknowledged.length} steps acknowledged, ${failures} refused`)
  })

  /** A reply may break off when the backend of its reader dies; what must not happen is a short one that parses. */
  function ignoreBrokenReply(error: NodeJS.ErrnoException) {
    if (error.code !== 'ECONNRESET') throw error
  }

  async function countBusySessions(sql: postgres.Sql): Promise<number> {
    const [row] = await sql`
      select count(*)::integer as busy from pg_stat_activity
      where datname = current_database() and pid <> pg_backend_pid() and state <> 'idle'`
    return row?.busy
  }

  /** The checkpoint and the timeline of one moment, although steps may still arrive. */
  async function readAtOneVersion(service: Service, jobId: string) {
    for (;;) {
      const checkpoint = await readCheckpoint(service, jobId)
      const entries = await readTimeline(service, jobId)
      if ((await readCheckpoint(service, jobId)).headers.etag === checkpoint.headers.etag)
        return { completed_steps: json(checkpoint).completed_steps as Record<string, unknown>, entries }
    }
  }

  test('a client that goes away in mid-request leaves each step wholly there or wholly absent', async (t) => {
    const service = await start()
    const sql = openSql(t, service.databaseUrl)
    const jobId = await target.newJob(service)
    const { port } = new URL(service.url)
    const result = `"${'x'.repeat(3000)}"`
    // How much of the body is sent before the client leaves.
    const cuts = fc.sample(fc.tuple(fc.double({ min: 0, max: 1, maxExcluded: true, noNaN: true }), fc.boolean()), 200)

    async function sendAndLeave(key: string, [fraction, complete]: readonly [number, boolean]) {
      const body = Buffer.from(stepBody({ key, result }))
      const outgoing = http.request({
        port,
        host: '127.0.0.1',
        method: 'POST',
        path: `/jobs/${jobId}/inline-checkpoint`,
        headers: { 'content-type': 'application/json', 'content-length': body.length },
      })
      outgoing.on('error', () => {})
      const closed = new Promise((resolve) => outgoing.once('close', resolve))
      const sent = complete ? body : body.subarray(0, Math.floor(body.length * fraction))
      await new Promise<void>((resolve) => outgoing.write(sent.length ? sent : ' ', () => resolve()))
      outgoing.destroy()
      await closed
    }

    for (let from = 0; from < cuts.length; from += 20)
      await Promise.all(cuts.slice(from, from + 20).map((cut, n) => sendAndLeave(`k${from + n}`, cut)))
    await waitUntil(async () => (await countBusySessions(sql)) === 0, 'no session at work')
    const { completed_steps, entries } = await readAtOneVersion(service, jobId)
    assert.ok(entries.length > 0)
    for (const value of Object.values(completed_steps)) assert.equal(JSON.stringify(value), result)
    assert.deepEqual(entries.map((entry) => entry.key).sort(), Object.keys(completed_steps).sort())
    for (const [n, [, complete]] of cuts.entries()) if (!complete) assert.equal(`k${n}` in completed_steps, false)
  })

  test('a reader that goes away in mid-reply holds nothing', async (t) => {
    const service = await start()
    const sql = openSql(t, service.databaseUrl)
    const jobId = await target.newJob(service)
    for (let n = 0; n < 8; n++)
      await recorded(record(service, jobId, { key: `k${n}`, result: `"${'x'.repeat(1024 * 1024)}"` }))
    for (let n = 0; n < 12; n++) {
      await new Promise<void>((resolve, reject) => {
        http
          .get(`${service.url}/jobs/${jobId}/checkpoint`, (incoming) => {
            incoming.once('data', () => incoming.destroy())
            incoming.once('close', () => resolve())
            incoming.on('error', () => {})
          })
          .on('error', reject)
      })
    }
    const reply: Reply = await readCheckpoint(service, jobId)
    assert.equal(Object.keys(json(reply).completed_steps).length, 8)
    await waitUntil(async () => (await countBusySessions(sql)) === 0, 'no session at work')
  })
})
