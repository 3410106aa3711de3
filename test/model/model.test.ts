import assert from 'node:assert/strict'
import test from 'node:test'
import fc from 'fast-check'
import type postgres from 'postgres'
import { assertProblem, json, newJobId, openSql, readCheckpoint, request, type Service, startApp } from '../support.ts'
import { anyChoice, type Choice, JOB_COUNT, KEYS } from './actions.ts'
import { send } from './requests.ts'
import {
  type Action,
  apply,
  emptyWorld,
  findResult,
  mappedChildren,
  SERVER_TIME,
  type Shown,
  show,
  type World,
} from './rules.ts'

/** Seconds that sequences are tried and, once one fails, made smaller: CAIRN_MODEL_SECONDS=3600 npm test -- test/model */
const SECONDS = Number(process.env.CAIRN_MODEL_SECONDS ?? 20)
const RUNS = process.env.CAIRN_MODEL_SECONDS === undefined ? 300 : Number.MAX_SAFE_INTEGER
const MAX_COMMANDS = 40
/** What a failure prints as seed, path and replayPath brings it back: CAIRN_MODEL_REPLAY='seed path replayPath'. */
const [SEED, PATH, REPLAY_PATH] = process.env.CAIRN_MODEL_REPLAY?.split(' ') ?? []

const JOBS = Array.from({ length: JOB_COUNT }, (_, job) => job)
const TIME_BY_SERVER = /^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z$/
const DOCUMENT_MEMBERS = ['scheduled_for', 'started_at', 'name', 'duration_ms'] as const

interface Seen {
  version: string
  checkpoint: string
  timeline: string
}

/** The service and the model side by side. */
interface Run {
  service: Service
  sql: postgres.Sql
  world: World
  ids: string[]
  seen: Seen[]
  /** Every version that a job had: none may come back. */
  versions: Set<string>[]
  /** What the model showed after the command before. */
  shown: Shown[]
  last: { action: Action; done: boolean } | undefined
  steps: number
}

test('whatever clients send, in any order, the service does what the rules say', async (t) => {
  const service = await startApp(t)
  const sql = openSql(t, service.databaseUrl)
  const commands = fc.commands([anyChoice.map(asCommand)], {
    size: 'max',
    maxCommands: MAX_COMMANDS,
    ...(REPLAY_PATH !== undefined && { replayPath: REPLAY_PATH }),
  })
  let sequences = 0
  let steps = 0
  await fc.assert(
    fc.asyncProperty(commands, async (sequence) => {
      const run = openRun(service, sql)
      await fc.asyncModelRun(() => ({ model: run.world, real: run }), sequence)
      for (const job of JOBS) await compareByKey(run, job)
      await compareDocuments(run)
      sequences += 1
      steps += run.steps
    }),
    {
      numRuns: RUNS,
      interruptAfterTimeLimit: SECONDS * 1000,
      includeErrorInReport: true,
      ...(SEED !== undefined && { seed: Number(SEED) }),
      ...(PATH !== undefined && { path: PATH }),
    },
  )
  t.diagnostic(`${sequences} sequences, ${steps} commands`)
})

function asCommand(choice: Choice): fc.AsyncCommand<World, Run> {
  return {
    check: () => true,
    run: (_, run) => perform(run, choice),
    toString: () => JSON.stringify(choice),
  }
}

function openRun(service: Service, sql: postgres.Sql): Run {
  const world = emptyWorld()
  const ids = JOBS.map(newJobId)
  return {
    service,
    sql,
    world,
    ids,
    seen: JOBS.map(() => ({ version: '0', checkpoint: '', timeline: '{"entries":[],"next":null}' })),
    versions: JOBS.map(() => new Set(['0'])),
    shown: JOBS.map((job) => show(world, job, (other) => ids[other] as string)),
    last: undefined,
    steps: 0,
  }
}

/** The action itself: which children are mapped is known only now. */
function resolve(run: Run, choice: Choice): Action | undefined {
  if (choice === 'again') return run.last?.action
  const { mapped, ...action } = choice
  const candidates = mappedChildren(run.world)
  const chosen = typeof mapped === 'number' ? candidates[mapped % candidates.length] : undefined
  return { ...action, ...chosen }
}

async function perform(run: Run, choice: Choice): Promise<void> {
  const action = resolve(run, choice)
  if (!action) return
  run.steps += 1
  const mustStay = choice === 'again' && run.last?.done && action.kind !== 'put'
  const reply = await send(run.service, action, {
    idOf: (job) => run.ids[job] as string,
    versionOf: (job) => run.seen[job]?.version as string,
  })
  const before = JOBS.map((job) => run.shown[job]?.changes)
  const expected = apply(run.world, action)
  const answered = `${JSON.stringify(action)} was answered ${reply.status} ${reply.text}`
  if ('problem' in expected) {
    assert.equal(reply.status, expected.status, answered)
    assertProblem(reply, expected.problem)
  } else {
    assert.equal(reply.status, expected.status, answered)
    const told = reply.status === 204 ? {} : json(reply)
    for (const [member, value] of Object.entries(expected.told ?? {})) assert.deepEqual(told[member], value, member)
    for (const piece of expected.verbatim ?? []) assert.ok(reply.text.includes(piece), `${reply.text} lacks ${piece}`)
  }
  for (const job of JOBS) run.shown[job] = show(run.world, job, (other) => run.ids[other] as string)
  // The model itself must keep the promise that a repeat changes nothing.
  if (mustStay)
    assert.deepEqual(
      JOBS.map((job) => run.shown[job]?.changes),
      before,
    )
  await Promise.all(JOBS.map((job) => compare(run, job, before[job] as number)))
  if (!('problem' in expected) && expected.status !== 204) {
    assert.equal(json(reply).version, run.seen[action.job]?.version, 'the version that the answer told')
    assert.equal(json(reply).job_id, run.ids[action.job])
  }
  run.last = { action, done: !('problem' in expected) }
}

/** The job as clients read it against the job as the model has it. `changesBefore` is the model's count before. */
async function compare(run: Run, job: number, changesBefore: number): Promise<void> {
  const id = run.ids[job] as string
  const shown = run.shown[job] as Shown
  const before = run.seen[job] as Seen
  const changed = shown.changes !== changesBefore
  const checkpoint = await readCheckpoint(run.service, id)
  assert.equal(checkpoint.status, 200, checkpoint.text)
  const version = String(checkpoint.headers.etag).slice(1, -1)
  const ending = `"completed_steps":{${shown.completedSteps}}`
  assert.ok(checkpoint.text.includes(ending), `${job}: ${checkpoint.text}\nlacks ${ending}`)
  const { completed_steps, ...rest } = json(checkpoint)
  assert.deepEqual(rest, shown.rest)

  const moved = version !== before.version
  if (changed || (checkpoint.text !== before.checkpoint && before.checkpoint !== '')) {
    assert.ok(moved, `${job}: the version ${version} stayed although the checkpoint changed`)
  } else if (run.world.jobs.get(job)?.origin === null) {
    assert.ok(!moved, `${job}: the version moved from ${before.version} to ${version} although nothing changed`)
  }
  assert.equal(version === '0', shown.job === undefined)
  if (moved && version !== '0') {
    assert.ok(!run.versions[job]?.has(version), `${job}: the version ${version} came back`)
    run.versions[job]?.add(version)
  }

  let { timeline } = before
  if (moved || changed) {
    timeline = (await request(run.service, `GET /jobs/${id}/timeline`)).text
    compareTimeline(JSON.parse(timeline).entries, shown)
    await compareSummary(run, job, version)
  }
  run.seen[job] = { version, checkpoint: checkpoint.text, timeline }
}

function compareTimeline(entries: Record<string, unknown>[], shown: Shown): void {
  let previous = 0
  const told = entries.map(({ position, ...entry }) => {
    assert.ok((position as number) > previous, 'positions ascend')
    previous = position as number
    return entry
  })
  assert.deepEqual(withServerTimes(told, shown.timeline), shown.timeline)
}

/** Where the model only knows that the service gave a time, such a time counts as equal. */
function withServerTimes(told: Record<string, unknown>[], expected: Record<string, unknown>[]) {
  return told.map((entry, index) => {
    const members = Object.entries(entry).map(([name, value]) => {
      const byServer = expected[index]?.[name] === SERVER_TIME && TIME_BY_SERVER.test(String(value))
      return [name, byServer ? SERVER_TIME : value]
    })
    return Object.fromEntries(members)
  })
}

async function compareSummary(run: Run, job: number, version: string): Promise<void> {
  const { job: expected } = run.shown[job] as Shown
  const reply = await request(run.service, `GET /jobs/${run.ids[job]}`)
  if (!expected) return assertProblem(reply, 'job_not_found')
  const { created_at, updated_at, finished_at, ...summary } = json(reply)
  assert.deepEqual(summary, { ...expected, version })
  assert.match(created_at, TIME_BY_SERVER)
  assert.match(updated_at, TIME_BY_SERVER)
  if (expected.status === 'open') assert.equal(finished_at, null)
  else assert.match(finished_at, TIME_BY_SERVER)
  const { end } = run.world.jobs.get(job) ?? {}
  if (end) assert.ok(reply.text.endsWith(`,"result":${end.result}}`), reply.text)
}

/** Results read by key: the same as in the whole checkpoint, of a child too. And nothing moved behind our back. */
async function compareByKey(run: Run, job: number): Promise<void> {
  const path = `/jobs/${run.ids[job]}`
  const expected = KEYS.flatMap((key) => {
    const result = findResult(run.world, job, key)
    return result === undefined ? [] : [`{"key":${JSON.stringify(key)},"result":${result}}`]
  })
  const query = KEYS.map((key) => `key=${encodeURIComponent(key)}`).join('&')
  assert.equal((await request(run.service, `GET ${path}/steps?${query}`)).text, `{"steps":[${expected.join(',')}]}`)
  assert.equal((await request(run.service, `GET ${path}/timeline`)).text, run.seen[job]?.timeline)
}

/** The view for SQL readers: the checkpoint and the timeline in the form that Windmill keeps, extra members included. */
async function compareDocuments(run: Run): Promise<void> {
  const rows = await run.sql<{ id: string; document: string }[]>`
    select id, workflow_as_code_status::text as document from cairn.v2_job_status where id in ${run.sql(run.ids)}`
  assert.equal(rows.length, run.world.jobs.size)
  for (const { id, document } of rows) {
    const job = run.ids.indexOf(id)
    const { _checkpoint, ...entries } = JSON.parse(document)
    assert.deepEqual(_checkpoint, JSON.parse(run.seen[job]?.checkpoint as string))
    const { extras } = run.shown[job] as Shown
    const expected = JSON.parse(run.seen[job]?.timeline as string).entries.map((entry: Record<string, unknown>) => {
      const name = entry.kind === 'step' ? `_step/${entry.key}` : String(entry.child_job_id)
      const members = DOCUMENT_MEMBERS.flatMap((member) => (member in entry ? [[member, entry[member]]] : []))
      return [name, { ...Object.fromEntries(members), ...(extras[name] as object | undefined) }]
    })
    assert.deepEqual(entries, Object.fromEntries(expected))
  }
}
