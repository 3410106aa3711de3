import { CHECKPOINT_FIELDS, type CheckpointField, VERSION_OF_NOTHING } from '../src/checkpoint.ts'
import { UUID } from '../src/input-formats.ts'
import { Problem, shown } from '../src/problems.ts'
import { type Row, textArray, textOf, textOrNull } from './client.ts'
import type { CheckpointReading, JobFilter, TimelinePage } from './store.ts'

/** Runs one statement for a reader. Throws a `Problem`. `deadline` is in terms of performance.now(). */
export type Read = (statement: string, parameters: ReadonlyArray<string | null>, deadline?: number) => Promise<Row[]>

/** Octets after which a page of a checkpoint is cut. A page is what a reader costs in memory. */
export const PAGE_BYTES = 512 * 1024
/** Steps that Postgres is asked for, in the first page, and at least and at most in those that follow. */
const FIRST_PAGE_STEPS = 512
const MIN_PAGE_STEPS = 64
const MAX_PAGE_STEPS = 4096
/** Octets of a page behind which no other is read ahead. */
const READ_AHEAD_BYTES = 2 * PAGE_BYTES
/** How often a checkpoint that changed before its first octet was sent is read anew. */
const READING_ATTEMPTS = 5

/**
 * What must be the same in the head and in every page. Replacing or forgetting steps changes it; recording does not, since
 * a step recorded later lies behind the head's last position. Of a child it names the whole line of parents.
 */
const IDENTITY = `
  case
    when j.parent_id is null then j.created_at::text || '.' || j.rewrite_count
    else (
      select string_agg(source.created_at::text || '.' || source.rewrite_count, '/' order by line.generation)
      from cairn.lineage(j.id) line join cairn.job source on source.id = line.source_id)
  end`

const SELECT_HEAD = `
  select
    cairn.version_text(j), ${IDENTITY},
    to_json(j.source_hash)::text, j.pending::text, j.input_args::text,
    case when $2::text::boolean then '{' || coalesce((
      select string_agg(to_json(c.key)::text || ':"' || c.child_id::text || '"', ',' order by c.position)
      from cairn.child c where c.job_id = j.id and c.key is not null), '') || '}' end,
    to_json(j.executing_key)::text, j.extra::text, j.step_count, j.last_position,
    case when $3::text::boolean and j.parent_id is not null then (
      select json_agg(json_build_array(line.generation, line.source_number, line.bound, (
        select count(*) from cairn.visible_steps(j.id) v where v.generation = line.generation))
        order by line.generation desc)
      from cairn.lineage(j.id) line where line.generation > 0)::text end,
    j.number
  from cairn.job j where j.id = $1`

// $1 the job that is read, $2 the number of the job whose steps are read (itself, or one it inherits from), behind position
// $3 and up to $4, at most $5 steps. Rows, and not one text put together by Postgres, which takes longer to make it.
const selectPage = (nearer: string, notHidden: string) => `
  ${nearer}
  select to_json(s.key)::text || ':' || s.result::text, s.position,
    case when s.preceding_bytes = 0 then (select ${IDENTITY} from cairn.job j where j.id = $1) end
  from (
    select candidate.position, candidate.key, candidate.result,
      sum((candidate.bytes + octet_length(candidate.key))::integer) over (order by candidate.position)
        - candidate.bytes - octet_length(candidate.key) as preceding_bytes
    from (
      select p.position, p.key, p.result, p.bytes
      from cairn.step p
      where p.job_number = $2 and p.position > $3 and p.position <= $4 and p.result is not null ${notHidden}
      order by p.position
      limit $5::bigint
    ) as candidate
  ) as s
  where s.preceding_bytes < ${PAGE_BYTES}
  order by s.position`

const SELECT_OWN_PAGE = selectPage('', '')

// Without those of nearer generations than $6, of the job itself up to position $7.
const SELECT_INHERITED_PAGE = selectPage(
  `with nearer as materialized (
    select source_id, case when generation = 0 then $7::bigint else bound end as bound
    from cairn.lineage($1) where generation < $6::integer
  )`,
  `and not exists (
    select from nearer join cairn.step own on own.job_id = nearer.source_id and own.key = p.key
    where own.result is not null and own.position <= nearer.bound)`,
)

const SELECT_STEP = `
  select case when s.result is null and j.parent_id is not null then cairn.inherited_result(j.id, $2::text) else s.result end
  from cairn.job j left join cairn.step s on s.job_id = j.id and s.key = $2::text
  where j.id = $1`

// Those of the keys behind the place $3, as many as fit into a page, and how many there are in all behind that place.
const SELECT_STEPS = `
  select paged.no, paged.key, paged.result, paged.remaining
  from (
    select found.no, found.key, found.result, count(*) over () as remaining,
      sum(octet_length(found.result::text)) over (order by found.no) - octet_length(found.result::text) as preceding_bytes
    from (
      select wanted.no, wanted.key,
        case when s.result is null and j.parent_id is not null then cairn.inherited_result(j.id, wanted.key) else s.result end
          as result
      from unnest($2::text[]) with ordinality as wanted (key, no)
      join cairn.job j on j.id = $1
      left join cairn.step s on s.job_id = j.id and s.key = wanted.key
      where wanted.no > $3::bigint
    ) as found
    where found.result is not null
  ) as paged
  where paged.preceding_bytes < ${PAGE_BYTES}
  order by paged.no`

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
        from cairn.job j join cairn.step s on s.job_number = j.number
        where j.id = $1 and s.position > $2 and s.scheduled_for is not null
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
  const [row] = await read('select cairn.version_text(j) from cairn.job j where j.id = $1', [jobId])
  return row ? textOf(row, 0) : VERSION_OF_NOTHING
}

export async function readStep(read: Read, jobId: string, key: string): Promise<Buffer | undefined> {
  const [row] = await read(SELECT_STEP, [jobId, key])
  return row?.[0] ?? undefined
}

/** The first page is read before this returns, the rest while the client takes it. */
export async function readSteps(read: Read, jobId: string, keys: readonly string[]): Promise<AsyncIterable<Buffer>> {
  const readPage = (after: string) => read(SELECT_STEPS, [jobId, textArray(keys), after])
  return joinSteps(await readPage('0'), readPage)
}

async function* joinSteps(first: Row[], readPage: (after: string) => Promise<Row[]>): AsyncGenerator<Buffer> {
  let opening = '{"steps":['
  for (let rows = first; rows.length > 0; ) {
    const pieces: Buffer[] = []
    for (const row of rows) {
      pieces.push(Buffer.from(`${opening}{"key":${JSON.stringify(textOf(row, 1))},"result":`), row[2] as Buffer)
      opening = '},'
    }
    yield Buffer.concat(pieces)
    const last = rows.at(-1) as Row
    rows = Number(textOf(last, 3)) > rows.length ? await readPage(textOf(last, 0)) : []
  }
  yield Buffer.from(opening === '},' ? '}]}' : '{"steps":[]}')
}

export async function readTimeline(read: Read, jobId: string, page: TimelinePage): Promise<Buffer> {
  const [row] = await read(SELECT_TIMELINE, [jobId, String(page.after), String(page.limit)])
  return (row as Row)[0] as Buffer
}

const JOB_DOCUMENT = `
  (select row_to_json(document)::text from (
    select
      j.id, j.parent_id, j.name, j.labels, j.status, j.source_hash, j.step_count, j.failed_count, j.bytes,
      coalesce(to_json(j.pending_keys), '[]') as pending_keys, cairn.version_text(j) as version,
      cairn.utc_text(j.created_at) as created_at, cairn.utc_text(j.updated_at) as updated_at,
      cairn.utc_text(j.finished_at) as finished_at
  ) as document)`

export async function readJob(read: Read, jobId: string): Promise<Buffer | undefined> {
  // A finished job's result is put in as the text that it is.
  const statement = `
    select left(${JOB_DOCUMENT}, -1) || coalesce(',"result":' || j.result::text, '') || '}' from cairn.job j where j.id = $1`
  const [row] = await read(statement, [jobId])
  return row?.[0] ?? undefined
}

export async function readJobs(read: Read, filter: JobFilter): Promise<Buffer> {
  const parameters: string[] = []
  const bind = (value: string) => `$${parameters.push(value)}`
  const conditions: string[] = []
  // A literal, so that the planner can use the partial indexes.
  if (filter.status !== undefined) conditions.push(`j.status = '${filter.status}'`)
  if (filter.name !== undefined) conditions.push(`j.name = ${bind(filter.name)}::text`)
  if (filter.label !== undefined) {
    const { name, value } = filter.label
    // As one value: a function of two would be called for each job that is looked at.
    const wanted = bind(`{${JSON.stringify(name)}:${JSON.stringify(value)}}`)
    conditions.push(`j.labels <> '{}' and j.labels @> ${wanted}::text::jsonb`)
  }
  if (filter.prefix !== undefined) {
    const [lowest, highest] = uuidRange(filter.prefix)
    conditions.push(`j.id between ${bind(lowest)}::uuid and ${bind(highest)}::uuid`)
  }
  if (filter.cursor !== undefined) {
    const { micros, id } = readCursor(filter.cursor)
    const moment = `timestamptz 'epoch' + ${bind(micros)}::bigint * interval '1 microsecond'`
    conditions.push(`(j.created_at, j.id) < (${moment}, ${bind(id)}::uuid)`)
  }
  const rows = await read(
    `select ${JOB_DOCUMENT}, (extract(epoch from j.created_at) * 1000000)::bigint, j.id
     from cairn.job j ${conditions.length > 0 ? `where ${conditions.join(' and ')}` : ''}
     order by j.created_at desc, j.id desc limit ${bind(String(filter.limit + 1))}::bigint`,
    parameters,
  )
  const page = rows.slice(0, filter.limit)
  const last = page.at(-1)
  const next =
    last && rows.length > filter.limit ? JSON.stringify(makeCursor(textOf(last, 1), textOf(last, 2))) : 'null'
  return Buffer.from(`{"jobs":[${page.map((row) => textOf(row, 0)).join(',')}],"next_cursor":${next}}`)
}

/** The lowest and the highest UUID that begin with `prefix`. */
function uuidRange(prefix: string): [string, string] {
  const lowest = '00000000-0000-0000-0000-000000000000'
  const highest = 'ffffffff-ffff-ffff-ffff-ffffffffffff'
  return [prefix + lowest.slice(prefix.length), prefix + highest.slice(prefix.length)]
}

function makeCursor(micros: string, id: string): string {
  return Buffer.from(`${micros}.${id}`).toString('base64url')
}

function readCursor(cursor: string): { micros: string; id: string } {
  const [, micros, id] = /^(\d{1,18})\.([0-9a-f-]{36})$/.exec(Buffer.from(cursor, 'base64url').toString()) ?? []
  if (!micros || !id || !UUID.test(id))
    throw new Problem('invalid_request', `cursor must be a next_cursor, not ${shown(cursor)}.`)
  return { micros, id }
}

interface Head {
  version: string
  identity: string
  /** The members' JSON; undefined = absent. */
  members: Map<string, string>
  extra: string | undefined
  ownCount: number
  lastPosition: number
  /** Of a child: what it sees of each job in the line of its parents, the farthest first. */
  inherited: Stretch[]
  number: number
}

interface Page {
  count: number
  lastPosition: number
  members: Buffer
  identity: string | undefined
}

/** The steps of one job in the line, in order of position up to the bound. */
interface Stretch {
  /** 0 = the job that is read. */
  generation: number
  /** The number of that job. */
  source: number
  bound: number
  count: number
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
    inherited: (JSON.parse(textOrNull(row, 10) ?? '[]') as [number, number, number, number][]).map(
      ([generation, source, bound, count]) => ({ generation, source, bound, count }),
    ),
    number: Number(textOf(row, 11)),
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
  let piece = Buffer.concat([Buffer.from(opening), first.value])
  for (;;) {
    // While the client takes a page the next one is read, unless the two would be a lot of memory.
    const ahead = piece.length <= READ_AHEAD_BYTES ? rest.next() : undefined
    ahead?.catch(() => {})
    yield piece
    const page = await (ahead ?? rest.next())
    if (page.done) break
    piece = Buffer.concat([COMMA, page.value])
  }
  yield CLOSING
}

const COMMA = Buffer.from(',')
const CLOSING = Buffer.from('}}')

/** The members of completed_steps, a page at a time. Throws `CheckpointChanged` rather than give fewer than the head counted. */
async function* readPages(read: Read, jobId: string, head: Head, firstDeadline: number): AsyncGenerator<Buffer> {
  const own: Stretch = { generation: 0, source: head.number, bound: head.lastPosition, count: head.ownCount }
  let deadline: number | undefined = firstDeadline
  for (const stretch of [...head.inherited, own]) {
    let remaining = stretch.count
    let after = 0
    let limit = FIRST_PAGE_STEPS
    while (remaining > 0) {
      const page = await readPage(read, { jobId, ownBound: head.lastPosition, stretch, after, limit, deadline })
      deadline = undefined
      if (page.identity !== head.identity || page.count > remaining) throw new CheckpointChanged()
      remaining -= page.count
      after = page.lastPosition
      limit = stepsToAskFor(page)
      yield page.members
    }
  }
}

/** As many as would fill a page if they are as long as those of the page before; Postgres looks at each that it is asked for. */
function stepsToAskFor({ count, members }: Page): number {
  return Math.max(MIN_PAGE_STEPS, Math.min(MAX_PAGE_STEPS, Math.ceil((1.125 * PAGE_BYTES * count) / members.length)))
}

/** The first columns, with commas between them. */
function joinWithCommas(rows: readonly Row[]): Buffer {
  let length = Math.max(0, rows.length - 1)
  for (const row of rows) length += (row[0] as Buffer).length
  const joined = Buffer.allocUnsafe(length)
  let end = 0
  for (const row of rows) {
    if (end > 0) joined[end++] = 0x2c
    end += (row[0] as Buffer).copy(joined, end)
  }
  return joined
}

interface PageRequest {
  jobId: string
  ownBound: number
  stretch: Stretch
  after: number
  limit: number
  deadline: number | undefined
}

/** A page without any step has no identity. */
async function readPage(read: Read, request: PageRequest): Promise<Page> {
  const { jobId, ownBound, stretch, after, limit, deadline } = request
  const { generation, source, bound } = stretch
  const parameters = [jobId, String(source), String(after), String(bound), String(limit)]
  const rows =
    generation === 0
      ? await read(SELECT_OWN_PAGE, parameters, deadline)
      : await read(SELECT_INHERITED_PAGE, [...parameters, String(generation), String(ownBound)], deadline)
  const [first] = rows
  const last = rows.at(-1)
  return {
    count: rows.length,
    lastPosition: last ? Number(textOf(last, 1)) : after,
    members: joinWithCommas(rows),
    identity: first && textOf(first, 2),
  }
}
