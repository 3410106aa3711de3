import { setTimeout as wait } from 'node:timers/promises'

const CAIRN = process.env.CAIRN_URL ?? 'http://127.0.0.1:8080'
const TOKEN = process.env.CAIRN_TOKEN ?? 'none'
const GIVE_UP_AFTER_MS = 60_000

/** What the SDK reads from the environment to find Cairn by itself. */
export const SDK_VARIABLES = { BASE_INTERNAL_URL: CAIRN, WM_TOKEN: TOKEN, WM_WORKSPACE: 'examples' }

/** How a job or a child ends. */
export type Outcome = { result: unknown } | { error: unknown }

// biome-ignore lint/suspicious/noExplicitAny: answers are read as the routes promise them
type Answer = Record<string, any>

/**
 * Asks Cairn, again and again while it does not answer, for a minute: each call of the engine may be repeated safely.
 * A problem whose code is among `accept` is given back like an answer; any other one is thrown.
 */
export async function call(route: string, body?: object, { accept = [] }: { accept?: string[] } = {}): Promise<Answer> {
  const [method = '', path] = route.split(' ')
  const headers = { authorization: `Bearer ${TOKEN}`, 'content-type': 'application/json' }
  const init = { method, headers, ...(body && { body: JSON.stringify(body, encode) }) }
  const deadline = Date.now() + GIVE_UP_AFTER_MS
  for (;;) {
    let failure: unknown
    try {
      const response = await fetch(CAIRN + path, { ...init, signal: AbortSignal.timeout(15_000) })
      const answer = (await response.json()) as Answer
      if (response.ok || accept.includes(answer.code)) return answer
      failure = new Error(`${route}: ${answer.code}: ${answer.detail}`)
      if (!answer.retryable) return Promise.reject(failure)
    } catch (error) {
      failure = error
    }
    if (Date.now() > deadline) throw failure
    await wait(250)
  }
}

/** Ends a job. The first end stands: who comes later (a process thought dead, say) is told so, and changes nothing. */
export async function endJob(jobId: string, outcome: Outcome): Promise<{ end: Outcome; isFirst: boolean }> {
  const answer = await call(`POST /jobs/${jobId}/complete`, outcome, { accept: ['job_finished'] })
  return { end: (await findEnd(jobId)) as Outcome, isFirst: answer.code !== 'job_finished' }
}

/** What the job ended with; undefined while it is open. */
export async function findEnd(jobId: string): Promise<Outcome | undefined> {
  const { status, result } = await call(`GET /jobs/${jobId}`)
  if (status === 'open') return undefined
  return status === 'failed' ? { error: result.result.error } : { result }
}

/**
 * Ends a child, and records how it ended under its key in the parent: in that order, so that a child that runs twice
 * after all has one result, the one that the workflow goes on with.
 */
export async function endChild(
  child: { id: string; parentId: string },
  outcome: Outcome,
  timing: { duration_ms?: number } = {},
): Promise<void> {
  const { end, isFirst } = await endJob(child.id, outcome)
  const news = { ...end, ...(isFirst && timing) }
  // A parent that no longer waits for this child needs no news of it.
  const accept = ['stale_child', 'job_finished']
  await call(`POST /jobs/${child.parentId}/children/${child.id}/complete`, news, { accept })
}

/** As the SDK encodes what it sends itself. */
function encode(_member: string, value: unknown): unknown {
  return value === undefined ? null : typeof value === 'bigint' ? String(value) : value
}
