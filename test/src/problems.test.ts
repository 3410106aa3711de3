import assert from 'node:assert/strict'
import { Writable } from 'node:stream'
import test, { type TestContext } from 'node:test'
import Fastify, { type FastifyBaseLogger } from 'fastify'
import pino from 'pino'
import { PROBLEM_CODES, Problem, problemResponse, problemStatus, setProblemHandler, shown } from '../../src/problems.ts'
import { PROBLEM_STATUSES } from '../support.ts'

/** A bare Fastify whose only route throws `error`, and the lines that it logs. */
function openApp(t: TestContext, error: unknown) {
  const lines: string[] = []
  const stream = new Writable({
    write(chunk, _encoding, done) {
      lines.push(String(chunk))
      done()
    },
  })
  const logger: FastifyBaseLogger = pino({ level: 'error' }, stream)
  const app = Fastify({ loggerInstance: logger })
  t.after(() => app.close())
  setProblemHandler(app)
  app.get('/', async () => {
    throw error
  })
  return { app, lines }
}

test('every code has the status that the contract promises', () => {
  assert.deepEqual(Object.fromEntries(PROBLEM_CODES.map((code) => [code, problemStatus(code)])), PROBLEM_STATUSES)
})

test('a problem is answered with its code, status, detail and headers', async (t) => {
  const { app, lines } = openApp(t, new Problem('method_not_allowed', 'Not so.', { headers: { allow: 'GET' } }))
  const reply = await app.inject('/')
  const { request_id, title, ...rest } = reply.json()
  assert.equal(reply.statusCode, 405)
  assert.equal(reply.headers.allow, 'GET')
  assert.equal(reply.headers['content-type'], 'application/problem+json; charset=utf-8')
  assert.equal(reply.headers['x-request-id'], request_id)
  assert.ok(title)
  assert.deepEqual(rest, {
    type: 'urn:cairn:problem:method_not_allowed',
    status: 405,
    detail: 'Not so.',
    code: 'method_not_allowed',
    retryable: false,
  })
  assert.deepEqual(lines, [])
})

test('an error that is no problem is a 500 whose text stays in the log', async (t) => {
  for (const error of [
    new Error('secret: db.internal'),
    Object.assign(new Error('secret'), { statusCode: 400 }),
    'secret',
  ]) {
    const { app, lines } = openApp(t, error)
    const reply = await app.inject('/')
    assert.equal(reply.statusCode, 500)
    assert.equal(reply.json().code, 'internal')
    assert.ok(!reply.body.includes('secret'))
    if (error instanceof Error) assert.ok(lines.join('').includes('secret'))
  }
})

test('the cause of a problem stays in the log', async (t) => {
  const { app, lines } = openApp(t, new Problem('unavailable', 'Not now.', { cause: new Error('secret') }))
  const reply = await app.inject('/')
  assert.equal(reply.statusCode, 503)
  assert.equal(reply.headers['retry-after'], '1')
  assert.ok(!reply.body.includes('secret'))
  assert.ok(lines.join('').includes('secret'))
})

test('a problem as bytes is a whole response that says that the connection ends', () => {
  const text = problemResponse(new Problem('headers_too_large', 'Too large — by far.'), 'id-1')
  const [head = '', body = ''] = text.split('\r\n\r\n')
  assert.match(head, /^HTTP\/1\.1 431 Request Header Fields Too Large\r\n/)
  assert.ok(head.includes(`\r\ncontent-length: ${Buffer.byteLength(body)}\r\n`))
  assert.ok(head.includes('\r\nconnection: close'))
  assert.equal(JSON.parse(body).detail, 'Too large — by far.')
  assert.equal(JSON.parse(body).request_id, 'id-1')
})

test('a value at fault is shown as JSON, cut to a length that fits a sentence', () => {
  assert.equal(shown('a"b'), '"a\\"b"')
  assert.equal(shown(undefined), 'nothing')
  assert.equal(shown({ kind: 'array' }), 'a JSON array')
  const long = shown('🤔'.repeat(500))
  assert.ok(long.length <= 82)
  assert.ok(long.isWellFormed())
})
