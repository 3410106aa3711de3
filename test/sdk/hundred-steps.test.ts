import assert from 'node:assert/strict'
import { randomUUID } from 'node:crypto'
import { test } from 'node:test'
import { createDatabase } from '../postgres.ts'
import { startService } from '../service-process.ts'
import { allKeys, assertAgree, assertRightOutcomes, startRun } from './workflow-process.ts'

const OFF = { WM_WAC_INLINE_FAST_PATH: '0' }

async function readRecorded(url: string, jobId: string): Promise<Set<string>> {
  const response = await fetch(`${url}/jobs/${jobId}/checkpoint`)
  assert.equal(response.status, 200)
  return new Set(Object.keys(((await response.json()) as { completed_steps: object }).completed_steps))
}

function sorted(keys: Iterable<string>): string[] {
  return [...keys].sort()
}

function common(keys: Iterable<string>, others: Set<string>): string[] {
  return [...keys].filter((key) => others.has(key))
}

test('The npm SDK, unmodified, over the real service', async (t) => {
  const { url: databaseUrl } = await createDatabase(t)
  const { url } = await startService(t, { databaseUrl })

  for (const killAt of [1, 26, 55, 87]) {
    await t.test(`a run killed at step ${killAt} of 100 executes only what is missing when run again`, async (t) => {
      const jobId = randomUUID()
      const first = await startRun(t, { url, jobId, hangAt: Math.min(killAt + 8, 99) })
      first.go()
      await first.reaches(killAt)
      const killed = await first.kill()
      const recorded = await readRecorded(url, jobId)
      assert.deepEqual(
        killed.outcomes.map(({ key }) => key).filter((key) => !recorded.has(key)),
        [],
        'an acknowledged step is in the checkpoint',
      )
      assert.deepEqual(
        [...recorded].filter((key) => !killed.executed.includes(key)),
        [],
        'nothing else is there',
      )

      // The steps of one Promise.all, ten at most, may be under way; all before them are there.
      assert.ok(recorded.size >= killAt - 10 && recorded.size < 100, `${recorded.size} are recorded`)

      const second = await startRun(t, { url, jobId })
      second.go()
      const resumed = await second.succeeds()
      assert.deepEqual(common(resumed.executed, recorded), [], 'no recorded step is executed again')
      assert.equal(new Set(resumed.executed).size, resumed.executed.length, 'nor any other one twice')
      assertRightOutcomes(resumed)
      assertAgree(killed, resumed)
      assert.deepEqual(sorted(await readRecorded(url, jobId)), sorted(allKeys()))

      const third = await startRun(t, { url, jobId })
      third.go()
      const replayed = await third.succeeds()
      assert.deepEqual(replayed.executed, [])
      assertRightOutcomes(replayed)
      assertAgree(resumed, replayed)
    })
  }

  await t.test('the timeline has an entry for each step, with its own time and its outcome', async (t) => {
    const jobId = randomUUID()
    const run = await startRun(t, { url, jobId })
    run.go()
    const { executed, outcomes } = await run.succeeds()
    assert.deepEqual(sorted(executed), sorted(allKeys()))
    const response = await fetch(`${url}/jobs/${jobId}/timeline`)
    const { entries } = (await response.json()) as {
      entries: { key: string; status: string; started_at: string; scheduled_for: string; duration_ms: number }[]
    }
    assert.deepEqual(sorted(entries.map(({ key }) => key)), sorted(allKeys()))
    const failed = outcomes.filter(({ outcome }) => outcome.error).map(({ key }) => key)
    assert.equal(failed.length, 16)
    for (const entry of entries) {
      assert.equal(entry.status, failed.includes(entry.key) ? 'failed' : 'completed', entry.key)
      assert.match(entry.started_at, /^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z$/)
      assert.equal(entry.scheduled_for, entry.started_at)
      assert.ok(Number.isInteger(entry.duration_ms))
    }
  })

  await t.test('two processes of one job with steps of their own lose none, though one is killed', async (t) => {
    const jobId = randomUUID()
    const runs = await Promise.all([
      startRun(t, { url, jobId, prefix: 'a:', hangAt: 60 }),
      startRun(t, { url, jobId, prefix: 'b:' }),
    ])
    for (const run of runs) run.go()
    await runs[0].reaches(40)
    const killed = await runs[0].kill()
    const whole = await runs[1].succeeds()
    assertRightOutcomes(whole, 'b:')
    const recorded = await readRecorded(url, jobId)
    for (const { key } of [...killed.outcomes, ...whole.outcomes]) assert.ok(recorded.has(key), key)

    const again = await startRun(t, { url, jobId, prefix: 'a:' })
    again.go()
    const resumed = await again.succeeds()
    assert.deepEqual(common(resumed.executed, recorded), [])
    assertRightOutcomes(resumed, 'a:')
    assertAgree(killed, resumed)
    assert.deepEqual(sorted(await readRecorded(url, jobId)), sorted([...allKeys('a:'), ...allKeys('b:')]))

    for (const [prefix, before] of [
      ['a:', resumed],
      ['b:', whole],
    ] as const) {
      const replay = await startRun(t, { url, jobId, prefix })
      replay.go()
      const replayed = await replay.succeeds()
      assert.deepEqual(replayed.executed, [])
      assertRightOutcomes(replayed, prefix)
      assertAgree(before, replayed)
    }
  })

  await t.test('two processes of one job with the same steps both end with the right values', async (t) => {
    const jobId = randomUUID()
    const runs = await Promise.all([startRun(t, { url, jobId }), startRun(t, { url, jobId })])
    for (const run of runs) run.go()
    for (const run of runs) assertRightOutcomes(await run.succeeds())
    assert.deepEqual(sorted(await readRecorded(url, jobId)), sorted(allKeys()))

    const replay = await startRun(t, { url, jobId })
    replay.go()
    const replayed = await replay.succeeds()
    assert.deepEqual(replayed.executed, [])
    assertRightOutcomes(replayed)
  })

  await t.test('without the fast path the runner records each step itself, and none runs twice', async (t) => {
    const jobId = randomUUID()
    const first = await startRun(t, { url, jobId, hangAt: 45, env: OFF })
    first.go()
    await first.reaches(42)
    const killed = await first.kill()
    const recorded = await readRecorded(url, jobId)
    assert.deepEqual(
      killed.outcomes.map(({ key }) => key).filter((key) => !recorded.has(key)),
      [],
    )
    assert.equal(new Set(killed.executed).size, killed.executed.length)

    const second = await startRun(t, { url, jobId, env: OFF })
    second.go()
    const resumed = await second.succeeds()
    assert.deepEqual(common(resumed.executed, recorded), [])
    assert.equal(new Set(resumed.executed).size, resumed.executed.length)
    assertRightOutcomes(resumed)
    assertAgree(killed, resumed)
  })
})

test('a workflow outlives the death of the service: no finished step runs twice', async (t) => {
  const { url: databaseUrl } = await createDatabase(t)
  const service = await startService(t, { databaseUrl })
  const jobId = randomUUID()
  const run = await startRun(t, { url: service.url, jobId })
  run.go()
  await run.reaches(35)
  service.kill('SIGKILL')
  await service.exited
  await startService(t, { databaseUrl, port: service.port })
  const log = await run.succeeds()
  assert.match(run.stderr(), /does not answer yet/)
  assert.deepEqual(sorted(log.executed), sorted(allKeys()), 'each step is executed exactly once')
  assertRightOutcomes(log)

  const replay = await startRun(t, { url: service.url, jobId })
  replay.go()
  const replayed = await replay.succeeds()
  assert.deepEqual(replayed.executed, [])
  assertAgree(log, replayed)
})
