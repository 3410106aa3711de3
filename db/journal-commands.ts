import { Problem, SOURCE_CHANGED_DETAIL } from '../src/problems.ts'
import { failureKind, type Pool, PoolExhausted, plainArray, type Row, textArray, textOf } from './client.ts'
import type {
  CheckpointLimits,
  CheckpointReplacement,
  ChildCompletion,
  Dispatch,
  JobDescription,
  JobEnd,
  ParkedState,
} from './store.ts'
import { RETRY_MAX_MS, RETRY_MIN_MS, WRITE_DEADLINE_MS } from './write-coalescer.ts'

/** Milliseconds that one attempt waits for a job's row before others have their turn with the connection. */
export const LOCK_WAIT_MS = 250

const PENDING_KEYS = "coalesce(to_json(pending_keys)::text, '[]')"

/** The writes of engines: one call of a function each, sent again until they succeed or are late. */
export function createJournalCommands(pool: Pool, limits: CheckpointLimits) {
  /** `repeatable`: whether the statement may be sent again when it is unknown whether it took effect. */
  async function run(
    statement: string,
    parameters: ReadonlyArray<string | null>,
    options: { repeatable: boolean },
  ): Promise<Row> {
    const deadline = performance.now() + WRITE_DEADLINE_MS
    for (let attempt = 0; ; attempt++) {
      try {
        return (await pool.query(statement, parameters, deadline))[0] as Row
      } catch (error) {
        if (error instanceof PoolExhausted) throw new Problem('unavailable', `${error.message}.`)
        const kind = failureKind(error)
        if (kind === 'data') throw new Problem('internal', 'The database refused the values.', { cause: error })
        if (kind === 'other') throw new Problem('unavailable', 'The database refused the statement.', { cause: error })
        if (kind === 'transient' && !options.repeatable) {
          throw new Problem('unavailable', 'The connection was lost; whether the write took effect is unknown.', {
            cause: error,
          })
        }
        const pause = kind === 'lock' ? 0 : Math.min(RETRY_MAX_MS, RETRY_MIN_MS * 2 ** attempt)
        if (performance.now() + pause >= deadline) {
          throw new Problem('unavailable', `Nothing could be written within ${WRITE_DEADLINE_MS / 1000} s.`, {
            cause: error,
          })
        }
        if (pause > 0) await new Promise((resolve) => setTimeout(resolve, pause))
      }
    }
  }

  return {
    async dispatch(jobId: string, dispatch: Dispatch): Promise<ParkedState> {
      const row = await run(
        `select outcome, version, ${PENDING_KEYS}, culprit from cairn.dispatch_v1($1::uuid, $2::text[], $3::text[], $4::uuid[], $5::text, $6::text, $7::text, $8::text[], $9::text[], ${LOCK_WAIT_MS})`,
        [
          jobId,
          textArray(dispatch.keys),
          textArray(dispatch.children.map(({ key }) => key)),
          plainArray(dispatch.children.map(({ childId }) => childId)),
          pendingText(dispatch),
          dispatch.inputArgs,
          dispatch.sourceHash,
          textArray(dispatch.entries.map(({ key }) => key)),
          textArray(dispatch.entries.map(({ extra }) => extra)),
        ],
        { repeatable: true },
      )
      switch (textOf(row, 0)) {
        case 'source_changed':
          throw new Problem('source_changed', SOURCE_CHANGED_DETAIL)
        case 'job_finished':
          throw jobFinished(jobId)
        case 'child_taken':
          throw new Problem('invalid_request', `${textOf(row, 3)} is a child of another job or of another key already.`)
        case 'stale_child':
          throw new Problem('stale_child', `No key maps to the child ${textOf(row, 3)} any more: dispatch a new one.`)
      }
      return { version: textOf(row, 1), pendingKeys: JSON.parse(textOf(row, 2)) as string[] }
    },

    async startChild(jobId: string, childId: string, startedAt: string | null): Promise<ParkedState & { key: string }> {
      const row = await run(
        `select outcome, version, key, ${PENDING_KEYS} from cairn.start_child_v1($1::uuid, $2::uuid, $3::text, ${LOCK_WAIT_MS})`,
        [jobId, childId, startedAt],
        {
          repeatable: true,
        },
      )
      return childState(row, { jobId, childId, limits })
    },

    async completeChild(jobId: string, childId: string, end: ChildCompletion): Promise<ParkedState & { key: string }> {
      const row = await run(
        `select outcome, version, key, ${PENDING_KEYS} from cairn.complete_child_v1($1::uuid, $2::uuid, $3::text, $4::text, $5::text, $6::text::boolean, $7::text, $8::bigint, $9::bigint, $10::bigint, ${LOCK_WAIT_MS})`,
        [
          jobId,
          childId,
          'result' in end ? end.result.text() : null,
          'error' in end ? end.error.text() : null,
          'error' in end ? end.message.text() : null,
          String('error' in end || end.result.isFailure),
          end.startedAt,
          end.durationMs === null ? null : String(end.durationMs),
          String(limits.maxStepsPerJob),
          String(limits.maxCheckpointBytes),
        ],
        { repeatable: true },
      )
      return childState(row, { jobId, childId, limits })
    },

    async putCheckpoint(jobId: string, checkpoint: CheckpointReplacement): Promise<string> {
      const row = await run(
        `select outcome, version from cairn.put_checkpoint_v1($1::uuid, $2::text, $3::text[], $4::text[], $5::boolean[], $6::text, $7::text[], $8::text, $9::text[], $10::uuid[], $11::text, $12::text, $13::text[], $14::text::boolean, $15::bigint, $16::bigint, ${LOCK_WAIT_MS})`,
        [
          jobId,
          checkpoint.sourceHash,
          textArray(checkpoint.steps.map(({ key }) => key)),
          textArray(checkpoint.steps.map(({ result }) => result.text())),
          plainArray(checkpoint.steps.map(({ result }) => result.isFailure)),
          checkpoint.pending?.text ?? null,
          checkpoint.pending ? textArray(checkpoint.pending.keys) : null,
          checkpoint.inputArgs,
          textArray(checkpoint.children.map(({ key }) => key)),
          plainArray(checkpoint.children.map(({ childId }) => childId)),
          checkpoint.executingKey,
          checkpoint.extra,
          checkpoint.ifVersions ? textArray(checkpoint.ifVersions) : null,
          String(checkpoint.force),
          String(limits.maxStepsPerJob),
          String(limits.maxCheckpointBytes),
        ],
        { repeatable: checkpoint.ifVersions === null },
      )
      switch (textOf(row, 0)) {
        case 'precondition_failed':
          throw new Problem(
            'precondition_failed',
            `The version of job ${jobId} is "${textOf(row, 1)}", not one of If-Match.`,
          )
        case 'job_parked':
          throw jobParked(jobId)
        case 'job_finished':
          throw jobFinished(jobId)
        case 'checkpoint_full':
          throw checkpointFull(jobId, limits)
      }
      return textOf(row, 1)
    },

    async describeJob(jobId: string, job: JobDescription): Promise<{ version: string; created: boolean }> {
      const row = await run(
        `select outcome, version from cairn.describe_job_v1($1::uuid, $2::text, $3::text, $4::text, $5::text, ${LOCK_WAIT_MS})`,
        [jobId, job.name, job.labels, job.inputArgs, job.sourceHash],
        { repeatable: true },
      )
      if (textOf(row, 0) === 'source_changed') throw new Problem('source_changed', SOURCE_CHANGED_DETAIL)
      return { version: textOf(row, 1), created: textOf(row, 0) === 'created' }
    },

    async completeJob(jobId: string, end: JobEnd): Promise<string> {
      const row = await run(
        `select outcome, version from cairn.complete_job_v1($1::uuid, $2::text, $3::text, ${LOCK_WAIT_MS})`,
        [jobId, end.result.text(), end.result.isFailure ? 'failed' : 'completed'],
        { repeatable: true },
      )
      if (textOf(row, 0) === 'job_finished') {
        throw new Problem('job_finished', `Job ${jobId} is finished already, with another result.`)
      }
      return textOf(row, 1)
    },

    async reopenJob(jobId: string): Promise<string> {
      const row = await run(`select outcome, version from cairn.reopen_job_v1($1::uuid, ${LOCK_WAIT_MS})`, [jobId], {
        repeatable: true,
      })
      if (textOf(row, 0) === 'job_not_found') throw new Problem('job_not_found', `Nothing is known of job ${jobId}.`)
      return textOf(row, 1)
    },

    async forgetStep(jobId: string, key: string, force: boolean): Promise<void> {
      const row = await run(
        `select outcome from cairn.forget_step_v1($1::uuid, $2::text, $3::text::boolean, ${LOCK_WAIT_MS})`,
        [jobId, key, String(force)],
        { repeatable: true },
      )
      if (textOf(row, 0) === 'job_parked') throw jobParked(jobId)
    },

    async forgetJob(jobId: string, force: boolean): Promise<void> {
      const row = await run(
        `select outcome from cairn.forget_job_v1($1::uuid, $2::text::boolean, ${LOCK_WAIT_MS})`,
        [jobId, String(force)],
        {
          repeatable: true,
        },
      )
      if (textOf(row, 0) === 'job_parked') throw jobParked(jobId)
    },
  }
}

/** `pending_steps` as text: member names such as `__proto__` or `7` would not survive a JavaScript object in order. */
function pendingText({ mode, keys, children }: Dispatch): string {
  const jobIds = children.map(({ key, childId }) => `${JSON.stringify(key)}:"${childId}"`)
  return `{"mode":${JSON.stringify(mode)},"keys":${JSON.stringify(keys)},"job_ids":{${jobIds.join(',')}}}`
}

function childState(
  row: Row,
  child: { jobId: string; childId: string; limits: CheckpointLimits },
): ParkedState & { key: string } {
  switch (textOf(row, 0)) {
    case 'stale_child':
      throw new Problem('stale_child', `No key of job ${child.jobId} maps to ${child.childId}.`)
    case 'job_finished':
      throw jobFinished(child.jobId)
    case 'checkpoint_full':
      throw checkpointFull(child.jobId, child.limits)
  }
  return { version: textOf(row, 1), key: textOf(row, 2), pendingKeys: JSON.parse(textOf(row, 3)) as string[] }
}

export function jobFinished(jobId: string): Problem {
  return new Problem('job_finished', `Job ${jobId} is finished and takes no new steps.`)
}

export function checkpointFull(jobId: string, limits: CheckpointLimits): Problem {
  const detail = `Job ${jobId} may have ${limits.maxStepsPerJob} steps and ${limits.maxCheckpointBytes} bytes of results.`
  return new Problem('checkpoint_full', detail)
}

function jobParked(jobId: string): Problem {
  return new Problem(
    'job_parked',
    `Job ${jobId} waits for a child whose checkpoint leans on its steps; ?force=true insists.`,
  )
}
