import type { DatabaseServer } from './databases.ts'
import { type LoadFigures, markdownTable, medianOfRounds, short } from './figures.ts'
import { type LoadGenerator, type ServerProcess, startServer } from './processes.ts'

interface Workload {
  name: string
  clients: number
  stepsPerJob: number
  resultBytes: number
  seconds: number
  /** How often a contender has its turn in one round. */
  turns: number
  /** What the ratio is made of: requests per second, or the total time of the one job. */
  compares: 'rate' | 'total'
  ratioToReach: number
}

// Short jobs repeat until the seconds are over; only whole jobs count, since the seed's later steps cost more. Many short
// turns, not few long ones: on a shared machine a turn's figure can be off by half, and its neighbour's by as much.
const WORKLOADS: Workload[] = [
  {
    name: '64 clients x 20 steps of 200 B',
    clients: 64,
    stepsPerJob: 20,
    resultBytes: 200,
    seconds: 1.5,
    turns: 3,
    compares: 'rate',
    ratioToReach: 6,
  },
  {
    name: '64 clients x 100 steps of 1 KB',
    clients: 64,
    stepsPerJob: 100,
    resultBytes: 1000,
    seconds: 1.5,
    turns: 1,
    compares: 'rate',
    ratioToReach: 14,
  },
  {
    name: 'one client x 1,000 steps of 1 KB',
    clients: 1,
    stepsPerJob: 1000,
    resultBytes: 1000,
    seconds: 0,
    turns: 1,
    compares: 'total',
    ratioToReach: 50,
  },
  {
    name: 'one client x 1 step of 200 B',
    clients: 1,
    stepsPerJob: 1,
    resultBytes: 200,
    seconds: 1,
    turns: 3,
    compares: 'rate',
    ratioToReach: 1.8,
  },
]

const P99_TO_STAY_UNDER_MS = 25
const LATE_TO_EARLY_TO_STAY_WITHIN = 1.3

export interface ComparisonOptions {
  rounds: number
  pools: number[]
}

interface Contender {
  name: string
  pool?: number
  server: ServerProcess
  databaseUrl: string
}

interface WorkloadOutcome {
  workload: Workload
  seed: LoadFigures
  seedPool: number
  cairn: LoadFigures
  ratio: number
  rounds: Record<string, LoadFigures[]>
}

export interface ComparisonReport {
  markdown: string
  data: unknown
}

/**
 * Cairn against the seed with each pool size: turns alternate between the contenders, in reverse order every other
 * time, so that drift of the machine hurts all alike. Figures are medians of the turns; the ratio is taken against the
 * pool that did best at that workload. Cairn keeps the rows of earlier rounds, the seed's table is emptied.
 */
export async function compareWithSeed(
  databases: DatabaseServer,
  generator: LoadGenerator,
  options: ComparisonOptions,
): Promise<ComparisonReport> {
  const contenders: Contender[] = []
  try {
    const databaseUrl = await databases.createDatabase('cairn')
    contenders.push({ name: 'cairn', databaseUrl, server: await startServer('src/main.ts', { databaseUrl }) })
    for (const pool of options.pools) contenders.push(await startSeed(databases, pool))
    for (const { server } of contenders) await warmUp(generator, server.url)
    const seedUrl = contenders.at(-1)?.server.url ?? ''
    const ceiling = await measureCeiling(generator, seedUrl)
    const outcomes: WorkloadOutcome[] = []
    for (const workload of WORKLOADS)
      outcomes.push(await runWorkload(workload, { databases, generator, contenders, options }))
    return report(outcomes, ceiling)
  } finally {
    for (const { server } of contenders) await server.stop()
  }
}

async function startSeed(databases: DatabaseServer, pool: number): Promise<Contender> {
  const databaseUrl = await databases.createDatabase(`seed_${pool}`)
  const server = await startServer('bench/seed-server.ts', { args: [String(pool)], databaseUrl })
  return { name: `seed, pool ${pool}`, pool, server, databaseUrl }
}

/** Long enough for V8 to compile both sides' hot paths and for every pool to have opened its connections. */
async function warmUp(generator: LoadGenerator, url: string): Promise<void> {
  await generator.run('jobs', { url, clients: 64, stepsPerJob: 20, resultBytes: 200, seconds: 2 })
}

/** What this generator and this Fastify reach with 64 clients and no database: below it, the generator is no limit. */
async function measureCeiling(generator: LoadGenerator, url: string): Promise<LoadFigures> {
  const order = { url, route: 'ceiling', clients: 64, stepsPerJob: 20, resultBytes: 200 } as const
  await generator.run('jobs', { ...order, seconds: 2 })
  return generator.run('jobs', { ...order, seconds: 2 })
}

interface RunContext {
  databases: DatabaseServer
  generator: LoadGenerator
  contenders: Contender[]
  options: ComparisonOptions
}

async function runWorkload(workload: Workload, context: RunContext): Promise<WorkloadOutcome> {
  const { clients, stepsPerJob, resultBytes } = workload
  const seconds = workload.seconds
  const rounds: Record<string, LoadFigures[]> = {}
  for (let turn = 0; turn < context.options.rounds * workload.turns; turn++) {
    const order = turn % 2 === 0 ? context.contenders : context.contenders.toReversed()
    for (const contender of order) {
      const tables = contender.pool === undefined ? 'cairn.job, cairn.step, cairn.child' : 'v2_job_status'
      await context.databases.settle({ truncate: { url: contender.databaseUrl, tables } })
      const url = contender.server.url
      const figures = await context.generator.run('jobs', { url, clients, stepsPerJob, resultBytes, seconds })
      const line = `${workload.name}, turn ${turn + 1}, ${contender.name}: ${short(figures.requestsPerSecond)} requests/s`
      process.stderr.write(`${line}, p50 ${short(figures.p50)} ms, p99 ${short(figures.p99)} ms\n`)
      rounds[contender.name] = [...(rounds[contender.name] ?? []), figures]
    }
  }
  const seeds = context.contenders
    .filter((contender) => contender.pool !== undefined)
    .map((contender) => ({ pool: contender.pool ?? 0, figures: medianOfRounds(rounds[contender.name] ?? []) }))
    .toSorted((a, b) => b.figures.requestsPerSecond - a.figures.requestsPerSecond)
  const best = seeds[0]
  if (best === undefined) throw new Error('No seed was measured')
  const cairn = medianOfRounds(rounds.cairn ?? [])
  const ratio =
    workload.compares === 'rate'
      ? cairn.requestsPerSecond / best.figures.requestsPerSecond
      : best.figures.seconds / cairn.seconds
  return { workload, seed: best.figures, seedPool: best.pool, cairn, ratio, rounds }
}

function report(outcomes: WorkloadOutcome[], ceiling: LoadFigures): ComparisonReport {
  const figure = (outcome: WorkloadOutcome, side: LoadFigures): string =>
    outcome.workload.compares === 'rate' ? `${short(side.requestsPerSecond)}/s` : `${short(side.seconds)} s`
  const rows = outcomes.map((outcome) => [
    outcome.workload.name,
    `${figure(outcome, outcome.seed)} (pool ${outcome.seedPool})`,
    figure(outcome, outcome.cairn),
    `**${short(outcome.ratio)}x**`,
    verdict(`${outcome.workload.ratioToReach}x`, outcome.ratio >= outcome.workload.ratioToReach),
    `${short(outcome.seed.p50)} / ${short(outcome.seed.p99)}`,
    `${short(outcome.cairn.p50)} / ${short(outcome.cairn.p99)}`,
  ])
  const header = ['Work', 'Seed, best pool', 'Cairn', 'Ratio', 'To reach', 'Seed p50 / p99 ms', 'Cairn p50 / p99 ms']
  const p99 = Math.max(...outcomes.filter(({ workload }) => workload.clients === 64).map(({ cairn }) => cairn.p99))
  const lines = [
    '## Against the seed',
    '',
    markdownTable(header, rows),
    '',
    `Highest p99 at 64 clients: ${short(p99)} ms (${verdict(`under ${P99_TO_STAY_UNDER_MS} ms`, p99 < P99_TO_STAY_UNDER_MS)}).`,
    `Ceiling of the load generator with Fastify and no database: ${short(ceiling.requestsPerSecond)} requests/s.`,
  ]
  return { markdown: lines.join('\n'), data: { ceiling, outcomes } }
}

/** Whether step 10,000 costs what step 10 costs, on Cairn alone: the seed would take hours to get there. */
export async function measureEarlyAndLate(
  databases: DatabaseServer,
  generator: LoadGenerator,
  options: { longJobs: number; longJobSteps: number },
): Promise<ComparisonReport> {
  const databaseUrl = await databases.createDatabase('early_and_late')
  const server = await startServer('src/main.ts', { databaseUrl })
  try {
    await warmUp(generator, server.url)
    const figures = await generator.run('earlyAndLate', { url: server.url, resultBytes: 1000, ...options })
    const ratio = figures.lateMedian / figures.earlyMedian
    const limit = LATE_TO_EARLY_TO_STAY_WITHIN
    const lines = [
      `## Step ${short(options.longJobSteps)} against step 10`,
      '',
      `One client, results of 1 KB, medians of ${figures.samples} samples each: step 10 ${short(figures.earlyMedian)} ms, ` +
        `step ${short(options.longJobSteps)} ${short(figures.lateMedian)} ms, ratio **${short(ratio)}** ` +
        `(${verdict(`within ${limit}x`, ratio <= limit)}).`,
    ]
    return { markdown: lines.join('\n'), data: { ...figures, ratio } }
  } finally {
    await server.stop()
  }
}

export function verdict(target: string, reached: boolean): string {
  return `${target}: ${reached ? 'yes' : '**no**'}`
}
