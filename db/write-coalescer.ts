import { Problem } from '../src/problems.ts'
import { failureKind } from './client.ts'

/** Requests that share one statement. More gain little and make each wait for the others. */
export const BATCH_MAX_REQUESTS = 256
/** Octets of results that share one statement: beyond, the commit is no longer what costs. */
export const BATCH_MAX_BYTES = 1024 * 1024
/** Steps that share one statement: one request may bring as many alone. */
export const BATCH_MAX_STEPS = 1024
/** Requests that wait or are under way. At 10,000 a second this is less than half a second of work. */
export const QUEUE_MAX_REQUESTS = 4096
/** Octets of results that wait or are under way. */
export const QUEUE_MAX_BYTES = 128 * 1024 * 1024
/** Milliseconds until a write is answered with 503. The SDKs give up after 10 s. */
export const WRITE_DEADLINE_MS = 8000
/** A first repeat after a lost connection or a failover, in milliseconds; doubled up to the maximum. */
export const RETRY_MIN_MS = 50
export const RETRY_MAX_MS = 400

/** A request as far as the coalescer has to know it. */
export interface Coalescable {
  jobId: string
  sourceHash: string
  keys: readonly string[]
  bytes: number
}

/** What became of one request of a batch. */
export type BatchOutcome<Result> =
  | { kind: 'done'; result: Result }
  | { kind: 'refused'; problem: Problem }
  /** Somebody else holds the job's row. */
  | { kind: 'busy' }
  /** The job was deleted meanwhile. */
  | { kind: 'retry' }
  /** Must be alone in its statement. */
  | { kind: 'single' }

export interface WriteCoalescerOptions<Request extends Coalescable, Result> {
  /** Statements that may be under way at the same time, in each lane. */
  sharedWidth: number
  slowWidth: number
  /** One statement for many jobs that skips jobs whose rows are locked. In terms of performance.now(). */
  runShared(requests: readonly Request[], deadline: number): Promise<BatchOutcome<Result>[]>
  /** One statement for one job that waits a while for its row. */
  runSlow(requests: readonly Request[], deadline: number): Promise<BatchOutcome<Result>[]>
  onFailure?(error: unknown, requestCount: number): void
}

export interface WriteCoalescer<Request, Result> {
  /** Resolves when committed; rejects with a `Problem`. */
  submit(request: Request): Promise<Result>
  /** Resolves when nothing waits and nothing is under way. */
  drained(): Promise<void>
  /** For metrics and tests: what waits or is under way. */
  load(): { requests: number; bytes: number }
}

interface Entry<Request, Result> {
  request: Request
  /** In terms of performance.now(). */
  deadline: number
  timer: NodeJS.Timeout
  /** Answered, though perhaps still part of a statement that is under way. */
  settled: boolean
  resolve(result: Result): void
  reject(problem: Problem): void
}

/** The requests of one job, in order. It is in a lane's ready set, or one statement is at work on it, never both. */
interface Line<Request, Result> {
  jobId: string
  waiting: Entry<Request, Result>[]
  slow: boolean
  /** How many of the next requests must each have a statement of their own. */
  singles: number
}

type Batch<Request, Result> = { line: Line<Request, Result>; entries: Entry<Request, Result>[] }[]

interface LaneState<Request extends Coalescable, Result> {
  run: WriteCoalescerOptions<Request, Result>['runShared']
  free: number
  oneLineEach: boolean
  ready: Set<Line<Request, Result>>
  /** Failures in a row that asked for a pause; while one lasts, nothing is sent. */
  failures: number
  paused: boolean
}

/**
 * Shares statements, and so commits, between requests. While a statement is under way what arrives queues up, and goes
 * together in the next one: at low load a request goes out at once, and nobody ever waits for a timer. A job is in at
 * most one statement at a time. Jobs whose rows somebody else holds, and large requests, go by the slow lane.
 */
export function createWriteCoalescer<Request extends Coalescable, Result>(
  options: WriteCoalescerOptions<Request, Result>,
): WriteCoalescer<Request, Result> {
  const lines = new Map<string, Line<Request, Result>>()
  const shared = createLane(options.runShared, options.sharedWidth, false)
  const slow = createLane(options.runSlow, options.slowWidth, true)
  const drainWaiters: (() => void)[] = []
  let requestCount = 0
  let byteCount = 0

  function createLane(run: typeof options.runShared, width: number, oneLineEach: boolean): LaneState<Request, Result> {
    return { run, free: width, oneLineEach, ready: new Set(), failures: 0, paused: false }
  }

  function submit(request: Request): Promise<Result> {
    if (requestCount >= QUEUE_MAX_REQUESTS || byteCount + request.bytes > QUEUE_MAX_BYTES) {
      const detail = `Too many steps wait to be recorded: ${requestCount} requests with ${byteCount} bytes.`
      return Promise.reject(new Problem('unavailable', detail))
    }
    requestCount += 1
    byteCount += request.bytes
    return new Promise((resolve, reject) => {
      const entry: Entry<Request, Result> = {
        request,
        deadline: performance.now() + WRITE_DEADLINE_MS,
        timer: setTimeout(() => expire(entry), WRITE_DEADLINE_MS),
        settled: false,
        resolve,
        reject,
      }
      const line = lines.get(request.jobId)
      if (line) {
        line.waiting.push(entry)
        return
      }
      const created = { jobId: request.jobId, waiting: [entry], slow: false, singles: 0 }
      lines.set(request.jobId, created)
      makeReady(created)
    })
  }

  function expire(entry: Entry<Request, Result>) {
    const seconds = WRITE_DEADLINE_MS / 1000
    settle(entry)
    entry.reject(
      new Problem('unavailable', `Job ${entry.request.jobId}: nothing could be recorded within ${seconds} s.`),
    )
  }

  function settle(entry: Entry<Request, Result>) {
    entry.settled = true
    clearTimeout(entry.timer)
    requestCount -= 1
    byteCount -= entry.request.bytes
  }

  function makeReady(line: Line<Request, Result>) {
    const lane =
      line.slow || (line.waiting[0] as Entry<Request, Result>).request.bytes > BATCH_MAX_BYTES ? slow : shared
    lane.ready.add(line)
    pump(lane)
  }

  function pump(lane: LaneState<Request, Result>) {
    while (lane.free > 0 && !lane.paused && lane.ready.size > 0) {
      const batch = takeBatch(lane)
      if (batch.length > 0) void launch(lane, batch)
    }
  }

  /** What goes in the next statement: the jobs that have waited longest, each with as many of its requests as fit. */
  function takeBatch(lane: LaneState<Request, Result>): Batch<Request, Result> {
    const batch: Batch<Request, Result> = []
    const room = { requests: BATCH_MAX_REQUESTS, bytes: BATCH_MAX_BYTES, steps: BATCH_MAX_STEPS }
    for (const line of lane.ready) {
      const exclusive = line.singles > 0 || lane.oneLineEach
      if (exclusive && batch.length > 0) continue
      const entries = takeFrom(line, room)
      if (entries.length === 0 && line.waiting.length > 0) break
      lane.ready.delete(line)
      if (entries.length > 0) batch.push({ line, entries })
      else forget(line)
      if (exclusive && entries.length > 0) break
    }
    return batch
  }

  /** Takes from the front: distinct keys and at most one hash, as the statement requires; the first fits any empty batch. */
  function takeFrom(line: Line<Request, Result>, room: { requests: number; bytes: number; steps: number }) {
    const taken: Entry<Request, Result>[] = []
    const keys = new Set<string>()
    let hash = ''
    for (let entry = line.waiting[0]; entry; entry = line.waiting[0]) {
      const { request, settled } = entry
      if (!settled) {
        const empty = room.requests === BATCH_MAX_REQUESTS
        const fits = room.requests > 0 && request.bytes <= room.bytes && request.keys.length <= room.steps
        if (!fits && !empty) break
        if (hash !== '' && request.sourceHash !== '' && request.sourceHash !== hash) break
        if (request.keys.some((key) => keys.has(key))) break
        for (const key of request.keys) keys.add(key)
        hash ||= request.sourceHash
        room.requests -= 1
        room.bytes -= request.bytes
        room.steps -= request.keys.length
        taken.push(entry)
      }
      line.waiting.shift()
      if (line.singles > 0) {
        line.singles -= 1
        if (!settled) break
      }
    }
    return taken
  }

  async function launch(lane: LaneState<Request, Result>, batch: Batch<Request, Result>) {
    lane.free -= 1
    const entries = batch.flatMap((part) => part.entries)
    const requests = entries.map((entry) => entry.request)
    const deadline = Math.max(...entries.map((entry) => entry.deadline))
    let outcomes: BatchOutcome<Result>[]
    try {
      outcomes = await lane.run(requests, deadline)
      lane.failures = 0
    } catch (error) {
      options.onFailure?.(error, requests.length)
      const outcome = outcomeOfFailure(lane, error, requests.length)
      outcomes = requests.map(() => outcome)
    }
    lane.free += 1
    let next = 0
    for (const { line, entries: taken } of batch) {
      finish(line, taken, outcomes.slice(next, next + taken.length))
      next += taken.length
    }
    pump(shared)
    pump(slow)
  }

  function outcomeOfFailure(lane: LaneState<Request, Result>, error: unknown, count: number): BatchOutcome<Result> {
    switch (failureKind(error)) {
      case 'data': {
        if (count > 1) return { kind: 'single' }
        return { kind: 'refused', problem: new Problem('internal', 'The database refused the step.', { cause: error }) }
      }
      case 'lock':
        return { kind: 'busy' }
      case 'transient': {
        pause(lane)
        return { kind: 'retry' }
      }
      case 'other':
        return {
          kind: 'refused',
          problem: new Problem('unavailable', 'The database refused to record.', { cause: error }),
        }
    }
  }

  /** Nothing is sent for a moment: a server that just went away is not helped by a storm of attempts. */
  function pause(lane: LaneState<Request, Result>) {
    const delay = Math.min(RETRY_MAX_MS, RETRY_MIN_MS * 2 ** lane.failures)
    lane.failures += 1
    if (lane.paused) return
    lane.paused = true
    setTimeout(() => {
      lane.paused = false
      pump(lane)
    }, delay)
  }

  /** Answers what is settled and puts the rest back to the front of its line. */
  function finish(line: Line<Request, Result>, entries: Entry<Request, Result>[], outcomes: BatchOutcome<Result>[]) {
    const again: Entry<Request, Result>[] = []
    line.slow = false
    for (const [index, entry] of entries.entries()) {
      const outcome = outcomes[index] as BatchOutcome<Result>
      if (entry.settled) continue
      if (outcome.kind === 'done' || outcome.kind === 'refused') {
        settle(entry)
        if (outcome.kind === 'done') entry.resolve(outcome.result)
        else entry.reject(outcome.problem)
        continue
      }
      again.push(entry)
      if (outcome.kind === 'busy') line.slow = true
      if (outcome.kind === 'single') line.singles += 1
    }
    line.waiting.unshift(...again)
    if (line.waiting.length > 0) makeReady(line)
    else forget(line)
  }

  function forget(line: Line<Request, Result>) {
    lines.delete(line.jobId)
    if (lines.size === 0) for (const wake of drainWaiters.splice(0)) wake()
  }

  return {
    submit,
    drained: () => (lines.size === 0 ? Promise.resolve() : new Promise((resolve) => drainWaiters.push(resolve))),
    load: () => ({ requests: requestCount, bytes: byteCount }),
  }
}
