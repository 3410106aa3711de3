import { verdict } from './comparison.ts'
import type { DatabaseServer } from './databases.ts'
import { type LoadFigures, markdownTable, short } from './figures.ts'
import type { BodyShape } from './load-generator.ts'
import { type LoadGenerator, startLoadGenerator, startServer } from './processes.ts'

const BODY_BYTES = 32 * 1024 * 1024
const DELAY_TO_STAY_UNDER_MS = 200
const SHAPES: BodyShape[] = ['one string', 'empty objects', 'numbers', 'small nested objects']

interface Outcome {
  shape: string
  bodies: number
  secondsPerBody: number
  post: LoadFigures
  livez: LoadFigures
}

/**
 * How long small requests wait while another client posts bodies of 32 MiB, the largest that the service takes: a small
 * POST and a GET /livez are due every few milliseconds, first alone and then beside the bodies of each shape. The delay is
 * the slowest small request beside the bodies less the median small request alone.
 */
export async function measureBigBodies(
  databases: DatabaseServer,
  generator: LoadGenerator,
  options: { seconds: number },
): Promise<{ markdown: string; data: unknown }> {
  const databaseUrl = await databases.createDatabase('big_body')
  const server = await startServer('src/main.ts', { databaseUrl })
  const bodyPoster = startLoadGenerator()
  try {
    const { url } = server
    await generator.run('jobs', { url, clients: 16, stepsPerJob: 20, resultBytes: 200, seconds: 2 })
    const steady = (seconds: number) => generator.run('steady', { url, everyMs: 10, seconds })
    await steady(1)
    const outcomes: Outcome[] = [{ shape: 'none', bodies: 0, secondsPerBody: 0, ...(await steady(options.seconds)) }]
    for (const shape of SHAPES) {
      await databases.settle({})
      const bodies = bodyPoster.run('bigBodies', { url, shape, bodyBytes: BODY_BYTES, seconds: options.seconds })
      // The poster first makes the body; the small requests go on long enough to meet several bodies whatever that takes.
      const [small, big] = await Promise.all([steady(options.seconds + 2), bodies])
      outcomes.push({ shape, bodies: big.requests, secondsPerBody: big.p50 / 1000, ...small })
    }
    return report(outcomes)
  } finally {
    await bodyPoster.stop()
    await server.stop()
  }
}

function report(outcomes: Outcome[]): { markdown: string; data: unknown } {
  const alone = outcomes[0]
  if (alone === undefined) throw new Error('Nothing was measured')
  const rows = outcomes.map((outcome) => {
    const delay = Math.max(outcome.post.max - alone.post.p50, outcome.livez.max - alone.livez.p50)
    const pair = (figures: LoadFigures): string => `${short(figures.p99)} / ${short(figures.max)}`
    const met = outcome === alone ? '' : verdict(`under ${DELAY_TO_STAY_UNDER_MS}`, delay < DELAY_TO_STAY_UNDER_MS)
    const bodies = outcome === alone ? '' : `${outcome.bodies} of ${short(outcome.secondsPerBody)} s`
    return [
      outcome.shape,
      bodies,
      pair(outcome.post),
      pair(outcome.livez),
      outcome === alone ? '' : `**${short(delay)}**`,
      met,
    ]
  })
  const header = ['32 MiB bodies', 'Posted', 'POST p99 / max ms', '/livez p99 / max ms', 'Delay, ms', 'To reach']
  return { markdown: `## Small requests beside 32 MiB bodies\n\n${markdownTable(header, rows)}`, data: outcomes }
}
