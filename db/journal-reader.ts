import { CHECKPOINT_FIELDS, type CheckpointField, type Job, VERSION_OF_NOTHING } from '../src/checkpoint.ts'
import { Problem } from '../src/problems.ts'
import { type Row, textArray, textOf, textOrNull } from './client.ts'
import type { CheckpointReading, TimelinePage } from './store.ts'

/** Runs one statement for a reader. Throws a `Problem`. `deadline` is in terms of performance.now(). */
export type Read = (statement: string, parameters: ReadonlyArray<string | null>, deadline?: number) => Promise<Row[]>

/** Octets after which a page of a checkpoint is cut. A page is what a reader costs in memory. */
export const PAGE_BYTES = 512 * 1024
/** Steps in one page, so that a page of tiny results is bounded too. */
export const PAGE_STEPS = 4096
/** How often a checkpoint that changed before its first octet was sent is read anew. */
const READING_ATTEMPTS = 5

/**
 * What must be the same in the head and in every page. Replacing or forgetting steps changes it; recording does not, since
 * a step recorded later lies behind the head's last position.
 */
const IDENTITY = `
  j.created_at::text || '.' || j.rewrite_count
    || coalesce((select '/' || p.created_at::text || '.' || p.rewrite_count from cairn.job p where p.id = j.parent_id), '')`

/** The steps that a child sees of its parent: up to the bound, and none that the child has itself. */
const INHERITED_STEPS = `
  from cairn.job parent
  join cairn.step p on p.job_id = parent.id and p.position <= j.parent_bound and p.result is not null
  where parent.id = j.parent_id and parent.created_at = j.parent_created_at
    and not exists (
      select from cairn.step s
      where s.job_id = j.id and s.key = p.key and s.result is not null and s.position <= j.last_position)`

const SELECT_HEAD = `
  select
    cairn.version_text(j.created_at, j.change_count), ${IDENTITY},
    to_json(j.source_hash)::text, j.pending::text, j.input_args::text,
    case when $2::text::boolean then '{' || coalesce((
      select string_agg(to_json(c.key)::text || ':"' || c.child_id::text || '"', ',' order by c.position)
      from cairn.child c where c.job_id = j.id and c.key is not null), '') || '}' end,
    to_json(j.executing_key)::text, j.extra::text,
    j.step_count, j.last_position,
    case when $3::text::boolean and j.parent_id is not null then (select count(*) ${INHERITED_STEPS}) end,
    (select parent.id from cairn.job parent where parent.id = j.parent_id and parent.created_at = j.parent_created_at),
    j.parent_bound
  from cairn.job j where j.id = $1`

// $1 the job that is read, $2 the job whose steps are read (itself or its parent), behind position $3 and up to $4; without
// those that $5 has up to its position $6. The text is put together here, so that a page reaches Node as one piece.
const SELECT_PAGE = `
  select
    count(*), max(page.position),
    string_agg(to_json(page.key)::text || ':' || page.result::text, ',' order by page.position),
    (select ${IDENTITY} from cairn.job j where j.id = $1)
  from (
    select s.key, s.result, s.position,
      sum(s.bytes + octet_length(s.key)) over (order by s.position) - s.bytes - octet_length(s.key) as preceding_bytes
    from (
      select key, result, position, bytes from cairn.step
      where job_id = $2 and position > $3 and position <= $4 and result is not null
        and ($5::uuid is null or not exists (
          select from cairn.step own
          where own.job_id = $5 and own.key = cairn.step.key and own.result is not null and own.position <= $6))
      order by position limit ${PAGE_STEPS}
    ) as s
  ) as page
  where page.preceding_bytes < ${PAGE_BYTES}`

const SELECT_STEPS = `
  select wanted.key, coalesce(s.result, inherited.result)
  from unnest($2::text[]) with ordinality as wanted (key, no)
  join cairn.job j on j.id = $1
  left join cairn.step s on s.job_id = j.id and s.key = wanted.key
  left join lateral (
    select p.result
    from cairn.job parent
    join cairn.step p on p.job_id = parent.id and p.key = wanted.key and p.position <= j.parent_bound
    where parent.id = j.parent_id and parent.created_at = j.parent_created_at
  ) as inherited on true
  where coalesce(s.result, inherited.result) is not null
  order by wanted.no`

const SELECT_TIMELINE = `
  select
    '{"entries":[' || coalesce(string_agg(ranked.entry, ',' order by ranked.position) filter (where ranked.rank <= $3), '')
    || '],"next":' || coalesce(
      case when count(*) > $3::bigint then max(ranked.position) filter (where ranked.rank <= $3) end::text, 'null') || '}'
  from (
    select merged.position, merged.entry::text as entry, row_number() over (order by merged.position) as rank
    from (
      (
        select s.position, json_strip_nulls(json_build_object(
          'kind', 'step', 'key', s.key, 'name', s.key,
          'status', case when s.result is null then 'running' when s.failed then 'failed' else 'completed' end,
          'scheduled_for', s.scheduled_for, 'started_at', s.started_at, 'duration_ms', s.duration_ms,
          'bytes', case when s.result is not null then s.bytes end, 'position', s.position)) as entry
        from cairn.step s
        where s.job_id = $1 and s.position > $2 and s.scheduled_for is not null
        order by s.position limit $3::bigint + 1
      ) union all (
        select c.position, json_strip_nulls(json_build_object(
          'kind', 'child', 'key', c.key, 'child_job_id', c.child_id, 'name', c.name, 'status', c.status,
          'scheduled_for', c.scheduled_for, 'started_at', c.started_at, 'duration_ms', c.duration_ms,
          'position', c.position))
        from cairn.child c
        where c.job_id = $1 and c.position > $2 and c.scheduled_for is not null
        order by c.position limit $3::bigint + 1
      )
    ) as merged
    order by merged.position limit $3::bigint + 1
  ) as ranked`

export async function readVersion(read: Read, jobId: string): Promise<string> {
  const [row] = await read('select cairn.version_text(created_at, change_count) from cairn.job where id = $1', [jobId])
  return row ? textOf(row, 0) : VERSION_OF_NOTHING
}

export async function readStep(read: Read, jobId: string, key: string): Promise<Buffer | undefined> {
  const [row] = await read(SELECT_STEPS, [jobId, textArray([key])])
  return row?.[1] ?? undefined
}

export async function readSteps(read: Read, jobId: string, keys: readonly string[]): Promise<Buffer> {
  const pieces: Buffer[] = []
  for (const [key, result] of (await read(SELECT_STEPS, [jobId, textArray(keys)])) as [Buffer, Buffer][]) {
    const opening = pieces.length === 0 ? '{"steps":[' : '},'
    pieces.push(Buffer.from(`${opening}{"key":${JSON.stringify(key.toString())},"result":`), result)
  }
  pieces.push(Buffer.from(pieces.length === 0 ? '{"steps":[]}' : '}]}'))
  return Buffer.concat(pieces)
}

export async function readTimeline(read: Read, jobId: string, page: TimelinePage): Promise<Buffer> {
  const [row] = await read(SELECT_TIMELINE, [jobId, String(page.after), String(page.limit)])
  return (row as Row)[0] as Buffer
}

const SELECT_JOB = `
  select json_build_object(
    'id', id, 'name', name, 'labels', labels, 'status', status, 'source_hash', source_hash,
    'step_count', step_count, 'failed_count', failed_count, 'bytes', bytes,
    'pending_keys', coalesce(to_json(pending_keys), '[]'), 'version', cairn.version_text(created_at, change_count),
    'created_at', cairn.utc_text(created_at), 'updated_at', cairn.utc_text(updated_at),
    'finished_at', cairn.utc_text(finished_at))::text
  from cairn.job`

export async function readJob(read: Read, jobId: string): Promise<Job | undefined> {
  const [row] = await read(`${SELECT_JOB} where id = $1`, [jobId])
  return row && (JSON.parse(textOf(row, 0)) as Job)
}

interface Head {
  version: string
  identity: string
  /** The members' JSON; undefined = absent. */
  members: Map<string, string>
  extra: string | undefined
  ownCount: number
  lastPosition: number
  inheritedCount: number
  parentId: string | undefined
  parentBound: number
}

interface Page {
  count: number
  lastPosition: number
  members: Buffer
  identity: string | null
}

/** A run of a job's steps in order of position. */
interface Stretch {
  sourceId: string
  bound: number
  count: number
  /** Whose own steps hide those of the source; only for what a child inherits. */
  shadow: { jobId: string; bound: number } | undefined
}

/** Reads the head and the first page; the rest is read while the client takes it. */
export async function openCheckpoint(
  read: Read,
  request: { jobId: string; fields: readonly CheckpointField[] | undefined; deadline: number },
): Promise<CheckpointReading> {
  const { jobId, deadline } = request
  const fields = request.fields ?? CHECKPOINT_FIELDS
  const withSteps = fields.includes('completed_steps')
  for (let attempt = 0; attempt < READING_ATTEMPTS; attempt++) {
    const head = await readHead(read, { jobId, withJobIds: fields.includes('job_ids'), withSteps, deadline })
    if (!head) return { version: VERSION_OF_NOTHING, body: inOnePiece(emptyCheckpoint(fields)) }
    const opening = openingText(head, fields, request.fields === undefined)
    if (!withSteps) return { version: head.version, body: inOnePiece(`${opening}}`) }
    const pages = readPages(read, jobId, head, deadline)
    try {
      // The first page is read before the reply begins: up to here a change just means to begin anew.
      const first = await pages.next()
      return { version: head.version, body: joinPages(opening, first, pages) }
    } catch (error) {
      if (!(error instanceof CheckpointChanged)) throw error
    }
  }
  throw new Problem(
    'unavailable',
    `Job ${jobId}: the checkpoint changed while it was read, ${READING_ATTEMPTS} times in a row.`,
  )
}

/** What was read so far and what is there now do not make one checkpoint. */
class CheckpointChanged extends Error {}

async function readHead(
  read: Read,
  options: { jobId: string; withJobIds: boolean; withSteps: boolean; deadline: number },
): Promise<Head | undefined> {
  const [row] = await read(
    SELECT_HEAD,
    [options.jobId, String(options.withJobIds), String(options.withSteps)],
    options.deadline,
  )
  if (!row) return undefined
  const members = new Map<string, string>()
  for (const [index, name] of ['source_hash', 'pending_steps', 'input_args', 'job_ids', '_executing_key'].entries()) {
    const text = textOrNull(row, index + 2)
    if (text !== null) members.set(name, text)
  }
  return {
    version: textOf(row, 0),
    identity: textOf(row, 1),
    members,
    extra: textOrNull(row, 7) ?? undefined,
    ownCount: Number(textOf(row, 8)),
    lastPosition: Number(textOf(row, 9)),
    inheritedCount: Number(textOrNull(row, 10) ?? 0),
    parentId: textOrNull(row, 11) ?? undefined,
    parentBound: Number(textOrNull(row, 12) ?? 0),
  }
}

/** The checkpoint's JSON up to its last member; completed_steps, which may be large, comes last and is left open. */
function openingText(head: Head, fields: readonly CheckpointField[], withExtra: boolean): string {
  const members: string[] = []
  for (const [name, text] of head.members) {
    if (fields.includes(name as CheckpointField)) members.push(`${JSON.stringify(name)}:${text}`)
  }
  if (withExtra && head.extra !== undefined && head.extra !== '{}') members.push(head.extra.slice(1, -1))
  if (fields.includes('completed_steps')) members.push('"completed_steps":{')
  return `{${members.join(',')}`
}

function emptyCheckpoint(fields: readonly CheckpointField[]): string {
  const empty: Partial<Record<CheckpointField, unknown>> = {
    source_hash: '',
    completed_steps: {},
    input_args: {},
    job_ids: {},
  }
  return JSON.stringify(
    Object.fromEntries(Object.entries(empty).filter(([name]) => fields.includes(name as CheckpointField))),
  )
}

async function* inOnePiece(text: string): AsyncGenerator<Buffer> {
  yield Buffer.from(text)
}

async function* joinPages(opening: string, first: IteratorResult<Buffer>, rest: AsyncGenerator<Buffer>) {
  if (first.done) {
    yield Buffer.from(`${opening}}}`)
    return
  }
  yield Buffer.concat([Buffer.from(opening), first.value])
  for await (const page of rest) {
    yield COMMA
    yield page
  }
  yield CLOSING
}

const COMMA = Buffer.from(',')
const CLOSING = Buffer.from('}}')

/** The members of completed_steps, a page at a time. Throws `CheckpointChanged` rather than give fewer than the head counted. */
async function* readPages(read: Read, jobId: string, head: Head, firstDeadline: number): AsyncGenerator<Buffer> {
  const own: Stretch = { sourceId: jobId, bound: head.lastPosition, count: head.ownCount, shadow: undefined }
  const stretches = [own]
  if (head.parentId !== undefined) {
    const shadow = { jobId, bound: head.lastPosition }
    stretches.unshift({ sourceId: head.parentId, bound: head.parentBound, count: head.inheritedCount, shadow })
  }
  let deadline: number | undefined = firstDeadline
  for (const stretch of stretches) {
    let remaining = stretch.count
    let after = 0
    while (remaining > 0) {
      const page = await readPage(read, { jobId, stretch, after, deadline })
      deadline = undefined
      if (page.identity !== head.identity || page.count === 0 || page.count > remaining) throw new CheckpointChanged()
      remaining -= page.count
      after = page.lastPosition
      yield page.members
    }
  }
}

async function readPage(
  read: Read,
  options: { jobId: string; stretch: Stretch; after: number; deadline: number | undefined },
): Promise<Page> {
  const { jobId, stretch, after, deadline } = options
  const { sourceId, bound, shadow } = stretch
  const parameters = [
    jobId,
    sourceId,
    String(after),
    String(bound),
    shadow?.jobId ?? null,
    shadow ? String(shadow.bound) : null,
  ]
  const row = (await read(SELECT_PAGE, parameters, deadline))[0] as Row
  return {
    count: Number(textOf(row, 0)),
    lastPosition: Number(textOrNull(row, 1) ?? 0),
    members: row[2] ?? Buffer.alloc(0),
    identity: textOrNull(row, 3),
  }
}
