import { randomUUID } from 'node:crypto'
import http from 'node:http'
import postgres from 'postgres'
import { verdict } from './comparison.ts'
import type { DatabaseServer } from './databases.ts'
import { markdownTable, median, short } from './figures.ts'
import { type Connection, openConnection } from './http-client.ts'
import { startServer } from './processes.ts'
import { makeResults } from './results.ts'

const SHORT_JOB_STEPS = 10
const LONG_JOB_STEPS = 10_000
const CHILDREN = 100
const STEPS_TOGETHER = 100
const STEPS_PER_REQUEST = 1000

const DISPATCH_TO_STAY_WITHIN = 1.3
const BARE_SQL_TO_STAY_WITHIN = 2
const TOGETHER_TO_REACH = 20

// What V8 and Postgres do only on the first few calls is not what an engine sees.
const WARM_UP_ROUNDS = 2

export interface EngineOptions {
  /** Fresh pairs of a short and a long job; each job of a pair is dispatched `dispatchesPerJob` times. */
  jobPairs: number
  dispatchesPerJob: number
  checkpointRounds: number
  stepsRounds: number
}

interface Outcome {
  work: string
  /** Milliseconds, one per round. */
  measured: number[]
  comparedWith: string
  reference: number[]
  ratio: number
  target: string
  reached: boolean
}

/**
 * What an engine does with long jobs: dispatching, replacing and reading a checkpoint against bare SQL, recording many
 * steps in one request. One client, which is the benchmark's own process; what is compared is measured in turns, in
 * reverse order every other time. Ratios are of medians.
 */
export async function measureEngine(
  databases: DatabaseServer,
  options: EngineOptions,
): Promise<{ markdown: string; data: unknown }> {
  const databaseUrl = await databases.createDatabase('engine')
  const server = await startServer('src/main.ts', { databaseUrl })
  const connection = await openConnection(server.url)
  const sql = postgres(databaseUrl, { max: 1, onnotice: () => {} })
  try {
    const outcomes = [
      await measureDispatch(connection, databases, options),
      ...(await measureCheckpoint(server.url, { databases, sql, rounds: options.checkpointRounds })),
      await measureStepsTogether(connection, options.stepsRounds),
    ]
    return report(outcomes)
  } finally {
    connection.close()
    await sql.end()
    await server.stop()
  }
}

async function measureDispatch(
  connection: Connection,
  databases: DatabaseServer,
  options: EngineOptions,
): Promise<Outcome> {
  const onShort: number[] = []
  const onLong: number[] = []
  const dispatch = async (jobId: string, round: number): Promise<number> => {
    const jobIds = Array.from({ length: CHILDREN }, (_, child) => `"child-${round}-${child}":"${randomUUID()}"`)
    return sendJson(connection, `/jobs/${jobId}/dispatch`, `{"mode":"parallel","job_ids":{${jobIds.join(',')}}}`)
  }
  for (let pair = 0; pair < options.jobPairs; pair++) {
    const [shortJob, longJob] = [randomUUID(), randomUUID()]
    await fillJob(connection, shortJob, { steps: SHORT_JOB_STEPS, resultBytes: 1000 })
    await fillJob(connection, longJob, { steps: LONG_JOB_STEPS, resultBytes: 1000 })
    await databases.settle({})
    for (let round = -WARM_UP_ROUNDS; round < options.dispatchesPerJob; round++) {
      const turns: [string, number[]][] = [
        [shortJob, onShort],
        [longJob, onLong],
      ]
      for (const [jobId, samples] of inTurns(turns, round)) {
        const milliseconds = await dispatch(jobId, round)
        if (round >= 0) samples.push(milliseconds)
      }
    }
  }
  const ratio = median(onLong) / median(onShort)
  return {
    work: `Dispatch of ${CHILDREN} new children, job with ${short(LONG_JOB_STEPS)} steps`,
    measured: onLong,
    comparedWith: `the same, job with ${SHORT_JOB_STEPS} steps`,
    reference: onShort,
    ratio,
    target: `within ${DISPATCH_TO_STAY_WITHIN}x`,
    reached: ratio <= DISPATCH_TO_STAY_WITHIN,
  }
}

interface CheckpointSamples {
  put: number[]
  replace: number[]
  get: number[]
}

interface CheckpointSide {
  samples: CheckpointSamples
  /** Each writes or reads all steps; `results` are the JSON texts in order of position. */
  put(jobId: string, results: string[]): Promise<void>
  replace(jobId: string, results: string[]): Promise<void>
  get(jobId: string): Promise<void>
}

/**
 * Each round, on a job id that is new to both sides: all steps written, all written once more with other results, all
 * read. Cairn's side begins with the request body in memory and ends with the last byte of the answer; the bare side
 * begins with the texts in memory and ends with the driver's rows.
 */
async function measureCheckpoint(
  url: string,
  context: { databases: DatabaseServer; sql: postgres.Sql; rounds: number },
): Promise<Outcome[]> {
  const keys = Array.from({ length: LONG_JOB_STEPS }, (_, step) => `step-${step + 1}`)
  const results = makeResults(1000, 2 * LONG_JOB_STEPS)
  const [first, second] = [results.slice(0, LONG_JOB_STEPS), results.slice(LONG_JOB_STEPS)]
  const bare = await bareSide(context.sql, keys)
  const client = openStreamingClient(url)
  const cairn = cairnSide(client, { keys, versions: [first, second] })
  try {
    for (let round = -WARM_UP_ROUNDS; round < context.rounds; round++) {
      const jobId = randomUUID()
      await context.databases.settle({})
      const run = async (name: keyof CheckpointSamples, work: (side: CheckpointSide) => Promise<void>) => {
        for (const side of inTurns([bare, cairn], round)) {
          const startedAt = performance.now()
          await work(side)
          if (round >= 0) side.samples[name].push(performance.now() - startedAt)
        }
      }
      await run('put', (side) => side.put(jobId, first))
      await run('replace', (side) => side.replace(jobId, second))
      await run('get', (side) => side.get(jobId))
      if (round === -WARM_UP_ROUNDS) await expectSteps(client, jobId, second)
    }
  } finally {
    client.close()
  }
  const outcome = (name: keyof CheckpointSamples, work: string, comparedWith: string): Outcome => {
    const ratio = median(cairn.samples[name]) / median(bare.samples[name])
    return {
      work,
      measured: cairn.samples[name],
      comparedWith,
      reference: bare.samples[name],
      ratio,
      target: `within ${BARE_SQL_TO_STAY_WITHIN}x`,
      reached: ratio <= BARE_SQL_TO_STAY_WITHIN,
    }
  }
  const steps = short(LONG_JOB_STEPS)
  return [
    outcome('put', `\`PUT\` of ${steps} steps, fresh job`, 'one bare `INSERT` of the rows'),
    outcome(
      'replace',
      `\`PUT\` of ${steps} steps over as many, all changed`,
      'one bare `INSERT .. ON CONFLICT DO UPDATE`',
    ),
    outcome('get', `\`GET\` of ${steps} steps`, 'one bare `SELECT` of the rows'),
  ]
}

/** The least that any store of rows must do: the driver, one connection, one statement, a table with the two indexes. */
async function bareSide(sql: postgres.Sql, keys: string[]): Promise<CheckpointSide> {
  await sql`
    CREATE TABLE bare_step (
      job_id uuid, key text COLLATE "C", result json, position bigint NOT NULL, PRIMARY KEY (job_id, key))`
  await sql`CREATE UNIQUE INDEX ON bare_step (job_id, position)`
  const insert = (jobId: string, results: string[]) => sql`
    INSERT INTO bare_step (job_id, key, result, position)
    SELECT ${jobId}::uuid, given.key, given.result::json, given.no
    FROM unnest(${keys}::text[], ${results}::text[]) WITH ORDINALITY AS given (key, result, no)`
  return {
    samples: { put: [], replace: [], get: [] },
    put: async (jobId, results) => {
      await insert(jobId, results)
    },
    replace: async (jobId, results) => {
      await sql`${insert(jobId, results)} ON CONFLICT (job_id, key) DO UPDATE SET result = excluded.result`
    },
    get: async (jobId) => {
      const rows = await sql`SELECT key, result::text FROM bare_step WHERE job_id = ${jobId} ORDER BY position`
      if (rows.length !== keys.length) throw new Error(`The bare table gave ${rows.length} rows`)
    },
  }
}

function cairnSide(client: StreamingClient, checkpoints: { keys: string[]; versions: string[][] }): CheckpointSide {
  const bodies = new Map(
    checkpoints.versions.map((results) => {
      const steps = results.map((result, index) => `${JSON.stringify(checkpoints.keys[index])}:${result}`)
      return [results, Buffer.from(`{"completed_steps":{${steps.join(',')}}}`)]
    }),
  )
  const put = async (jobId: string, results: string[]): Promise<void> => {
    await client.send('PUT', `/jobs/${jobId}/checkpoint`, bodies.get(results))
  }
  return {
    samples: { put: [], replace: [], get: [] },
    put,
    replace: put,
    get: async (jobId) => {
      const { bytes } = await client.send('GET', `/jobs/${jobId}/checkpoint`)
      if (bytes < LONG_JOB_STEPS * 1000) throw new Error(`The checkpoint came as ${bytes} bytes`)
    },
  }
}

/** A fast answer that is not the right one would be no figure. */
async function expectSteps(client: StreamingClient, jobId: string, results: string[]): Promise<void> {
  const { body } = await client.send('GET', `/jobs/${jobId}/checkpoint`)
  const { completed_steps } = JSON.parse(body().toString('utf8')) as { completed_steps: Record<string, unknown> }
  const steps = Object.entries(completed_steps)
  const wrong = steps.findIndex(
    ([key, result], index) => key !== `step-${index + 1}` || JSON.stringify(result) !== results[index],
  )
  if (steps.length !== results.length || wrong >= 0)
    throw new Error(`The checkpoint that was put came back with ${steps.length} steps, the first wrong one at ${wrong}`)
}

async function measureStepsTogether(connection: Connection, rounds: number): Promise<Outcome> {
  const results = makeResults(200, STEPS_TOGETHER)
  const steps = results.map((result, index) => `{"key":"step-${index + 1}","result":${result}}`)
  const together: number[] = []
  const singly: number[] = []
  const turns: [number[], string[]][] = [
    [together, [`{"steps":[${steps.join(',')}]}`]],
    [singly, steps],
  ]
  for (let round = -WARM_UP_ROUNDS; round < rounds; round++) {
    for (const [samples, bodies] of inTurns(turns, round)) {
      const jobId = randomUUID()
      const startedAt = performance.now()
      for (const body of bodies) await sendJson(connection, `/jobs/${jobId}/steps`, body)
      if (round >= 0) samples.push(performance.now() - startedAt)
    }
  }
  const ratio = median(singly) / median(together)
  return {
    work: `${STEPS_TOGETHER} steps of 200 B in one \`POST /steps\``,
    measured: together,
    comparedWith: `${STEPS_TOGETHER} requests of one step, one after another`,
    reference: singly,
    ratio,
    target: `${TOGETHER_TO_REACH}x the steps/s`,
    reached: ratio >= TOGETHER_TO_REACH,
  }
}

function report(outcomes: Outcome[]): { markdown: string; data: unknown } {
  const rows = outcomes.map((outcome) => [
    outcome.work,
    `${short(median(outcome.measured))} ms`,
    outcome.comparedWith,
    `${short(median(outcome.reference))} ms`,
    `**${short(outcome.ratio)}x**`,
    verdict(outcome.target, outcome.reached),
    String(outcome.measured.length),
  ])
  const header = ['Work', 'Median', 'Compared with', 'Median', 'Ratio', 'To reach', 'Samples each']
  const lines = [
    '## Engines and long jobs',
    '',
    markdownTable(header, rows),
    '',
    'One client. Results of 1 KB where nothing else is said. Cairn is asked over HTTP on one connection; bare SQL goes ' +
      'through the same driver on one connection to the same database, into a table with the same primary key and ' +
      'position index, and reads rows into memory. A `PUT` is compared from the body in memory to the answer, a `GET` ' +
      'from the request to the last byte.',
  ]
  return { markdown: lines.join('\n'), data: outcomes }
}

/** As given, and in reverse every other round. */
function inTurns<T>(sides: T[], round: number): T[] {
  return round % 2 === 0 ? sides : sides.toReversed()
}

/** Records `steps` results by batches; steps are called step-1, step-2, .. */
export async function fillJob(
  connection: Connection,
  jobId: string,
  options: { steps: number; resultBytes: number },
): Promise<void> {
  const results = makeResults(options.resultBytes, 64)
  for (let done = 0; done < options.steps; done += STEPS_PER_REQUEST) {
    const count = Math.min(STEPS_PER_REQUEST, options.steps - done)
    const steps = Array.from({ length: count }, (_, index) => {
      const step = done + index + 1
      return `{"key":"step-${step}","result":${results[step % results.length]}}`
    })
    await sendJson(connection, `/jobs/${jobId}/steps`, `{"steps":[${steps.join(',')}]}`)
  }
}

/** POSTs and throws unless the answer is 2xx; milliseconds until it was there. */
export async function sendJson(connection: Connection, path: string, body: string): Promise<number> {
  const reply = await connection.send('POST', path, body)
  if (reply.status < 200 || reply.status > 299)
    throw new Error(`POST ${path} answered ${reply.status}: ${reply.body.slice(0, 300)}`)
  return reply.milliseconds
}

/** One keep-alive connection for what `openConnection` does not know: PUT, and answers without `Content-Length`. */
export interface StreamingClient {
  /** Throws unless the answer is 2xx and came to its proper end. */
  send(method: 'GET' | 'PUT', path: string, body?: Buffer): Promise<StreamedReply>
  close(): void
}

export interface StreamedReply {
  bytes: number
  milliseconds: number
  body(): Buffer
}

export function openStreamingClient(url: string): StreamingClient {
  const agent = new http.Agent({ keepAlive: true, maxSockets: 1 })
  const send: StreamingClient['send'] = (method, path, body) =>
    new Promise((resolve, reject) => {
      const startedAt = performance.now()
      const headers = body && { 'content-type': 'application/json', 'content-length': body.length }
      const request = http.request(`${url}${path}`, { agent, method, ...(headers && { headers }) }, (response) => {
        const chunks: Buffer[] = []
        let bytes = 0
        response.on('data', (chunk: Buffer) => {
          chunks.push(chunk)
          bytes += chunk.length
        })
        response.on('error', reject)
        response.on('end', () => {
          const milliseconds = performance.now() - startedAt
          if (response.statusCode === 200) resolve({ bytes, milliseconds, body: () => Buffer.concat(chunks) })
          else reject(new Error(`${method} ${path} answered ${response.statusCode}: ${Buffer.concat(chunks)}`))
        })
      })
      request.on('error', reject)
      request.end(body)
    })
  return { send, close: () => agent.destroy() }
}
