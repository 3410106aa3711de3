import { type ChildProcess, spawn } from 'node:child_process'
import { readdir } from 'node:fs/promises'
import os from 'node:os'
import path from 'node:path'
import { fileURLToPath } from 'node:url'
import { startDatabaseServer } from './database-server.ts'

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

interface Tests {
  start(args: string[], databaseUrl: string): Promise<number>
}

/** Signals go to the tests, the second one as SIGKILL; one that comes before they run keeps them from starting. */
function listenForSignals(): Tests {
  let child: ChildProcess | undefined
  let received: NodeJS.Signals | undefined
  for (const signal of ['SIGINT', 'SIGTERM', 'SIGHUP'] as const) {
    process.on(signal, () => {
      child?.kill(received ? 'SIGKILL' : signal)
      received = signal
    })
  }
  const exitCode = (signal: NodeJS.Signals) => 128 + os.constants.signals[signal]
  return {
    start(args, databaseUrl) {
      if (received) return Promise.resolve(exitCode(received))
      const env = { ...process.env, CAIRN_TEST_POSTGRES_URL: databaseUrl }
      const running = spawn(process.execPath, ['--import', 'tsx', '--test', ...args], {
        cwd: root,
        env,
        stdio: 'inherit',
      })
      child = running
      return new Promise((resolve, reject) => {
        running.once('error', reject)
        running.once('exit', (code, signal) => resolve(code ?? exitCode(signal ?? 'SIGKILL')))
      })
    },
  }
}

async function main(): Promise<number> {
  const given = process.argv.slice(2)
  const flags = given.filter((argument) => argument.startsWith('--'))
  const files = await findTestFiles(given.filter((argument) => !argument.startsWith('--')))
  const args = [...defaultFlags(flags), ...flags, ...files]
  const tests = listenForSignals()
  const existing = process.env.CAIRN_TEST_DATABASE_URL
  if (existing) return tests.start(args, existing)
  const server = await startDatabaseServer()
  try {
    return await tests.start(args, server.url)
  } finally {
    await server.stop()
  }
}

process.exitCode = await main().catch((error: Error) => {
  console.error(error.message)
  return 1
})
