import assert from 'node:assert/strict'
import test from 'node:test'
import { assertProblem, exchangeBytes, json, newJobId, post, readCheckpoint, request } from '../support.ts'
import { contract, shareService } from './target.ts'

contract('Errors', (target) => {
  const start = shareService(target)

  test('an unknown route is 404, with the path and without the query', async () => {
    const service = await start()
    for (const path of ['/', '/job/x', '//', '/api/w/x', '/JOBS', '/__proto__', '/jobs/x/y/z/%41']) {
      const reply = await request(service, `GET ${path}?token=secret`)
      assertProblem(reply, 'route_not_found')
      assert.ok(!reply.text.includes('secret'))
    }
  })

  test('a method that a route does not have is 405, and Allow names those that it has', async () => {
    const service = await start()
    const jobId = newJobId()
    const cases: [string, string[]][] = [
      [`GET /jobs/${jobId}/inline-checkpoint`, ['POST']],
      [`PUT /jobs/${jobId}/inline-checkpoint`, ['POST']],
      [`OPTIONS /jobs/${jobId}/inline-checkpoint`, ['POST']],
      [`HEAD /jobs/${jobId}/inline-checkpoint`, ['POST']],
      [`GET /api/w/w/jobs/wac/inline_checkpoint/${jobId}`, ['POST']],
      [`DELETE /jobs/${jobId}/checkpoint`, ['GET', 'HEAD']],
      [`PATCH /jobs/${jobId}/timeline`, ['GET', 'HEAD']],
      [`PATCH /jobs/${jobId}/steps`, ['GET', 'HEAD']],
      [`PUT /jobs/${jobId}/steps/a`, ['GET', 'HEAD']],
      ['POST /livez', ['GET', 'HEAD']],
      ['DELETE /readyz', ['GET', 'HEAD']],
    ]
    for (const [line, methods] of cases) {
      const reply = await request(service, line, line.startsWith('GET') ? {} : { body: '' })
      const allowed = String(reply.headers.allow).split(', ')
      for (const method of methods) assert.ok(allowed.includes(method), `${line}: ${allowed}`)
      assert.equal(allowed.includes(line.split(' ')[0] as string), false, line)
      if (line.startsWith('HEAD')) assert.equal(reply.status, 405)
      else assertProblem(reply, 'method_not_allowed', new RegExp(`^${line.split(' ')[0]} `))
    }
    assert.equal((await readCheckpoint(service, jobId)).headers.etag, '"0"')
  })

  test('a request id that a log line can carry is taken over, any other is replaced', async () => {
    const service = await start()
    for (const id of ['abc-1', 'a.b:c/d+e=f@g_h', 'x'.repeat(128)]) {
      const headers = { 'x-request-id': id }
      assert.equal((await request(service, 'GET /livez', { headers })).headers['x-request-id'], id)
      assert.equal(json(await request(service, 'GET /nowhere', { headers })).request_id, id)
    }
    for (const id of ['a b', '"', '', 'x'.repeat(129), 'é', '{}']) {
      const reply = await request(service, 'GET /nowhere', { headers: { 'x-request-id': id } })
      assertProblem(reply, 'route_not_found')
      assert.notEqual(json(reply).request_id, id)
    }
  })

  test('a URL that is too long is 414', async () => {
    const service = await start()
    const long = await request(service, `GET /jobs/${newJobId()}/steps?key=${'x'.repeat(24 * 1024)}`)
    assertProblem(long, 'uri_too_long')
    const fits = await request(service, `GET /jobs/${newJobId()}/checkpoint?x=${'x'.repeat(20 * 1024)}`)
    assert.equal(fits.status, 200)
  })

  test('headers that are too large are 431, and the answer is readable', async () => {
    const service = await start()
    const reply = await exchangeBytes(service, `GET /livez HTTP/1.1\r\nhost: x\r\nx: ${'x'.repeat(40_000)}\r\n\r\n`)
    assertProblem(reply, 'headers_too_large')
    const uri = await exchangeBytes(service, `GET /livez?${'x'.repeat(40_000)} HTTP/1.1\r\nhost: x\r\n\r\n`)
    assertProblem(uri, 'headers_too_large')
    assert.equal((await request(service, 'GET /livez', { headers: { x: 'x'.repeat(20_000) } })).status, 200)
  })

  test('bytes that are no HTTP request are answered as a problem', async () => {
    const service = await start()
    for (const bytes of [
      'hello\r\n\r\n',
      'GET\r\n\r\n',
      'GET /livez HTTP/9.9\r\n\r\n',
      'GET /livez HTTP/1.1\r\nbad header\r\n\r\n',
      'BREW /livez HTTP/1.1\r\nhost: x\r\n\r\n',
      '\u0016\u0003\u0001\u0000\u0000\r\n\r\n',
      `POST /jobs/${newJobId()}/inline-checkpoint HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n`,
      `POST /livez HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n`,
    ])
      assertProblem(await exchangeBytes(service, bytes), 'invalid_request')
    assert.equal((await request(service, 'GET /livez')).status, 200)
  })

  test('what a client sends wrongly is told with the value at fault, cut short', async () => {
    const service = await start()
    const body = JSON.stringify({ key: 'a', result: 1, started_at: `never ${'é'.repeat(5000)}` })
    const reply = await post(service, newJobId(), { body })
    assertProblem(reply, 'invalid_request', /never éé/)
    assert.ok(reply.text.length < 1000)
  })
})

contract('Health', (target) => {
  const start = shareService(target)

  test('the process is alive and ready', async () => {
    const service = await start()
    for (const path of ['/livez', '/readyz']) {
      const reply = await request(service, `GET ${path}`)
      assert.deepEqual([reply.status, json(reply)], [200, { status: 'ok' }])
    }
  })

  test('the service describes itself', async () => {
    const reply = await request(await start(), 'GET /openapi.json')
    assert.equal(json(reply).openapi, '3.1.0')
    assert.match(String(reply.headers['content-type']), /^application\/json/)
  })
})
