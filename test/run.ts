import { spawn } from 'node:child_process'
import { chmod, mkdtemp, readdir, rm } from 'node:fs/promises'
import os from 'node:os'
import path from 'node:path'
import { fileURLToPath } from 'node:url'
import { startEmbeddedPostgres } from '../src/embedded-postgres.ts'

// `npm test [-- files, folders or parts of paths] [--flags for node --test]`: one database server for all test files.
const root = fileURLToPath(new URL('..', import.meta.url))
const TEST_CONCURRENCY = 2

/** All test files, or those that the arguments name: by path, by folder or by a part of the path. */
async function findTestFiles(wanted: string[]): Promise<string[]> {
  const all = (await readdir(path.join(root, 'test'), { recursive: true }))
    .filter((file) => file.endsWith('.test.ts'))
    .map((file) => path.join('test', file))
    .sort()
  if (wanted.length === 0) return all
  const files = new Set<string>()
  for (const name of wanted) {
    const found = all.filter((file) => file.includes(path.normalize(name).replace(/^\.\//, '')))
    if (found.length === 0) throw new Error(`No test file fits ${name}`)
    for (const file of found) files.add(file)
  }
  return [...files]
}

function defaultFlags(given: string[]): string[] {
  const flags = ['--test-reporter=spec']
  const [major = 0, minor = 0] = process.versions.node.split('.').map(Number)
  // --test-concurrency came with Node 20.10.
  if (major > 20 || minor >= 10) flags.push(`--test-concurrency=${TEST_CONCURRENCY}`)
  return flags.filter((flag) => !given.some((other) => other.split('=')[0] === flag.split('=')[0]))
}

/** A folder below the system's temporary one that other users may enter, so that root's Postgres can lie in it. */
async function makeDataDir(): Promise<string> {
  const dir = await mkdtemp(path.join(os.tmpdir(), 'cairn-test-'))
  await chmod(dir, 0o711)
  return dir
}

function runTests(args: string[], env: NodeJS.ProcessEnv): Promise<number> {
  return new Promise((resolve, reject) => {
    const child = spawn(process.execPath, ['--import', 'tsx', '--test', ...args], { cwd: root, env, stdio: 'inherit' })
    child.once('error', reject)
    child.once('exit', (code, signal) => resolve(code ?? 128 + (signal ? os.constants.signals[signal] : 0)))
    let signals = 0
    for (const signal of ['SIGINT', 'SIGTERM', 'SIGHUP'] as const) {
      process.on(signal, () => child.kill(signals++ === 0 ? signal : 'SIGKILL'))
    }
  })
}

async function main(): Promise<number> {
  const given = process.argv.slice(2)
  const flags = given.filter((argument) => argument.startsWith('--'))
  const files = await findTestFiles(given.filter((argument) => !argument.startsWith('--')))
  const args = [...defaultFlags(flags), ...flags, ...files]
  if (process.env.CAIRN_TEST_DATABASE_URL) {
    return runTests(args, { ...process.env, CAIRN_TEST_POSTGRES_URL: process.env.CAIRN_TEST_DATABASE_URL })
  }
  const dataDir = await makeDataDir()
  const server = await startEmbeddedPostgres({ dataDir, settings: { max_connections: '200' }, log: console.error })
  try {
    return await runTests(args, { ...process.env, CAIRN_TEST_POSTGRES_URL: server.url })
  } finally {
    await server.stop()
    for (const dir of [path.dirname(server.clusterDir), dataDir]) await rm(dir, { recursive: true, force: true })
  }
}

process.exitCode = await main().catch((error: Error) => {
  console.error(error.message)
  return 1
})
