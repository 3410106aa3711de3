import assert from 'node:assert/strict'
import test, { type TestContext } from 'node:test'
import {
  json,
  newJobId,
  openSql,
  readCheckpoint,
  record,
  recorded,
  startApp,
  waitForLockWaiters,
  waitUntil,
} from '../support.ts'

async function open(t: TestContext) {
  const service = await startApp(t)
  return { service, sql: openSql(t, service.databaseUrl) }
}

/** Calls the function for one step in the session of `sql`, which may have a transaction open. */
function recordBySql(
  sql: Awaited<ReturnType<typeof open>>['sql'],
  jobId: string,
  step: { key: string; result: string },
) {
  return sql`
    select outcome from cairn.record_steps_v1(
      array[${jobId}::uuid], array[${step.key}::text], array[${step.result}::text], '{f}', '{NULL}', '{NULL}', '{""}', '{f}',
      1, ${step.result.length}, 100000, 1000000, false, 1000)`
}

test('synchronous_commit is on until the commit, though server and role have it off', async (t) => {
  const { sql } = await open(t)
  await sql`set synchronous_commit = off`
  await sql`begin`
  const [row] = await recordBySql(sql, newJobId(), { key: 'a', result: '1' })
  assert.equal(row?.outcome, 'recorded')
  // What the commit below will go by: the function is over, and its own settings with it.
  assert.equal((await sql`show synchronous_commit`)[0]?.synchronous_commit, 'on')
  await sql`commit`
  assert.equal((await sql`show synchronous_commit`)[0]?.synchronous_commit, 'off')
})

test('remote_apply, which is stronger, is left alone', async (t) => {
  const { sql } = await open(t)
  await sql`set synchronous_commit = remote_apply`
  await sql`begin`
  await recordBySql(sql, newJobId(), { key: 'a', result: '1' })
  assert.equal((await sql`show synchronous_commit`)[0]?.synchronous_commit, 'remote_apply')
  await sql`commit`
})

test('the service commits durably in a database whose default is off', async (t) => {
  const { service, sql } = await open(t)
  const [database] = await sql`select current_database() as name`
  await sql.unsafe(`alter database ${database?.name} set synchronous_commit = off`)
  const second = await startApp(t, { databaseUrl: service.databaseUrl })
  // A trigger tells what the commit goes by, in the service's own session.
  await sql.unsafe(`
    create table public.seen (setting text);
    create function public.note() returns trigger language plpgsql as $$
      begin insert into public.seen values (current_setting('synchronous_commit')); return null; end $$;
    create constraint trigger note after insert on cairn.step deferrable initially deferred
      for each row execute function public.note()`)
  await recorded(record(second, newJobId(), { key: 'a', result: '1' }))
  const seen = await sql`select setting from public.seen`
  assert.deepEqual(
    seen.map((row) => row.setting),
    ['on'],
  )
})

test('recording a step updates the job row in place, however many steps there are', async (t) => {
  const { service, sql } = await open(t)
  const jobId = newJobId()
  const other = newJobId()
  for (let n = 0; n < 300; n++)
    await recorded(record(service, n % 3 ? jobId : other, { key: `k${n}`, result: `"${'x'.repeat(300)}"` }))
  const counts = async () => {
    const [row] = await sql`
      select n_tup_upd::integer as updated, n_tup_hot_upd::integer as hot
      from pg_stat_user_tables where schemaname = 'cairn' and relname = 'job'`
    return { updated: row?.updated as number, hot: row?.hot as number }
  }
  // Sessions report their statistics at intervals, and at their end.
  await sql`
    select pg_terminate_backend(pid) from pg_stat_activity
    where datname = current_database() and pid <> pg_backend_pid()`
  // All but the first step of each job, which came with the job's row.
  await waitUntil(async () => (await counts()).updated >= 298, 'the statistics of 298 updates')
  const { updated, hot } = await counts()
  assert.ok(hot >= updated * 0.95, `${hot} of ${updated} updates were HOT`)
  const [steps] = await sql`
    select n_tup_upd::integer as updated from pg_stat_user_tables where schemaname = 'cairn' and relname = 'step'`
  assert.equal(steps?.updated, 0)
})

test('recording, reading one step and reading pages scan no table as a whole', async (t) => {
  const { service, sql } = await open(t)
  // The plans are made and kept while the tables are empty, as in a service that has just come up.
  const jobId = newJobId()
  await recorded(record(service, jobId, { key: 'first', result: '1' }))
  await readCheckpoint(service, jobId)
  await sql`
    insert into cairn.job (id, change_count, last_position, step_count, bytes)
    select gen_random_uuid(), 1, 1, 1, 1 from generate_series(1, 20000)`
  await sql`
    insert into cairn.step (job_id, job_number, key, result, bytes, position, change)
    select id, number, 'k' || number, '1', 1, 1, 1 from cairn.job where id <> ${jobId}`
  await sql`analyze`
  const scans = async () => {
    const rows = await sql`
      select coalesce(sum(seq_tup_read), 0)::bigint::integer as read from pg_stat_user_tables where schemaname = 'cairn'
      and relname in ('job', 'step')`
    return rows[0]?.read as number
  }
  const flush = () => sql`select pg_stat_force_next_flush()`
  await flush()
  const before = await scans()
  for (let n = 0; n < 20; n++) {
    await Promise.all([0, 1, 2, 3].map((m) => recorded(record(service, jobId, { key: `k${n}/${m}`, result: '1' }))))
    await recorded(record(service, newJobId(), { key: 'k', result: '1' }))
    assert.ok('first' in json(await readCheckpoint(service, jobId)).completed_steps)
  }
  const [own] = await sql`select count(*)::integer as count from cairn.step where job_id = ${jobId}`
  assert.equal(own?.count, 81)
  await sql`
    select pg_terminate_backend(pid) from pg_stat_activity
    where datname = current_database() and pid <> pg_backend_pid()`
  await waitUntil(async () => {
    const [row] = await sql`
      select count(*)::integer as others from pg_stat_activity
      where datname = current_database() and pid <> pg_backend_pid() and backend_type = 'client backend'`
    return row?.others === 0
  }, 'the sessions have ended and reported')
  assert.ok((await scans()) - before < 20_000, `${(await scans()) - before} rows were read by sequential scans`)
})

test('two calls that create the same job wait for one another, and both steps are there', async (t) => {
  const { service, sql } = await open(t)
  const watch = openSql(t, service.databaseUrl)
  const jobId = newJobId()
  await sql`begin`
  await recordBySql(sql, jobId, { key: 'a', result: '1' })
  const second = recorded(record(service, jobId, { key: 'b', result: '2' }))
  await waitForLockWaiters(watch, 1)
  await sql`commit`
  await second
  assert.deepEqual(json(await readCheckpoint(service, jobId)).completed_steps, { a: 1, b: 2 })
})

test('a first write that is rolled back elsewhere leaves room for another', async (t) => {
  const { service, sql } = await open(t)
  const watch = openSql(t, service.databaseUrl)
  const jobId = newJobId()
  await sql`begin`
  await recordBySql(sql, jobId, { key: 'a', result: '1' })
  const second = recorded(record(service, jobId, { key: 'b', result: '2' }))
  await waitForLockWaiters(watch, 1)
  await sql`rollback`
  await second
  assert.deepEqual(json(await readCheckpoint(service, jobId)).completed_steps, { b: 2 })
})

test('v2_job_status gives the document that Windmill keeps', async (t) => {
  const { service, sql } = await open(t)
  const jobId = newJobId()
  const started_at = '2026-12-01T01:45:06.357+01:00'
  await recorded(
    record(service, jobId, { key: 'a"b', result: '{"n": 1.0}', started_at, duration_ms: 5, source_hash: 'h' }),
  )
  await recorded(record(service, jobId, { key: '_step/a', result: '"\\u0000\\ud83e"', started_at }))
  const [row] = await sql`
    select workflow_as_code_status::text as document from cairn.v2_job_status where id = ${jobId}`
  assert.equal(
    row?.document,
    '{"_checkpoint":{"source_hash":"h","completed_steps":{"a\\"b":{"n": 1.0},"_step/a":"\\u0000\\ud83e"},' +
      '"input_args":{},"job_ids":{}},' +
      `"_step/a\\"b":{"scheduled_for":"${started_at}","started_at":"${started_at}","name":"a\\"b","duration_ms":5},` +
      `"_step/_step/a":{"scheduled_for":"${started_at}","started_at":"${started_at}","name":"_step/a"}}`,
  )
})

test('v2_job_status agrees with the checkpoint that the service gives', async (t) => {
  const { service, sql } = await open(t)
  const jobId = newJobId()
  for (let n = 0; n < 50; n++) await recorded(record(service, jobId, { key: `k${n % 40}`, result: `${n}` }))
  const [row] = await sql`
    select workflow_as_code_status -> '_checkpoint' as checkpoint, (
      select count(*)::integer from json_object_keys(workflow_as_code_status) as name where name like '\\_step/%'
    ) as entries
    from cairn.v2_job_status where id = ${jobId}`
  assert.deepEqual(row?.checkpoint, json(await readCheckpoint(service, jobId)))
  assert.equal(row?.entries, 40)
})
