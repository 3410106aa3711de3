import { type ChildProcess, fork, spawn } from 'node:child_process'
import { once } from 'node:events'
import net from 'node:net'
import { fileURLToPath } from 'node:url'
import type { LoadAnswers } from './load-generator.ts'

const ROOT = fileURLToPath(new URL('..', import.meta.url))
const READY_WITHIN_MS = 60_000
const STOPPED_WITHIN_MS = 30_000

export interface ServerProcess {
  url: string
  pid: number
  stop(): Promise<void>
}

/** Starts a TypeScript server of this repository on a free loopback port; resolves when `GET /readyz` answers 200. */
export async function startServer(
  script: string,
  options: { args?: string[]; databaseUrl: string },
): Promise<ServerProcess> {
  const port = await freePort()
  const url = `http://127.0.0.1:${port}`
  const child = spawn(process.execPath, ['--import', 'tsx', script, ...(options.args ?? [])], {
    cwd: ROOT,
    env: {
      ...process.env,
      HOST: '127.0.0.1',
      PORT: String(port),
      DATABASE_URL: options.databaseUrl,
      LOG_LEVEL: 'warn',
      NODE_ENV: 'production',
    },
    stdio: ['ignore', 'inherit', 'inherit'],
  })
  try {
    await waitUntilReady(url, child)
  } catch (error) {
    child.kill('SIGKILL')
    throw error
  }
  return { url, pid: child.pid ?? 0, stop: () => stopChild(child) }
}

export interface LoadGenerator {
  run<Kind extends keyof LoadAnswers>(
    kind: Kind,
    order: Omit<LoadAnswers[Kind][0], 'kind'>,
  ): Promise<LoadAnswers[Kind][1]>
  stop(): Promise<void>
}

export function startLoadGenerator(): LoadGenerator {
  const script = fileURLToPath(new URL('load-generator.ts', import.meta.url))
  const child = fork(script, { cwd: ROOT, execArgv: ['--import', 'tsx'] })
  const run: LoadGenerator['run'] = async (kind, order) => {
    const answered = new AbortController()
    const died = once(child, 'exit', { signal: answered.signal }).then(() => {
      throw new Error('The load generator died')
    })
    child.send({ ...order, kind })
    try {
      const [answer] = await Promise.race([once(child, 'message', { signal: answered.signal }), died])
      if (answer.error !== undefined) throw new Error(`${kind} load on ${order.url}: ${answer.error}`)
      return answer.figures
    } finally {
      died.catch(() => {})
      answered.abort()
    }
  }
  return { run, stop: () => stopChild(child) }
}

async function waitUntilReady(url: string, child: ChildProcess): Promise<void> {
  const endsAt = Date.now() + READY_WITHIN_MS
  while (Date.now() < endsAt) {
    if (child.exitCode !== null) throw new Error(`${child.spawnargs.join(' ')} exited with ${child.exitCode}`)
    const status = await fetch(`${url}/readyz`).then(
      (response) => response.status,
      () => 0,
    )
    if (status === 200) return
    await new Promise((resolve) => setTimeout(resolve, 50))
  }
  throw new Error(`${url}/readyz did not answer 200 within ${READY_WITHIN_MS} ms`)
}

async function stopChild(child: ChildProcess): Promise<void> {
  if (child.exitCode !== null || child.signalCode !== null) return
  const exited = once(child, 'exit')
  child.kill('SIGTERM')
  const tooLong = setTimeout(() => child.kill('SIGKILL'), STOPPED_WITHIN_MS)
  await exited
  clearTimeout(tooLong)
}

async function freePort(): Promise<number> {
  const probe = net.createServer().listen(0, '127.0.0.1')
  await once(probe, 'listening')
  const { port } = probe.address() as net.AddressInfo
  probe.close()
  await once(probe, 'close')
  return port
}
