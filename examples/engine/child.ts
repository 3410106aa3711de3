// A child as a process: child.ts <parent job id> <child job id>. Runs one task, unless the child has ended already: a
// process before this one may have died when it had ended the child and not yet told the parent.
import { call, endChild, findEnd, type Outcome } from './cairn.ts'
import { playRound } from './round.ts'
import { album } from './workflow.ts'

async function runTask(id: string, parentId: string): Promise<Outcome> {
  const begun = { started_at: new Date().toISOString() }
  await call(`POST /jobs/${parentId}/children/${id}/start`, begun, { accept: ['stale_child'] })
  const checkpoint = await call(`GET /jobs/${id}/checkpoint`)
  const { input_args } = await call(`GET /jobs/${parentId}/checkpoint?fields=input_args`)
  const round = await playRound(id, checkpoint, () => album(input_args))
  if ('error' in round) return round
  const done = 'suspends' in round && round.suspends.find(({ mode }) => mode === 'step_complete')
  if (!done) throw new Error(`The workflow does not come to the step ${checkpoint._executing_key}`)
  return { result: done.result }
}

const [parentId = '', id = ''] = process.argv.slice(2)
const earlierEnd = await findEnd(id)
const began = Date.now()
if (earlierEnd) await endChild({ id, parentId }, earlierEnd)
else await endChild({ id, parentId }, await runTask(id, parentId), { duration_ms: Date.now() - began })
// Other branches of the workflow may still be at work; nothing comes of them in this process.
process.exit()
