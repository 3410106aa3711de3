import http from 'node:http'
import test from 'node:test'
import { assertProblem, newJobId, type Reply, startApp } from '../support.ts'

// Larger than what sockets buffer, so that the client is still sending when the fault is known.
const BODY = Buffer.from(`{"key":"a","result":"${'x'.repeat(20 * 1024 * 1024)}"}`)

/** Sends all before it reads, on a connection that ends with the reply, as simple clients do. Rejects on a reset. */
function sendThenRead(url: string, options: { method: string; type: string; body: Buffer; chunked: boolean }) {
  return new Promise<Reply>((resolve, reject) => {
    const { method, type, body, chunked } = options
    const headers = { 'content-type': type, connection: 'close', ...(!chunked && { 'content-length': body.length }) }
    const request = http.request(url, { method, agent: false, headers }, (response) => {
      const pieces: Buffer[] = []
      response.on('data', (piece: Buffer) => pieces.push(piece))
      response.on('end', () => {
        const reply = Buffer.concat(pieces)
        resolve({ status: response.statusCode ?? 0, headers: response.headers, body: reply, text: reply.toString() })
      })
    })
    request.on('error', reject)
    request.end(body)
  })
}

test('whatever is wrong with a large body, the client that is still sending it can read why', async (t) => {
  const service = await startApp(t)
  const job = `${service.url}/jobs/${newJobId()}`
  const json = 'application/json'
  const wrong = [
    {
      code: 'payload_too_large',
      url: `${job}/inline-checkpoint`,
      method: 'POST',
      type: json,
      body: Buffer.alloc(33 << 20, 0x20),
    },
    { code: 'unsupported_media_type', url: `${job}/inline-checkpoint`, method: 'POST', type: 'text/plain', body: BODY },
    { code: 'route_not_found', url: `${job}/nothing`, method: 'POST', type: json, body: BODY },
    { code: 'method_not_allowed', url: `${job}/checkpoint`, method: 'POST', type: json, body: BODY },
    {
      code: 'invalid_json',
      url: `${job}/inline-checkpoint`,
      method: 'POST',
      type: json,
      body: Buffer.concat([Buffer.from('!'), BODY]),
    },
    { code: 'invalid_request', url: `${service.url}/jobs/x/inline-checkpoint`, method: 'POST', type: json, body: BODY },
  ] as const
  for (const { code, url, ...options } of wrong) {
    for (const chunked of [false, true]) assertProblem(await sendThenRead(url, { ...options, chunked }), code)
  }
})
