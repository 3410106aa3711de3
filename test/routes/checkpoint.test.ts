import assert from 'node:assert/strict'
import http from 'node:http'
import test, { after, type TestContext } from 'node:test'
import {
  json,
  newJobId,
  openScope,
  openSql,
  readCheckpoint,
  record,
  recorded,
  type Service,
  startApp,
} from '../support.ts'

const scope = openScope()
after(() => scope.close())
let shared: Promise<Service> | undefined

function start(): Promise<Service> {
  shared ??= startApp(scope)
  return shared
}

/** Results of a megabyte; more than sockets and streams hold between the database and a client that does not read. */
const RESULTS = 20
const RESULT = `"${'x'.repeat(1024 * 1024)}"`

async function jobWithLargeCheckpoint(service: Service): Promise<string> {
  const jobId = newJobId()
  for (let n = 0; n < RESULTS; n++) await recorded(record(service, jobId, { key: `k${n}`, result: RESULT }))
  return jobId
}

/** A reader that takes the beginning and then nothing, until `resume` reads the rest or fails. */
async function openPausedReader(service: Service, jobId: string) {
  const incoming = await new Promise<http.IncomingMessage>((resolve, reject) => {
    http.get(`${service.url}/jobs/${jobId}/checkpoint`, { agent: false }, resolve).once('error', reject)
  })
  incoming.pause()
  return {
    async resume(): Promise<string> {
      const chunks: Buffer[] = []
      for await (const chunk of incoming) chunks.push(chunk)
      return Buffer.concat(chunks).toString()
    },
  }
}

async function assertBreaksOff(t: TestContext, change: string) {
  const service = await start()
  const sql = openSql(t, service.databaseUrl)
  const jobId = await jobWithLargeCheckpoint(service)
  const reader = await openPausedReader(service, jobId)
  await sql.unsafe(change.replaceAll('$job', `'${jobId}'`))
  await assert.rejects(reader.resume(), { code: 'ECONNRESET' })
}

test('a reader of a job that is deleted meanwhile sees a broken reply, never a short checkpoint', (t) =>
  assertBreaksOff(t, 'delete from cairn.step where job_id = $job; delete from cairn.job where id = $job'))

test('a reader of a job that is deleted and made anew sees a broken reply, never old and new steps', (t) =>
  assertBreaksOff(
    t,
    `delete from cairn.job where id = $job;
     insert into cairn.job (id, change_count, last_position, step_count, bytes)
     select job_id, 1, max(position), count(*), sum(bytes) from cairn.step where job_id = $job group by job_id`,
  ))

test('a reader of a job whose steps are forgotten meanwhile sees a broken reply', (t) =>
  assertBreaksOff(
    t,
    `delete from cairn.step where job_id = $job and key = 'k${RESULTS - 1}';
     update cairn.job set rewrite_count = rewrite_count + 1 where id = $job`,
  ))

test('steps that vanish without the knowledge of the job break the reply as well', (t) =>
  assertBreaksOff(t, `delete from cairn.step where job_id = $job and key = 'k${RESULTS - 1}'`))

test('a slow reader holds no session, and gets the checkpoint of its first moment although backends die', async (t) => {
  const service = await start()
  const sql = openSql(t, service.databaseUrl)
  const jobId = await jobWithLargeCheckpoint(service)
  const readers = await Promise.all(Array.from({ length: 4 }, () => openPausedReader(service, jobId)))
  await recorded(record(service, jobId, { key: 'later', result: '1' }))
  assert.ok('later' in json(await readCheckpoint(service, jobId)).completed_steps)
  await sql`
    select pg_terminate_backend(pid) from pg_stat_activity
    where datname = current_database() and pid <> pg_backend_pid()`
  const outcomes = await Promise.allSettled(readers.map((reader) => reader.resume()))
  const keys = Array.from({ length: RESULTS }, (_, n) => `k${n}`)
  for (const outcome of outcomes) {
    // The one that was being served when its session died may break; none may parse as something shorter.
    if (outcome.status === 'rejected') assert.equal(outcome.reason.code, 'ECONNRESET')
    else assert.deepEqual(Object.keys(JSON.parse(outcome.value).completed_steps), keys)
  }
  assert.ok(outcomes.some((outcome) => outcome.status === 'fulfilled'))
})
