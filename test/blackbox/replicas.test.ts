import assert from 'node:assert/strict'
import http from 'node:http'
import test, { type TestContext } from 'node:test'
import { createDatabase } from '../postgres.ts'
import { startService } from '../service-process.ts'
import { json, newJobId, type Reply, readCheckpoint, record, recorded, waitUntil } from '../support.ts'

/** Processes started at the same moment on an empty database, as replicas are after a deploy. */
async function startReplicas(t: TestContext, count: number) {
  const { url: databaseUrl } = await createDatabase(t)
  const agent = new http.Agent({ keepAlive: true })
  t.after(() => agent.destroy())
  const processes = await Promise.all(Array.from({ length: count }, () => startService(t, { databaseUrl })))
  return processes.map((process) => ({ process, service: { url: process.url, agent, databaseUrl } }))
}

test('two processes that start at once on an empty database both come up and lose no first write', async (t) => {
  const replicas = await startReplicas(t, 2)
  for (let round = 0; round < 10; round++) {
    const jobId = newJobId()
    const keys = Array.from({ length: 16 }, (_, n) => `k${n}`)
    await Promise.all(
      keys.map((key, n) => {
        const { service } = replicas[n % 2] ?? assert.fail()
        return recorded(record(service, jobId, { key, result: `"${key}"` }))
      }),
    )
    for (const { service } of replicas) {
      const { completed_steps } = json(await readCheckpoint(service, jobId))
      assert.deepEqual(completed_steps, Object.fromEntries(keys.map((key) => [key, key])))
    }
  }
})

test('a process that is killed under load has lost no step that it acknowledged, and its twin goes on', async (t) => {
  const [victim, twin] = await startReplicas(t, 2)
  assert.ok(victim && twin)
  const jobId = newJobId()
  const acknowledged: string[] = []
  let writing = true

  async function write(writer: number, { service }: typeof twin & object) {
    for (let n = 0; writing; n++) {
      const key = `${writer}/${n}`
      const reply: Reply | undefined = await record(service, jobId, { key, result: `"${key}"` }).catch(() => undefined)
      // The victim is gone.
      if (!reply) return
      assert.equal(reply.status, 200, reply.text)
      acknowledged.push(key)
    }
  }

  const writers = Array.from({ length: 16 }, (_, writer) => write(writer, writer % 2 ? victim : twin))
  await waitUntil(async () => acknowledged.length > 200, '200 steps')
  victim.process.kill('SIGKILL')
  await victim.process.exited
  const before = acknowledged.length
  await waitUntil(async () => acknowledged.length > before + 100, '100 more steps')
  writing = false
  await Promise.all(writers)
  const { completed_steps } = json(await readCheckpoint(twin.service, jobId))
  for (const key of acknowledged) assert.equal(completed_steps[key], key)
})
