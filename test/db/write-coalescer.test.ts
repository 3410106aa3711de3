import assert from 'node:assert/strict'
import test from 'node:test'
import { setImmediate as nextTurn } from 'node:timers/promises'
import fc from 'fast-check'
import {
  BATCH_MAX_BYTES,
  BATCH_MAX_REQUESTS,
  BATCH_MAX_STEPS,
  type BatchOutcome,
  createWriteCoalescer,
  QUEUE_MAX_BYTES,
  QUEUE_MAX_REQUESTS,
} from '../../db/write-coalescer.ts'
import { Problem } from '../../src/problems.ts'

interface Write {
  jobId: string
  sourceHash: string
  keys: readonly string[]
  bytes: number
}

/** A statement that is under way until the test ends it. */
interface Statement {
  lane: 'shared' | 'slow'
  writes: readonly Write[]
  done(): void
  end(...outcomes: BatchOutcome<string>[]): void
  fail(code: string): void
}

function write(jobId: string, key: string | readonly string[], rest: Partial<Write> = {}): Write {
  return { jobId, keys: [key].flat(), sourceHash: '', bytes: 10, ...rest }
}

/** A coalescer whose statements the test itself ends. Each result names the keys. */
function openCoalescer({ sharedWidth = 1, slowWidth = 1 } = {}) {
  const statements: Statement[] = []
  const failures: unknown[] = []
  const run = (lane: Statement['lane']) => (writes: readonly Write[]) =>
    new Promise<BatchOutcome<string>[]>((resolve, reject) => {
      const statement: Statement = {
        lane,
        writes,
        end: (...outcomes) => resolve(outcomes),
        done: () => resolve(writes.map((one) => ({ kind: 'done', result: one.keys.join() }))),
        fail: (code) => reject(Object.assign(new Error(code), { code })),
      }
      statements.push(statement)
    })
  const coalescer = createWriteCoalescer<Write, string>({
    sharedWidth,
    slowWidth,
    runShared: run('shared'),
    runSlow: run('slow'),
    onFailure: (error) => failures.push(error),
  })
  /** What went out since it was last asked, as soon as anything did. */
  async function sent(): Promise<Statement[]> {
    const deadline = performance.now() + 5000
    while (statements.length === 0 && performance.now() < deadline) await nextTurn()
    await nextTurn()
    return statements.splice(0)
  }
  async function sentOne(): Promise<Statement> {
    const [only, ...others] = await sent()
    assert.equal(others.length, 0)
    return only ?? assert.fail('Nothing was sent')
  }
  return { ...coalescer, statements, failures, sent, sentOne }
}

async function finish(statement: Statement): Promise<void> {
  statement.done()
  await nextTurn()
}

function keysOf(statement: Statement): string[] {
  return statement.writes.flatMap((one) => one.keys)
}

async function codeOf(outcome: Promise<unknown>): Promise<string> {
  const error = await outcome.then(
    () => assert.fail('It was recorded'),
    (reason) => reason,
  )
  assert.ok(error instanceof Problem)
  return error.code
}

test('a request that finds nothing under way goes out at once, within the same turn', async () => {
  const { submit, statements } = openCoalescer()
  const outcome = submit(write('job', 'a'))
  assert.equal(statements.length, 1)
  statements[0]?.done()
  assert.equal(await outcome, 'a')
})

test('what arrives while a statement is under way goes together in the next', async () => {
  const { submit, sentOne } = openCoalescer()
  const first = submit(write('job', 'a'))
  const others = [submit(write('job', 'b')), submit(write('other', 'c')), submit(write('job', 'd'))]
  ;(await sentOne()).done()
  const second = await sentOne()
  assert.deepEqual(keysOf(second).sort(), ['b', 'c', 'd'])
  second.done()
  assert.deepEqual(await Promise.all([first, ...others]), ['a', 'b', 'c', 'd'])
})

test('as many statements as the width are under way at once, and no job is in two of them', async () => {
  const { submit, sent, sentOne } = openCoalescer({ sharedWidth: 2 })
  const outcomes = [submit(write('x', 'a')), submit(write('y', 'b')), submit(write('x', 'c')), submit(write('z', 'd'))]
  const [first, second] = await sent()
  assert.deepEqual([first && keysOf(first), second && keysOf(second)], [['a'], ['b']])
  second?.done()
  // x is still under way: its c has to wait, z need not.
  const third = await sentOne()
  assert.deepEqual(keysOf(third), ['d'])
  first?.done()
  const fourth = await sentOne()
  assert.deepEqual(keysOf(fourth), ['c'])
  third.done()
  fourth.done()
  await Promise.all(outcomes)
})

test('a statement takes a bounded number of requests, steps and bytes', async () => {
  for (const [writes, sizes] of [
    [Array.from({ length: BATCH_MAX_REQUESTS + 1 }, (_, n) => write(`job ${n}`, 'k')), [BATCH_MAX_REQUESTS, 1]],
    [Array.from({ length: BATCH_MAX_REQUESTS + 1 }, (_, n) => write('job', `k${n}`)), [BATCH_MAX_REQUESTS, 1]],
    [Array.from({ length: 5 }, (_, n) => write(`job ${n}`, 'k', { bytes: BATCH_MAX_BYTES / 4 })), [4, 1]],
    [
      Array.from({ length: 3 }, (_, n) =>
        write(
          `job ${n}`,
          Array.from({ length: BATCH_MAX_STEPS / 2 }, (_, step) => `k${step}`),
        ),
      ),
      [2, 1],
    ],
  ] as const) {
    const { submit, sentOne } = openCoalescer()
    const first = submit(write('first', 'k'))
    const outcomes = writes.map((one) => submit(one))
    ;(await sentOne()).done()
    for (const size of sizes) {
      const statement = await sentOne()
      assert.equal(statement.writes.length, size)
      statement.done()
    }
    await Promise.all([first, ...outcomes])
  }
})

test('a request that is larger than a batch goes by the slow lane and holds up nobody', async () => {
  const { submit, sent } = openCoalescer()
  const outcomes = [submit(write('large', 'a', { bytes: BATCH_MAX_BYTES + 1 })), submit(write('small', 'b'))]
  const statements = await sent()
  assert.deepEqual(
    statements.map((one) => [one.lane, ...keysOf(one)]),
    [
      ['slow', 'a'],
      ['shared', 'b'],
    ],
  )
  for (const statement of statements) statement.done()
  await Promise.all(outcomes)
})

test('requests with the same key of a job go in statements of their own, in order', async () => {
  const { submit, sentOne } = openCoalescer()
  const outcomes = [submit(write('x', '1')), submit(write('x', ['a', 'b'])), submit(write('x', 'c'))]
  outcomes.push(submit(write('x', 'b')), submit(write('x', 'd')), submit(write('y', 'b')))
  ;(await sentOne()).done()
  const second = await sentOne()
  const byJob = (jobId: string) => second.writes.filter((one) => one.jobId === jobId).flatMap((one) => one.keys)
  assert.deepEqual([byJob('x'), byJob('y')], [['a', 'b', 'c'], ['b']])
  second.done()
  const third = await sentOne()
  assert.deepEqual(keysOf(third), ['b', 'd'])
  third.done()
  await Promise.all(outcomes)
})

test('requests of a job with different hashes go in statements of their own; those without one go along', async () => {
  const { submit, sentOne } = openCoalescer()
  const hashes = ['', '', 'h1', '', 'h1', 'h2', '']
  const outcomes = hashes.map((sourceHash, n) => submit(write('job', `k${n}`, { sourceHash })))
  ;(await sentOne()).done()
  const second = await sentOne()
  assert.deepEqual(keysOf(second), ['k1', 'k2', 'k3', 'k4'])
  second.done()
  const third = await sentOne()
  assert.deepEqual(keysOf(third), ['k5', 'k6'])
  third.done()
  await Promise.all(outcomes)
})

test('a job whose row somebody holds goes on in the slow lane, and the others in the shared one', async () => {
  const { submit, sentOne, sent } = openCoalescer()
  const outcomes = [submit(write('first', '0')), submit(write('held', 'a')), submit(write('free', 'b'))]
  ;(await sentOne()).done()
  const shared = await sentOne()
  outcomes.push(submit(write('held', 'c')), submit(write('free', 'd')))
  shared.end({ kind: 'busy' }, { kind: 'done', result: 'b' })
  const statements = (await sent()).sort((one, other) => one.lane.localeCompare(other.lane))
  assert.deepEqual(
    statements.map((one) => [one.lane, ...keysOf(one)]),
    [
      ['shared', 'd'],
      ['slow', 'a', 'c'],
    ],
  )
  const [next, slow] = statements
  next?.done()
  slow?.end({ kind: 'busy' }, { kind: 'busy' })
  const again = await sentOne()
  assert.deepEqual([again.lane, ...keysOf(again)], ['slow', 'a', 'c'])
  again.done()
  await Promise.all(outcomes)
})

test('each statement of the slow lane is for one job', async () => {
  const { submit, sent, sentOne } = openCoalescer({ slowWidth: 2 })
  const outcomes = ['x', 'y', 'z'].map((jobId) => submit(write(jobId, jobId)))
  ;(await sentOne()).end({ kind: 'busy' })
  const [slow, shared] = (await sent()).sort((a, b) => b.lane.localeCompare(a.lane))
  shared?.end({ kind: 'busy' }, { kind: 'busy' })
  const second = await sentOne()
  for (const statement of [slow, second]) assert.equal(new Set(statement?.writes.map((one) => one.jobId)).size, 1)
  slow?.done()
  const third = await sentOne()
  assert.equal(third.writes.length, 1)
  second.done()
  third.done()
  assert.deepEqual(await Promise.all(outcomes), ['x', 'y', 'z'])
})

test("requests that must be alone are sent one by one, and refusals are each request's own", async () => {
  const { submit, sentOne } = openCoalescer()
  const outcomes = Promise.allSettled(
    [write('first', '0'), ...['a', 'b', 'c'].map((key) => write('job', key))].map(submit),
  )
  ;(await sentOne()).done()
  ;(await sentOne()).end({ kind: 'single' }, { kind: 'single' }, { kind: 'single' })
  const full = new Problem('checkpoint_full', 'Full.')
  const alone = await sentOne()
  assert.deepEqual(keysOf(alone), ['a'])
  alone.done()
  const second = await sentOne()
  assert.deepEqual(keysOf(second), ['b'])
  second.end({ kind: 'refused', problem: full })
  const third = await sentOne()
  assert.deepEqual(keysOf(third), ['c'])
  third.done()
  assert.deepEqual(
    (await outcomes).map((one) => (one.status === 'fulfilled' ? one.value : one.reason)),
    ['0', 'a', full, 'c'],
  )
})

test('data that the database refuses harms no other request of its statement', async () => {
  const { submit, sentOne, failures } = openCoalescer()
  const outcomes = Promise.allSettled(['0', 'a', 'bad', 'c'].map((key) => submit(write(`job of ${key}`, key))))
  ;(await sentOne()).done()
  ;(await sentOne()).fail('22P05')
  for (const key of ['a', 'bad', 'c']) {
    const alone = await sentOne()
    assert.deepEqual(keysOf(alone), [key])
    if (key === 'bad') alone.fail('22P05')
    else alone.done()
  }
  assert.deepEqual(
    (await outcomes).map((one) => (one.status === 'fulfilled' ? one.value : one.reason.code)),
    ['0', 'a', 'internal', 'c'],
  )
  assert.equal(failures.length, 2)
})

test('a lock that is not had in time moves the jobs to the slow lane', async () => {
  const { submit, sentOne } = openCoalescer()
  const outcome = submit(write('job', 'a'))
  ;(await sentOne()).fail('55P03')
  const slow = await sentOne()
  assert.equal(slow.lane, 'slow')
  slow.done()
  await outcome
})

test('a lost connection, a deadlock and a failover are tried again', async () => {
  for (const code of ['CONNECTION_CLOSED', 'ECONNREFUSED', '40P01', '40001', '57P01', '53300', '08006', '25006']) {
    const { submit, sentOne } = openCoalescer()
    const outcome = submit(write('job', 'a'))
    ;(await sentOne()).fail(code)
    const again = await sentOne()
    assert.deepEqual([again.lane, ...keysOf(again)], ['shared', 'a'], code)
    again.done()
    assert.equal(await outcome, 'a')
  }
})

test('what the database refuses for any other reason is refused as unavailable, at once', async () => {
  const { submit, sentOne } = openCoalescer()
  const outcome = submit(write('job', 'a'))
  ;(await sentOne()).fail('42501')
  assert.equal(await codeOf(outcome), 'unavailable')
})

test('a job that was deleted meanwhile is taken up again before what came later', async () => {
  const { submit, sentOne } = openCoalescer()
  const outcomes = [submit(write('job', 'a')), submit(write('job', 'b'))]
  ;(await sentOne()).end({ kind: 'retry' })
  const again = await sentOne()
  assert.deepEqual(keysOf(again), ['a', 'b'])
  again.done()
  await Promise.all(outcomes)
})

test('the queue is bounded in requests', async () => {
  const { submit, statements, load } = openCoalescer()
  const outcomes = Array.from({ length: QUEUE_MAX_REQUESTS }, (_, n) => submit(write(`job ${n % 100}`, `k${n}`)))
  assert.equal(load().requests, QUEUE_MAX_REQUESTS)
  assert.equal(await codeOf(submit(write('job', 'one too many'))), 'unavailable')
  while (load().requests > 0) {
    for (const statement of statements.splice(0)) statement.done()
    await nextTurn()
  }
  await Promise.all(outcomes)
  assert.equal(statements.length, 0)
  assert.deepEqual(load(), { requests: 0, bytes: 0 })
})

test('the queue is bounded in bytes', async () => {
  const { submit, sent, load } = openCoalescer()
  const half = write('x', 'a', { bytes: QUEUE_MAX_BYTES / 2 })
  const outcomes = [submit(half), submit({ ...half, jobId: 'y' })]
  assert.equal(load().bytes, QUEUE_MAX_BYTES)
  assert.equal(await codeOf(submit(write('z', 'a', { bytes: 1 }))), 'unavailable')
  while (load().requests > 0) for (const statement of await sent()) await finish(statement)
  await Promise.all(outcomes)
  const next = submit(write('z', 'a', { bytes: 1 }))
  for (const statement of await sent()) statement.done()
  assert.equal(await next, 'a')
})

test('it is drained once nothing waits and nothing is under way', async () => {
  const { submit, drained, sentOne } = openCoalescer()
  await drained()
  const outcomes = [submit(write('job', 'a')), submit(write('job', 'a'))]
  let isDrained = false
  const draining = drained().then(() => {
    isDrained = true
  })
  ;(await sentOne()).done()
  await outcomes[0]
  assert.equal(isDrained, false)
  ;(await sentOne()).done()
  await Promise.all([draining, ...outcomes])
})

test('whatever the database answers, every request is answered once and every statement keeps the rules', async () => {
  const request = fc.record({
    jobId: fc.constantFrom('x', 'y', 'z'),
    keys: fc.uniqueArray(fc.constantFrom('a', 'b', 'c', 'd'), { minLength: 1, maxLength: 3 }),
    sourceHash: fc.constantFrom('', '', 'h1', 'h2'),
    bytes: fc.constantFrom(1, 1000, BATCH_MAX_BYTES / 2, BATCH_MAX_BYTES + 1),
  })
  const verdict = fc.constantFrom(
    'done',
    'done',
    'done',
    'busy',
    'retry',
    'single',
    'refused',
    '55P03',
    '23505',
    '42501',
  )
  await fc.assert(
    fc.asyncProperty(
      fc.array(request, { minLength: 1, maxLength: 40 }),
      fc.array(verdict, { minLength: 1, maxLength: 20 }),
      async (requests, verdicts) => {
        let turn = 0
        const atWork = new Set<string>()
        const order: Write[] = []
        const run = (slow: boolean) => async (writes: readonly Write[]) => {
          const jobs = new Set(writes.map((one) => one.jobId))
          if (slow) assert.equal(jobs.size, 1)
          for (const jobId of jobs) {
            assert.equal(atWork.has(jobId), false, 'a job is in two statements')
            atWork.add(jobId)
            const own = writes.filter((one) => one.jobId === jobId)
            const keys = own.flatMap((one) => one.keys)
            assert.equal(new Set(keys).size, keys.length, 'a key stands twice in a statement')
            assert.ok(new Set(own.map((one) => one.sourceHash).filter(Boolean)).size <= 1, 'two hashes of a job')
          }
          if (writes.length > 1) assert.ok(writes.reduce((sum, one) => sum + one.bytes, 0) <= BATCH_MAX_BYTES)
          await nextTurn()
          for (const jobId of jobs) atWork.delete(jobId)
          // Once the verdicts are used up all goes well, so that every request comes to an end.
          const answers = writes.map((one) => ({ one, kind: verdicts[turn++] ?? 'done' }))
          const code = answers.find(({ kind }) => /^\d/.test(kind))?.kind
          if (code) throw Object.assign(new Error(code), { code })
          return answers.map(({ one, kind }): BatchOutcome<Write> => {
            if (kind === 'busy' || kind === 'retry' || kind === 'single') return { kind }
            order.push(one)
            if (kind === 'refused') return { kind, problem: new Problem('source_changed', 'No.') }
            return { kind: 'done', result: one }
          })
        }
        const { submit, drained, load } = createWriteCoalescer<Write, Write>({
          sharedWidth: 2,
          slowWidth: 1,
          runShared: run(false),
          runSlow: run(true),
        })
        const settled = await Promise.allSettled(requests.map(submit))
        for (const [n, outcome] of settled.entries()) {
          if (outcome.status === 'fulfilled') assert.equal(outcome.value, requests[n])
          else assert.ok(outcome.reason instanceof Problem, String(outcome.reason))
        }
        await drained()
        assert.deepEqual(load(), { requests: 0, bytes: 0 })
        assert.equal(new Set(order).size, order.length, 'a request was written twice')
      },
    ),
    { numRuns: 300 },
  )
})
