// Runs before `npm start`, `npm test` and `npm run migrate`, so that a bare clone needs no command before them.
// Plain Node without dependencies, since it is what installs them. Optional argument: the project's folder.
import { spawnSync } from 'node:child_process'
import { createHash, randomUUID } from 'node:crypto'
import { existsSync, linkSync, readFileSync, renameSync, rmSync, writeFileSync } from 'node:fs'
import path from 'node:path'
import { fileURLToPath } from 'node:url'

const OLDEST_NODE = 20
const root = path.resolve(process.argv[2] ?? fileURLToPath(new URL('..', import.meta.url)))
const lockFile = path.join(root, '.installing')
const stampFile = path.join(root, 'node_modules', '.ensure-installed')

function say(line) {
  process.stderr.write(`cairn: ${line}\n`)
}

function readText(file) {
  try {
    return readFileSync(file, 'utf8')
  } catch {
    return undefined
  }
}

function readPackages(file) {
  try {
    return JSON.parse(readFileSync(file, 'utf8')).packages ?? {}
  } catch {
    return undefined
  }
}

function suits(allowed, actual) {
  if (allowed === undefined) return true
  if (allowed.includes(`!${actual}`)) return false
  return allowed.includes(actual) || allowed.every((name) => name.startsWith('!'))
}

function isSame(wanted, found) {
  if (wanted.link || found.link) return wanted.link === found.link && wanted.resolved === found.resolved
  return wanted.version === found.version && wanted.integrity === found.integrity
}

/** What is missing or of another version than the lock file says: `required`, and `optional` made for this platform. */
function findMissing() {
  const wanted = readPackages(path.join(root, 'package-lock.json'))
  const found = readPackages(path.join(root, 'node_modules', '.package-lock.json')) ?? {}
  if (wanted === undefined) return { required: ['package-lock.json'], optional: [] }
  const required = []
  const optional = []
  for (const [place, entry] of Object.entries(wanted)) {
    if (!place.includes('node_modules/')) continue
    const installed = found[place]
    if (installed && isSame(entry, installed) && existsSync(path.join(root, place, 'package.json'))) continue
    if (!entry.optional || installed) required.push(place)
    // Which libc this is costs Node a report of 50 ms; where such a package is left out, its siblings tell as well.
    else if (entry.libc) continue
    else if (suits(entry.os, process.platform) && suits(entry.cpu, process.arch)) optional.push(place)
  }
  return { required, optional }
}

/** npm may have left out optional packages for good reasons (another libc): its last answer to this lock file counts. */
function stampFor(optional) {
  const lock = readText(path.join(root, 'package-lock.json')) ?? ''
  return createHash('sha256')
    .update(JSON.stringify([lock, optional]))
    .digest('hex')
}

function isInstalled() {
  const { required, optional } = findMissing()
  if (required.length > 0) return false
  return optional.length === 0 || readText(stampFile) === stampFor(optional)
}

function startTimeOf(pid) {
  const stat = readText(`/proc/${pid}/stat`)
  return stat?.slice(stat.lastIndexOf(')') + 2).split(' ')[19] ?? ''
}

function isAlive(pid, startTime) {
  try {
    process.kill(pid, 0)
  } catch (error) {
    if (error.code !== 'EPERM') return false
  }
  return startTimeOf(pid) === startTime
}

/** A hard link appears with its content in one step: nobody can meet a lock that does not yet say whose it is. */
function tryLock() {
  const own = `${lockFile}.${randomUUID()}`
  writeFileSync(own, `${process.pid} ${startTimeOf(process.pid)}`)
  try {
    linkSync(own, lockFile)
    return true
  } catch (error) {
    if (error.code === 'EEXIST') return false
    throw error
  } finally {
    rmSync(own, { force: true })
  }
}

/** Moves a dead process's lock away. Should a live one have come in its place meanwhile, that one is put back. */
function removeStaleLock(staleText) {
  const aside = `${lockFile}.${randomUUID()}`
  try {
    renameSync(lockFile, aside)
    if (readText(aside) !== staleText) linkSync(aside, lockFile)
  } catch (error) {
    if (error.code !== 'ENOENT' && error.code !== 'EEXIST') throw error
  } finally {
    rmSync(aside, { force: true })
  }
}

async function lock() {
  let announced = false
  while (!tryLock()) {
    const text = readText(lockFile)
    if (text === undefined) continue
    const [pid, startTime] = text.split(' ')
    if (!isAlive(Number(pid), startTime)) {
      removeStaleLock(text)
      continue
    }
    if (!announced) say(`process ${pid} is installing the packages; waiting for it`)
    announced = true
    await new Promise((resolve) => setTimeout(resolve, 100))
  }
}

/** The npm that runs us, else the one beside this node, else the one in PATH. */
function npmCommand() {
  const running = process.env.npm_execpath
  if (running && /npm-cli\.c?js$/.test(running) && existsSync(running)) return [process.execPath, [running]]
  const beside = path.join(path.dirname(process.execPath), process.platform === 'win32' ? 'npm.cmd' : 'npm')
  return [existsSync(beside) ? beside : 'npm', []]
}

/** `--include` wins over NODE_ENV=production and a configured `omit`: tsx is a dev, Postgres an optional package. */
function install() {
  const [command, first] = npmCommand()
  const flags = [
    '--include=dev',
    '--include=optional',
    '--prefer-offline',
    '--no-audit',
    '--no-fund',
    '--loglevel=error',
  ]
  const done = spawnSync(command, [...first, 'ci', ...flags], {
    cwd: root,
    stdio: ['ignore', 2, 2],
    shell: process.platform === 'win32',
  })
  if (done.error) throw done.error
  return done.status ?? 1
}

async function main() {
  if (Number(process.versions.node.split('.')[0]) < OLDEST_NODE) {
    say(`Node ${OLDEST_NODE} or newer is needed; this is ${process.version}`)
    return 1
  }
  if (isInstalled()) return 0
  await lock()
  try {
    if (isInstalled()) return 0
    say('installing the packages named in package-lock.json (npm ci)')
    const status = install()
    if (status !== 0) {
      say(`npm ci failed with exit code ${status}; what it printed stands above`)
      return status
    }
    const { required, optional } = findMissing()
    if (required.length > 0) {
      say(`npm ci ended well, but these are still missing: ${required.join(', ')}`)
      return 1
    }
    if (optional.length > 0) writeFileSync(stampFile, stampFor(optional))
    return 0
  } finally {
    rmSync(lockFile, { force: true })
  }
}

main().then(
  (status) => {
    process.exitCode = status
  },
  (error) => {
    say(`the packages cannot be installed in ${root}: ${error.message}`)
    process.exitCode = 1
  },
)
