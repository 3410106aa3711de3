import { AsyncLocalStorage } from 'node:async_hooks'
import { setTimeout as wait } from 'node:timers/promises'
import { StepSuspend, setClient, setWorkflowCtx, WorkflowCtx } from 'windmill-client'

const CAIRN = process.env.CAIRN_URL ?? 'http://127.0.0.1:8080'
const TOKEN = process.env.CAIRN_TOKEN ?? 'none'
const round = new AsyncLocalStorage<WorkflowCtx>()

/** Runs `workflow` as the job `jobId` (a UUID) to its end. What the job's checkpoint holds is not run again. */
export async function runWorkflow<T>(jobId: string, workflow: () => Promise<T>): Promise<T> {
  const place = { BASE_INTERNAL_URL: CAIRN, WM_TOKEN: TOKEN, WM_WORKSPACE: 'examples', WM_JOB_ID: jobId }
  Object.assign(process.env, place)
  setClient()
  for (;;) {
    const ctx = new WorkflowCtx(await call(`/jobs/${jobId}/checkpoint`))
    const steps = trackSteps(ctx)
    setWorkflowCtx(ctx)
    const [outcome] = await Promise.allSettled([round.run(ctx, workflow)])
    // A step whose result the SDK could not record suspends. Record it here, then go again from the top.
    const unrecorded = new Set((await Promise.allSettled(steps)).flatMap(findSuspend))
    for (const { dispatchInfo } of unrecorded) await call(`/jobs/${jobId}/inline-checkpoint`, dispatchInfo)
    if (unrecorded.size > 0) continue
    if (outcome.status === 'fulfilled') return outcome.value
    throw findSuspend(outcome).length > 0 ? new Error('This runner knows step() alone') : outcome.reason
  }
}

/** The steps of one round. A branch that outlives its round begins none: it would take keys of the next one. */
function trackSteps(ctx: WorkflowCtx): Promise<unknown>[] {
  const steps: Promise<unknown>[] = []
  const runStep = ctx._runInlineStep.bind(ctx)
  ctx._runInlineStep = (name, fn) => {
    const step = round.getStore() === ctx ? runStep(name, fn) : Promise.reject(new StepSuspend({ mode: 'stale' }))
    steps.push(step)
    return step
  }
  return steps
}

function findSuspend(outcome: PromiseSettledResult<unknown>): StepSuspend[] {
  return outcome.status === 'rejected' && outcome.reason instanceof StepSuspend ? [outcome.reason] : []
}

/** GET, or POST if there is a body; for two minutes if Cairn does not answer. Throws what Cairn refuses. */
async function call(path: string, body?: Record<string, unknown>) {
  const headers = { authorization: `Bearer ${TOKEN}`, 'content-type': 'application/json' }
  const init = body ? { method: 'POST', headers, body: JSON.stringify(body, encode) } : { headers }
  for (let tries = 1; tries <= 120; tries++) {
    try {
      const response = await fetch(CAIRN + path, init)
      const answer = (await response.json()) as Record<string, unknown>
      if (response.ok) return answer
      if (!answer.retryable) return Promise.reject(new Error(`${answer.code}: ${answer.detail}`))
    } catch {}
    console.error(`Cairn at ${CAIRN} does not answer yet (CAIRN_URL says where it is)`)
    await wait(1000)
  }
  throw new Error(`Cairn at ${CAIRN} does not answer`)
}

/** As the SDK encodes what it sends itself. */
function encode(_member: string, value: unknown): unknown {
  return value === undefined ? null : typeof value === 'bigint' ? String(value) : value
}
