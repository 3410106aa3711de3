// An engine: runs a workflow of the npm package windmill-client, its tasks as processes of their own, on Cairn alone.
//
//   node --import tsx examples/engine/engine.ts <job id> '{"photos": ["sea", "hill", "cat"]}'   starts or resumes a job
//   node --import tsx examples/engine/engine.ts                                              resumes all that are open
//
// The loop: read the job's checkpoint, play the workflow's body with it (round.ts), do what the body suspended for,
// begin again from the top. Steps that the checkpoint holds are not run again; when nothing suspends, the job is done.
//
//   suspended for           what the engine does
//   tasks                   POST /dispatch parks the job and prepares a checkpoint for each child; each child runs as a
//                           process (child.ts), which reads that checkpoint, ends its own job and tells the parent
//   a sleep                 POST /dispatch notes when it began; when its time has come, its key is recorded with null
//   a step that the SDK     POST /inline-checkpoint: the same record by another way
//   could not record
//
// Kill it anywhere, its children with it or not, and start it again. What was recorded stays; what was dispatched keeps
// its child ids; a sleep goes on from when it began. A task that was under way runs again, so that its body may run
// twice, but one end stands: the first that its job was given. Run one engine for a job at a time.
import { spawn } from 'node:child_process'
import { createHash, randomUUID } from 'node:crypto'
import { once } from 'node:events'
import { readFile } from 'node:fs/promises'
import { setTimeout as wait } from 'node:timers/promises'
import { fileURLToPath } from 'node:url'
import { call, endChild, endJob, findEnd, type Outcome } from './cairn.ts'
import { playRound, type Suspend } from './round.ts'
import { album } from './workflow.ts'

const NAME = 'album'
const CHILD = fileURLToPath(new URL('child.ts', import.meta.url))
/** Processes that may die, one after another, before a task counts as failed. */
const MAX_ATTEMPTS = 3

/** Cairn refuses to go on with a job whose workflow was edited meanwhile: its keys may mean other steps now. */
const sourceHash = createHash('sha256')
  .update(await readFile(new URL('workflow.ts', import.meta.url)))
  .digest('hex')

async function run(jobId: string): Promise<Outcome> {
  for (;;) {
    const end = await findEnd(jobId)
    if (end) return end
    const checkpoint = await call(`GET /jobs/${jobId}/checkpoint`)
    const round = await playRound(jobId, checkpoint, () => album(checkpoint.input_args))
    if (!('suspends' in round)) return (await endJob(jobId, round)).end
    for (const suspend of round.suspends) await settle(jobId, suspend, checkpoint.pending_steps?.job_ids ?? {})
  }
}

/** Does what the workflow suspended for. `pendingIds` are the children by key that the job waits for already. */
async function settle(jobId: string, suspend: Suspend, pendingIds: Record<string, string>): Promise<void> {
  switch (suspend.mode) {
    case 'sequential':
    case 'parallel':
      return runChildren(jobId, suspend, pendingIds)
    case 'sleep':
      return sleepUntilDue(jobId, suspend)
    case 'inline_checkpoint': {
      const { key, result, started_at, duration_ms } = suspend
      const step = { key, result, started_at, duration_ms, source_hash: sourceHash }
      await call(`POST /jobs/${jobId}/inline-checkpoint`, step)
      return
    }
    default:
      throw new Error(`This engine does not know how to wait for: ${suspend.mode}`)
  }
}

async function runChildren(jobId: string, { mode, steps }: Suspend, pendingIds: Record<string, string>): Promise<void> {
  // An engine before this one may have dispatched them: only with the same ids is what they did of use.
  const idOf = (key: string) => (Object.hasOwn(pendingIds, key) && pendingIds[key]) || randomUUID()
  const job_ids = Object.fromEntries(steps.map(({ key }) => [key, idOf(key)]))
  await call(`POST /jobs/${jobId}/dispatch`, { mode, job_ids, source_hash: sourceHash })
  await Promise.all(Object.values(job_ids).map((id) => runChild({ id, parentId: jobId })))
}

async function runChild(child: { id: string; parentId: string }): Promise<void> {
  for (let attempt = 0; attempt < MAX_ATTEMPTS; attempt++) {
    // The flags too, --import tsx for one.
    const args = [...process.execArgv, CHILD, child.parentId, child.id]
    const [code] = await once(spawn(process.execPath, args, { stdio: 'inherit' }), 'exit')
    if (code === 0) return
  }
  await endChild(child, { error: { name: 'ChildDied', message: `It died ${MAX_ATTEMPTS} times` } })
}

async function sleepUntilDue(jobId: string, { key, seconds }: Suspend): Promise<void> {
  const entries = { [key]: { sleep_duration_s: seconds } }
  await call(`POST /jobs/${jobId}/dispatch`, { mode: 'sleep', keys: [key], entries, source_hash: sourceHash })
  const scheduledFor = await findScheduledFor(jobId, key)
  const due = Date.parse(scheduledFor) + seconds * 1000
  // A timer takes 24 days at most.
  for (let left = 1; left > 0; left = due - Date.now()) await wait(Math.min(left, 3_600_000))
  const timing = { started_at: scheduledFor, duration_ms: seconds * 1000 }
  await call(`POST /jobs/${jobId}/inline-checkpoint`, { key, result: null, ...timing, source_hash: sourceHash })
}

/** When the sleep was dispatched first, by Cairn's clock: an engine that was started anew does not sleep anew. */
async function findScheduledFor(jobId: string, key: string): Promise<string> {
  for (let after = 0; ; ) {
    const { entries, next } = await call(`GET /jobs/${jobId}/timeline?after=${after}`)
    for (const entry of entries) if (entry.kind === 'step' && entry.key === key) return entry.scheduled_for
    if (next === null) throw new Error(`The timeline of ${jobId} does not have ${key}`)
    after = next
  }
}

/** Ids of the open jobs of this workflow, the oldest first. Children have no name, and are not among them. */
async function listOpenJobs(): Promise<string[]> {
  const ids: string[] = []
  for (let cursor = ''; ; ) {
    const { jobs, next_cursor } = await call(`GET /jobs?status=open&name=${NAME}${cursor}`)
    for (const { id } of jobs) ids.unshift(id)
    if (next_cursor === null) return ids
    cursor = `&cursor=${encodeURIComponent(next_cursor)}`
  }
}

const [jobId, args] = process.argv.slice(2)
for (const id of jobId ? [jobId] : await listOpenJobs()) {
  const description = { name: NAME, source_hash: sourceHash, ...(args && { input_args: JSON.parse(args) }) }
  await call(`PUT /jobs/${id}`, description)
  console.log(`Job ${id} ended:`, JSON.stringify(await run(id)))
}
