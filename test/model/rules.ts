/**
 * The rules of design sections 2 and 3 in plain data, without a database, a version or a byte of SQL: what the service
 * is compared with. Times that the server gives are `SERVER_TIME`. Jobs and children are small numbers.
 */

export const SERVER_TIME = '(server)'

/** A result from its first write until it is forgotten: replacing it keeps the life, and with it the place. */
interface Result {
  owner: Job
  key: string
  text: string
  failed: boolean
  place: number
}

interface Timing {
  scheduledFor: string
  startedAt: string | null
  durationMs: number | null
}

/** `timing` is null where only a result is known; `result` where only the timing is. */
interface Step {
  key: string
  result: Result | null
  timing: Timing | null
  /** Further members of the timeline entry, as an object's text. */
  extra: string | null
  place: number
}

interface Child {
  child: number
  /** Null once its key maps to another child, or to none. */
  key: string | null
  name: string
  status: 'running' | 'completed' | 'failed'
  /** Null where only the mapping is known: the child was not dispatched. */
  timing: Timing | null
  place: number
}

interface Job {
  alive: boolean
  /** What a child sees of the job that dispatched it: the results that this one had itself at that moment. */
  origin: { parent: Job; parentId: number; seen: Set<Result> } | null
  sourceHash: string
  steps: Map<string, Step>
  children: Map<number, Child>
  places: number
  pending: { mode: string; keys: string[]; jobIds: [string, number][] } | null
  inputArgs: string
  executingKey: string | null
  /** Members that the service does not know, as an object's text. */
  extra: string | null
  name: string | null
  labels: string
  end: { status: 'completed' | 'failed'; result: string } | null
  /** Moves with every change of what belongs to the job itself. */
  changes: number
}

export interface World {
  jobs: Map<number, Job>
}

export function emptyWorld(): World {
  return { jobs: new Map() }
}

// ---- what a client sends -----------------------------------------------------------------------------------------

/** JSON texts; an error is `{name, message}`. */
export type Ending = { result: string } | { error: { name: string; message: string } }

export interface Times {
  started_at: string | null
  duration_ms: number | null
}

export type IfMatch = 'current' | 'other' | 'any' | 'unknown' | 'weak' | null

export type Action =
  | { kind: 'record'; job: number; key: string; result: string; hash: string; times: Times }
  | { kind: 'steps'; job: number; steps: { key: string; ending: Ending; times: Times }[]; hash: string }
  | {
      kind: 'put'
      job: number
      steps: [string, string][]
      children: [string, number][]
      pending: { mode: string; keys: string[]; jobIds: [string, number][] } | null
      hash: string
      inputArgs: string | null
      executingKey: string | null
      extra: string | null
      ifMatch: IfMatch
      force: boolean
    }
  | {
      kind: 'dispatch'
      job: number
      mode: string
      children: [string, number][]
      /** Keys that no child stands behind: a sleep, an approval. */
      others: string[]
      entries: [string, string][]
      hash: string
      inputArgs: string | null
    }
  | { kind: 'startChild'; job: number; child: number; started_at: string | null }
  | { kind: 'completeChild'; job: number; child: number; ending: Ending; times: Times }
  | { kind: 'forgetStep'; job: number; key: string; force: boolean }
  | { kind: 'forgetJob'; job: number; force: boolean }
  | {
      kind: 'describe'
      job: number
      name: string | null
      labels: string | null
      inputArgs: string | null
      hash: string
    }
  | { kind: 'completeJob'; job: number; ending: Ending }
  | { kind: 'reopen'; job: number }

/** What the service must answer. `told` are members of the reply: parsed, and those of `verbatim` as text. */
export type Expected =
  | { status: number; told?: Record<string, unknown>; verbatim?: string[] }
  | { problem: string; status: number }

function refused(status: number, problem: string): Expected {
  return { status, problem }
}

// ---- reading -----------------------------------------------------------------------------------------------------

/** The results that a checkpoint shows: a child's own over what it sees of its parents; the farthest first. */
function visibleResults(job: Job): Result[] {
  const layers: Result[][] = []
  const shown = new Set<string>()
  let seen: Set<Result> | null = null
  for (let source: Job | null = job; source?.alive; ) {
    const layer: Result[] = []
    for (const { result } of source.steps.values()) {
      if (result && (seen === null || seen.has(result)) && !shown.has(result.key)) layer.push(result)
    }
    for (const { key } of layer) shown.add(key)
    layers.unshift(layer.sort((a, b) => a.place - b.place))
    seen = source.origin?.seen ?? null
    source = source.origin?.parent ?? null
  }
  return layers.flat()
}

export function findResult(world: World, id: number, key: string): string | undefined {
  const job = world.jobs.get(id)
  return job && visibleResults(job).find((result) => result.key === key)?.text
}

const isCompleted = (job: Job, key: string) => visibleResults(job).some((result) => result.key === key)

/** While a dispatched child runs under a pending key, its checkpoint leans on the job's steps. */
function isParked(job: Job): boolean {
  return [...job.children.values()].some(
    ({ key, status, timing }) => status === 'running' && timing && key !== null && job.pending?.keys.includes(key),
  )
}

function ownResults(job: Job): Result[] {
  return [...job.steps.values()].flatMap(({ result }) => (result ? [result] : []))
}

/** Every child that a key maps to, with the job whose key it is. */
export function mappedChildren(world: World): { job: number; child: number }[] {
  return [...world.jobs].flatMap(([job, { children }]) =>
    [...children.values()].flatMap(({ key, child }) => (key === null ? [] : [{ job, child }])),
  )
}

export interface Shown {
  /** The members of `completed_steps` as text. */
  completedSteps: string
  /** All other members of the checkpoint, parsed. */
  rest: Record<string, unknown>
  timeline: Record<string, unknown>[]
  /** Of the job's summary; undefined for a job that is not known. */
  job: Record<string, unknown> | undefined
  /** Further members of timeline entries, by their name in the document that Windmill keeps. */
  extras: Record<string, unknown>
  changes: number
}

/** All that clients see of a job. `idOf` gives the UUID behind a small number. */
export function show(world: World, id: number, idOf: (job: number) => string): Shown {
  const job = world.jobs.get(id)
  if (!job) {
    const rest = { source_hash: '', input_args: {}, job_ids: {} }
    return { completedSteps: '', rest, timeline: [], job: undefined, extras: {}, changes: 0 }
  }
  const own = ownResults(job)
  const mapped = [...job.children.values()].flatMap(({ key, child }) => (key === null ? [] : [[key, child] as const]))
  return {
    completedSteps: visibleResults(job)
      .map(({ key, text }) => `${JSON.stringify(key)}:${text}`)
      .join(','),
    rest: {
      source_hash: job.sourceHash,
      ...(job.pending && {
        pending_steps: { mode: job.pending.mode, keys: job.pending.keys, job_ids: mapOf(job.pending.jobIds, idOf) },
      }),
      input_args: JSON.parse(job.inputArgs),
      job_ids: mapOf(mapped, idOf),
      ...(job.executingKey !== null && { _executing_key: job.executingKey }),
      ...JSON.parse(job.extra ?? '{}'),
    },
    timeline: showTimeline(job, idOf),
    job: {
      id: idOf(id),
      parent_id: job.origin ? idOf(job.origin.parentId) : null,
      name: job.name,
      labels: JSON.parse(job.labels),
      status: job.end?.status ?? 'open',
      source_hash: job.sourceHash,
      step_count: own.length,
      failed_count: own.filter(({ failed }) => failed).length,
      bytes: own.reduce((sum, { text }) => sum + Buffer.byteLength(text), 0),
      pending_keys: job.pending?.keys ?? [],
      ...(job.end && { result: JSON.parse(job.end.result) }),
    },
    extras: Object.fromEntries(
      [...job.steps.values()].flatMap(({ key, timing, extra }) =>
        timing && extra !== null ? [[`_step/${key}`, JSON.parse(extra)]] : [],
      ),
    ),
    changes: job.changes,
  }
}

/** By way of text, since an object literal has no own member `__proto__`. */
function mapOf(pairs: readonly (readonly [string, number])[], idOf: (job: number) => string) {
  return JSON.parse(`{${pairs.map(([key, child]) => `${JSON.stringify(key)}:"${idOf(child)}"`).join(',')}}`)
}

function showTimeline(job: Job, idOf: (job: number) => string) {
  const entries: { place: number; timing: Timing; members: Record<string, unknown> }[] = []
  for (const { key, result, timing, place } of job.steps.values()) {
    if (!timing) continue
    const status = result ? (result.failed ? 'failed' : 'completed') : 'running'
    const members = { kind: 'step', key, name: key, status, ...(result && { bytes: Buffer.byteLength(result.text) }) }
    entries.push({ place, timing, members })
  }
  for (const { child, key, name, status, timing, place } of job.children.values()) {
    if (!timing) continue
    const members = { kind: 'child', ...(key !== null && { key }), child_job_id: idOf(child), name, status }
    entries.push({ place, timing, members })
  }
  return entries
    .sort((a, b) => a.place - b.place)
    .map(({ members, timing: { scheduledFor, startedAt, durationMs } }) => ({
      ...members,
      scheduled_for: scheduledFor,
      ...(startedAt !== null && { started_at: startedAt }),
      ...(durationMs !== null && { duration_ms: durationMs }),
    }))
}

// ---- writing -----------------------------------------------------------------------------------------------------

function newJob(): Job {
  return {
    alive: true,
    origin: null,
    sourceHash: '',
    steps: new Map(),
    children: new Map(),
    places: 0,
    pending: null,
    inputArgs: '{}',
    executingKey: null,
    extra: null,
    name: null,
    labels: '{}',
    end: null,
    changes: 0,
  }
}

function failureRecord({ name, message }: { name: string; message: string }, key: string | undefined): string {
  const error = { name, message }
  return JSON.stringify({
    __wmill_error: true,
    message,
    ...(key !== undefined && { step_key: key }),
    result: { error },
  })
}

const textOf = (ending: Ending, key?: string) => ('result' in ending ? ending.result : failureRecord(ending.error, key))

const isFailure = (text: string) => (JSON.parse(text) as { __wmill_error?: unknown } | null)?.__wmill_error === true

/** A clock that stepped back tells nothing. */
const durationOf = ({ duration_ms }: Times) => (duration_ms !== null && duration_ms >= 0 ? duration_ms : null)

const isOtherHash = (job: Job, hash: string) => hash !== '' && job.sourceHash !== '' && hash !== job.sourceHash

/** Puts a result under its key; the timing, if one is given, becomes the entry's. */
function writeResult(job: Job, write: { key: string; text: string; timing: Timing | null }): void {
  const { key, text, timing } = write
  const step = job.steps.get(key) ?? { key, result: null, timing: null, extra: null, place: 0 }
  if (step.result) {
    step.result.text = text
    step.result.failed = isFailure(text)
  } else {
    step.place = ++job.places
    step.result = { owner: job, key, text, failed: isFailure(text), place: step.place }
  }
  if (timing) step.timing = timing
  job.steps.set(key, step)
}

function dropPendingIfCompleted(job: Job): void {
  if (job.pending?.keys.every((key) => isCompleted(job, key))) job.pending = null
}

function agrees(times: Times, timing: Timing | null): boolean {
  const duration = durationOf(times)
  return (
    (times.started_at === null || times.started_at === timing?.startedAt) &&
    (duration === null || duration === timing?.durationMs)
  )
}

function recordSteps(
  world: World,
  id: number,
  request: { steps: { key: string; text: string; times: Times }[]; hash: string; firstStands: boolean },
): { refusal: Expected } | { standing: (string | undefined)[] } {
  const job = world.jobs.get(id) ?? newJob()
  if (isOtherHash(job, request.hash)) return { refusal: refused(409, 'source_changed') }
  const standing = request.steps.map(({ key }) => (request.firstStands ? findResult(world, id, key) : undefined))
  const accepted = request.steps.filter(({ key, text, times }, index) => {
    const step = job.steps.get(key)
    return standing[index] === undefined && !(step?.result?.text === text && agrees(times, step.timing))
  })
  if (accepted.length === 0) return { standing }
  if (job.end) return { refusal: refused(409, 'job_finished') }
  world.jobs.set(id, job)
  for (const { key, text, times } of accepted) {
    const startedAt = times.started_at ?? SERVER_TIME
    writeResult(job, { key, text, timing: { scheduledFor: startedAt, startedAt, durationMs: durationOf(times) } })
  }
  if (job.sourceHash === '') job.sourceHash = request.hash
  dropPendingIfCompleted(job)
  job.changes++
  return { standing }
}

function record(world: World, action: Extract<Action, { kind: 'record' }>): Expected {
  const { key, result, times, hash } = action
  const steps = [{ key, text: result, times }]
  const outcome = recordSteps(world, action.job, { steps, hash, firstStands: false })
  if ('refusal' in outcome) return outcome.refusal
  return { status: 200, told: { key }, verbatim: isFailure(result) ? [`"failure":${result}}`] : [] }
}

function steps(world: World, action: Extract<Action, { kind: 'steps' }>): Expected {
  const writes = action.steps.map(({ key, ending, times }) => ({ key, text: textOf(ending, key), times }))
  const outcome = recordSteps(world, action.job, { steps: writes, hash: action.hash, firstStands: true })
  if ('refusal' in outcome) return outcome.refusal
  const verbatim = outcome.standing.map((stored, index) => {
    const key = JSON.stringify(writes[index]?.key)
    return stored === undefined ? `"key":${key},"recorded":true}` : `"key":${key},"recorded":false,"result":${stored}}`
  })
  return { status: writes.length === 1 && outcome.standing[0] === undefined ? 201 : 200, verbatim }
}

function put(world: World, action: Extract<Action, { kind: 'put' }>): Expected {
  const known = world.jobs.get(action.job)
  const job = known ?? newJob()
  const fits = { any: known, current: true, unknown: !known, other: false, weak: false }
  if (action.ifMatch && !fits[action.ifMatch]) return refused(412, 'precondition_failed')
  if (isParked(job) && !action.force) return refused(409, 'job_parked')
  if (job.end) return refused(409, 'job_finished')
  const before = snapshot(job)
  const givenSteps = new Map(action.steps)
  for (const [key, step] of job.steps) {
    if (givenSteps.has(key)) continue
    step.result = null
    if (!step.timing) job.steps.delete(key)
  }
  for (const [key, text] of action.steps) {
    if (job.steps.get(key)?.result?.text !== text) writeResult(job, { key, text, timing: null })
  }
  for (const child of job.children.values()) {
    if (action.children.some(([key, id]) => id === child.child && key === child.key)) continue
    child.key = null
    if (!child.timing) job.children.delete(child.child)
  }
  for (const [key, id] of action.children) {
    const mapped = job.children.get(id)
    if (mapped) mapped.key = key
    else {
      const place = ++job.places
      job.children.set(id, { child: id, key, name: key, status: 'running', timing: null, place })
    }
  }
  job.pending = action.pending
  job.sourceHash = action.hash
  job.inputArgs = action.inputArgs ?? '{}'
  job.executingKey = action.executingKey
  job.extra = action.extra
  job.origin = null
  if (!known || snapshot(job) !== before) job.changes++
  world.jobs.set(action.job, job)
  return { status: 200 }
}

/** All that a replacement can change, so that an identical one can be told. */
function snapshot(job: Job): string {
  return JSON.stringify([
    job.origin !== null,
    ownResults(job)
      .map(({ key, text }) => [key, text])
      .sort(),
    [...job.children.values()].map(({ child, key }) => [child, key]).sort(),
    [job.pending, job.sourceHash, job.inputArgs, job.executingKey, job.extra],
  ])
}

function newChildJob(parent: Job, parentId: number, key: string): Job {
  return { ...newJob(), origin: { parent, parentId, seen: new Set(ownResults(parent)) }, executingKey: key, changes: 1 }
}

function sameMembers(some: readonly string[], others: readonly string[]): boolean {
  return new Set(some).size === new Set([...some, ...others]).size && others.length === some.length
}

function dispatch(world: World, action: Extract<Action, { kind: 'dispatch' }>): Expected {
  const { children, entries, hash, inputArgs, mode } = action
  const keys = [...children.map(([key]) => key), ...action.others]
  const ids = new Set(children.map(([, child]) => child))
  if (keys.length === 0 || ids.size < children.length || ids.has(action.job)) return refused(400, 'invalid_request')
  const known = world.jobs.get(action.job)
  const job = known ?? newJob()
  if (isOtherHash(job, hash)) return refused(409, 'source_changed')
  for (const [key, child] of children) {
    const mapped = job.children.get(child)
    const others = [...world.jobs.values()].filter((other) => other !== job)
    if (
      (mapped && mapped.key !== null && mapped.key !== key) ||
      others.some((other) => other.children.get(child)?.timing)
    )
      return refused(400, 'invalid_request')
  }
  if (children.some(([, child]) => job.children.get(child)?.key === null)) return refused(409, 'stale_child')
  const isMapped = children.every(([key, child]) => {
    const mapped = job.children.get(child)
    return mapped?.key === key && mapped.timing
  })
  const pending = { mode, keys, jobIds: children }
  const allCompleted = keys.every((key) => isCompleted(job, key))
  const isAwaited = job.pending !== null && sameMembers(job.pending.keys, keys)
  if (known && isMapped && (isAwaited || allCompleted)) {
    for (const [key, id] of children) {
      const isRunning = job.children.get(id)?.status === 'running' && !isCompleted(job, key)
      if (isRunning && !world.jobs.has(id)) world.jobs.set(id, newChildJob(job, action.job, key))
    }
    return { status: 200, told: { pending_keys: job.pending?.keys ?? [] } }
  }
  if (job.end) return refused(409, 'job_finished')

  world.jobs.set(action.job, job)
  for (const [key, id] of children) {
    for (const other of job.children.values()) if (other.key === key && other.child !== id) other.key = null
    const opened = { scheduledFor: SERVER_TIME, startedAt: null, durationMs: null }
    const mapped = job.children.get(id)
    if (!mapped) {
      job.children.set(id, { child: id, key, name: key, status: 'running', timing: opened, place: ++job.places })
    } else if (!mapped.timing || (mapped.status !== 'running' && !isCompleted(job, key))) {
      mapped.timing = opened
      mapped.status = 'running'
    }
  }
  for (const [key, extra] of entries) {
    const step = job.steps.get(key) ?? { key, result: null, timing: null, extra: null, place: ++job.places }
    if (step.result) continue
    step.timing = { scheduledFor: SERVER_TIME, startedAt: null, durationMs: null }
    step.extra = extra
    job.steps.set(key, step)
  }
  for (const [key, id] of children) {
    if (!world.jobs.has(id)) world.jobs.set(id, newChildJob(job, action.job, key))
  }
  if (job.sourceHash === '') job.sourceHash = hash
  if (inputArgs !== null) job.inputArgs = inputArgs
  job.pending = allCompleted ? null : pending
  job.changes++
  return { status: 200, told: { pending_keys: allCompleted ? [] : keys } }
}

function findChild(world: World, id: number, child: number) {
  const job = world.jobs.get(id)
  const found = job?.children.get(child)
  return job && found && found.key !== null ? { job, found, key: found.key } : undefined
}

function startChild(world: World, action: Extract<Action, { kind: 'startChild' }>): Expected {
  const mapped = findChild(world, action.job, action.child)
  if (!mapped) return refused(409, 'stale_child')
  const { job, found, key } = mapped
  const { timing } = found
  const given = action.started_at
  const begins = !timing?.startedAt
  if (begins || (found.status === 'running' && given !== null && given !== timing.startedAt)) {
    if (job.end) return refused(409, 'job_finished')
    const startedAt = given ?? SERVER_TIME
    found.timing = {
      scheduledFor: timing?.scheduledFor ?? startedAt,
      startedAt,
      durationMs: timing?.durationMs ?? null,
    }
    job.changes++
  }
  return { status: 200, told: { key, pending_keys: job.pending?.keys ?? [] } }
}

function completeChild(world: World, action: Extract<Action, { kind: 'completeChild' }>): Expected {
  const mapped = findChild(world, action.job, action.child)
  if (!mapped) return refused(409, 'stale_child')
  const { job, found, key } = mapped
  const { ending, times } = action
  const text = textOf(ending, key)
  const isRepeat =
    found.status !== 'running' && job.steps.get(key)?.result?.text === text && agrees(times, found.timing)
  if (!isRepeat) {
    if (job.end) return refused(409, 'job_finished')
    writeResult(job, { key, text, timing: null })
    found.status = isFailure(text) ? 'failed' : 'completed'
    found.timing = {
      scheduledFor: found.timing?.scheduledFor ?? times.started_at ?? SERVER_TIME,
      startedAt: times.started_at ?? found.timing?.startedAt ?? null,
      durationMs: durationOf(times) ?? found.timing?.durationMs ?? null,
    }
    dropPendingIfCompleted(job)
    job.changes++
  }
  return { status: 200, told: { key, pending_keys: job.pending?.keys ?? [] } }
}

function forgetStep(world: World, { job: id, key, force }: Extract<Action, { kind: 'forgetStep' }>): Expected {
  const job = world.jobs.get(id)
  if (!job?.steps.has(key)) return { status: 204 }
  if (isParked(job) && !force) return refused(409, 'job_parked')
  job.steps.delete(key)
  job.changes++
  return { status: 204 }
}

function forgetJob(world: World, { job: id, force }: Extract<Action, { kind: 'forgetJob' }>): Expected {
  const job = world.jobs.get(id)
  if (!job) return { status: 204 }
  if (isParked(job) && !force) return refused(409, 'job_parked')
  job.alive = false
  world.jobs.delete(id)
  return { status: 204 }
}

function describe(world: World, action: Extract<Action, { kind: 'describe' }>): Expected {
  const known = world.jobs.get(action.job)
  const job = known ?? newJob()
  if (isOtherHash(job, action.hash)) return refused(409, 'source_changed')
  const before = [job.name, job.labels, job.inputArgs, job.sourceHash].join()
  job.name = action.name ?? job.name
  job.labels = action.labels ?? job.labels
  job.inputArgs = action.inputArgs ?? job.inputArgs
  if (job.sourceHash === '') job.sourceHash = action.hash
  if (!known || [job.name, job.labels, job.inputArgs, job.sourceHash].join() !== before) job.changes++
  world.jobs.set(action.job, job)
  return { status: known ? 200 : 201 }
}

function completeJob(world: World, action: Extract<Action, { kind: 'completeJob' }>): Expected {
  const job = world.jobs.get(action.job) ?? newJob()
  const result = textOf(action.ending)
  if (job.end) return job.end.result === result ? { status: 200 } : refused(409, 'job_finished')
  job.end = { status: isFailure(result) ? 'failed' : 'completed', result }
  job.changes++
  world.jobs.set(action.job, job)
  return { status: 200 }
}

function reopen(world: World, action: Extract<Action, { kind: 'reopen' }>): Expected {
  const job = world.jobs.get(action.job)
  if (!job) return refused(404, 'job_not_found')
  if (job.end) job.changes++
  job.end = null
  return { status: 200 }
}

/** Does to the world what the service must do to the database. */
export function apply(world: World, action: Action): Expected {
  switch (action.kind) {
    case 'record':
      return record(world, action)
    case 'steps':
      return steps(world, action)
    case 'put':
      return put(world, action)
    case 'dispatch':
      return dispatch(world, action)
    case 'startChild':
      return startChild(world, action)
    case 'completeChild':
      return completeChild(world, action)
    case 'forgetStep':
      return forgetStep(world, action)
    case 'forgetJob':
      return forgetJob(world, action)
    case 'describe':
      return describe(world, action)
    case 'completeJob':
      return completeJob(world, action)
    case 'reopen':
      return reopen(world, action)
  }
}
