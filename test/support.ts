import assert from 'node:assert/strict'
import { randomUUID } from 'node:crypto'
import http from 'node:http'
import net, { type AddressInfo } from 'node:net'
import { setTimeout as delay } from 'node:timers/promises'
import pino from 'pino'
import postgres from 'postgres'
import { parseDatabaseUrl } from '../db/database-url.ts'
import { createJournalStore } from '../db/journal-store.ts'
import { migrate } from '../db/migrate.ts'
import type { Store } from '../db/store.ts'
import { buildApp } from '../src/app.ts'
import { createDatabase } from './postgres.ts'

/** Where clean-up is registered: a test's context, or what `openScope` gives. */
export interface Scope {
  after(fn: () => Promise<void>): void
}

/** A scope that is closed by hand, for what several tests share. The last thing opened is closed first. */
export function openScope(): Scope & { close(): Promise<void> } {
  const closers: (() => Promise<void>)[] = []
  return {
    after: (fn) => void closers.push(fn),
    async close() {
      for (const closer of closers.splice(0).reverse()) await closer()
    },
  }
}

// ---- the service -----------------------------------------------------------------------------------------------

const DEFAULT_LIMITS = {
  maxBodyBytes: 32 * 1024 * 1024,
  maxResultDepth: 512,
  maxStepsPerJob: 100_000,
  maxCheckpointBytes: 256 * 1024 * 1024,
}
export type Limits = typeof DEFAULT_LIMITS

export interface Service {
  /** Without a slash at its end. */
  url: string
  databaseUrl: string
  agent: http.Agent
}

export interface ServiceOptions {
  limits?: Partial<Limits>
  /** A database that is migrated already; unless given, a fresh one. */
  databaseUrl?: string
  /** Connections, all pools together. */
  poolMax?: number
}

/** A database with Cairn's schema. Making one takes most of a second: tests share it and each takes jobs of its own. */
export async function createMigratedDatabase(scope: Scope): Promise<string> {
  const { url } = await createDatabase(scope)
  await migrate({ connection: parseDatabaseUrl(url).connection, mode: 'auto' })
  return url
}

/** The journal store's service on a real database and a real port, until the scope closes. */
export async function startApp(scope: Scope, options: ServiceOptions = {}): Promise<Service> {
  const databaseUrl = options.databaseUrl ?? (await createMigratedDatabase(scope))
  const limits = { ...DEFAULT_LIMITS, ...options.limits }
  const store = createJournalStore({
    connection: parseDatabaseUrl(databaseUrl).connection,
    prepare: true,
    poolMax: options.poolMax ?? 10,
    limits,
  })
  const url = await listen(scope, store, limits)
  return { url, databaseUrl, agent: openAgent(scope) }
}

/** An app over any store, listening on a free port of the loopback address. */
export async function listen(scope: Scope, store: Store, limits: Limits = DEFAULT_LIMITS): Promise<string> {
  const app = await buildApp({ store, limits, logger: pino({ level: 'silent' }) })
  scope.after(async () => {
    await app.close()
    await store.close()
  })
  await app.listen({ host: '127.0.0.1', port: 0 })
  return `http://127.0.0.1:${(app.server.address() as AddressInfo).port}`
}

function openAgent(scope: Scope): http.Agent {
  const agent = new http.Agent({ keepAlive: true })
  scope.after(async () => agent.destroy())
  return agent
}

// ---- requests --------------------------------------------------------------------------------------------------

export interface Reply {
  status: number
  headers: http.IncomingHttpHeaders
  body: Buffer
  /** The body as UTF-8. */
  text: string
}

export interface RequestOptions {
  headers?: http.OutgoingHttpHeaders
  /** Several pieces are sent chunked, one by one; one piece has a Content-Length. */
  body?: string | Buffer | readonly Buffer[]
}

/** Sends `line`, like `GET /livez`, exactly as it stands: no path is normalised. Rejects when the connection breaks. */
export function request(service: Pick<Service, 'url' | 'agent'>, line: string, options: RequestOptions = {}) {
  const space = line.indexOf(' ')
  const { hostname, port } = new URL(service.url)
  const { body } = options
  return new Promise<Reply>((resolve, reject) => {
    const outgoing = http.request({
      agent: service.agent,
      host: hostname,
      port,
      method: line.slice(0, space),
      path: line.slice(space + 1),
      headers: options.headers ?? {},
    })
    outgoing.once('error', reject)
    outgoing.once('response', (incoming) => {
      const chunks: Buffer[] = []
      incoming.on('data', (chunk: Buffer) => chunks.push(chunk))
      incoming.once('error', reject)
      incoming.once('end', () => {
        const whole = Buffer.concat(chunks)
        resolve({ status: incoming.statusCode ?? 0, headers: incoming.headers, body: whole, text: whole.toString() })
      })
    })
    if (body === undefined || typeof body === 'string' || Buffer.isBuffer(body)) return void outgoing.end(body)
    for (const piece of body) outgoing.write(piece)
    outgoing.end()
  })
}

/** The body's JSON. For what must be compared byte for byte, take `text`. */
export function json(reply: Reply) {
  return JSON.parse(reply.text)
}

export interface StepInput {
  key: string
  /** JSON, sent as it stands. */
  result: string
  started_at?: string | null
  duration_ms?: number | null
  source_hash?: string | null
}

/** A body of the inline-checkpoint contract. */
export function stepBody({ key, result, ...optional }: StepInput): string {
  const rest = JSON.stringify(optional).slice(1, -1)
  return `{"key":${JSON.stringify(key)},"result":${result}${rest && `,${rest}`}}`
}

/** POSTs a body, whatever it is, to the inline-checkpoint route of a job. */
export function post(service: Service, jobId: string, options: RequestOptions) {
  return request(service, `POST /jobs/${jobId}/inline-checkpoint`, {
    body: options.body ?? '',
    headers: { 'content-type': 'application/json', ...options.headers },
  })
}

/** Records a step by the inline-checkpoint route. */
export function record(service: Service, jobId: string, step: StepInput): Promise<Reply> {
  return post(service, jobId, { body: stepBody(step) })
}

/** The version in the answer to a step that was recorded. */
export async function recorded(answer: Promise<Reply>): Promise<string> {
  const reply = await answer
  assert.equal(reply.status, 200, reply.text)
  return json(reply).version
}

export function readCheckpoint(service: Service, jobId: string): Promise<Reply> {
  return request(service, `GET /jobs/${jobId}/checkpoint`)
}

/** The text of one result, as `GET /jobs/:id/steps/:key` gives it. */
export async function readResult(service: Service, jobId: string, key: string): Promise<string> {
  const reply = await request(service, `GET /jobs/${jobId}/steps/${encodeURIComponent(key)}`)
  assert.equal(reply.status, 200, reply.text)
  return reply.text
}

export interface Entry {
  kind: 'step' | 'child'
  key: string
  name: string
  status: string
  scheduled_for: string
  started_at?: string
  duration_ms?: number
  bytes?: number
  position: number
}

export async function readTimeline(service: Service, jobId: string): Promise<Entry[]> {
  const reply = await request(service, `GET /jobs/${jobId}/timeline`)
  assert.equal(reply.status, 200, reply.text)
  return json(reply).entries
}

/** All that a client can see of a job, as text. */
export async function observe(service: Service, jobId: string) {
  const [checkpoint, timeline, job] = await Promise.all([
    readCheckpoint(service, jobId),
    request(service, `GET /jobs/${jobId}/timeline`),
    request(service, `GET /jobs/${jobId}`),
  ])
  return {
    checkpoint: checkpoint.text,
    version: checkpoint.headers.etag,
    timeline: timeline.text,
    jobStatus: job.status,
    job: job.status === 200 ? job.text : '',
  }
}

/** Fails unless the job looks the same after `action` as before. Gives what the action gives. */
export async function assertUnchanged<T>(service: Service, jobId: string, action: () => Promise<T>): Promise<T> {
  const before = await observe(service, jobId)
  const outcome = await action()
  assert.deepEqual(await observe(service, jobId), before)
  return outcome
}

/** The statuses that design promises for each code, stated here once more so that a slip in the catalogue shows. */
export const PROBLEM_STATUSES: Record<string, number> = {
  invalid_json: 400,
  invalid_request: 400,
  unauthenticated: 401,
  forbidden: 403,
  route_not_found: 404,
  job_not_found: 404,
  step_not_found: 404,
  method_not_allowed: 405,
  request_timeout: 408,
  source_changed: 409,
  stale_child: 409,
  job_finished: 409,
  job_parked: 409,
  precondition_failed: 412,
  payload_too_large: 413,
  checkpoint_full: 413,
  uri_too_long: 414,
  unsupported_media_type: 415,
  unstorable_result: 422,
  headers_too_large: 431,
  internal: 500,
  not_supported: 501,
  unavailable: 503,
}

/** Fails unless the reply is the problem `code` in every member, with a detail that fits. */
export function assertProblem(reply: Reply, code: string, detail: RegExp = /\S/): void {
  assert.match(String(reply.headers['content-type']), /^application\/problem\+json(;|$)/, reply.text)
  const { title, request_id, retryable, ...rest } = json(reply)
  assert.match(rest.detail, detail)
  const status = PROBLEM_STATUSES[code]
  assert.deepEqual(rest, { type: `urn:cairn:problem:${code}`, status, detail: rest.detail, code })
  assert.equal(reply.status, status)
  assert.ok(typeof title === 'string' && title !== '')
  assert.equal(retryable, ['request_timeout', 'internal', 'unavailable'].includes(code))
  assert.equal(request_id, reply.headers['x-request-id'])
  assert.equal(reply.headers['retry-after'] !== undefined, code === 'unavailable')
}

/** Sends bytes that need not be HTTP and gives all that comes back until the server ends the connection. */
export function exchangeBytes(service: Pick<Service, 'url'>, bytes: string | Buffer): Promise<Reply> {
  const { hostname, port } = new URL(service.url)
  return new Promise((resolve, reject) => {
    const socket = net.connect(Number(port), hostname, () => socket.write(bytes))
    const chunks: Buffer[] = []
    socket.on('data', (chunk) => chunks.push(chunk))
    socket.once('error', reject)
    socket.once('end', () => {
      socket.end()
      try {
        resolve(parseReply(Buffer.concat(chunks).toString()))
      } catch (error) {
        reject(error)
      }
    })
  })
}

function parseReply(text: string): Reply {
  const [head = '', body = ''] = text.split(/\r\n\r\n(.*)/s)
  const [, status] = /^HTTP\/1\.1 (\d{3}) /.exec(head) ?? assert.fail(`Not a response: ${JSON.stringify(text)}`)
  const headers = head
    .split('\r\n')
    .slice(1)
    .map((line) => [line.slice(0, line.indexOf(':')).toLowerCase(), line.slice(line.indexOf(':') + 1).trim()])
  return { status: Number(status), headers: Object.fromEntries(headers), body: Buffer.from(body), text: body }
}

// ---- the database ----------------------------------------------------------------------------------------------

/** One connection of the test's own, closed with the scope. */
export function openSql(scope: Scope, databaseUrl: string): postgres.Sql {
  const sql = postgres(databaseUrl, { max: 1, fetch_types: false, onnotice: () => {} })
  scope.after(() => sql.end({ timeout: 1 }))
  return sql
}

const WAIT_MS = 10_000

/** Asks again and again until `condition` holds. Fails after ten seconds. */
export async function waitUntil(condition: () => Promise<boolean>, what: string): Promise<void> {
  const deadline = performance.now() + WAIT_MS
  while (!(await condition())) {
    if (performance.now() > deadline) assert.fail(`Waited in vain: ${what}`)
    await delay(2)
  }
}

/** Waits until at least `count` sessions of the database that `sql` is connected to wait for a lock. */
export function waitForLockWaiters(sql: postgres.Sql, count: number): Promise<void> {
  return waitUntil(async () => {
    const [row] = await sql`
      select count(*)::integer as waiting from pg_stat_activity
      where datname = current_database() and wait_event_type = 'Lock'`
    return row?.waiting >= count
  }, `${count} sessions that wait for a lock`)
}

/** A way to the database that can be cut, and one on which nothing passes any more although it stays open. */
export async function openProxy(scope: Scope, databaseUrl: string) {
  const target = new URL(databaseUrl)
  const pairs = new Set<readonly [net.Socket, net.Socket]>()
  let state: 'open' | 'cut' | 'stalled' = 'open'
  const server = net.createServer((client) => {
    if (state === 'cut') return void client.destroy()
    const upstream = net.connect(Number(target.port), target.hostname)
    const pair = [client, upstream] as const
    pairs.add(pair)
    for (const [from, to] of [pair, [upstream, client] as const]) {
      from.on('data', (chunk) => {
        if (state !== 'stalled') to.write(chunk)
      })
      from.on('error', () => {})
      from.on('close', () => {
        to.destroy()
        pairs.delete(pair)
      })
    }
  })
  function destroyAll() {
    for (const [client, upstream] of pairs) {
      client.destroy()
      upstream.destroy()
    }
  }
  await new Promise<void>((resolve) => server.listen(0, '127.0.0.1', resolve))
  scope.after(async () => {
    destroyAll()
    await new Promise((resolve) => server.close(resolve))
  })
  const url = new URL(databaseUrl)
  url.hostname = '127.0.0.1'
  url.port = String((server.address() as AddressInfo).port)
  return {
    url: url.href,
    /** Breaks all connections and accepts no new ones. */
    cut() {
      state = 'cut'
      destroyAll()
    },
    /** Swallows whatever is sent from now on, also on new connections. */
    stall() {
      state = 'stalled'
    },
    restore() {
      state = 'open'
    },
  }
}

export function newJobId(): string {
  return randomUUID()
}
