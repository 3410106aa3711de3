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

export interface ChildMapping {
  key: string
  /** In lower case. */
  childId: string
}

/** Parks a job on children, a sleep or an approval. Texts of JSON are kept as they are. */
export interface Dispatch {
  mode: string
  /** All that the job waits for; holds the children's keys. */
  keys: readonly string[]
  children: readonly ChildMapping[]
  /** An object; null = as it is. */
  inputArgs: string | null
  sourceHash: string
  /** Timeline entries to open under `_step/<key>`; `extra` is an object. */
  entries: readonly { key: string; extra: string }[]
}

/** Where a job stands after a dispatch or a child's news. */
export interface ParkedState {
  version: string
  pendingKeys: string[]
}

interface Timing {
  startedAt: string | null
  durationMs: number | null
}

/** A child's result, or its error (an object, with its message, a JSON text) to be kept as a failure marker. */
export type ChildCompletion = Timing & ({ result: RawJson } | { error: RawJson; message: RawJson })

/** A whole checkpoint to take the place of what is there. Texts of JSON are kept as they are. */
export interface CheckpointReplacement {
  sourceHash: string
  steps: readonly { key: string; result: RawJson }[]
  pending: { text: string; keys: readonly string[] } | null
  inputArgs: string
  children: readonly ChildMapping[]
  executingKey: string | null
  /** The members that Cairn does not know, as one object. */
  extra: string | null
  /** Versions of which one must be the job's; '*' = any job that is known; null = no condition. */
  ifVersions: readonly string[] | null
  /** Also while a dispatched child is pending. */
  force: boolean
}

/** What is null stays as it is. `labels` and `inputArgs` are JSON objects. */
export interface JobDescription {
  name: string | null
  labels: string | null
  inputArgs: string | null
  sourceHash: string
}

/** What a job ended with: a result, or a failure marker. */
export interface JobEnd {
  result: RawJson
}

/** Which jobs to list; all conditions must hold. */
export interface JobFilter {
  status?: 'open' | 'completed' | 'failed'
  name?: string
  label?: { name: string; value: string }
  /** The beginning of the job's id, in lower case. */
  prefix?: string
  limit: number
  /** Of the page before. */
  cursor?: string
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
  getSteps(jobId: string, keys: readonly string[]): Promise<AsyncIterable<Buffer>>
  /** `{"entries": [..], "next"}` in order of position. */
  getTimeline(jobId: string, page: TimelinePage): Promise<Buffer>
  /** The job as JSON, with its result once it is finished. */
  getJob(jobId: string): Promise<Buffer | undefined>
  /** `{"jobs", "next_cursor"}`, newest created first. */
  listJobs(filter: JobFilter): Promise<Buffer>

  /** Throws `source_changed`, `job_finished`, `stale_child`, and `invalid_request` for a child that is somebody else's. */
  dispatch(jobId: string, dispatch: Dispatch): Promise<ParkedState>
  /** Throws `stale_child` and `job_finished`. */
  startChild(jobId: string, childId: string, startedAt: string | null): Promise<ParkedState & { key: string }>
  /** Throws `stale_child`, `job_finished` and `checkpoint_full`. */
  completeChild(jobId: string, childId: string, end: ChildCompletion): Promise<ParkedState & { key: string }>
  /** The new version. Throws `precondition_failed`, `job_parked`, `job_finished` and `checkpoint_full`. */
  putCheckpoint(jobId: string, checkpoint: CheckpointReplacement): Promise<string>
  /** Throws `source_changed`. */
  describeJob(jobId: string, job: JobDescription): Promise<{ version: string; created: boolean }>
  /** The version. Throws `job_finished` when the job ended with something else. */
  completeJob(jobId: string, end: JobEnd): Promise<string>
  /** The version. Throws `job_not_found`. */
  reopenJob(jobId: string): Promise<string>
  /** Throws `job_parked`. */
  forgetStep(jobId: string, key: string, force: boolean): Promise<void>
  /** Throws `job_parked`. */
  forgetJob(jobId: string, force: boolean): Promise<void>

  /** Throws unless the database answers in time and takes writes. */
  checkReady(): Promise<void>
  /** Waits for what was accepted, then closes the connections. */
  close(): Promise<void>
}
