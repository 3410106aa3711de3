import { type ChildProcess, spawn } from 'node:child_process'
import { fileURLToPath } from 'node:url'
import { CONFIG_VARIABLES } from '../src/config.ts'

const ROOT = fileURLToPath(new URL('..', import.meta.url))
/** A cold start on two busy cores takes 3 s, one that makes an embedded database 10 s. */
const START_TIMEOUT_MS = 60_000
/** SHUTDOWN_TIMEOUT_S, and a little for the process to say so. */
const STOP_TIMEOUT_MS = 30_000

export interface Exit {
  code: number | null
  signal: NodeJS.Signals | null
}

export interface ServiceProcess {
  /** Without a slash at the end. */
  readonly url: string
  readonly port: number
  readonly pid: number
  /** Everything written so far to stdout and stderr. */
  output(): string
  /** Sends the signal and does not wait: see `exited`. */
  kill(signal: NodeJS.Signals): void
  readonly exited: Promise<Exit>
  /** SIGTERM, then waits for the end. Throws if the process has to be killed. Harmless when it is gone already. */
  stop(): Promise<Exit>
}

export interface ServiceOptions {
  /** Absent: whatever `env` says, the embedded database by default. */
  databaseUrl?: string
  /** 0 (the default) = a free one. Give the port of a dead service to start its successor at the same address. */
  port?: number
  /** More variables of the service. What the caller's own environment sets for it is not passed on. */
  env?: Record<string, string>
}

/**
 * Starts src/main.ts as a process of its own and waits until it listens; it ends after the test `t`.
 * Throws with the output if it ends before, or does not listen within a minute.
 */
export async function startService(
  t: { after(fn: () => Promise<void>): void },
  options: ServiceOptions = {},
): Promise<ServiceProcess> {
  const child = spawn(process.execPath, ['--import', 'tsx', 'src/main.ts'], {
    cwd: ROOT,
    env: serviceEnvironment(options),
    stdio: ['ignore', 'pipe', 'pipe'],
  })
  const exited = watchExit(child)
  const stop = () => stopChild(child, exited)
  t.after(async () => {
    await stop()
  })

  let output = ''
  const listening = new Promise<string>((resolve) => {
    const read = (chunk: string) => {
      output += chunk
      const url = findListeningUrl(output)
      if (url) resolve(url)
    }
    for (const stream of [child.stdout, child.stderr]) stream.setEncoding('utf8').on('data', read)
  })
  const url = await withDeadline(
    Promise.race([
      listening,
      exited.then(({ code, signal }) => {
        throw new Error(`The service ended (${signal ?? code}) before it listened:\n${output}`)
      }),
    ]),
    { ms: START_TIMEOUT_MS, failure: () => `The service does not listen after ${START_TIMEOUT_MS} ms:\n${output}` },
  )
  return {
    url,
    port: Number(new URL(url).port),
    pid: child.pid as number,
    output: () => output,
    kill: (signal) => void child.kill(signal),
    exited,
    stop,
  }
}

function serviceEnvironment({ databaseUrl, port = 0, env = {} }: ServiceOptions): NodeJS.ProcessEnv {
  const inherited = { ...process.env }
  for (const { name } of CONFIG_VARIABLES) delete inherited[name]
  delete inherited.NODE_TEST_CONTEXT
  return {
    ...inherited,
    PORT: String(port),
    ...(databaseUrl === undefined ? {} : { DATABASE_URL: databaseUrl }),
    ...env,
  }
}

/** The line that main.ts writes once it listens: for a person with the embedded database, a log line otherwise. */
function findListeningUrl(output: string): string | undefined {
  for (const line of output.split('\n').slice(0, -1)) {
    const told = /^Cairn listens on (\S+)$/.exec(line)?.[1]
    if (told) return told
    if (line.includes('"msg":"Listening"')) return (JSON.parse(line) as { url: string }).url
  }
}

function watchExit(child: ChildProcess): Promise<Exit> {
  // A test file that is stopped in its middle must not leave its services running.
  const killWithUs = () => child.kill('SIGKILL')
  process.on('exit', killWithUs)
  return new Promise((resolve, reject) => {
    child.once('error', reject)
    // Not 'exit': after 'close' no more output comes.
    child.once('close', (code, signal) => {
      process.off('exit', killWithUs)
      resolve({ code, signal })
    })
  })
}

async function stopChild(child: ChildProcess, exited: Promise<Exit>): Promise<Exit> {
  if (child.exitCode === null && child.signalCode === null) child.kill('SIGTERM')
  return withDeadline(exited, {
    ms: STOP_TIMEOUT_MS,
    failure: () => {
      child.kill('SIGKILL')
      return `The service does not end within ${STOP_TIMEOUT_MS} ms of SIGTERM and was killed`
    },
  })
}

async function withDeadline<T>(work: Promise<T>, { ms, failure }: { ms: number; failure: () => string }): Promise<T> {
  let timer: NodeJS.Timeout | undefined
  const late = new Promise<never>((_, reject) => {
    timer = setTimeout(() => reject(new Error(failure())), ms)
  })
  try {
    return await Promise.race([work, late])
  } finally {
    clearTimeout(timer)
  }
}
