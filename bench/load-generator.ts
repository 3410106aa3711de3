/**
 * The load generator: a process of its own that takes one order at a time over IPC and answers with figures. All load
 * is closed-loop (a client sends its next request when the last one is answered) except `steady`, which keeps a timetable.
 * Every answer must be 2xx: the first one that is not fails the order, and with it the run.
 */
import { randomUUID } from 'node:crypto'
import http from 'node:http'
import { type LoadFigures, median, summarise } from './figures.ts'
import { type Connection, openConnection } from './http-client.ts'
import { makeResults } from './results.ts'

/** `clients` connections, each recording whole jobs of `stepsPerJob` steps until `seconds` are over, at least one job. */
export interface JobsOrder {
  kind: 'jobs'
  url: string
  route?: 'inline-checkpoint' | 'ceiling'
  clients: number
  stepsPerJob: number
  resultBytes: number
  seconds: number
}

/** Fills one job with `steps` results of `resultBytes` from `clients` connections at once. */
export interface FillOrder {
  kind: 'fill'
  url: string
  jobId: string
  clients: number
  steps: number
  resultBytes: number
}

/** One client; a step near the end of a `longJobSteps`-step job and a step near the start of a fresh job in turns. */
export interface EarlyAndLateOrder {
  kind: 'earlyAndLate'
  url: string
  longJobSteps: number
  longJobs: number
  resultBytes: number
}

export interface EarlyAndLateFigures {
  samples: number
  earlyMedian: number
  lateMedian: number
}

/** `readers` connections read one checkpoint to its end, all at once and at full speed. */
export interface ReadOrder {
  kind: 'read'
  url: string
  jobId: string
  readers: number
}

export interface ReadFigures {
  seconds: number
  bytesEach: number
}

/** Reads one checkpoint, parses it and counts its steps. */
export interface CountOrder {
  kind: 'count'
  url: string
  jobId: string
}

/** A small POST and a GET /livez, each due every `everyMs`, on connections enough that none waits for another. */
export interface SteadyOrder {
  kind: 'steady'
  url: string
  everyMs: number
  seconds: number
}

export interface SteadyFigures {
  post: LoadFigures
  livez: LoadFigures
}

/** Bodies of exactly `bodyBytes` in one shape, one after another, each to a fresh job, until `seconds` are over. */
export interface BigBodiesOrder {
  kind: 'bigBodies'
  url: string
  shape: BodyShape
  bodyBytes: number
  seconds: number
}

export type BodyShape = 'one string' | 'empty objects' | 'numbers' | 'small nested objects'

export interface LoadAnswers {
  jobs: [JobsOrder, LoadFigures]
  fill: [FillOrder, LoadFigures]
  earlyAndLate: [EarlyAndLateOrder, EarlyAndLateFigures]
  read: [ReadOrder, ReadFigures]
  count: [CountOrder, number]
  steady: [SteadyOrder, SteadyFigures]
  bigBodies: [BigBodiesOrder, LoadFigures]
}

type Runners = { [Kind in keyof LoadAnswers]: (order: LoadAnswers[Kind][0]) => Promise<LoadAnswers[Kind][1]> }

const runners: Runners = {
  jobs: postJobs,
  fill: fillJob,
  earlyAndLate: postEarlyAndLate,
  read: readTogether,
  count: countSteps,
  steady: postSteadily,
  bigBodies: postBigBodies,
}

process.on('message', async (order: { kind: keyof LoadAnswers }) => {
  const run = runners[order.kind] as (order: unknown) => Promise<unknown>
  try {
    process.send?.({ figures: await run(order) })
  } catch (error) {
    process.send?.({ error: error instanceof Error ? error.message : String(error) })
  }
})
process.on('disconnect', () => process.exit())

async function postJobs(order: JobsOrder): Promise<LoadFigures> {
  const { route = 'inline-checkpoint', stepsPerJob } = order
  const results = makeResults(order.resultBytes, 64)
  return withConnections(order.url, order.clients, async (connections) => {
    const latencies: number[] = []
    const startedAt = performance.now()
    const endsAt = startedAt + order.seconds * 1000
    const work = async (connection: Connection, client: number): Promise<void> => {
      do {
        const jobId = randomUUID()
        const path = route === 'ceiling' ? `/ceiling/${jobId}` : recordPath(jobId)
        for (let step = 1; step <= stepsPerJob; step++)
          latencies.push(await post(connection, path, stepBody(step, chosen(results, client + step))))
      } while (performance.now() < endsAt)
    }
    await Promise.all(connections.map(work))
    return summarise(latencies, (performance.now() - startedAt) / 1000)
  })
}

async function fillJob(order: FillOrder): Promise<LoadFigures> {
  const results = makeResults(order.resultBytes, order.resultBytes > 100_000 ? 4 : 64)
  return withConnections(order.url, order.clients, async (connections) => {
    const latencies: number[] = []
    const startedAt = performance.now()
    let step = 0
    const work = async (connection: Connection): Promise<void> => {
      while (step < order.steps) {
        step += 1
        latencies.push(await post(connection, recordPath(order.jobId), stepBody(step, chosen(results, step))))
      }
    }
    await Promise.all(connections.map(work))
    return summarise(latencies, (performance.now() - startedAt) / 1000)
  })
}

const EARLY_FROM = 5
const SAMPLES_EACH_SIDE = 50

/**
 * Step 10 is represented by steps 5 to 55 of fresh jobs, step n by steps n - 50 to n + 50. The two are measured in
 * turns on one connection, so that whatever else the machine does meets both alike.
 */
async function postEarlyAndLate(order: EarlyAndLateOrder): Promise<EarlyAndLateFigures> {
  const results = makeResults(order.resultBytes, 64)
  return withConnections(order.url, 1, async ([connection]) => {
    if (connection === undefined) throw new Error('No connection')
    const record = (jobId: string, step: number): Promise<number> =>
      post(connection, recordPath(jobId), stepBody(step, chosen(results, step)))
    const early: number[] = []
    const late: number[] = []
    for (let longJob = 0; longJob < order.longJobs; longJob++) {
      const longJobId = randomUUID()
      let freshJobId = randomUUID()
      let freshStep = 0
      const firstLate = order.longJobSteps - SAMPLES_EACH_SIDE
      for (let step = 1; step < firstLate; step++) await record(longJobId, step)
      for (let step = firstLate; step <= order.longJobSteps + SAMPLES_EACH_SIDE; step++) {
        if (freshStep >= EARLY_FROM + SAMPLES_EACH_SIDE) {
          freshJobId = randomUUID()
          freshStep = 0
        }
        while (freshStep < EARLY_FROM - 1) await record(freshJobId, ++freshStep)
        late.push(await record(longJobId, step))
        early.push(await record(freshJobId, ++freshStep))
      }
    }
    return { samples: late.length, earlyMedian: median(early), lateMedian: median(late) }
  })
}

async function readTogether(order: ReadOrder): Promise<ReadFigures> {
  const startedAt = performance.now()
  const readings = await Promise.all(Array.from({ length: order.readers }, () => readCheckpoint(order)))
  const seconds = (performance.now() - startedAt) / 1000
  const bytesEach = readings[0]?.bytes ?? 0
  for (const { bytes, ending } of readings) {
    if (bytes !== bytesEach) throw new Error(`Readers of one checkpoint got ${bytesEach} and ${bytes} bytes`)
    if (!ending.trimEnd().endsWith('}')) throw new Error(`A checkpoint ended with ${JSON.stringify(ending)}`)
  }
  return { seconds, bytesEach }
}

async function countSteps(order: CountOrder): Promise<number> {
  const chunks: Buffer[] = []
  await readCheckpoint({ ...order, onChunk: (chunk) => chunks.push(chunk) })
  const checkpoint = JSON.parse(Buffer.concat(chunks).toString('utf8')) as { completed_steps: Record<string, unknown> }
  return Object.keys(checkpoint.completed_steps).length
}

interface Reading {
  url: string
  jobId: string
  onChunk?: (chunk: Buffer) => void
}

/** Resolves only when the answer was 200 and came to its proper end: Node reports a cut-off one as `aborted`. */
function readCheckpoint(reading: Reading): Promise<{ bytes: number; ending: string }> {
  return new Promise((resolve, reject) => {
    const request = http.get(`${reading.url}/jobs/${reading.jobId}/checkpoint`, { agent: false }, (response) => {
      if (response.statusCode !== 200) return reject(new Error(`GET checkpoint answered ${response.statusCode}`))
      let bytes = 0
      let ending = ''
      response.on('data', (chunk: Buffer) => {
        bytes += chunk.length
        ending = chunk.toString('latin1', Math.max(0, chunk.length - 32))
        reading.onChunk?.(chunk)
      })
      response.on('end', () => resolve({ bytes, ending }))
      response.on('error', reject)
    })
    request.on('error', reject)
  })
}

const STEADY_CONNECTIONS = 32

async function postSteadily(order: SteadyOrder): Promise<SteadyFigures> {
  const result = chosen(makeResults(200, 1), 0)
  return withConnections(order.url, 2 * STEADY_CONNECTIONS, async (connections) => {
    const posts = connections.slice(0, STEADY_CONNECTIONS).map((connection) => {
      let [jobId, step] = [randomUUID(), 0]
      return (): Promise<unknown> => {
        if (step === 20) [jobId, step] = [randomUUID(), 0]
        return post(connection, recordPath(jobId), stepBody(++step, result))
      }
    })
    const probes = connections.slice(STEADY_CONNECTIONS).map((connection) => async (): Promise<void> => {
      expectSuccess(await connection.send('GET', '/livez'))
    })
    const [postFigures, livezFigures] = await Promise.all([onTimetable(order, posts), onTimetable(order, probes)])
    return { post: postFigures, livez: livezFigures }
  })
}

/**
 * Sends what is due by whichever sender is free. Latency counts from when a request was due: a stall of 300 ms delays
 * every request due in it, and a closed loop would count it once. One sender alone would queue behind its own answers.
 */
async function onTimetable(order: SteadyOrder, senders: (() => Promise<unknown>)[]): Promise<LoadFigures> {
  const latencies: number[] = []
  const startedAt = performance.now()
  const endsAt = startedAt + order.seconds * 1000
  let nextDueAt = startedAt
  const work = async (send: () => Promise<unknown>): Promise<void> => {
    while (nextDueAt < endsAt) {
      const dueAt = nextDueAt
      nextDueAt += order.everyMs
      const early = dueAt - performance.now()
      if (early > 0) await new Promise((resolve) => setTimeout(resolve, early))
      await send()
      latencies.push(performance.now() - dueAt)
    }
  }
  await Promise.all(senders.map(work))
  return summarise(latencies, (performance.now() - startedAt) / 1000)
}

async function postBigBodies(order: BigBodiesOrder): Promise<LoadFigures> {
  const body = makeBigBody(order.shape, order.bodyBytes)
  return withConnections(order.url, 1, async ([connection]) => {
    if (connection === undefined) throw new Error('No connection')
    const latencies: number[] = []
    const startedAt = performance.now()
    do latencies.push(await post(connection, recordPath(randomUUID()), body))
    while (performance.now() - startedAt < order.seconds * 1000)
    return summarise(latencies, (performance.now() - startedAt) / 1000)
  })
}

function makeBigBody(shape: BodyShape, bytes: number): Buffer {
  const opening = '{"key":"big","result":'
  const space = bytes - opening.length - 1
  const listOf = (item: string): string => {
    const items = Math.floor((space - 1) / (item.length + 1))
    const list = `[${Array.from({ length: items }, () => item).join(',')}]`
    return list + ' '.repeat(space - list.length)
  }
  const results: Record<BodyShape, () => string> = {
    'one string': () => `"${chosen(makeResults(space - 2, 1), 0).replaceAll('"', ' ')}"`,
    'empty objects': () => listOf('{}'),
    numbers: () => listOf('3.14159265358979'),
    'small nested objects': () => listOf('{"a":{"b":[1,{"c":null}],"d":"text"}}'),
  }
  const body = Buffer.from(`${opening}${results[shape]()}}`, 'latin1')
  if (body.length !== bytes) throw new Error(`Made a body of ${body.length} bytes instead of ${bytes}`)
  return body
}

async function withConnections<T>(
  url: string,
  count: number,
  work: (connections: Connection[]) => Promise<T>,
): Promise<T> {
  const connections = await Promise.all(Array.from({ length: count }, () => openConnection(url)))
  try {
    return await work(connections)
  } finally {
    for (const connection of connections) connection.close()
  }
}

async function post(connection: Connection, path: string, body: string | Buffer): Promise<number> {
  const reply = await connection.send('POST', path, body)
  expectSuccess(reply)
  return reply.milliseconds
}

function expectSuccess(reply: { status: number; body: string }): void {
  if (reply.status < 200 || reply.status > 299) throw new Error(`Answer ${reply.status}: ${reply.body.slice(0, 300)}`)
}

function recordPath(jobId: string): string {
  return `/jobs/${jobId}/inline-checkpoint`
}

/** What the SDKs send: key, result, start and duration. */
function stepBody(step: number, result: string): string {
  return `{"key":"step-${step}","result":${result},"started_at":"2026-01-02T03:04:05.678Z","duration_ms":${step % 900}}`
}

function chosen(results: string[], index: number): string {
  return results[index % results.length] ?? 'null'
}
