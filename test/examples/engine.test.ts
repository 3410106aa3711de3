import assert from 'node:assert/strict'
import { type ChildProcess, spawn } from 'node:child_process'
import { createHash, randomUUID } from 'node:crypto'
import { once } from 'node:events'
import { existsSync, mkdtempSync, readFileSync, rmSync } from 'node:fs'
import os from 'node:os'
import path from 'node:path'
import { type TestContext, test } from 'node:test'
import { setTimeout as wait } from 'node:timers/promises'
import { fileURLToPath } from 'node:url'
import { createDatabase } from '../postgres.ts'
import { type ServiceProcess, startService } from '../service-process.ts'

const ENGINE = fileURLToPath(new URL('../../examples/engine/engine.ts', import.meta.url))
const SEED = Number(process.env.ENGINE_SEED ?? 1)
const ARGS = { photos: ['sea', 'hill'] }
/** What a body writes when it runs, by the key of its step. */
const BODIES: Record<string, string> = {
  'open album': 'open album',
  print: 'print sea',
  print_2: 'print hill',
  paintCover: 'paint cover of sea',
  publish: 'publish',
}
const CHILD_KEYS = ['paintCover', 'print', 'print_2', 'publish']
/** Of a whole run: 5 bodies, 6 results, 6 timeline entries, each of them started. */
const WHOLE_PROGRESS = 23
const PATIENCE_MS = 60_000

/** One job, and the engines that are at it, one after another. */
interface Trial {
  url: string
  jobId: string
  folder: string
  engines: Engine[]
}

interface Engine {
  process: ChildProcess
  /** Its children write here as well. */
  file: string
  output: string
  /** What the job had recorded when the engine was killed. */
  recorded: string[]
  exited: Promise<unknown>
  /** The engine and all its children are gone. */
  closed: Promise<unknown>
}

test('the example engine', async (t) => {
  const { url: databaseUrl } = await createDatabase(t)
  let service = await startService(t, { databaseUrl })

  await t.test('runs a workflow to its end, each body once', async (t) => {
    const trial = startTrial(t, service)
    await runToEnd(startEngine(trial))
    await checkEnd(trial)
    assert.deepEqual(readBodies(trial).sort(), Object.values(BODIES).sort())
    assert.equal(await measureProgress(trial), WHOLE_PROGRESS)

    const { entries } = await get(trial, '/timeline')
    const named = Object.fromEntries(entries.map((entry: { name: string }) => [entry.name, entry]))
    assert.deepEqual(Object.keys(named).sort(), [...CHILD_KEYS, 'open album', 'sleep'].sort())
    for (const key of CHILD_KEYS) {
      assert.equal(named[key].kind, 'child')
      assert.equal(named[key].status, key === 'paintCover' ? 'failed' : 'completed')
      assert.ok(named[key].duration_ms >= 100, `${key} took ${named[key].duration_ms} ms`)
    }
    assert.equal(named.sleep.duration_ms, 1000)
    const slept = Date.parse(named.publish.scheduled_for) - Date.parse(named.sleep.scheduled_for)
    assert.ok(slept >= 1000, `publish was dispatched ${slept} ms after the sleep`)
  })

  await t.test('killed with its children, it does not repeat what is recorded, nor begin a sleep anew', async (t) => {
    const trial = startTrial(t, service)
    const [first, second] = choosePoints(SEED)
    await runAndKill(trial, { when: () => hasProgress(trial, first), children: true })
    await runAndKill(trial, { when: () => hasProgress(trial, second), children: true })
    const begun = await runAndKill(trial, { when: () => findSleep(trial), children: true })
    await runToEnd(startEngine(trial))
    await checkEnd(trial)
    assert.equal((await findSleep(trial))?.scheduled_for, begun?.scheduled_for, 'it slept anew')
  })

  await t.test(
    'killed without its children, it does not repeat what is recorded, nor do they disturb it',
    async (t) => {
      const trial = startTrial(t, service)
      const twin = await startTwin(trial)
      const [, point] = choosePoints(SEED + 1)
      await runAndKill(trial, { when: () => hasProgress(trial, point), children: false })
      await runToEnd(startEngine(trial))
      await checkEnd(trial)

      const before = await readEverything(trial)
      twin.resume()
      await twin.engine.closed
      assert.deepEqual(await readEverything(trial), before)
    },
  )

  await t.test('goes on where it was when Cairn itself is killed, each body once', async (t) => {
    const trial = startTrial(t, service)
    const engine = startEngine(trial)
    const [point] = choosePoints(SEED + 2)
    await until(() => hasProgress(trial, point), engine)
    service.kill('SIGKILL')
    await service.exited
    service = await startService(t, { databaseUrl, port: service.port })
    await runToEnd(engine)
    await checkEnd(trial)
    assert.deepEqual(readBodies(trial).sort(), Object.values(BODIES).sort())
  })
})

function startTrial(t: TestContext, service: ServiceProcess): Trial {
  const folder = mkdtempSync(path.join(os.tmpdir(), 'cairn-engine-'))
  const trial: Trial = { url: service.url, jobId: randomUUID(), folder, engines: [] }
  t.after(async () => {
    for (const engine of trial.engines) killAll(engine)
    await Promise.all(trial.engines.map(({ closed }) => closed))
    rmSync(folder, { recursive: true })
  })
  return trial
}

/** The first engine of a trial is told its job; a later one finds what is open. */
function startEngine(trial: Trial, { workMs = 100 } = {}): Engine {
  const file = path.join(trial.folder, String(trial.engines.length))
  const args = trial.engines.length === 0 ? [trial.jobId, JSON.stringify(ARGS)] : []
  const env = { ...process.env, CAIRN_URL: trial.url, EXECUTIONS_FILE: file, WORK_MS: String(workMs) }
  const child = spawn(process.execPath, ['--import', 'tsx', ENGINE, ...args], {
    env,
    // Of a process group of its own, which a kill can take as a whole.
    detached: true,
    stdio: ['ignore', 'pipe', 'pipe'],
  })
  // The children hold the pipes as well: they close when the last one is gone.
  const [exited, closed] = [once(child, 'exit'), once(child, 'close')]
  const engine: Engine = { process: child, file, output: '', recorded: [], exited, closed }
  for (const stream of [child.stdout, child.stderr]) {
    stream.setEncoding('utf8').on('data', (text) => {
      engine.output += text
    })
  }
  trial.engines.push(engine)
  return engine
}

async function runToEnd(engine: Engine): Promise<void> {
  await until(() => engine.process.exitCode !== null, engine)
  assert.equal(engine.process.exitCode, 0, engine.output)
}

/** Kills an engine, with its children or without, once `when` gives something; gives that back. */
async function runAndKill<T>(trial: Trial, options: { when: () => Promise<T>; children: boolean }): Promise<T> {
  const engine = startEngine(trial)
  const seen = await until(options.when, engine)
  await kill(trial, engine, options.children)
  return seen
}

async function kill(trial: Trial, engine: Engine, withChildren: boolean): Promise<void> {
  if (withChildren) killAll(engine)
  else engine.process.kill('SIGKILL')
  await (withChildren ? engine.closed : engine.exited)
  engine.recorded = Object.keys((await get(trial, '/checkpoint')).completed_steps)
}

function killAll(engine: Engine): void {
  try {
    process.kill(-(engine.process.pid as number), 'SIGKILL')
  } catch (error) {
    // None of the group is left.
    if ((error as NodeJS.ErrnoException).code !== 'ESRCH') throw error
  }
}

/** An engine is killed and leaves a child that stands still in the middle of its task, until it is told to go on. */
async function startTwin(trial: Trial): Promise<{ engine: Engine; resume(): void }> {
  const engine = startEngine(trial, { workMs: 2000 })
  const find = async () => readLines(engine).find(({ detail }) => detail === BODIES.print)
  const { pid } = (await until(find, engine)) as { pid: number }
  process.kill(pid, 'SIGSTOP')
  await kill(trial, engine, false)
  assert.ok(!engine.recorded.includes('print'), 'the task was over before it was stopped')
  return { engine, resume: () => process.kill(pid, 'SIGCONT') }
}

/** Two points of a run at which to kill, ascending, the same for the same seed. */
function choosePoints(seed: number): [number, number] {
  const random = createHash('sha256').update(String(seed)).digest()
  const points = [0, 4].map((offset) => 1 + (random.readUInt32BE(offset) % (WHOLE_PROGRESS - 1)))
  const [first = 1, second = 1] = points.sort((a, b) => a - b)
  console.log(`# Seed ${seed}: progress ${first} and ${second} of ${WHOLE_PROGRESS}`)
  return [first, second]
}

/** How far a job is: bodies that began, results, timeline entries, and those of them that started. */
async function measureProgress(trial: Trial): Promise<number> {
  const { completed_steps } = await get(trial, '/checkpoint')
  const { entries } = await get(trial, '/timeline')
  const started = entries.filter((entry: { started_at?: string }) => entry.started_at !== undefined)
  return new Set(readBodies(trial)).size + Object.keys(completed_steps).length + entries.length + started.length
}

async function hasProgress(trial: Trial, point: number): Promise<boolean> {
  return (await measureProgress(trial)) >= point
}

async function findSleep(trial: Trial): Promise<{ scheduled_for: string } | undefined> {
  const { entries } = await get(trial, '/timeline')
  return entries.find(({ name }: { name: string }) => name === 'sleep')
}

async function readEverything(trial: Trial): Promise<unknown[]> {
  return Promise.all(['', '/checkpoint', '/timeline'].map((place) => get(trial, place)))
}

/** The result is right, the failure is always the same one, and nothing that was recorded at a kill ran later. */
async function checkEnd(trial: Trial): Promise<void> {
  const { completed_steps: steps, ...checkpoint } = await get(trial, '/checkpoint')
  assert.deepEqual(Object.keys(steps).sort(), [...Object.keys(BODIES), 'sleep'].sort())
  assert.equal(checkpoint.pending_steps, undefined)
  assert.deepEqual(checkpoint.input_args, ARGS)

  const prints = [steps.print, steps.print_2]
  assert.deepEqual(
    prints.map(({ photo }) => photo),
    ARGS.photos,
  )
  const message = 'sea is too small for a cover'
  const expected = { album: steps['open album'].number, prints, cover: { plain: message } }
  assert.deepEqual(steps.publish, expected)
  const { status, result } = await get(trial, '')
  assert.deepEqual({ status, result }, { status: 'completed', result: expected })

  assert.equal(steps.paintCover.result.error.name, 'RangeError')
  const failure = { message, result: steps.paintCover.result, step_key: 'paintCover' }
  const caught = trial.engines.flatMap(readLines).filter(({ what }) => what === 'caught')
  assert.ok(caught.length >= 3, `The failure was seen ${caught.length} times`)
  for (const { detail } of caught) assert.deepEqual(JSON.parse(detail), failure)

  assert.deepEqual(Object.keys(checkpoint.job_ids).sort(), CHILD_KEYS)
  for (const [key, childId] of Object.entries(checkpoint.job_ids)) {
    const child = await get({ ...trial, jobId: childId as string }, '')
    assert.equal(child.status, key === 'paintCover' ? 'failed' : 'completed')
    assert.deepEqual(child.result.result ?? child.result, steps[key].result ?? steps[key])
  }
  const open = await fetch(`${trial.url}/jobs?status=open`)
  assert.deepEqual(((await open.json()) as { jobs: unknown[] }).jobs, [])

  for (const [index, { recorded }] of trial.engines.entries()) {
    const later = trial.engines.slice(index + 1).flatMap(readLines)
    const repeated = recorded.filter((key) =>
      later.some(({ what, detail }) => what === 'ran' && detail === BODIES[key]),
    )
    assert.deepEqual(repeated, [], `recorded before kill ${index}, and run again`)
  }
}

function readBodies(trial: Trial): string[] {
  return trial.engines
    .flatMap(readLines)
    .filter(({ what }) => what === 'ran')
    .map(({ detail }) => detail)
}

function readLines({ file }: Engine): { what: string; pid: number; detail: string }[] {
  if (!existsSync(file)) return []
  const lines = readFileSync(file, 'utf8').split('\n').slice(0, -1)
  return lines.map((line) => {
    const [what = '', pid, detail = ''] = line.split('\t')
    return { what, pid: Number(pid), detail }
  })
}

// biome-ignore lint/suspicious/noExplicitAny: what the answers hold is what is tested
async function get({ url, jobId }: Trial, place: string): Promise<Record<string, any>> {
  const response = await fetch(`${url}/jobs/${jobId}${place}`)
  assert.equal(response.status, 200, `${place} of job ${jobId}`)
  return (await response.json()) as Record<string, unknown>
}

/** Looks again and again until there is something to see, or the engine ends. */
async function until<T>(look: () => T | Promise<T>, engine: Engine): Promise<T> {
  for (const deadline = Date.now() + PATIENCE_MS; ; ) {
    const seen = await look()
    if (seen || engine.process.exitCode !== null) return seen
    if (Date.now() > deadline) throw new Error(`Nothing to see within ${PATIENCE_MS} ms:\n${engine.output}`)
    await wait(50)
  }
}
