import assert from 'node:assert/strict'
import http from 'node:http'
import test, { after, afterEach, before, describe } from 'node:test'
import fc from 'fast-check'
import type postgres from 'postgres'
import { createDatabase } from '../postgres.ts'
import { startService } from '../service-process.ts'
import {
  assertProblem,
  json,
  newJobId,
  observe,
  openScope,
  openSql,
  type Reply,
  readCheckpoint,
  readTimeline,
  record,
  recorded,
  request,
  type Service,
  waitUntil,
} from '../support.ts'

// Two processes of the service on one database, as two replicas are. Whatever the order in which they meet there, the
// outcome must be one that some order of the requests explains.

const ROUNDS = 12

describe('Two processes on one database', () => {
  const scope = openScope()
  let replicas: [Service, Service]
  let sql: postgres.Sql
  let stopBoth: () => Promise<unknown>

  before(async () => {
    const { url: databaseUrl, name } = await createDatabase(scope)
    sql = openSql(scope, databaseUrl)
    // Below the time that the service waits for a lock: else it gives up and tries again before a deadlock is told.
    await sql`alter database ${sql(name)} set deadlock_timeout = '10ms'`
    const started = await Promise.all([1, 2].map(() => startService(scope, { databaseUrl })))
    const agent = new http.Agent({ keepAlive: true })
    scope.after(async () => agent.destroy())
    replicas = started.map(({ url }) => ({ url, databaseUrl, agent })) as [Service, Service]
    stopBoth = () => Promise.all(started.map(({ stop }) => stop()))
  })
  after(() => scope.close())

  afterEach(async () => {
    const stuck = await sql`
      select pid, query from pg_stat_activity where datname = current_database() and state like 'idle in transaction%'`
    assert.deepEqual([...stuck], [])
  })

  const replica = (n: number) => replicas[n % 2] as Service

  function send(n: number, line: string, body: unknown = undefined, headers: Record<string, string> = {}) {
    return request(replica(n), line, {
      ...(body !== undefined && { body: JSON.stringify(body) }),
      headers: { ...(body !== undefined && { 'content-type': 'application/json' }), ...headers },
    })
  }

  async function sent(...args: Parameters<typeof send>) {
    const reply = await send(...args)
    assert.ok(reply.status >= 200 && reply.status < 300, `${args[1]} was answered ${reply.status} ${reply.text}`)
    return reply.text === '' ? undefined : json(reply)
  }

  async function checkpointOf(jobId: string) {
    const [one, other] = await Promise.all(replicas.map((service) => readCheckpoint(service, jobId)))
    assert.equal(one?.text, other?.text)
    assert.equal(one?.headers.etag, other?.headers.etag)
    return json(one as Reply)
  }

  test('of sixteen first writes with three hashes one hash wins, all its steps are there, the others are refused', async () => {
    for (let round = 0; round < ROUNDS; round++) {
      const jobId = newJobId()
      const replies = await Promise.all(
        Array.from({ length: 16 }, (_, n) =>
          record(replica(n), jobId, { key: `k${n}`, result: `${n}`, source_hash: `hash ${n % 3}` }),
        ),
      )
      const { source_hash, completed_steps } = await checkpointOf(jobId)
      const won = replies.flatMap((_, n) => (source_hash === `hash ${n % 3}` ? [n] : []))
      assert.ok(won.length >= 5)
      for (const [n, reply] of replies.entries()) {
        if (won.includes(n)) assert.equal(reply.status, 200, reply.text)
        else assertProblem(reply, 'source_changed')
      }
      const expected = Object.fromEntries(won.map((n) => [`k${n}`, n]))
      assert.deepEqual(completed_steps, expected)
      const positions = (await readTimeline(replica(0), jobId)).map(({ position }) => position)
      assert.equal(new Set(positions).size, won.length)
    }
  })

  test('racing first writes of one key all end with the same value, and one of them recorded it', async () => {
    for (let round = 0; round < ROUNDS; round++) {
      const jobId = newJobId()
      const answers = await Promise.all(
        Array.from({ length: 8 }, (_, n) => sent(n, `POST /jobs/${jobId}/steps`, { key: 'k', result: `from ${n}` })),
      )
      const winners = answers.flatMap(({ recorded }, n) => (recorded ? [`from ${n}`] : []))
      assert.equal(winners.length, 1)
      for (const { recorded, result } of answers) if (!recorded) assert.equal(result, winners[0])
      assert.deepEqual((await checkpointOf(jobId)).completed_steps, { k: winners[0] })
    }
  })

  test('of several steps at once, in different orders, each key has one winner', async () => {
    const keys = ['a', 'b', 'c', 'd', 'e']
    await fc.assert(
      fc.asyncProperty(
        fc.array(fc.shuffledSubarray(keys, { minLength: 2 }), { minLength: 4, maxLength: 6 }),
        async (orders) => {
          const jobId = newJobId()
          const answers = await Promise.all(
            orders.map((order, n) =>
              sent(n, `POST /jobs/${jobId}/steps`, { steps: order.map((key) => ({ key, result: n })) }),
            ),
          )
          const { completed_steps } = await checkpointOf(jobId)
          for (const [n, { steps }] of answers.entries()) {
            for (const { key, recorded, result } of steps) assert.equal(completed_steps[key], recorded ? n : result)
          }
          const winners = answers.flatMap(({ steps }) => steps.filter((step: { recorded: boolean }) => step.recorded))
          assert.equal(winners.length, Object.keys(completed_steps).length)
        },
      ),
      { numRuns: ROUNDS },
    )
  })

  test('two children that finish at once leave both results and nothing pending', async () => {
    for (let round = 0; round < ROUNDS; round++) {
      const [jobId, a, b] = [newJobId(), newJobId(), newJobId()]
      await sent(round, `POST /jobs/${jobId}/dispatch`, { mode: 'parallel', job_ids: { a, b } })
      const answers = await Promise.all([
        sent(0, `POST /jobs/${jobId}/children/${a}/complete`, { result: 1 }),
        sent(1, `POST /jobs/${jobId}/children/${b}/complete`, { error: { name: 'E', message: 'm' } }),
      ])
      const { completed_steps, pending_steps } = await checkpointOf(jobId)
      assert.deepEqual(Object.keys(completed_steps).sort(), ['a', 'b'])
      assert.equal(pending_steps, undefined)
      // Exactly one of them was the last, and knows that the job can go on.
      assert.deepEqual(answers.map(({ pending_keys }) => pending_keys.length).sort(), [0, 2])
    }
  })

  test('a child that ends while another takes its key is either recorded before or stale', async () => {
    const outcomes = { recorded: 0, stale: 0 }
    for (let round = 0; round < ROUNDS * 2; round++) {
      const [jobId, former, successor] = [newJobId(), newJobId(), newJobId()]
      await sent(0, `POST /jobs/${jobId}/dispatch`, { mode: 'parallel', job_ids: { k: former } })
      const redispatch = () =>
        sent(round, `POST /jobs/${jobId}/dispatch`, { mode: 'parallel', job_ids: { k: successor } })
      const complete = () => send(round + 1, `POST /jobs/${jobId}/children/${former}/complete`, { result: 'former' })
      const [reply] = await Promise.all(round % 4 < 2 ? [complete(), redispatch()] : [redispatch().then(complete)])
      const { completed_steps, job_ids } = await checkpointOf(jobId)
      assert.deepEqual(job_ids, { k: successor })
      if (reply.status === 200) outcomes.recorded += 1
      else {
        assertProblem(reply, 'stale_child')
        outcomes.stale += 1
      }
      assert.deepEqual(completed_steps, reply.status === 200 ? { k: 'former' } : {})
      await sent(round, `POST /jobs/${jobId}/children/${successor}/complete`, { result: 'successor' })
      assert.deepEqual((await checkpointOf(jobId)).completed_steps, { k: 'successor' })
    }
    assert.ok(outcomes.stale >= ROUNDS, JSON.stringify(outcomes))
  })

  test('a checkpoint that is put under If-Match never loses a step that was recorded meanwhile', async (t) => {
    const jobId = newJobId()
    let refusals = 0
    async function write(writer: number): Promise<string[]> {
      const keys: string[] = []
      for (let n = 0; n < 40; n++) {
        const key = `${writer}/${n}`
        await recorded(record(replica(writer), jobId, { key, result: '1' }))
        keys.push(key)
      }
      return keys
    }
    /** Counts to ten in input_args, by reading the checkpoint and putting it back changed. */
    async function count(counter: number): Promise<void> {
      for (let counted = 0; counted < 10; ) {
        const reply = await readCheckpoint(replica(counter), jobId)
        const checkpoint = json(reply)
        checkpoint.input_args = { n: (checkpoint.input_args.n ?? 0) + 1 }
        const put = await send(counter, `PUT /jobs/${jobId}/checkpoint`, checkpoint, {
          'if-match': String(reply.headers.etag),
        })
        if (put.status === 200) counted += 1
        else {
          assertProblem(put, 'precondition_failed')
          refusals += 1
        }
      }
    }
    const [keys] = await Promise.all([Promise.all([0, 1, 2, 3].map(write)), Promise.all([0, 1].map(count))])
    const { completed_steps, input_args } = await checkpointOf(jobId)
    assert.deepEqual(Object.keys(completed_steps).sort(), keys.flat().sort())
    assert.equal(input_args.n, 20)
    assert.ok(refusals > 0)
    t.diagnostic(`${input_args.n} checkpoints put, ${refusals} refused`)
  })

  test('a job forgotten while it is written to is wholly gone or wholly new', async () => {
    for (let round = 0; round < ROUNDS; round++) {
      const jobId = newJobId()
      const old = Array.from({ length: 10 }, (_, n) => `old ${n}`)
      await sent(round, `POST /jobs/${jobId}/steps`, {
        steps: old.map((key) => ({ key, result: 1 })),
        source_hash: 'old',
      })
      const racing = Array.from({ length: 24 }, (_, n) => `racing ${n}`)
      await Promise.all([
        ...racing.map((key, n) => recorded(record(replica(n), jobId, { key, result: '1' }))),
        sent(round, `DELETE /jobs/${jobId}`),
        sent(round + 1, `DELETE /jobs/${jobId}`),
      ])
      await recorded(record(replica(round), jobId, { key: 'new', result: '1', source_hash: 'new' }))
      const { completed_steps, source_hash } = await checkpointOf(jobId)
      assert.equal(source_hash, 'new')
      const keys = Object.keys(completed_steps)
      assert.ok(
        keys.every((key) => key === 'new' || racing.includes(key)),
        keys.join(),
      )
      assert.deepEqual(
        (await readTimeline(replica(0), jobId)).map(({ key }) => key),
        keys,
      )
      const job = json(await request(replica(1), `GET /jobs/${jobId}`))
      assert.deepEqual([job.step_count, job.bytes], [keys.length, keys.length])
      await sent(round, `DELETE /jobs/${jobId}`)
      const [left] = await sql`
        select (select count(*) from cairn.step where job_id = ${jobId})
          + (select count(*) from cairn.child where job_id = ${jobId})
          + (select count(*) from cairn.job where id = ${jobId}) as rows`
      assert.equal(Number(left?.rows), 0)
    }
  })

  test('dispatching, recording on parents and on children, and forgetting go on together; no step is lost', async () => {
    const rounds = ROUNDS / 2
    const parents = Array.from({ length: 3 }, newJobId)
    for (let round = 0; round < rounds; round++) {
      const children = parents.map(() => Array.from({ length: 5 }, newJobId))
      await Promise.all(
        parents.flatMap((parent, p) => {
          const own = children[p] as string[]
          const job_ids = Object.fromEntries(own.map((child, n) => [`${round}/${n}`, child]))
          return [
            sent(p, `POST /jobs/${parent}/dispatch`, { mode: 'parallel', job_ids }),
            sent(p + 1, `POST /jobs/${parent}/dispatch`, { mode: 'parallel', job_ids }),
            sent(p, `DELETE /jobs/${newJobId()}`),
            recorded(record(replica(p), parent, { key: `step ${round}`, result: '1' })),
            recorded(record(replica(p + 1), parent, { key: `other ${round}`, result: '1' })),
            ...own.map((child, n) => recorded(record(replica(n), child, { key: 'first', result: `${n}` }))),
          ]
        }),
      )
      await Promise.all(
        parents.flatMap((parent, p) =>
          (children[p] as string[]).flatMap((child, n) => [
            recorded(record(replica(n + 1), child, { key: 'second', result: '2' })),
            sent(n, `POST /jobs/${parent}/children/${child}/start`, {}),
            sent(n + 1, `POST /jobs/${parent}/children/${child}/complete`, { result: n }),
          ]),
        ),
      )
      for (const child of children.flat()) {
        const { completed_steps } = await checkpointOf(child)
        assert.ok('first' in completed_steps && completed_steps.second === 2)
      }
    }
    for (const parent of parents) {
      const { completed_steps, pending_steps, job_ids } = await checkpointOf(parent)
      assert.equal(Object.keys(completed_steps).length, rounds * 7)
      assert.equal(Object.keys(job_ids).length, rounds * 5)
      assert.equal(pending_steps, undefined)
      const entries = await readTimeline(replica(0), parent)
      assert.equal(new Set(entries.map(({ position }) => position)).size, rounds * 7)
      assert.ok(entries.every(({ status }) => status === 'completed'))
    }
  })

  test('jobs that dispatch each other all at once, while they are written to and forgotten, block nobody', async () => {
    const move = fc.tuple(fc.nat(5), fc.nat(5), fc.constantFrom('record', 'forget', 'dispatch', 'dispatch', 'dispatch'))
    await fc.assert(
      fc.asyncProperty(fc.array(move, { minLength: 24, maxLength: 32 }), async (moves) => {
        const ids = Array.from({ length: 6 }, newJobId)
        const replies = await Promise.all(
          moves.map(([of, key, kind], n) => {
            const job = ids[of] as string
            if (kind === 'record') return record(replica(n), job, { key: `k${key}`, result: `${n}` })
            if (kind === 'forget') return send(n, `DELETE /jobs/${job}?force=true`)
            // All others are its children: the locks of all are taken, even where one is another job's child and it is refused.
            const children = ids.flatMap((id, index) => (id === job ? [] : [[`k${index}`, id]]))
            return send(n, `POST /jobs/${job}/dispatch`, { mode: 'parallel', job_ids: Object.fromEntries(children) })
          }),
        )
        for (const { status, text } of replies) assert.ok(status === 200 || status === 204 || status === 400, text)
      }),
      { numRuns: ROUNDS * 2 },
    )
  })

  test('identical requests that come at once by both processes are one change', async () => {
    for (let round = 0; round < ROUNDS / 3; round++) {
      const [jobId, child] = [newJobId(), newJobId()]
      const moves: [line: string, body: unknown][] = [
        [`PUT /jobs/${jobId}`, { name: 'order', labels: { a: '1' } }],
        [`POST /jobs/${jobId}/inline-checkpoint`, { key: 'a', result: 1, started_at: '2026-12-01T01:45Z' }],
        [
          `POST /jobs/${jobId}/steps`,
          {
            steps: [
              { key: 'b', result: 2 },
              { key: 'c', result: 3 },
            ],
          },
        ],
        [`POST /jobs/${jobId}/dispatch`, { mode: 'parallel', job_ids: { run: child } }],
        [`POST /jobs/${jobId}/children/${child}/start`, { started_at: '2026-12-01T01:45Z' }],
        [`POST /jobs/${jobId}/children/${child}/complete`, { result: 4, duration_ms: 1 }],
        [`PUT /jobs/${jobId}/checkpoint`, { completed_steps: { a: 1, b: 3 }, input_args: { n: 1 } }],
        [`POST /jobs/${jobId}/complete`, { result: 5 }],
        [`POST /jobs/${jobId}/reopen`, undefined],
      ]
      for (const [line, body] of moves) {
        const answers = await Promise.all(Array.from({ length: 6 }, (_, n) => sent(n, line, body)))
        const versions = new Set(answers.map(({ version }) => version))
        assert.equal(versions.size, 1, `${line}: ${[...versions]}`)
        const seen = await observe(replica(0), jobId)
        assert.equal(seen.version, `"${[...versions][0]}"`)
        await sent(1, line, body)
        assert.deepEqual(await observe(replica(1), jobId), seen)
      }
    }
  })

  test('all that without a single deadlock', async () => {
    await stopBoth()
    // A backend tells its counts at the latest when it ends.
    await waitUntil(async () => {
      const [row] = await sql`
        select count(*)::integer as others from pg_stat_activity
        where datname = current_database() and pid <> pg_backend_pid()`
      return row?.others === 0
    }, 'the end of all sessions')
    const [row] = await sql`select deadlocks::integer from pg_stat_database where datname = current_database()`
    assert.equal(row?.deadlocks, 0)
  })
})
