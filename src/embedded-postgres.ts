import { spawn } from 'node:child_process'
import { randomBytes, randomInt, randomUUID } from 'node:crypto'
import fs from 'node:fs/promises'
import { createServer } from 'node:net'
import os from 'node:os'
import path from 'node:path'
import { geteuid, kill } from 'node:process'
import { setTimeout as delay } from 'node:timers/promises'
import postgres from 'postgres'
import {
  type Binaries,
  EmbeddedPostgresError,
  findRunUser,
  type HomeOptions,
  lockHome,
  makeDataDir,
  placeCluster,
  prepareBinaries,
} from './embedded-postgres-home.ts'
import {
  identityOf,
  isErrno,
  POSTGRES_ENV,
  type RunUser,
  readIfThere,
  run,
  startTimeOf,
  statIfThere,
  syncDir,
  writeFileAtomically,
} from './operating-system.ts'

export { EmbeddedPostgresError }

// Of the package `embedded-postgres` only the binaries are used. Its class writes the password into a world-readable
// file, hooks the process's exit, knows no interrupted initdb, no leftover server, no restart and no folder of root.

/** A running embedded server. */
export interface EmbeddedPostgres {
  /** `postgres://cairn:<password>@127.0.0.1:<port>/cairn`; the role is a superuser of this server. */
  url: string
  /** As given, made absolute: holds `password` (mode 0600) and `postgres.log`. */
  dataDir: string
  /** Where the cluster really lies: `<dataDir>/postgres`, or elsewhere if root's unprivileged user cannot get there. */
  clusterDir: string
  /** Lines for the operator: where the data is, as which user Postgres runs, and why. */
  notes: string[]
  /** Shuts the server down (connections are closed, data is written out) and gives the folder free. Can be repeated. */
  stop(): Promise<void>
}

export interface EmbeddedPostgresOptions extends HomeOptions {
  dataDir: string
  /** Postgres settings, over the defaults. */
  settings?: Record<string, string>
  /** Told when the server died and was started again. */
  log?: (line: string) => void
}

/** All that is needed to start the cluster's server again and again. */
interface Cluster {
  dir: string
  homeDir: string
  binaries: Binaries
  runUser: RunUser | undefined
  logFile: string
  settings: Record<string, string>
  log: (line: string) => void
}

interface Server {
  pid: number
  port: number
  /** Resolves, never rejects, with how it ended. */
  ended: Promise<string>
}

const ROLE = 'cairn'

// Small on purpose: it shares a developer's machine. What makes a commit durable is left as Postgres has it.
const DEFAULT_SETTINGS: Record<string, string> = {
  shared_buffers: '128MB',
  max_connections: '50',
  max_wal_size: '2GB',
  min_wal_size: '256MB',
  checkpoint_timeout: '15min',
  random_page_cost: '1.1',
  jit: 'off',
  log_checkpoints: 'off',
  // A failing statement carries its parameters and rows into the log: results are nobody's business.
  log_min_error_statement: 'panic',
  log_error_verbosity: 'terse',
}

const FIXED_SETTINGS: Record<string, string> = {
  listen_addresses: '127.0.0.1',
  // No socket file: its path may be at most 107 bytes long, and every client here has TCP.
  unix_socket_directories: '',
  log_destination: 'stderr',
  logging_collector: 'off',
  timezone: 'UTC',
  log_timezone: 'UTC',
}

// Below the range from which Linux and macOS take ports for outgoing connections, so that it is free after a restart.
const PORT_RANGE = { from: 15_432, to: 32_000 }

const LOG_MAX_BYTES = 8 * 1024 * 1024
const SHUTDOWN_PATIENCE_MS = 20_000
const LONGEST_RESTART_DELAY_MS = 5_000
const STEADY_AFTER_MS = 30_000
// After a crash it first replays its log: at most max_wal_size of it, which a slow disk takes minutes for.
const STARTING_WORD_MS = 10_000

/**
 * Starts the Postgres that lies under `dataDir`, making it first if needed; takes over a server that an earlier,
 * killed process left behind. While the returned server is not stopped it is started again whenever it dies.
 * @throws {EmbeddedPostgresError} among others when another process has the folder
 */
export async function startEmbeddedPostgres(options: EmbeddedPostgresOptions): Promise<EmbeddedPostgres> {
  try {
    return await start(options)
  } catch (error) {
    if (error instanceof EmbeddedPostgresError || !isErrno(error)) throw error
    throw new EmbeddedPostgresError(`The embedded Postgres cannot use ${options.dataDir}: ${error.message}`, {
      cause: error,
    })
  }
}

async function start(options: EmbeddedPostgresOptions): Promise<EmbeddedPostgres> {
  const dataDir = await makeDataDir(options.dataDir)
  const runUser = geteuid?.() === 0 ? await findRunUser(path.join(dataDir, 'postgres')) : undefined
  const place = await placeCluster(dataDir, runUser, options)
  const notes = [...place.notes]
  const { unlock } = await lockHome(place.homeDir)
  try {
    const password = await readOrMakePassword(path.join(dataDir, 'password'))
    const prepared = await prepareBinaries(place.homeDir, runUser, options)
    notes.push(...prepared.notes)
    const cluster: Cluster = {
      dir: place.clusterDir,
      homeDir: place.homeDir,
      binaries: prepared.binaries,
      runUser,
      logFile: path.join(dataDir, 'postgres.log'),
      settings: { ...DEFAULT_SETTINGS, ...options.settings, ...FIXED_SETTINGS },
      log: options.log ?? (() => {}),
    }
    const leftover = await findLeftover(cluster)
    const server = (leftover && (await takeOver(leftover, cluster, password))) ?? (await startFresh(cluster, password))
    if (server.pid === leftover?.pid)
      notes.push(`A server left over from an earlier run was taken over: pid ${server.pid}`)
    const supervisor = supervise(server, cluster)
    let stopped: Promise<void> | undefined
    const stop = () => {
      stopped ??= supervisor.stop().finally(unlock)
      return stopped
    }
    return { url: urlOf(server.port, password), dataDir, clusterDir: cluster.dir, notes, stop }
  } catch (error) {
    await unlock()
    throw error
  }
}

function urlOf(port: number, password: string): string {
  return `postgres://${ROLE}:${password}@127.0.0.1:${port}/${ROLE}`
}

async function readOrMakePassword(file: string): Promise<string> {
  const known = (await readIfThere(file))?.trim()
  if (known) {
    const { mode } = await fs.stat(file)
    if ((mode & 0o077) !== 0) await fs.chmod(file, 0o600)
    return known
  }
  const made = randomBytes(24).toString('base64url')
  await writeFileAtomically(file, `${made}\n`, 0o600)
  return made
}

async function startFresh(cluster: Cluster, password: string): Promise<Server> {
  await fs.writeFile(cluster.logFile, '', { mode: 0o600 })
  if (!(await statIfThere(path.join(cluster.dir, 'PG_VERSION')))) await createCluster(cluster, password)
  const server = await launchOnFreePort(cluster)
  const refusal = await tryLogin(server.port, password)
  if (refusal === undefined) return server
  await shutDown(server)
  if (refusal !== 'password') throw failure('started, but refuses connections', cluster, refusal)
  // The password file was lost or replaced; who may write to the folder owns the data in it anyway.
  await runSingleUser(cluster, cluster.dir, [`ALTER ROLE ${ROLE} PASSWORD '${password.replaceAll("'", "''")}'`])
  return launchOnFreePort(cluster)
}

/** Everything happens under another name first: an interrupted attempt leaves nothing that looks like a cluster. */
async function createCluster(cluster: Cluster, password: string): Promise<void> {
  const prefix = `${path.basename(cluster.dir)}.new-`
  for (const name of await fs.readdir(cluster.homeDir)) {
    if (name.startsWith(prefix)) await fs.rm(path.join(cluster.homeDir, name), { recursive: true, maxRetries: 5 })
  }
  const fresh = path.join(cluster.homeDir, prefix + randomUUID())
  await fs.mkdir(fresh, { mode: 0o700 })
  if (cluster.runUser) await fs.chown(fresh, cluster.runUser.uid, cluster.runUser.gid)
  const made = await run(
    cluster.binaries.initdb,
    [
      `--pgdata=${fresh}`,
      `--username=${ROLE}`,
      '--auth=reject',
      '--encoding=UTF8',
      '--locale=C',
      '--locale-provider=builtin',
      '--builtin-locale=C.UTF-8',
      '--no-instructions',
    ],
    cluster.runUser,
  )
  if (!made.ok) throw failure('cannot be set up (initdb)', cluster, made.output)
  await fs.writeFile(path.join(fresh, 'pg_hba.conf'), 'host all all 127.0.0.1/32 scram-sha-256\n')
  await runSingleUser(cluster, fresh, [
    `ALTER ROLE ${ROLE} PASSWORD '${password.replaceAll("'", "''")}'`,
    `CREATE DATABASE ${ROLE} OWNER ${ROLE}`,
  ])
  await fs.rename(fresh, cluster.dir)
  await syncDir(cluster.homeDir)
}

/** Before the first start there is nobody to connect to, and in this mode no password has to lie in a file. */
async function runSingleUser(cluster: Cluster, dir: string, statements: string[]): Promise<void> {
  const args = ['--single', '-D', dir, '-c', 'exit_on_error=on', '-c', 'log_min_error_statement=panic', 'postgres']
  const done = await run(cluster.binaries.postgres, args, cluster.runUser, `${statements.join('\n')}\n`)
  if (!done.ok) throw failure('cannot be set up (single-user mode)', cluster, done.output)
}

// ---- the server

async function launchOnFreePort(cluster: Cluster): Promise<Server> {
  const portFile = path.join(cluster.homeDir, 'port')
  let port = Number(await readIfThere(portFile))
  // Who dies by SIGKILL leaves backends that hold the shared memory for some milliseconds more.
  const patience = Date.now() + 10_000
  for (;;) {
    if (!(port > 0 && port < 65_536 && (await isPortFree(port)))) port = await findFreePort()
    try {
      const server = await launch(cluster, port)
      await writeFileAtomically(portFile, `${port}\n`)
      return server
    } catch (error) {
      const message = error instanceof EmbeddedPostgresError ? error.message : ''
      if (Date.now() > patience) throw error
      if (/could not bind|Address already in use/.test(message)) port = 0
      else if (!/shared memory block .* still in use|lock file .* already exists/.test(message)) throw error
      await delay(100)
    }
  }
}

async function findFreePort(): Promise<number> {
  for (let attempt = 0; attempt < 100; attempt++) {
    const port = randomInt(PORT_RANGE.from, PORT_RANGE.to)
    if (await isPortFree(port)) return port
  }
  throw new EmbeddedPostgresError(`No free port on 127.0.0.1 between ${PORT_RANGE.from} and ${PORT_RANGE.to}.`)
}

function isPortFree(port: number): Promise<boolean> {
  return new Promise((resolve) => {
    const probe = createServer()
    probe.once('error', () => resolve(false))
    probe.listen({ host: '127.0.0.1', port, exclusive: true }, () => probe.close(() => resolve(true)))
  })
}

function serverArguments(cluster: Cluster, port: number): string[] {
  const settings = Object.entries({ ...cluster.settings, port: String(port) })
  return ['-D', cluster.dir, ...settings.flatMap(([name, value]) => ['-c', `${name}=${value}`])]
}

/** Resolves once the server takes connections. Rejects with the end of its log when it ends before. */
async function launch(cluster: Cluster, port: number, signal?: AbortSignal): Promise<Server> {
  const output = await fs.open(cluster.logFile, 'a', 0o600)
  const logStart = (await output.stat()).size
  try {
    const child = spawn(cluster.binaries.postgres, serverArguments(cluster, port), {
      ...identityOf(cluster.runUser),
      cwd: cluster.homeDir,
      env: POSTGRES_ENV,
      stdio: ['ignore', output.fd, output.fd],
      // A process group of its own: Ctrl-C in the terminal must not end the database before its service has drained.
      detached: true,
    })
    let gone: string | undefined
    const ended = new Promise<string>((resolve) => {
      child.once('error', (error) => resolve(error.message))
      child.once('exit', (code, killedBy) => resolve(killedBy ?? `exit code ${code}`))
    })
    ended.then((how) => {
      gone = how
    })
    if (child.pid === undefined) throw failure('does not start', cluster, await ended)
    const server = { pid: child.pid, port, ended }
    let nextWord = Date.now() + STARTING_WORD_MS
    for (;;) {
      const state = await readPostmasterFile(cluster.dir)
      if (gone === undefined && state?.pid === server.pid && state.status === 'ready') return server
      if (gone !== undefined) throw failure(`does not start (${gone})`, cluster, await readLog(cluster, logStart))
      if (signal?.aborted) {
        await shutDown(server)
        throw failure('was stopped while it started', cluster, '')
      }
      if (Date.now() > nextWord) {
        cluster.log(`The embedded Postgres is still starting; its log is ${cluster.logFile}`)
        nextWord += STARTING_WORD_MS
      }
      await Promise.race([delay(20), ended])
    }
  } finally {
    await output.close()
  }
}

interface PostmasterFile {
  pid: number
  port: number
  status: string
}

/** `postmaster.pid`, laid down in Postgres's `pidfile.h`: line 1 is the pid, line 4 the port, line 8 the status. */
async function readPostmasterFile(clusterDir: string): Promise<PostmasterFile | undefined> {
  const lines = (await readIfThere(path.join(clusterDir, 'postmaster.pid')))?.split('\n')
  if (!lines?.[0]) return undefined
  return { pid: Number(lines[0]), port: Number(lines[3]), status: lines[7]?.trim() ?? '' }
}

/**
 * A running server of this cluster. Removes a pid file whose pid is a stranger's or that of a dead process that its
 * parent (a container's first process) has not collected: Postgres takes either for a running server.
 */
async function findLeftover(cluster: Cluster): Promise<PostmasterFile | undefined> {
  const state = await readPostmasterFile(cluster.dir)
  if (!state || !isTaken(state.pid)) return undefined
  const isRunning = (await startTimeOf(state.pid)) !== undefined
  if (isRunning && (await isAtHome(state.pid, cluster.dir))) return state
  await waitUntilNobodyIsAtHome(cluster.dir)
  await fs.rm(path.join(cluster.dir, 'postmaster.pid'), { force: true })
  return undefined
}

function isTaken(pid: number): boolean {
  try {
    return kill(pid, 0)
  } catch (error) {
    return isErrno(error) && error.code === 'EPERM'
  }
}

/** Without its pid file Postgres would not notice backends that have outlived their server by some milliseconds. */
async function waitUntilNobodyIsAtHome(clusterDir: string): Promise<void> {
  const patience = Date.now() + 10_000
  while (os.platform() === 'linux' && Date.now() < patience) {
    const pids = (await fs.readdir('/proc')).map(Number).filter((pid) => pid > 0)
    const found = await Promise.all(pids.map((pid) => isAtHome(pid, clusterDir)))
    if (!found.includes(true)) return
    await delay(50)
  }
}

/** Postgres processes have the cluster as their working directory. */
async function isAtHome(pid: number, clusterDir: string): Promise<boolean> {
  if (os.platform() !== 'linux') {
    const { output } = await run('ps', ['-o', 'command=', '-p', String(pid)])
    return output.includes(clusterDir)
  }
  const cwd = await fs.readlink(`/proc/${pid}/cwd`).catch(() => undefined)
  return cwd !== undefined && cwd === (await fs.realpath(clusterDir))
}

/** Undefined if it cannot be used (other settings, other password, hangs): then it has been shut down. */
async function takeOver(leftover: PostmasterFile, cluster: Cluster, password: string): Promise<Server | undefined> {
  const server = { pid: leftover.pid, port: leftover.port, ended: waitForEnd(leftover.pid) }
  const startedWith = await readIfThere(path.join(cluster.dir, 'postmaster.opts'))
  const wanted = serverArguments(cluster, leftover.port).map((argument) => `"${argument}"`)
  const fits = startedWith?.trim().endsWith(wanted.join(' ')) && leftover.status === 'ready'
  if (fits && (await tryLogin(server.port, password)) === undefined) return server
  await shutDown(server)
  return undefined
}

/** For a process that is not our child, so that nobody tells us. */
async function waitForEnd(pid: number): Promise<string> {
  const startedAt = await startTimeOf(pid)
  while (startedAt !== undefined && (await startTimeOf(pid)) === startedAt) await delay(200)
  return 'not our child, so the reason is unknown'
}

/** Undefined if the password is right. The SCRAM handshake also proves that the server knows it: it is ours. */
async function tryLogin(port: number, password: string): Promise<string | undefined> {
  const sql = postgres(urlOf(port, password), { max: 1, connect_timeout: 10, fetch_types: false, ssl: false })
  try {
    await sql`select 1`
    return undefined
  } catch (error) {
    const { code, message } = error as { code?: string; message: string }
    return code === '28P01' ? 'password' : message
  } finally {
    await sql.end({ timeout: 1 })
  }
}

/** Fast, then immediate shutdown (replays its log at the next start), then the kernel's. Waits for the end. */
async function shutDown(server: Server): Promise<void> {
  // An ended server's pid may be another process's by now.
  let ended = await Promise.race([server.ended.then(() => true), delay(0, false)])
  for (const signal of ['SIGINT', 'SIGQUIT', 'SIGKILL'] as const) {
    if (ended) return
    try {
      kill(server.pid, signal)
    } catch (error) {
      if (!isErrno(error) || error.code !== 'ESRCH') throw error
    }
    const patience = new AbortController()
    const waited = delay(SHUTDOWN_PATIENCE_MS, false, { signal: patience.signal }).catch(() => true)
    ended = await Promise.race([server.ended.then(() => true), waited])
    patience.abort()
  }
}

/** Starts the server again, on the same port, whenever it ends without having been told to. */
function supervise(first: Server, cluster: Cluster): { stop(): Promise<void> } {
  const stopping = new AbortController()
  const { signal } = stopping
  let server = first
  let current: Server | undefined = first
  const logCheck = setInterval(() => truncateLongLog(cluster.logFile), 60_000)

  async function watch(): Promise<void> {
    let failures = 0
    let startedAt = Date.now()
    for (;;) {
      const how = await server.ended
      current = undefined
      if (signal.aborted) return
      if (Date.now() - startedAt > STEADY_AFTER_MS) failures = 0
      cluster.log(`The embedded Postgres ended (${how}); starting it again`)
      while (current === undefined) {
        const pause = Math.min(100 * 2 ** failures, LONGEST_RESTART_DELAY_MS)
        failures++
        await delay(pause, undefined, { signal }).catch(() => {})
        if (signal.aborted) return
        try {
          await findLeftover(cluster)
          server = await launch(cluster, server.port, signal)
          current = server
          startedAt = Date.now()
          cluster.log('The embedded Postgres is back')
        } catch (error) {
          if (!signal.aborted) cluster.log(error instanceof Error ? error.message : String(error))
        }
      }
    }
  }

  const watching = watch()
  return {
    async stop() {
      stopping.abort()
      clearInterval(logCheck)
      if (current) await shutDown(current)
      await watching
    },
  }
}

async function truncateLongLog(file: string): Promise<void> {
  const stats = await statIfThere(file).catch(() => undefined)
  // The server appends, so that its next line lands at the new end.
  if (stats && stats.size > LOG_MAX_BYTES) await fs.truncate(file).catch(() => {})
}

async function readLog(cluster: Cluster, from: number): Promise<string> {
  const text = await fs.readFile(cluster.logFile)
  return text.subarray(from).toString().trim().split('\n').slice(-12).join('\n')
}

function failure(what: string, cluster: Cluster, details: string): EmbeddedPostgresError {
  const told = details === '' ? '' : `\n${details}`
  return new EmbeddedPostgresError(`The embedded Postgres in ${cluster.dir} ${what}.${told}`)
}
