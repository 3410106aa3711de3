import assert from 'node:assert/strict'
import { spawn } from 'node:child_process'
import { once } from 'node:events'
import { readFileSync, watch } from 'node:fs'
import { mkdtemp, readFile, rm } from 'node:fs/promises'
import os from 'node:os'
import path from 'node:path'
import { fileURLToPath } from 'node:url'
import { makeGroups, type Outcome } from './hundred-steps.ts'

const ROOT = fileURLToPath(new URL('../..', import.meta.url))
/** A hundred steps take about a second; an outage and two busy cores add to it. */
const RUN_TIMEOUT_MS = 90_000

export interface SeenOutcome {
  value?: unknown
  error?: { name: string; message: string; step_key: string; record: { error: { name?: string; stack?: string } } }
}

export interface RunLog {
  /** A key for each time that a step's function was entered, in order. */
  executed: string[]
  /** What the workflow saw, each time that it was not what it had seen before. */
  outcomes: { key: string; outcome: SeenOutcome }[]
}

export interface RunOptions {
  url: string
  jobId: string
  prefix?: string
  /** Index of a step whose function never returns: such a run cannot end before it is killed. */
  hangAt?: number
  env?: Record<string, string>
}

export interface WorkflowRun {
  /** Lets the workflow begin; until then the process has read nothing. */
  go(): void
  /** Waits until `count` steps have been entered. Fails if the process ends before. */
  reaches(count: number): Promise<void>
  /** SIGKILL, and waits for the end. */
  kill(): Promise<RunLog>
  /** Waits for the end and demands that it is a good one. */
  succeeds(): Promise<RunLog>
  stderr(): string
}

/** Starts hundred-steps-process.ts and waits until it is ready to begin. */
export async function startRun(
  t: { after(fn: () => Promise<void>): void },
  { url, jobId, prefix = '', hangAt = -1, env = {} }: RunOptions,
): Promise<WorkflowRun> {
  const dir = await mkdtemp(path.join(os.tmpdir(), 'cairn-sdk-'))
  const file = path.join(dir, 'log')
  const child = spawn(process.execPath, ['--import', 'tsx', 'test/sdk/hundred-steps-process.ts'], {
    cwd: ROOT,
    env: {
      ...process.env,
      CAIRN_URL: url,
      JOB_ID: jobId,
      LOG_FILE: file,
      PREFIX: prefix,
      HANG_AT: String(hangAt),
      ...env,
    },
  })
  const timer = setTimeout(() => child.kill('SIGKILL'), RUN_TIMEOUT_MS)
  const closed = once(child, 'close').finally(() => clearTimeout(timer))
  t.after(async () => {
    child.kill('SIGKILL')
    await closed
    await rm(dir, { recursive: true, force: true })
  })
  let stderr = ''
  child.stderr.setEncoding('utf8').on('data', (chunk: string) => {
    stderr += chunk
  })
  const [first] = await Promise.race([once(child.stdout, 'data'), closed])
  assert.match(String(first), /^READY/, stderr)
  child.stdout.resume()

  return {
    go: () => void child.stdin.end('go'),
    reaches: (count) =>
      new Promise((resolve, reject) => {
        const check = () => {
          if (countExecuted(readFileSync(file, 'utf8')) < count) return
          watcher.close()
          resolve()
        }
        const watcher = watch(file, check)
        closed.then(() => {
          watcher.close()
          reject(new Error(`The run ended before ${count} steps: ${stderr}`))
        })
        check()
      }),
    kill: async () => {
      child.kill('SIGKILL')
      assert.deepEqual(await closed, [null, 'SIGKILL'], stderr)
      return parseLog(await readFile(file, 'utf8'))
    },
    succeeds: async () => {
      assert.deepEqual(await closed, [0, null], stderr)
      return parseLog(await readFile(file, 'utf8'))
    },
    stderr: () => stderr,
  }
}

function countExecuted(text: string): number {
  return text.split('{"executed":').length - 1
}

function parseLog(text: string): RunLog {
  const entries = text
    .split('\n')
    .slice(0, -1)
    .map((line) => JSON.parse(line))
  return {
    executed: entries.filter((entry) => 'executed' in entry).map((entry) => entry.executed),
    outcomes: entries
      .filter((entry) => 'outcome' in entry)
      .map(({ outcome, ...rest }) => ({ key: outcome, outcome: rest })),
  }
}

/** The keys of all hundred steps. */
export function allKeys(prefix = ''): string[] {
  return makeGroups(prefix)
    .flat()
    .map(({ key }) => key)
}

/** The run has seen all hundred outcomes, each once, and each the right one. */
export function assertRightOutcomes({ outcomes }: RunLog, prefix = ''): void {
  const steps = makeGroups(prefix).flat()
  assert.deepEqual(outcomes.map(({ key }) => key).sort(), steps.map(({ key }) => key).sort())
  const seen = new Map(outcomes.map(({ key, outcome }) => [key, outcome]))
  for (const { key, outcome } of steps) assertSameText(key, { seen: summarize(key, seen.get(key)), expected: outcome })
}

/** Where both runs have seen a step's outcome, it is the very same, down to the stack of a failure. */
export function assertAgree(one: RunLog, other: RunLog): void {
  const seen = new Map(one.outcomes.map(({ key, outcome }) => [key, outcome]))
  for (const { key, outcome } of other.outcomes) {
    if (seen.has(key)) assertSameText(key, { seen: outcome, expected: seen.get(key) })
  }
}

/** Compared as JSON: `__proto__` and lone surrogates count, and a difference of megabytes is not drawn. */
function assertSameText(key: string, { seen, expected }: { seen: unknown; expected: unknown }): void {
  const [text, wanted] = [JSON.stringify(seen), JSON.stringify(expected)]
  assert.ok(text === wanted, `Step ${JSON.stringify(key)}: ${text?.slice(0, 300)} is not ${wanted?.slice(0, 300)}`)
}

function summarize(key: string, outcome: SeenOutcome | undefined): Outcome | undefined {
  if (!outcome?.error) return outcome as Outcome | undefined
  const { name, message, step_key, record } = outcome.error
  assert.equal(step_key, key)
  const cause = record.error.name
  return { error: { name: name as 'TaskError', message, ...(cause === undefined ? {} : { cause }) } }
}
