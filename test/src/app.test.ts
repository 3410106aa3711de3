import assert from 'node:assert/strict'
import http from 'node:http'
import net from 'node:net'
import test, { type TestContext } from 'node:test'
import pino from 'pino'
import type { Store } from '../../db/store.ts'
import { buildApp } from '../../src/app.ts'
import { Problem } from '../../src/problems.ts'
import {
  assertProblem,
  json,
  listen,
  newJobId,
  post,
  type Reply,
  request,
  type Service,
  waitUntil,
} from '../support.ts'

/** A store that answers with what the test gives; anything else that is asked of it fails. */
function storeWith(methods: Partial<Store>): Store {
  return { close: async () => {}, ...methods } as Store
}

async function open(t: TestContext, methods: Partial<Store>, limits?: Parameters<typeof listen>[2]) {
  const agent = new http.Agent({ keepAlive: true })
  const url = await listen(t, storeWith(methods), limits)
  t.after(async () => agent.destroy())
  return { url, agent, databaseUrl: '' } satisfies Service
}

async function* inPieces(...pieces: (string | Error)[]): AsyncGenerator<Buffer> {
  for (const piece of pieces) {
    if (piece instanceof Error) throw piece
    yield Buffer.from(piece)
  }
}

test('a store that fails in an unforeseen way is a 500 that tells nothing of it', async (t) => {
  const service = await open(t, {
    getJob: async () => {
      throw new TypeError('secret')
    },
  })
  const reply = await request(service, `GET /jobs/${newJobId()}`)
  assertProblem(reply, 'internal')
  assert.ok(!reply.text.includes('secret'))
})

test('what the store refuses is answered as it says', async (t) => {
  const service = await open(t, {
    recordSteps: async () => {
      throw new Problem('job_finished', 'It is over.')
    },
  })
  assertProblem(await post(service, newJobId(), { body: '{"key":"a","result":1}' }), 'job_finished', /^It is over\.$/)
})

test('a checkpoint that fails half-way breaks the connection, whatever was sent', async (t) => {
  const service = await open(t, {
    getCheckpoint: async () => ({ version: '1', body: inPieces('{"completed_steps":{"a":1', new Error('gone')) }),
  })
  await assert.rejects(request(service, `GET /jobs/${newJobId()}/checkpoint`), { code: 'ECONNRESET' })
  const whole = await open(t, { getCheckpoint: async () => ({ version: '1', body: inPieces('{', '}') }) })
  assert.equal((await request(whole, `GET /jobs/${newJobId()}/checkpoint`)).text, '{}')
})

test('readiness is refused while the process stops, and liveness is not', async (t) => {
  let stopping = false
  const app = await buildApp({
    store: storeWith({ checkReady: async () => {} }),
    limits: { maxBodyBytes: 1024, maxResultDepth: 8 },
    logger: pino({ level: 'silent' }),
    isStopping: () => stopping,
  })
  t.after(() => app.close())
  assert.equal((await app.inject('/readyz')).statusCode, 200)
  stopping = true
  const reply = await app.inject('/readyz')
  assert.deepEqual([reply.statusCode, reply.json().code, reply.headers['retry-after']], [503, 'unavailable', '1'])
  assert.equal((await app.inject('/livez')).statusCode, 200)
})

test('a database that is not ready is 503 with the reason', async (t) => {
  const service = await open(t, {
    checkReady: async () => {
      throw new Problem('unavailable', 'The database takes no writes.')
    },
  })
  assertProblem(await request(service, 'GET /readyz'), 'unavailable', /takes no writes/)
  assert.equal((await request(service, 'GET /livez')).status, 200)
})

test('bodies that are under way together are bounded, and what they took is given back', async (t) => {
  // Each request takes a part of the 256 MiB and does not end until the test says so.
  const limits = { maxBodyBytes: 256 * 1024 * 1024, maxResultDepth: 8, maxStepsPerJob: 1, maxCheckpointBytes: 1 }
  const service = await open(t, { recordSteps: async () => ({ version: '1', steps: [] }) }, limits)
  const { port } = new URL(service.url)
  const part = Buffer.concat([Buffer.from('{"key":"a","result":"'), Buffer.alloc(140 * 1024 * 1024, 'x')])
  const sendPart = async () => {
    const outgoing = http.request({
      port,
      host: '127.0.0.1',
      method: 'POST',
      path: `/jobs/${newJobId()}/inline-checkpoint`,
      headers: { 'content-type': 'application/json', 'content-length': part.length + 2 },
    })
    const reply = new Promise<Reply | Error>((resolve) => {
      outgoing.once('error', resolve)
      outgoing.once('response', (incoming) => {
        const chunks: Buffer[] = []
        incoming.on('data', (chunk) => chunks.push(chunk))
        incoming.once('end', () => {
          const body = Buffer.concat(chunks)
          resolve({ status: incoming.statusCode ?? 0, headers: incoming.headers, body, text: body.toString() })
        })
      })
    })
    await new Promise<void>((resolve) => outgoing.write(part, () => resolve()))
    return { outgoing, reply }
  }
  const first = await sendPart()
  const second = await sendPart()
  const refused = await Promise.race([first, second].map(({ reply }) => reply))
  assert.ok(!(refused instanceof Error), String(refused))
  assertProblem(refused, 'unavailable', /bodies/)
  for (const { outgoing } of [first, second]) outgoing.destroy()
  // Once the other is gone there is room again for as much.
  const body = Buffer.concat([part, Buffer.from('"}')])
  await waitUntil(async () => {
    const again = await post(service, newJobId(), { body })
    return again.status === 200
  }, 'room for a large body')
})

test('a keep-alive connection serves any number of checkpoints without leaving listeners behind', async (t) => {
  const service = await open(t, { getCheckpoint: async () => ({ version: '1', body: inPieces('{', '}') }) })
  const warnings: Error[] = []
  const note = (warning: Error) => void warnings.push(warning)
  process.on('warning', note)
  t.after(() => void process.off('warning', note))
  for (let n = 0; n < 30; n++) assert.equal((await request(service, `GET /jobs/${newJobId()}/checkpoint`)).status, 200)
  await new Promise((resolve) => setImmediate(resolve))
  assert.deepEqual(warnings, [])
})

test('requests on one connection are answered in order', async (t) => {
  const service = await open(t, { getVersion: async () => '1', getJob: async () => undefined })
  const { hostname, port } = new URL(service.url)
  const ids = [newJobId(), newJobId(), newJobId()]
  const socket = net.connect(Number(port), hostname)
  const text = await new Promise<string>((resolve, reject) => {
    let all = ''
    socket.setEncoding('utf8')
    socket.on('data', (chunk) => {
      all += chunk
    })
    socket.once('error', reject)
    socket.once('end', () => resolve(all))
    socket.write(
      ids
        .map((id, n) => `GET /jobs/${id} HTTP/1.1\r\nhost: x\r\n${n === 2 ? 'connection: close\r\n' : ''}\r\n`)
        .join(''),
    )
  })
  socket.destroy()
  const places = ids.map((id) => text.indexOf(id))
  assert.ok(
    places.every((place, n) => place > (places[n - 1] ?? 0)),
    text,
  )
})

test('the service describes its operations without asking the store', async (t) => {
  const service = await open(t, {})
  const { paths } = json(await request(service, 'GET /openapi.json'))
  assert.ok(paths['/jobs/{id}/inline-checkpoint'].post.operationId)
})
