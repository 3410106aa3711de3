import assert from 'node:assert/strict'
import { once } from 'node:events'
import { type AddressInfo, createServer } from 'node:net'
import test from 'node:test'
import { createPool, failureKind } from '../../db/client.ts'
import { parseDatabaseUrl } from '../../db/database-url.ts'
import { migrate } from '../../db/migrate.ts'

/** Listens where no Postgres is: reads the first message and hangs up. */
async function startHangingUp(t: test.TestContext) {
  let connections = 0
  const server = createServer((socket) => {
    connections += 1
    socket.on('error', () => {})
    socket.once('data', () => socket.end())
  }).listen(0, '127.0.0.1')
  await once(server, 'listening')
  t.after(() => server.close())
  const url = `postgres://u:p@127.0.0.1:${(server.address() as AddressInfo).port}/db`
  return { connection: parseDatabaseUrl(url).connection, connections: () => connections }
}

test('where something hangs up that is no Postgres, a statement fails at once, and few connections are tried', async (t) => {
  const { connection, connections } = await startHangingUp(t)
  const pool = createPool('test', 1, { connection, prepare: true })
  t.after(() => pool.close())
  const deadline = performance.now() + 8000
  await assert.rejects(pool.query('select 1', [], deadline), (error) => failureKind(error) === 'transient')
  assert.ok(performance.now() < deadline)
  assert.ok(connections() <= 2, `${connections()} connections`)
})

test('and a migration says what happened instead of trying for ever', async (t) => {
  const { connection, connections } = await startHangingUp(t)
  await assert.rejects(migrate({ connection, mode: 'auto' }), /hung up before it said anything/)
  assert.ok(connections() <= 2, `${connections()} connections`)
})
