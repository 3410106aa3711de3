/**
 * Measures Cairn on this machine, and beside it the upstream algorithm on the same Postgres; prints Markdown and keeps it,
 * with every round's figures, under bench/results/<time>.
 *
 *   --quick             one round, one seed pool, smaller checkpoints: does it run, not how fast is it
 *   --rounds=3          rounds; short workloads take three turns a round
 *   --only=a,b          some of: comparison, early-and-late, memory, big-body, engine, job-list
 *   --database-url=URL  a Postgres to use instead of an embedded one; the role must be a superuser or pg_checkpoint
 */
import { execFileSync } from 'node:child_process'
import { mkdir, mkdtemp, rm, writeFile } from 'node:fs/promises'
import { availableParallelism, cpus, loadavg } from 'node:os'
import { join } from 'node:path'
import { fileURLToPath } from 'node:url'
import { parseArgs } from 'node:util'
import { measureBigBodies } from './big-body.ts'
import { compareWithSeed, measureEarlyAndLate } from './comparison.ts'
import { connectDatabaseServer, type DatabaseServer } from './databases.ts'
import { measureEngine } from './engine.ts'
import { measureJobList } from './job-list.ts'
import { measureReaderMemory } from './memory.ts'
import { type LoadGenerator, startLoadGenerator } from './processes.ts'

const RESULTS = fileURLToPath(new URL('results', import.meta.url))
const SEED_POOLS = [4, 10, 20]

type Measurement = (databases: DatabaseServer, generator: LoadGenerator) => Promise<{ markdown: string; data: unknown }>

const { values: flags } = parseArgs({
  options: {
    quick: { type: 'boolean', default: false },
    rounds: { type: 'string' },
    only: { type: 'string' },
    'database-url': { type: 'string' },
  },
})
const { quick } = flags
const rounds = Number(flags.rounds ?? (quick ? 1 : 3))
if (!Number.isInteger(rounds) || rounds < 1) throw new Error(`--rounds must be a whole number from 1: ${flags.rounds}`)

const measurements: Record<string, Measurement> = {
  comparison: (databases, generator) =>
    compareWithSeed(databases, generator, { rounds, pools: quick ? [10] : SEED_POOLS }),
  'early-and-late': (databases, generator) =>
    measureEarlyAndLate(databases, generator, { longJobs: quick ? 1 : 3, longJobSteps: 10_000 }),
  memory: (databases, generator) => measureReaderMemory(databases, generator, { sizeScale: quick ? 0.2 : 1 }),
  'big-body': (databases, generator) => measureBigBodies(databases, generator, { seconds: quick ? 4 : 10 }),
  engine: (databases) =>
    measureEngine(databases, {
      jobPairs: quick ? 2 : 4,
      dispatchesPerJob: 10,
      checkpointRounds: quick ? 5 : 15,
      stepsRounds: quick ? 7 : 31,
    }),
  'job-list': (databases) => measureJobList(databases, { jobs: 100_000, requests: quick ? 50 : 300 }),
}
const chosen = flags.only?.split(',') ?? Object.keys(measurements)
const unknown = chosen.filter((name) => !Object.hasOwn(measurements, name))
if (unknown.length > 0)
  throw new Error(`--only knows ${Object.keys(measurements).join(', ')}, not ${unknown.join(', ')}`)

const startedAt = new Date()
// Whatever else runs on the machine is in every figure: at rest this is near zero.
const loadBefore = loadavg()[0] ?? Number.NaN
const toStop: (() => Promise<unknown>)[] = []

try {
  const adminUrl = flags['database-url'] ?? (await startScratchPostgres())
  const databases = await connectDatabaseServer(adminUrl)
  toStop.push(databases.stop)
  const generator = startLoadGenerator()
  toStop.push(generator.stop)
  // Without its generator the measurement fails at once, and everything is stopped in order on the way out.
  for (const signal of ['SIGINT', 'SIGTERM'] as const) process.once(signal, generator.stop)

  const sections = [describeMachine(databases)]
  const data: Record<string, unknown> = {}
  for (const name of chosen) {
    const measured = await measurements[name]?.(databases, generator)
    if (measured === undefined) continue
    console.log(`\n${measured.markdown}`)
    sections.push(measured.markdown)
    data[name] = measured.data
  }
  await keep(sections.join('\n\n'), { startedAt, loadBefore, rounds, quick, postgres: databases.settings, ...data })
} finally {
  await stopAll()
}

async function startScratchPostgres(): Promise<string> {
  const { startEmbeddedPostgres } = await import('../src/embedded-postgres.ts')
  // Beside the code and not in the temporary folder, which may be kept in memory: fsync would cost nothing there.
  const parent = fileURLToPath(new URL('.data', import.meta.url))
  await mkdir(parent, { recursive: true })
  const dataDir = await mkdtemp(join(parent, 'run-'))
  const server = await startEmbeddedPostgres({ dataDir, settings: { fsync: 'on', synchronous_commit: 'on' } })
  toStop.push(async () => {
    await server.stop()
    for (const dir of [dataDir, server.clusterDir]) await rm(dir, { recursive: true, force: true })
  })
  return server.url
}

async function stopAll(): Promise<void> {
  for (let stop = toStop.pop(); stop !== undefined; stop = toStop.pop())
    await stop().catch((error: unknown) => console.error('Could not clean up:', error))
}

function describeMachine(databases: DatabaseServer): string {
  const settings = Object.entries(databases.settings).map(([name, value]) => `${name} ${value}`)
  return [
    `# Benchmark of ${startedAt.toISOString().slice(0, 10)}${quick ? ' (quick: figures are not to be quoted)' : ''}`,
    '',
    `${availableParallelism()} x ${cpus()[0]?.model.trim() ?? 'unknown CPU'}, shared by load generator, server and Postgres; ` +
      `load average before the run ${loadBefore.toFixed(2)}. ` +
      `Node ${process.versions.node}, Postgres ${databases.version} (${settings.join(', ')}). ` +
      `Commit ${currentCommit()}. Medians of ${rounds} rounds.`,
  ].join('\n')
}

function currentCommit(): string {
  try {
    return execFileSync('git', ['rev-parse', '--short', 'HEAD'], {
      cwd: fileURLToPath(new URL('.', import.meta.url)),
      encoding: 'utf8',
      stdio: 'pipe',
    }).trim()
  } catch {
    return 'unknown'
  }
}

async function keep(markdown: string, data: unknown): Promise<void> {
  await mkdir(RESULTS, { recursive: true })
  const base = join(RESULTS, startedAt.toISOString().replaceAll(/[:.]/g, '-'))
  await writeFile(`${base}.md`, `${markdown}\n`)
  await writeFile(`${base}.json`, `${JSON.stringify(data, null, 2)}\n`)
  console.log(`\nKept as ${base}.md and .json`)
}
