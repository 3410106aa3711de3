import { randomUUID } from 'node:crypto'
import postgres from 'postgres'
import { DEFAULT_JOBS_LIMIT } from '../routes/jobs.ts'
import { verdict } from './comparison.ts'
import type { DatabaseServer } from './databases.ts'
import { fillJob, openStreamingClient, sendJson } from './engine.ts'
import { type LoadFigures, markdownTable, short, summarise } from './figures.ts'
import { openConnection } from './http-client.ts'
import { startServer } from './processes.ts'

const LONG_JOB_STEPS = 10_000
const CHILDREN = 100
const TO_STAY_UNDER_MS = 5
const WARM_UP_REQUESTS = 20

interface Lookup {
  name: string
  path: string
  /** How many jobs the page must have. */
  jobs: number
}

interface Outcome {
  name: string
  figures: LoadFigures
}

/**
 * Lists among many jobs, and what a front end reads of a long job without its results. The jobs are written by SQL as the
 * service would have left them: one every ten seconds, 95 of 100 completed, the open ones spread over the whole time,
 * 20 names, labels of which one fits a fiftieth of the jobs and one fits ten jobs.
 */
export async function measureJobList(
  databases: DatabaseServer,
  options: { jobs: number; requests: number },
): Promise<{ markdown: string; data: unknown }> {
  const databaseUrl = await databases.createDatabase('job_list')
  const server = await startServer('src/main.ts', { databaseUrl })
  const connection = await openConnection(server.url)
  const client = openStreamingClient(server.url)
  try {
    await writeJobs(databaseUrl, options.jobs)
    const longJob = randomUUID()
    await fillJob(connection, longJob, { steps: LONG_JOB_STEPS, resultBytes: 1000 })
    await databases.settle({})

    const outcomes: Outcome[] = []
    const measureList = async (lookup: Lookup): Promise<void> => {
      const ask = async (): Promise<number> => {
        const reply = await connection.send('GET', lookup.path)
        if (reply.status !== 200) throw new Error(`GET ${lookup.path} answered ${reply.status}: ${reply.body}`)
        const found = reply.body.split('"source_hash":').length - 1
        if (found !== lookup.jobs) throw new Error(`GET ${lookup.path} gave ${found} jobs, not ${lookup.jobs}`)
        return reply.milliseconds
      }
      outcomes.push({ name: lookup.name, figures: await repeat(ask, options.requests) })
    }
    for (const lookup of listLookups(await cursorInTheMiddle(connection, options.jobs))) await measureList(lookup)

    const jobIds = Array.from({ length: CHILDREN }, (_, child) => `"child-${child}":"${randomUUID()}"`)
    await sendJson(connection, `/jobs/${longJob}/dispatch`, `{"mode":"parallel","job_ids":{${jobIds.join(',')}}}`)
    await measureList({ name: '`GET /jobs`, a page of children', path: '/jobs', jobs: PAGE })
    for (const fields of ['job_ids', 'job_ids,pending_steps']) {
      const path = `/jobs/${longJob}/checkpoint?fields=${fields}`
      const ask = async (): Promise<number> => {
        const reply = await client.send('GET', path)
        const { job_ids } = JSON.parse(reply.body().toString('utf8')) as { job_ids: Record<string, string> }
        if (Object.keys(job_ids).length !== CHILDREN) throw new Error(`GET ${path} gave other children than dispatched`)
        return reply.milliseconds
      }
      const name = `\`/checkpoint?fields=${fields}\`, ${short(LONG_JOB_STEPS)} steps, ${CHILDREN} children`
      outcomes.push({ name, figures: await repeat(ask, options.requests) })
    }
    return report(outcomes, options.jobs)
  } finally {
    connection.close()
    client.close()
    await server.stop()
  }
}

async function writeJobs(databaseUrl: string, jobs: number): Promise<void> {
  const sql = postgres(databaseUrl, { max: 1, onnotice: () => {} })
  try {
    await sql`
      INSERT INTO cairn.job
        (id, created_at, updated_at, finished_at, change_count, last_position, step_count, bytes, source_hash, name, labels,
          status, result)
      SELECT gen_random_uuid(), j.created_at, j.created_at + interval '5 seconds',
        CASE WHEN j.status <> 'open' THEN j.created_at + interval '5 seconds' END,
        21, 20, 20, 4000, 'c0ffee', 'workflow-' || j.no % 20,
        jsonb_build_object('team', 'team-' || j.no / 20 % 50, 'order', 'order-' || j.no / 10),
        j.status, CASE WHEN j.status <> 'open' THEN json '{"shipped":true}' END
      FROM (
        SELECT no, now() - (${jobs}::integer - no) * interval '10 seconds' AS created_at,
          CASE WHEN no % 100 < 5 THEN 'open' ELSE 'completed' END AS status
        FROM generate_series(0, ${jobs}::integer - 1) AS no
      ) AS j
      ORDER BY j.no`
    await sql`ANALYZE cairn.job`
  } finally {
    await sql.end()
  }
}

const PAGE = DEFAULT_JOBS_LIMIT

function listLookups(cursor: string): Lookup[] {
  return [
    { name: '`GET /jobs`', path: '/jobs', jobs: PAGE },
    { name: '`?cursor=`, half-way', path: `/jobs?cursor=${cursor}`, jobs: PAGE },
    { name: '`?status=open`', path: '/jobs?status=open', jobs: PAGE },
    { name: '`?status=completed`', path: '/jobs?status=completed', jobs: PAGE },
    { name: '`?status=failed`, none is', path: '/jobs?status=failed', jobs: 0 },
    { name: '`?name=`, one of 20', path: '/jobs?name=workflow-7', jobs: PAGE },
    { name: '`?name=`, unknown', path: '/jobs?name=nothing', jobs: 0 },
    { name: '`?label=`, fits one of 50', path: '/jobs?label=team:team-7', jobs: PAGE },
    { name: '`?label=`, fits ten', path: '/jobs?label=order:order-70', jobs: 10 },
    { name: '`?label=`, unknown', path: '/jobs?label=order:nothing', jobs: 0 },
    { name: '`?status=open&label=`, one of 50', path: '/jobs?status=open&label=team:team-0', jobs: PAGE },
  ]
}

async function cursorInTheMiddle(
  connection: Awaited<ReturnType<typeof openConnection>>,
  jobs: number,
): Promise<string> {
  let cursor = ''
  for (let seen = 0; seen < jobs / 2; seen += 1000) {
    const reply = await connection.send('GET', `/jobs?limit=1000${cursor && `&cursor=${cursor}`}`)
    const { next_cursor } = JSON.parse(reply.body) as { next_cursor: string }
    cursor = next_cursor
  }
  return cursor
}

async function repeat(ask: () => Promise<number>, requests: number): Promise<LoadFigures> {
  for (let request = 0; request < WARM_UP_REQUESTS; request++) await ask()
  const latencies: number[] = []
  const startedAt = performance.now()
  for (let request = 0; request < requests; request++) latencies.push(await ask())
  return summarise(latencies, (performance.now() - startedAt) / 1000)
}

function report(outcomes: Outcome[], jobs: number): { markdown: string; data: unknown } {
  const rows = outcomes.map(({ name, figures }) => [
    name,
    `**${short(figures.p50)}**`,
    short(figures.p99),
    verdict(`under ${TO_STAY_UNDER_MS}`, figures.p50 < TO_STAY_UNDER_MS),
  ])
  const header = ['Request', 'Median, ms', 'p99, ms', 'To reach']
  const lines = [
    `## Lists among ${jobs.toLocaleString('en-US')} jobs`,
    '',
    markdownTable(header, rows),
    '',
    `One client; ${short(outcomes[0]?.figures.requests ?? 0)} requests each, pages of ${PAGE} jobs.`,
  ]
  return { markdown: lines.join('\n'), data: outcomes }
}
