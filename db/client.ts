import { connect, type Socket } from 'node:net'
import postgres from 'postgres'

/** What a statement's failure asks for. */
export type FailureKind =
  /** The data of this very statement is at fault (SQLSTATE classes 22, 23, 54): repeating it cannot help. */
  | 'data'
  /** A lock was not had in time, or the statement was cancelled. */
  | 'lock'
  /** The connection or the server went away, is overloaded, or is read-only: it may work in a moment. */
  | 'transient'
  | 'other'

const DATA_CLASSES = new Set(['22', '23', '54'])
const LOCK_STATES = new Set(['55P03', '57014'])
const TRANSIENT_CLASSES = new Set(['08', '53'])
const TRANSIENT_STATES = new Set(['40001', '40P01', '25006', '57P01', '57P02', '57P03', '57P04', '57P05'])
// Of Node's sockets and of the driver, which have no SQLSTATE.
const LOST_CONNECTION_CODES = new Set([
  'CONNECTION_CLOSED',
  'CONNECTION_DESTROYED',
  'CONNECTION_ENDED',
  'CONNECT_TIMEOUT',
  'ECONNREFUSED',
  'ECONNRESET',
  'ECONNABORTED',
  'EPIPE',
  'ETIMEDOUT',
  'EHOSTUNREACH',
  'ENETUNREACH',
  'ENOTFOUND',
  'EAI_AGAIN',
  'ENOENT',
])

/** The one table of which database failures can pass by themselves. Source: the Postgres manual, appendix A. */
export function failureKind(error: unknown): FailureKind {
  if (error instanceof StatementTimeout) return 'transient'
  const code = String((error as { code?: unknown } | null)?.code ?? '')
  if (LOST_CONNECTION_CODES.has(code)) return 'transient'
  const sqlClass = code.length === 5 ? code.slice(0, 2) : ''
  if (DATA_CLASSES.has(sqlClass)) return 'data'
  if (LOCK_STATES.has(code)) return 'lock'
  if (TRANSIENT_CLASSES.has(sqlClass) || TRANSIENT_STATES.has(code)) return 'transient'
  return 'other'
}

/** The statement was not answered in time; its connection has been destroyed, and whether it took effect is unknown. */
export class StatementTimeout extends Error {
  constructor(timeoutMs: number) {
    super(`The database did not answer within ${Math.round(timeoutMs)} ms`)
    this.name = 'StatementTimeout'
  }
}

/** No connection of the pool became free in time; nothing was sent. */
export class PoolExhausted extends Error {
  constructor(pool: string) {
    super(`All ${pool} connections are busy`)
    this.name = 'PoolExhausted'
  }
}

/** One row as the text of its columns, in the statement's order; null is SQL's NULL. */
export type Row = ReadonlyArray<Buffer | null>

export interface DatabaseOptions {
  /** What `parseDatabaseUrl` made of the URL. */
  connection: postgres.Options<Record<string, never>>
  /** False behind a pooler that shares sessions between transactions. */
  prepare: boolean
}

export interface Pool {
  /**
   * Runs one statement, whose parameters are all sent as text.
   * Throws `PoolExhausted`, `StatementTimeout` or what Postgres says. `deadline` is in terms of performance.now().
   */
  query(statement: string, parameters: ReadonlyArray<string | null>, deadline: number): Promise<Row[]>
  readonly size: number
  close(): Promise<void>
}

interface Connection {
  query(statement: string, parameters: ReadonlyArray<string | null>, timeoutMs: number): Promise<Row[]>
  close(): Promise<void>
}

const CONNECT_TIMEOUT_S = 3
const RECONNECT_PAUSE_MS = 100

/** The driver's view of where to connect to. */
interface Target {
  host: string[]
  port: number[]
  path?: string | false
}

/**
 * Makes the driver's sockets. One that is closed before the server said anything ends in an error: the driver by itself
 * would connect again at once, thousands of times a second, and never tell.
 */
export function createDialer(onSocket: (socket: Socket) => void = () => {}): (target: Target) => Promise<Socket> {
  let attempt = 0
  return async ({ host, port, path }) => {
    const turn = attempt % host.length
    // With several hosts the driver goes on to the next without telling either.
    if (attempt++ >= host.length) await new Promise((resolve) => setTimeout(resolve, RECONNECT_PAUSE_MS))
    const socket = path ? connect(path) : connect({ host: host[turn] as string, port: port[turn] as number })
    // The driver reads the host here to check a certificate's name.
    Object.assign(socket, { host: host[turn] })
    socket.setNoDelay(true)
    socket.once('end', () => {
      if (socket.bytesRead > 0) return
      socket.destroy(Object.assign(new Error('The server hung up before it said anything'), { code: 'ECONNRESET' }))
    })
    onSocket(socket)
    return socket
  }
}

/**
 * One session with the database that runs one statement at a time. The driver's own pool is not used: it sends statements
 * behind one that is blocked, and cannot give up a single connection. Whatever goes wrong on a connection, a new one
 * takes its place for the next statement.
 */
function openConnection(options: DatabaseOptions): Connection {
  let session: { sql: postgres.Sql; sockets: Set<Socket> } | undefined

  function open() {
    const sockets = new Set<Socket>()
    const sql = postgres({
      ...options.connection,
      max: 1,
      max_pipeline: 0,
      fetch_types: false,
      prepare: options.prepare,
      connect_timeout: Number(options.connection.connect_timeout ?? CONNECT_TIMEOUT_S),
      idle_timeout: 0,
      max_lifetime: null,
      backoff: () => 0.05,
      onnotice: () => {},
      // Made here, so that a connection whose peer no longer answers can be destroyed and not merely asked to end.
      socket: createDialer((socket) => {
        sockets.add(socket)
        socket.once('close', () => sockets.delete(socket))
      }),
    } as postgres.Options<Record<string, never>>)
    return { sql, sockets }
  }

  function discard() {
    if (!session) return
    const { sql, sockets } = session
    session = undefined
    sql.end({ timeout: 0 }).catch(() => {})
    for (const socket of sockets) socket.destroy()
  }

  return {
    async query(statement, parameters, timeoutMs) {
      session ??= open()
      const sent = session.sql.unsafe(statement, parameters as string[], { prepare: options.prepare }).raw()
      let timer: NodeJS.Timeout | undefined
      const late = new Promise<never>((_, reject) => {
        timer = setTimeout(() => reject(new StatementTimeout(timeoutMs)), timeoutMs)
      })
      try {
        return (await Promise.race([sent, late])) as unknown as Row[]
      } catch (error) {
        // A statement that Postgres itself refused leaves its session sound; anything else does not.
        if (!(error instanceof postgres.PostgresError) || failureKind(error) === 'transient') discard()
        throw error
      } finally {
        clearTimeout(timer)
      }
    },
    async close() {
      const closing = session
      session = undefined
      if (!closing) return
      await closing.sql.end({ timeout: 1 })
      for (const socket of closing.sockets) socket.destroy()
    },
  }
}

interface Waiter {
  take(connection: Connection): void
  timer: NodeJS.Timeout
}

/** `size` connections that are opened when needed; who finds none free waits in line, until the deadline. */
export function createPool(name: string, size: number, options: DatabaseOptions): Pool {
  const connections = Array.from({ length: size }, () => openConnection(options))
  const free = [...connections]
  const waiters = new Set<Waiter>()

  function take(deadline: number): Promise<Connection> {
    const connection = free.pop()
    if (connection) return Promise.resolve(connection)
    return new Promise((resolve, reject) => {
      const waiter: Waiter = {
        take: resolve,
        timer: setTimeout(
          () => {
            waiters.delete(waiter)
            reject(new PoolExhausted(name))
          },
          Math.max(0, deadline - performance.now()),
        ),
      }
      waiters.add(waiter)
    })
  }

  function give(connection: Connection) {
    const [waiter] = waiters
    if (!waiter) return free.push(connection)
    waiters.delete(waiter)
    clearTimeout(waiter.timer)
    waiter.take(connection)
  }

  return {
    size,
    async query(statement, parameters, deadline) {
      const connection = await take(deadline)
      try {
        return await connection.query(statement, parameters, Math.max(1, deadline - performance.now()))
      } finally {
        give(connection)
      }
    },
    async close() {
      await Promise.all(connections.map((connection) => connection.close()))
    },
  }
}

/** A column that is known to be there, as text. */
export function textOf(row: Row, column: number): string {
  return (row[column] as Buffer).toString('utf8')
}

/** A column as text, or null. */
export function textOrNull(row: Row, column: number): string | null {
  return row[column]?.toString('utf8') ?? null
}

/** The literal of a Postgres array whose elements need no quoting: numbers, booleans, UUIDs, nulls. */
export function plainArray(values: ReadonlyArray<string | number | boolean | null>): string {
  return `{${values.map((value) => value ?? 'NULL').join(',')}}`
}

/** The literal of a Postgres text array. */
export function textArray(values: ReadonlyArray<string | null>): string {
  return `{${values.map((value) => (value === null ? 'NULL' : `"${value.replace(/["\\]/g, '\\$&')}"`)).join(',')}}`
}
