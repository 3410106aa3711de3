import { Problem, SOURCE_CHANGED_DETAIL } from '../src/problems.ts'
import {
  createPool,
  type DatabaseOptions,
  failureKind,
  type Pool,
  PoolExhausted,
  plainArray,
  type Row,
  textArray,
  textOf,
} from './client.ts'
import { checkpointFull, createJournalCommands, jobFinished, LOCK_WAIT_MS } from './journal-commands.ts'
import { openCheckpoint, readJob, readJobs, readStep, readSteps, readTimeline, readVersion } from './journal-reader.ts'
import type { CheckpointLimits, RecordRequest, RecordResult, StepOutcome, StepWrite, Store } from './store.ts'
import { BATCH_MAX_BYTES, type BatchOutcome, createWriteCoalescer } from './write-coalescer.ts'

/** Milliseconds until a read that has not begun is answered with 503. The SDKs give up after 10 s. */
export const READ_DEADLINE_MS = 8000
/** Milliseconds in which the database must answer for the service to count as ready. */
export const READY_DEADLINE_MS = 2000
/** Milliseconds that a shared statement may wait for a lock: only another transaction that creates the same job holds one. */
const SHARED_LOCK_WAIT_MS = 250

export interface JournalStoreOptions extends DatabaseOptions {
  /** Connections, all pools together; at least 4. */
  poolMax: number
  limits: CheckpointLimits
  /** Told of every statement for steps that failed, with the number of requests in it. */
  onWriteFailure?: (error: unknown, requestCount: number) => void
}

/** The share of each pool: a locked job, a slow reader or a full queue never takes the connections of the others. */
export function poolSizes(poolMax: number) {
  const slow = Math.max(1, Math.floor(poolMax / 5))
  // One shared statement at a time: with two, each finds half as much to share. (On two cores 4,850 steps/s against 4,400.)
  return { write: 1, slow, probe: 1, read: Math.max(1, poolMax - slow - 2) }
}

interface JournalRequest extends RecordRequest {
  keys: readonly string[]
  bytes: number
}

/** Cairn's own tables: see db/migrations for their shape and guarantees. */
export function createJournalStore(options: JournalStoreOptions): Store {
  const sizes = poolSizes(options.poolMax)
  const pools = {
    write: createPool('write', sizes.write, options),
    slow: createPool('slow-lane', sizes.slow, options),
    read: createPool('read', sizes.read, options),
    probe: createPool('probe', sizes.probe, options),
  }

  const coalescer = createWriteCoalescer<JournalRequest, RecordResult>({
    sharedWidth: sizes.write,
    slowWidth: sizes.slow,
    runShared: (requests, deadline) => runBatch(pools.write, requests, { skipLocked: true, deadline }),
    runSlow: (requests, deadline) => runBatch(pools.slow, requests, { skipLocked: false, deadline }),
    ...(options.onWriteFailure && { onFailure: options.onWriteFailure }),
  })

  async function runBatch(
    pool: Pool,
    requests: readonly JournalRequest[],
    mode: { skipLocked: boolean; deadline: number },
  ): Promise<BatchOutcome<RecordResult>[]> {
    const { limits } = options
    const [only] = requests
    if (only && requests.length === 1 && only.steps.length === 1) {
      const { statement, parameters } = recordOneStatement(only, { limits, skipLocked: mode.skipLocked })
      // The driver copies a large result several times at once: what else waits gets its turn before that.
      if (only.bytes > BATCH_MAX_BYTES) await new Promise(setImmediate)
      const [row] = await pool.query(statement, parameters, mode.deadline)
      if (row?.[0])
        return [{ kind: 'done', result: { version: nextVersion(textOf(row, 0)), steps: [{ recorded: true }] } }]
    }
    const { statement, parameters } = recordStatement(requests, { limits, skipLocked: mode.skipLocked })
    return recordOutcomes(requests, await pool.query(statement, parameters, mode.deadline), limits)
  }

  async function read(
    statement: string,
    parameters: ReadonlyArray<string | null>,
    deadline = performance.now() + READ_DEADLINE_MS,
  ) {
    return readFrom(pools.read, statement, { parameters, deadline })
  }

  async function checkReady() {
    const deadline = performance.now() + READY_DEADLINE_MS
    const row = (await readFrom(pools.probe, SELECT_READINESS, { parameters: [], deadline }))[0] as Row
    if (textOf(row, 0) === 't') throw new Problem('unavailable', 'The database takes no writes.')
    if (textOf(row, 1) === 'f') throw new Problem('unavailable', 'The database has no schema of Cairn.')
  }

  return {
    ...createJournalCommands(pools.slow, options.limits),
    recordSteps(request) {
      const { jobId, sourceHash, firstStands, steps } = request
      let bytes = 0
      for (const step of steps) bytes += step.result.byteLength
      const keys = steps.map((step) => step.key)
      return coalescer.submit({ jobId, sourceHash, firstStands, steps, keys, bytes })
    },
    getVersion: (jobId) => readVersion(read, jobId),
    getCheckpoint: (jobId, fields) =>
      openCheckpoint(read, { jobId, fields, deadline: performance.now() + READ_DEADLINE_MS }),
    getStep: (jobId, key) => readStep(read, jobId, key),
    getSteps: (jobId, keys) => readSteps(read, jobId, keys),
    getTimeline: (jobId, page) => readTimeline(read, jobId, page),
    getJob: (jobId) => readJob(read, jobId),
    listJobs: (filter) => readJobs(read, filter),
    checkReady,
    async close() {
      await coalescer.drained()
      await Promise.all(Object.values(pools).map((pool) => pool.close()))
    },
  }
}

const SELECT_READINESS = `
  select pg_is_in_recovery() or current_setting('transaction_read_only') = 'on', to_regclass('cairn.job') is not null`

/** A statement that only reads may be sent once more: the session that it met can have died while it was idle. */
async function readFrom(
  pool: Pool,
  statement: string,
  { parameters, deadline }: { parameters: ReadonlyArray<string | null>; deadline: number },
): Promise<Row[]> {
  for (let attempt = 0; ; attempt++) {
    try {
      return await pool.query(statement, parameters, deadline)
    } catch (error) {
      if (attempt === 0 && failureKind(error) === 'transient' && performance.now() < deadline) continue
      throw readProblem(error)
    }
  }
}

function readProblem(error: unknown): Problem {
  if (error instanceof PoolExhausted) return new Problem('unavailable', `${error.message}.`)
  if (failureKind(error) === 'data')
    return new Problem('internal', 'The database refused the statement.', { cause: error })
  return new Problem('unavailable', 'The database cannot be reached or does not answer.', { cause: error })
}

// $1 to $12 are everything but the results, which are bound singly so that none is escaped into an array literal.
const FIXED_PARAMETERS = 12

/**
 * The statement for a batch. Results are padded with NULLs to a power of two, so that a session prepares eleven
 * statements at most, and the padding is cut off again in SQL.
 */
function recordStatement(
  requests: readonly JournalRequest[],
  options: { limits: CheckpointLimits; skipLocked: boolean },
): { statement: string; parameters: (string | null)[] } {
  const jobIds: string[] = []
  const keys: string[] = []
  const results: (string | null)[] = []
  const failures: boolean[] = []
  const starts: (string | null)[] = []
  const durations: (number | null)[] = []
  const hashes: string[] = []
  const firsts: boolean[] = []
  let bytes = 0
  for (const request of requests) {
    bytes += request.bytes
    for (const step of request.steps) {
      jobIds.push(request.jobId)
      keys.push(step.key)
      results.push(step.result.text())
      failures.push(step.result.isFailure)
      starts.push(step.startedAt)
      durations.push(step.durationMs)
      hashes.push(request.sourceHash)
      firsts.push(request.firstStands)
    }
  }
  const { maxStepsPerJob, maxCheckpointBytes } = options.limits
  const stepCount = results.length
  while ((results.length & (results.length - 1)) !== 0) results.push(null)
  const parameters = [
    plainArray(jobIds),
    textArray(keys),
    plainArray(failures),
    textArray(starts),
    plainArray(durations),
    textArray(hashes),
    plainArray(firsts),
    String(requests.length),
    String(bytes),
    String(maxStepsPerJob),
    String(maxCheckpointBytes),
    String(stepCount),
    ...results,
  ]
  const bound = results.map((_, index) => `$${FIXED_PARAMETERS + 1 + index}`).join(',')
  const lockWaitMs = options.skipLocked ? SHARED_LOCK_WAIT_MS : LOCK_WAIT_MS
  const statement = `select outcome, stored, version from cairn.record_steps_v1(
    $1::uuid[], $2::text[], (array[${bound}]::text[])[1:$12::integer], $3::boolean[], $4::text[], $5::bigint[],
    $6::text[], $7::boolean[], $8::integer, $9::bigint, $10::bigint, $11::bigint, ${options.skipLocked}, ${lockWaitMs})`
  return { statement, parameters }
}

function recordOneStatement(request: JournalRequest, options: { limits: CheckpointLimits; skipLocked: boolean }) {
  const { jobId, sourceHash, steps } = request
  const [step] = steps as [StepWrite]
  const parameters = [
    jobId,
    step.key,
    step.result.text(),
    String(step.result.isFailure),
    step.startedAt,
    step.durationMs === null ? null : String(step.durationMs),
    sourceHash,
    String(options.limits.maxStepsPerJob),
    String(options.limits.maxCheckpointBytes),
  ]
  return { statement: options.skipLocked ? RECORD_ONE_SHARED : RECORD_ONE_SLOW, parameters }
}

const RECORD_ONE = `select cairn.record_step_v1(
  $1::uuid, $2::text, $3::text, $4::text::boolean, $5::text, $6::bigint, $7::text, $8::bigint, $9::bigint,`
const RECORD_ONE_SHARED = `${RECORD_ONE} true, '${SHARED_LOCK_WAIT_MS}')`
const RECORD_ONE_SLOW = `${RECORD_ONE} false, '${LOCK_WAIT_MS}')`

/** What the rows of record_steps_v1, one per step, say about each request. */
function recordOutcomes(
  requests: readonly JournalRequest[],
  rows: readonly Row[],
  limits: CheckpointLimits,
): BatchOutcome<RecordResult>[] {
  const touched = new Set<string>()
  let row = 0
  for (const { jobId, steps } of requests) {
    for (const _ of steps) if (textOf(rows[row++] as Row, 0) === 'recorded') touched.add(jobId)
  }
  let next = 0
  return requests.map((request) => {
    const own = rows.slice(next, next + request.steps.length)
    next += request.steps.length
    const steps: StepOutcome[] = []
    for (const row of own) {
      const outcome = textOf(row, 0)
      if (outcome === 'stands') steps.push({ recorded: false, stored: row[1] as Buffer })
      else if (outcome === 'recorded' || outcome === 'unchanged') steps.push({ recorded: true })
      else return refusal(outcome, request.jobId, limits)
    }
    const version = textOf(own[0] as Row, 2)
    return { kind: 'done', result: { version: touched.has(request.jobId) ? nextVersion(version) : version, steps } }
  })
}

/** The version after one more change, as cairn.version_text makes it. */
function nextVersion(version: string): string {
  return version.replace(/\.(\d+)/, (_, count: string) => `.${BigInt(count) + 1n}`)
}

function refusal(outcome: string, jobId: string, limits: CheckpointLimits): BatchOutcome<never> {
  switch (outcome) {
    case 'busy':
    case 'retry':
    case 'single':
      return { kind: outcome }
    case 'source_changed':
      return { kind: 'refused', problem: new Problem('source_changed', SOURCE_CHANGED_DETAIL) }
    case 'job_finished':
      return { kind: 'refused', problem: jobFinished(jobId) }
    case 'checkpoint_full':
      return { kind: 'refused', problem: checkpointFull(jobId, limits) }
    default:
      throw new Error(`Unknown outcome of record_steps_v1: ${outcome}`)
  }
}
