import assert from 'node:assert/strict'
import test from 'node:test'
import { json, readCheckpoint, record, recorded, request, type Service, stepBody } from '../support.ts'
import { contract, shareService } from './target.ts'

/** More than fit into one page of any reader, in number and, with the results below, in bytes. */
const STEPS = 9000
const MEGABYTE = 1024 * 1024

contract('Large checkpoints', (target) => {
  const start = shareService(target)

  /** By the route that takes up to a thousand steps at once. */
  async function recordMany(service: Service, jobId: string, steps: readonly { key: string; result: string }[]) {
    for (let from = 0; from < steps.length; from += 1000) {
      const some = steps.slice(from, from + 1000).map((step) => stepBody(step))
      const reply = await request(service, `POST /jobs/${jobId}/steps`, {
        headers: { 'content-type': 'application/json' },
        body: `{"steps":[${some.join(',')}]}`,
      })
      assert.equal(reply.status, 200, reply.text)
    }
  }

  test('thousands of small steps come back complete, each once', async () => {
    const service = await start()
    const jobId = await target.newJob(service)
    const keys = Array.from({ length: STEPS }, (_, n) => `step_${n}`)
    await recordMany(
      service,
      jobId,
      keys.map((key) => ({ key, result: `"${key} ${'x'.repeat(100)}"` })),
    )
    const reply = await readCheckpoint(service, jobId)
    assert.equal(reply.text.match(/"step_\d+":/g)?.length, STEPS)
    const { completed_steps } = json(reply)
    assert.deepEqual(Object.keys(completed_steps).sort(), [...keys].sort())
    for (const key of keys) assert.ok(completed_steps[key].startsWith(`${key} `))
    const job = json(await request(service, `GET /jobs/${jobId}`))
    assert.deepEqual([job.step_count, job.version], [STEPS, String(reply.headers.etag).slice(1, -1)])
    const head = await request(service, `GET /jobs/${jobId}/checkpoint?fields=job_ids,pending_steps`)
    assert.equal(head.text, '{"job_ids":{}}')
  })

  test('a few results of a megabyte come back byte for byte', async () => {
    const service = await start()
    const jobId = await target.newJob(service)
    const keys = ['a', 'b', 'c', 'd', 'e']
    const result = (key: string) => `"${key}${'x'.repeat(MEGABYTE)}"`
    for (const key of keys) {
      await recorded(record(service, jobId, { key, result: result(key) }))
      await recorded(record(service, jobId, { key: `${key} small`, result: '1' }))
    }
    const { completed_steps } = json(await readCheckpoint(service, jobId))
    assert.deepEqual(
      Object.keys(completed_steps),
      keys.flatMap((key) => [key, `${key} small`]),
    )
    for (const key of keys) assert.equal(JSON.stringify(completed_steps[key]), result(key))
  })

  test('a checkpoint that is read while steps are recorded is one that the job had', async () => {
    const service = await start()
    const jobId = await target.newJob(service)
    const result = `"${'x'.repeat(2000)}"`
    const writers = 8
    const perWriter = 100
    let writing = true
    const write = async (writer: number) => {
      for (let n = 0; n < perWriter; n++) await recorded(record(service, jobId, { key: `${writer}/${n}`, result }))
    }
    const written = Promise.all(Array.from({ length: writers }, (_, writer) => write(writer))).then(() => {
      writing = false
    })
    let reads = 0
    while (writing) {
      const reply = await readCheckpoint(service, jobId)
      assert.equal(reply.status, 200, reply.text)
      assertPrefixes(Object.keys(json(reply).completed_steps), writers)
      reads += 1
    }
    await written
    assert.ok(reads > 3, `only ${reads} reads`)
    assert.equal(Object.keys(json(await readCheckpoint(service, jobId)).completed_steps).length, writers * perWriter)
  })

  /** Each writer waits for every answer, so of its steps a checkpoint has the first so many, without a gap. */
  function assertPrefixes(keys: readonly string[], writers: number) {
    const counts = Array(writers).fill(0)
    for (const key of keys) {
      const [writer = 0, n] = key.split('/').map(Number)
      assert.equal(n, counts[writer], key)
      counts[writer] += 1
    }
  }

  test('results that are replaced while a checkpoint is read leave it whole', async () => {
    const service = await start()
    const jobId = await target.newJob(service)
    const keys = Array.from({ length: 60 }, (_, n) => `k${n}`)
    const write = (turn: number) =>
      Promise.all(
        keys.map((key) =>
          recorded(record(service, jobId, { key, result: `"${turn}${'x'.repeat(turn % 2 ? 20_000 : 10_000)}"` })),
        ),
      )
    await write(0)
    let writing = true
    const written = (async () => {
      for (let turn = 1; turn < 8; turn++) await write(turn)
      writing = false
    })()
    while (writing) {
      const { completed_steps } = json(await readCheckpoint(service, jobId))
      assert.deepEqual(Object.keys(completed_steps).sort(), [...keys].sort())
    }
    await written
  })
})
