import { randomUUID } from 'node:crypto'
import { readFileSync } from 'node:fs'
import { verdict } from './comparison.ts'
import type { DatabaseServer } from './databases.ts'
import { markdownTable, short } from './figures.ts'
import { type LoadGenerator, startServer } from './processes.ts'

const READERS = 10
const GROWTH_TO_STAY_UNDER_MB = 128
const SAMPLE_EVERY_MS = 10

interface Checkpoint {
  resultName: string
  steps: number
  resultBytes: number
  writers: number
}

const CHECKPOINTS: Checkpoint[] = [
  { resultName: '1 KB', steps: 100_000, resultBytes: 1000, writers: 64 },
  { resultName: '1 MB', steps: 100, resultBytes: 1_000_000, writers: 2 },
]

/**
 * How much the service's resident memory grows while ten readers read one checkpoint of 100 MB at once, at full speed.
 * Each checkpoint is read from a service started afresh after it was filled: memory that the filling left behind would
 * hide growth. The baseline is taken after a light load of writes and reads, once resident memory has come to rest.
 */
export async function measureReaderMemory(
  databases: DatabaseServer,
  generator: LoadGenerator,
  options: { sizeScale: number },
): Promise<{ markdown: string; data: unknown }> {
  const outcomes = []
  for (const checkpoint of CHECKPOINTS) {
    const steps = Math.max(1, Math.round(checkpoint.steps * options.sizeScale))
    outcomes.push(await measureCheckpoint(databases, generator, { ...checkpoint, steps }))
  }
  const rows = outcomes.map((outcome) => [
    outcome.name,
    short(outcome.megabytesEach),
    short(outcome.seconds),
    short(outcome.baselineMb),
    short(outcome.peakMb),
    `**${short(outcome.growthMb)}**`,
    verdict(`under ${GROWTH_TO_STAY_UNDER_MB}`, outcome.growthMb < GROWTH_TO_STAY_UNDER_MB),
  ])
  const header = ['Checkpoint', 'MB each', 'Seconds', 'RSS before, MB', 'Peak, MB', 'Growth, MB', 'To reach']
  const markdown = `## Ten readers of one checkpoint at once\n\n${markdownTable(header, rows)}`
  return { markdown, data: outcomes }
}

async function measureCheckpoint(databases: DatabaseServer, generator: LoadGenerator, checkpoint: Checkpoint) {
  const databaseUrl = await databases.createDatabase(`memory_${checkpoint.steps}_${checkpoint.resultBytes}`)
  const jobId = randomUUID()
  const { steps, resultBytes, writers } = checkpoint
  const name = `${steps.toLocaleString('en-US')} results of ${checkpoint.resultName}`

  const filler = await startServer('src/main.ts', { databaseUrl })
  try {
    await generator.run('fill', { url: filler.url, jobId, clients: writers, steps, resultBytes })
  } finally {
    await filler.stop()
  }
  await databases.settle({})

  const server = await startServer('src/main.ts', { databaseUrl })
  try {
    await warmUp(generator, server.url)
    const baselineMb = await restingMemory(server.pid)
    const sampler = sampleMemory(server.pid)
    const { seconds, bytesEach } = await generator.run('read', { url: server.url, jobId, readers: READERS })
    const peakMb = sampler.stop()
    const counted = await generator.run('count', { url: server.url, jobId })
    if (counted !== steps) throw new Error(`The checkpoint of ${name} has ${counted} steps instead of ${steps}`)
    if (bytesEach < steps * resultBytes) throw new Error(`The checkpoint of ${name} came as ${bytesEach} bytes`)
    return { name, megabytesEach: bytesEach / 1e6, seconds, baselineMb, peakMb, growthMb: peakMb - baselineMb }
  } finally {
    await server.stop()
  }
}

async function warmUp(generator: LoadGenerator, url: string): Promise<void> {
  await generator.run('jobs', { url, clients: 64, stepsPerJob: 20, resultBytes: 1000, seconds: 3 })
  const jobId = randomUUID()
  await generator.run('fill', { url, jobId, clients: 1, steps: 100, resultBytes: 1000 })
  for (let round = 0; round < 20; round++) await generator.run('read', { url, jobId, readers: READERS })
}

const RESTING_CHANGE_MB = 1
const RESTING_FOR_SAMPLES = 4
const RESTING_SAMPLES_AT_MOST = 40

async function restingMemory(pid: number): Promise<number> {
  let last = residentMb(pid)
  let resting = 0
  for (let sample = 0; sample < RESTING_SAMPLES_AT_MOST && resting < RESTING_FOR_SAMPLES; sample++) {
    await new Promise((resolve) => setTimeout(resolve, 500))
    const now = residentMb(pid)
    resting = Math.abs(now - last) < RESTING_CHANGE_MB ? resting + 1 : 0
    last = now
  }
  return last
}

function sampleMemory(pid: number): { stop(): number } {
  let peak = residentMb(pid)
  const timer = setInterval(() => {
    peak = Math.max(peak, residentMb(pid))
  }, SAMPLE_EVERY_MS)
  return {
    stop: () => {
      clearInterval(timer)
      return Math.max(peak, residentMb(pid))
    },
  }
}

/** Linux's VmRSS, in MB of 1,048,576 bytes. */
function residentMb(pid: number): number {
  const kilobytes = /^VmRSS:\s+(\d+) kB$/m.exec(readFileSync(`/proc/${pid}/status`, 'utf8'))?.[1]
  if (kilobytes === undefined) throw new Error(`No VmRSS for process ${pid}`)
  return Number(kilobytes) / 1024
}
