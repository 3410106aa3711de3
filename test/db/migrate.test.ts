import assert from 'node:assert/strict'
import test, { type TestContext } from 'node:test'
import { parseDatabaseUrl } from '../../db/database-url.ts'
import { type Migration, migrate, readMigrations, SchemaError } from '../../db/migrate.ts'
import { createDatabase } from '../postgres.ts'
import { openSql, waitForLockWaiters, waitUntil } from '../support.ts'

const KNOWN = readMigrations()
const LAST = Math.max(...KNOWN.map(({ number }) => number))

function nextMigration(rest: Partial<Migration> = {}): Migration {
  return {
    number: LAST + 1,
    name: 'a_later_one',
    compatibleFrom: 1,
    sql: 'create table cairn.later (id integer)',
    ...rest,
  }
}

async function openDatabase(t: TestContext) {
  const { url } = await createDatabase(t)
  const sql = openSql(t, url)
  const log: string[] = []
  const run = (migrations?: readonly Migration[], mode: 'auto' | 'verify' = 'auto') =>
    migrate({
      connection: parseDatabaseUrl(url).connection,
      mode,
      log: (line) => void log.push(line),
      ...(migrations && { migrations }),
    })
  const applied = async () =>
    (await sql`select number from cairn.migration order by number`).map((row) => row.number as number)
  const schemaExists = async () => {
    const [row] = await sql`select to_regnamespace('cairn') is not null as found`
    return row?.found as boolean
  }
  return { url, sql, log, run, applied, schemaExists }
}

function refusal(pattern: RegExp) {
  return (error: unknown) => error instanceof SchemaError && pattern.test(error.message)
}

test('migrations are numbered from 1 without gaps, and none needs a program that does not know it', () => {
  assert.deepEqual(
    KNOWN.map(({ number }) => number),
    KNOWN.map((_, index) => index + 1),
  )
  for (const { number, compatibleFrom } of KNOWN) assert.ok(compatibleFrom >= 1 && compatibleFrom <= number)
})

test('an empty database gets all migrations once, and later starts change nothing', async (t) => {
  const { run, applied, log } = await openDatabase(t)
  await run()
  assert.deepEqual(
    await applied(),
    KNOWN.map(({ number }) => number),
  )
  assert.deepEqual(
    log,
    KNOWN.map(({ name }) => `Applied migration ${name}`),
  )
  await run()
  await run(undefined, 'verify')
  assert.equal(log.length, KNOWN.length)
})

test('of programs that start together on an empty database one migrates, and all come up', async (t) => {
  const { run, applied, log } = await openDatabase(t)
  await Promise.all([run(), run(), run(), run()])
  assert.equal(log.length, KNOWN.length)
  assert.equal((await applied()).length, KNOWN.length)
})

test('a program waits for another that is migrating, then finds nothing left to do', async (t) => {
  const { run, sql, applied, log } = await openDatabase(t)
  // The first migrator stops in its middle for as long as the test holds this lock.
  await sql`select pg_advisory_lock(1)`
  const halting = nextMigration({ sql: 'select pg_advisory_xact_lock(1)' })
  const first = run([...KNOWN, halting])
  await waitForLockWaiters(sql, 1)
  let secondIsDone = false
  const second = run([...KNOWN, halting]).then(() => {
    secondIsDone = true
  })
  await waitUntil(async () => {
    const [row] = await sql`
      select count(*)::integer as sessions from pg_stat_activity
      where datname = current_database() and pid <> pg_backend_pid()`
    return row?.sessions === 2
  }, 'both migrators are connected')
  assert.equal(secondIsDone, false)
  await sql`select pg_advisory_unlock(1)`
  await Promise.all([first, second])
  assert.equal(log.length, KNOWN.length + 1)
  assert.deepEqual(await applied(), [...KNOWN.map(({ number }) => number), LAST + 1])
})

test('a migration that fails leaves nothing of itself nor of those before it', async (t) => {
  const { run, schemaExists } = await openDatabase(t)
  const broken = nextMigration({ sql: 'create table cairn.half (id integer); select 1 / 0' })
  await assert.rejects(run([...KNOWN, broken]), /division by zero/)
  assert.equal(await schemaExists(), false)
  await run()
  assert.equal(await schemaExists(), true)
})

test('a migration that fails on a schema in use leaves that schema as it was', async (t) => {
  const { run, sql, applied } = await openDatabase(t)
  await run()
  await sql`insert into cairn.job (id, change_count) values (gen_random_uuid(), 1)`
  const broken = nextMigration({ sql: 'drop table cairn.child cascade; select 1 / 0' })
  await assert.rejects(run([...KNOWN, broken]), /division by zero/)
  assert.deepEqual(await applied(), [...KNOWN.map(({ number }) => number)])
  assert.equal((await sql`select from cairn.child`).length, 0)
  assert.equal((await sql`select from cairn.job`).length, 1)
})

test('verify accepts a current schema alone, changes nothing, and says what to do', async (t) => {
  const { run, schemaExists } = await openDatabase(t)
  await assert.rejects(run(undefined, 'verify'), refusal(/0001_journal.*npm run migrate/s))
  assert.equal(await schemaExists(), false)
  await run()
  await run(undefined, 'verify')
  await assert.rejects(run([...KNOWN, nextMigration()], 'verify'), refusal(/a_later_one/))
})

test('an older program works on a newer schema that says it may', async (t) => {
  const { run } = await openDatabase(t)
  await run([...KNOWN, nextMigration({ compatibleFrom: LAST })])
  await run()
  await run(undefined, 'verify')
})

test('an older program refuses a newer schema that it cannot work with, and names both', async (t) => {
  const { run, applied } = await openDatabase(t)
  await run([...KNOWN, nextMigration({ compatibleFrom: LAST + 1 })])
  const names = new RegExp(`migration ${LAST + 1}.* ${LAST}\\b.*upgrade`)
  await assert.rejects(run(), refusal(names))
  await assert.rejects(run(undefined, 'verify'), refusal(names))
  assert.equal((await applied()).length, KNOWN.length + 1)
})
