import { StepSuspend, setClient, setWorkflowCtx, WorkflowCtx } from 'windmill-client'
import { type Outcome, SDK_VARIABLES } from './cairn.ts'

/** What the SDK asks for when it suspends a workflow; `mode` says which of the other members are there. */
export interface Suspend {
  mode: string
  key: string
  result: unknown
  steps: { key: string }[]
  seconds: number
  started_at: string
  duration_ms: number
}

// What a body does not await, or no longer can, rejects with nobody there: the round has learnt of it by itself.
process.on('unhandledRejection', (reason) => {
  if (!(reason instanceof StepSuspend)) console.error('Not awaited:', reason)
})

/**
 * Plays the workflow's body once, from the top, with what `checkpoint` holds: to its end, or to where it suspends. In
 * a child's checkpoint `_executing_key` names the one task whose body runs; every other open step just never settles.
 */
export async function playRound(
  jobId: string,
  checkpoint: object,
  workflow: () => Promise<unknown>,
): Promise<Outcome | { suspends: Suspend[] }> {
  Object.assign(process.env, SDK_VARIABLES, { WM_JOB_ID: jobId })
  setClient()
  const ctx = new WorkflowCtx(checkpoint)
  setWorkflowCtx(ctx)
  const { suspends, inlineSteps, suspended, taskFailed } = watch(ctx)
  const ended = workflow().then((result) => ({ result }), describeFailure)
  // A suspended body may catch the suspend, or never settle (Promise.allSettled): what the SDK raised is what counts.
  const outcome = await Promise.race([taskFailed, suspended, ended])
  // Steps that run side by side with what suspended are let finish: run on in the next round, they would run twice.
  if (ctx._executingKey === null) await Promise.allSettled(inlineSteps)
  const unawaited = ctx._flushPending() as Suspend['steps']
  if (suspends.length > 0) return { suspends }
  if (unawaited.length > 0) return { suspends: [{ mode: 'parallel', steps: unawaited } as Suspend] }
  return outcome as Outcome
}

/** Learns of each suspend, each inline step and the failure of the child's task where the SDK raises or begins them. */
function watch(ctx: WorkflowCtx) {
  const suspends: Suspend[] = []
  const inlineSteps: Promise<unknown>[] = []
  const suspended = new Promise<void>((resolve) => {
    const raiseSuspend = ctx._raiseSuspend.bind(ctx)
    ctx._raiseSuspend = (info) => {
      suspends.push(info as Suspend)
      resolve()
      return raiseSuspend(info)
    }
  })
  const taskFailed = new Promise<Outcome>((resolve) => {
    const raiseFailure = ctx._raiseStepFailure.bind(ctx)
    ctx._raiseStepFailure = (error) => {
      resolve(describeFailure(error))
      return raiseFailure(error)
    }
  })
  const runInlineStep = ctx._runInlineStep.bind(ctx)
  ctx._runInlineStep = (name, body) => {
    const step = runInlineStep(name, body)
    inlineSteps.push(step)
    return step
  }
  return { suspends, inlineSteps, suspended, taskFailed }
}

function describeFailure(thrown: unknown): Outcome {
  const { name, message, stack } = thrown instanceof Error ? thrown : new Error(String(thrown))
  return { error: { name, message, stack } }
}
