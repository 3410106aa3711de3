import assert from 'node:assert/strict'
import test from 'node:test'
import {
  assertProblem,
  assertUnchanged,
  json,
  readCheckpoint,
  record,
  recorded,
  request,
  type Service,
} from '../support.ts'
import { contract, shareService } from './target.ts'

const MAX_STEPS = 5
const MAX_BYTES = 1000

/** A JSON string of `bytes` bytes. */
function resultOf(bytes: number): string {
  return `"${'x'.repeat(bytes - 2)}"`
}

contract('A full checkpoint', (target) => {
  const start = shareService(target, { limits: { maxStepsPerJob: MAX_STEPS, maxCheckpointBytes: MAX_BYTES } })

  async function freshJob() {
    const service = await start()
    return { service, jobId: await target.newJob(service) }
  }

  async function fill(service: Service, jobId: string, { steps, bytes }: { steps: number; bytes: number }) {
    for (let n = 0; n < steps; n++) await recorded(record(service, jobId, { key: `k${n}`, result: resultOf(bytes) }))
  }

  async function assertFull(service: Service, jobId: string, step: { key: string; result: string }) {
    const reply = await assertUnchanged(service, jobId, () => record(service, jobId, step))
    assertProblem(reply, 'checkpoint_full', new RegExp(`${MAX_STEPS}.*${MAX_BYTES}`))
  }

  test('a job may have MAX_STEPS_PER_JOB steps and not one more', async () => {
    const { service, jobId } = await freshJob()
    await fill(service, jobId, { steps: MAX_STEPS, bytes: 10 })
    await assertFull(service, jobId, { key: 'more', result: 'null' })
    assert.equal(Object.keys(json(await readCheckpoint(service, jobId)).completed_steps).length, MAX_STEPS)
  })

  test('a job that has all its steps still takes other results for them', async () => {
    const { service, jobId } = await freshJob()
    await fill(service, jobId, { steps: MAX_STEPS, bytes: 10 })
    await recorded(record(service, jobId, { key: 'k3', result: resultOf(50) }))
    await recorded(record(service, jobId, { key: 'k3', result: 'null' }))
    assert.equal(json(await request(service, `GET /jobs/${jobId}`)).step_count, MAX_STEPS)
  })

  test('results may have MAX_CHECKPOINT_BYTES together and not one more', async () => {
    const { service, jobId } = await freshJob()
    await fill(service, jobId, { steps: 3, bytes: 300 })
    await assertFull(service, jobId, { key: 'more', result: resultOf(101) })
    await recorded(record(service, jobId, { key: 'more', result: resultOf(100) }))
    assert.equal(json(await request(service, `GET /jobs/${jobId}`)).bytes, MAX_BYTES)
    await assertFull(service, jobId, { key: 'k0', result: resultOf(301) })
    await recorded(record(service, jobId, { key: 'k0', result: resultOf(300).replaceAll('x', 'y') }))
    await recorded(record(service, jobId, { key: 'k0', result: '1' }))
    await recorded(record(service, jobId, { key: 'k0', result: resultOf(300) }))
  })

  test('bytes are those of UTF-8, not characters', async () => {
    const { service, jobId } = await freshJob()
    await assertFull(service, jobId, { key: 'k', result: `"${'é'.repeat(500)}"` })
    await recorded(record(service, jobId, { key: 'k', result: `"${'é'.repeat(499)}"` }))
    assert.equal(json(await request(service, `GET /jobs/${jobId}`)).bytes, MAX_BYTES)
  })

  test('a first step beyond the limit leaves no job behind', async () => {
    const { service, jobId } = await freshJob()
    await assertFull(service, jobId, { key: 'k', result: resultOf(MAX_BYTES + 1) })
    assert.equal((await readCheckpoint(service, jobId)).headers.etag, '"0"')
  })

  test('a repeat of what a full job has is harmless', async () => {
    const { service, jobId } = await freshJob()
    await fill(service, jobId, { steps: MAX_STEPS, bytes: 200 })
    const again = { key: 'k1', result: resultOf(200) }
    await assertUnchanged(service, jobId, () => recorded(record(service, jobId, again)))
  })

  test('a limit that was lowered below what a job has lets it shrink, and repeat', async (t) => {
    const { service, jobId } = await freshJob()
    await fill(service, jobId, { steps: MAX_STEPS, bytes: 200 })
    const lowered = await target.start(t, {
      databaseUrl: service.databaseUrl,
      limits: { maxStepsPerJob: 2, maxCheckpointBytes: 500 },
    })
    await recorded(record(lowered, jobId, { key: 'k0', result: resultOf(200) }))
    await recorded(record(lowered, jobId, { key: 'k0', result: resultOf(199) }))
    assertProblem(await record(lowered, jobId, { key: 'k0', result: resultOf(200) }), 'checkpoint_full')
    assertProblem(await record(lowered, jobId, { key: 'new', result: '1' }), 'checkpoint_full')
    assert.equal(json(await readCheckpoint(lowered, jobId)).completed_steps.k0.length, 197)
  })

  test('of steps that come together to a nearly full job exactly those that fit are recorded', async () => {
    const { service, jobId } = await freshJob()
    await fill(service, jobId, { steps: 2, bytes: 10 })
    const replies = await Promise.all(
      Array.from({ length: 12 }, (_, n) => record(service, jobId, { key: `new${n}`, result: '1' })),
    )
    const statuses = replies.map((reply) => reply.status).sort()
    assert.deepEqual(statuses, [...Array(MAX_STEPS - 2).fill(200), ...Array(12 - MAX_STEPS + 2).fill(413)])
    const { completed_steps } = json(await readCheckpoint(service, jobId))
    assert.equal(Object.keys(completed_steps).length, MAX_STEPS)
    for (const [n, reply] of replies.entries()) assert.equal(`new${n}` in completed_steps, reply.status === 200)
  })

  test('one job that is full does not hinder another', async () => {
    const { service, jobId } = await freshJob()
    await fill(service, jobId, { steps: MAX_STEPS, bytes: 10 })
    const other = await target.newJob(service)
    const [full, ...rest] = await Promise.all([
      record(service, jobId, { key: 'more', result: '1' }),
      ...[0, 1, 2].map((n) => record(service, other, { key: `k${n}`, result: '1' })),
    ])
    assertProblem(full, 'checkpoint_full')
    assert.deepEqual(
      rest.map((reply) => reply.status),
      [200, 200, 200],
    )
  })
})
