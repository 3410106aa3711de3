import type { CheckpointField } from '../src/checkpoint.ts'
import type { RawJson } from '../src/json-scanner.ts'

/** The limits of one job's checkpoint. */
export interface CheckpointLimits {
  maxStepsPerJob: number
  maxCheckpointBytes: number
}

/** One finished step, as a client sent it. */
export interface StepWrite {
  key: string
  result: RawJson
  /** Verbatim; null = the server's time. */
  startedAt: string | null
  /** Whole milliseconds; null = not known. */
  durationMs: number | null
}

/** The steps that one request records: all of them or none. */
export interface RecordRequest {
  /** In lower case. */
  jobId: string
  /** '' = the drift check is skipped. */
  sourceHash: string
  /** True: a key that has a result keeps it. False: it is replaced. */
  firstStands: boolean
  /** At least one; their keys are distinct. */
  steps: readonly StepWrite[]
}

export interface StepOutcome {
  /** False: the key had a result, which stands, and nothing was written for it. */
  recorded: boolean
  /** What stands, verbatim; only where `recorded` is false. */
  stored?: Buffer
}

export interface RecordResult {
  version: string
  /** In the order of the request's steps. */
  steps: StepOutcome[]
}

/** A checkpoint on its way to a client. */
export interface CheckpointReading {
  version: string
  /**
   * The JSON in pieces; no connection is held between them. Throws when the job changed in a way that the rest would not
   * fit what was given: the reply must then break off and never end as if it were whole.
   */
  body: AsyncIterable<Buffer>
}

export interface TimelinePage {
  /** Only entries behind this position. */
  after: number
  limit: number
}

/** What a job is and how far it got. Times are ISO 8601 in UTC; `bytes` counts the results' octets. */
export interface JobSummary {
  id: string
  name: string | null
  labels: Record<string, string>
  status: 'open' | 'completed' | 'failed'
  source_hash: string
  step_count: number
  failed_count: number
  bytes: number
  pending_keys: string[]
  version: string
  created_at: string
  updated_at: string
  finished_at: string | null
}

/**
 * Where checkpoints are kept. Job ids are lower-case UUIDs. Every method answers or throws a `Problem` within nine
 * seconds, so that no client of the SDKs (they wait ten) is left without a reply.
 */
export interface Store {
  /**
   * Records steps; when it returns, they are committed. Throws the problems `source_changed`, `job_finished`,
   * `checkpoint_full` (nothing was written) and `unavailable` (it may or may not have been; sending it again is harmless).
   */
  recordSteps(request: RecordRequest): Promise<RecordResult>
  /** The version alone; "0" for a job that is not known. */
  getVersion(jobId: string): Promise<string>
  /** The checkpoint or some of its members; that of an unknown job is empty and has version "0". */
  getCheckpoint(jobId: string, fields?: readonly CheckpointField[]): Promise<CheckpointReading>
  /** The result as it was sent; undefined if the checkpoint has no such step. */
  getStep(jobId: string, key: string): Promise<Buffer | undefined>
  /** `{"steps": [{"key", "result"}]}` of those that exist, in the order of `keys`. */
  getSteps(jobId: string, keys: readonly string[]): Promise<Buffer>
  /** `{"entries": [..], "next"}` in order of position. */
  getTimeline(jobId: string, page: TimelinePage): Promise<Buffer>
  getJob(jobId: string): Promise<JobSummary | undefined>
  /** Throws unless the database answers in time and takes writes. */
  checkReady(): Promise<void>
  /** Waits for what was accepted, then closes the connections. */
  close(): Promise<void>
}
