import { readdirSync, readFileSync } from 'node:fs'
import postgres from 'postgres'
import { createDialer } from './client.ts'
import type { DatabaseConnectionOptions } from './database-url.ts'

/** Any number, the same in every version of Cairn: who migrates holds the advisory lock of this key. */
const MIGRATION_LOCK = 4_702_394_921_427_752n
/** Milliseconds between two attempts to get the lock, and until a migrator gives up on another one. */
const LOCK_POLL_MS = 100
const LOCK_TIMEOUT_MS = 120_000
/** Milliseconds in which the database must have accepted a connection. */
const CONNECT_MS = 15_000

/** The schema is not one that this program can work with. The message is for the operator. */
export class SchemaError extends Error {
  override readonly name = 'SchemaError'
}

export interface Migration {
  number: number
  name: string
  /** The lowest migration number that a program must know to work with the schema after this one. */
  compatibleFrom: number
  sql: string
}

export interface MigrateOptions {
  connection: DatabaseConnectionOptions
  /** auto: apply what is missing. verify: only check that nothing is. */
  mode: 'auto' | 'verify'
  migrations?: readonly Migration[]
  log?: (line: string) => void
}

/** The migrations that this program knows, in order. */
export function readMigrations(directory = new URL('./migrations/', import.meta.url)): Migration[] {
  return readdirSync(directory)
    .filter((file) => file.endsWith('.sql'))
    .sort()
    .map((file) => {
      const sql = readFileSync(new URL(file, directory), 'utf8')
      const compatibleFrom = /^-- compatible-from: (\d+)$/m.exec(sql)?.[1]
      const number = /^(\d{4})_/.exec(file)?.[1]
      if (!compatibleFrom || !number) throw new Error(`Migration ${file} lacks its number or its compatible-from line`)
      return { number: Number(number), name: file.replace(/\.sql$/, ''), compatibleFrom: Number(compatibleFrom), sql }
    })
}

/**
 * Brings the schema to what this program knows, in one transaction, or checks it. Of programs that start together one
 * migrates and the others wait for it. Throws `SchemaError` when the schema is newer than this program can work with, or,
 * with `verify`, not current; then nothing has changed.
 */
export async function migrate(options: MigrateOptions): Promise<void> {
  const migrations = options.migrations ?? readMigrations()
  const deadline = Date.now() + LOCK_TIMEOUT_MS
  for (;;) {
    const outcome = await withConnection(options.connection, (sql) => attempt(sql, migrations, options))
    if (outcome === 'done') return
    if (Date.now() > deadline)
      throw new SchemaError(`Another program has been migrating for ${LOCK_TIMEOUT_MS / 1000} s`)
    await new Promise((resolve) => setTimeout(resolve, LOCK_POLL_MS))
  }
}

/** A connection of its own for each attempt: one that failed may be in a transaction that is to be forgotten. */
async function withConnection<T>(connection: DatabaseConnectionOptions, use: (sql: postgres.Sql) => Promise<T>) {
  const sql = postgres({
    ...connection,
    max: 1,
    fetch_types: false,
    prepare: false,
    onnotice: () => {},
    idle_timeout: 0,
    socket: createDialer(),
  } as postgres.Options<Record<string, never>>)
  let timer: NodeJS.Timeout | undefined
  const late = new Promise<never>((_, reject) => {
    timer = setTimeout(() => reject(new SchemaError(`No Postgres answered within ${CONNECT_MS / 1000} s`)), CONNECT_MS)
  })
  try {
    // Where something accepts and never answers, the driver waits or tries again for ever.
    await Promise.race([sql`select 1`, late])
    clearTimeout(timer)
    return await use(sql)
  } finally {
    clearTimeout(timer)
    await sql.end({ timeout: 1 })
  }
}

interface Applied {
  number: number
  compatible_from: number
}

async function attempt(sql: postgres.Sql, migrations: readonly Migration[], { mode, log }: MigrateOptions) {
  const applied = await readApplied(sql)
  refuseNewer(applied, migrations)
  const present = new Set(applied.map(({ number }) => number))
  const missing = migrations.filter(({ number }) => !present.has(number))
  if (missing.length === 0) return 'done'
  if (mode === 'verify') {
    const names = missing.map(({ name }) => name).join(', ')
    throw new SchemaError(`The database lacks ${names}: run \`npm run migrate\`, or start with MIGRATE=auto`)
  }
  try {
    await sql.unsafe(migrationScript(applied, missing)).simple()
  } catch (error) {
    const { code } = error as { code?: string }
    if (code === OTHER_MIGRATES || code === OTHER_HAS_MIGRATED) return 'again'
    throw error
  }
  for (const { name } of missing) log?.(`Applied migration ${name}`)
  return 'done'
}

async function readApplied(sql: postgres.Sql): Promise<Applied[]> {
  const [schema] = await sql`select to_regclass('cairn.migration') is not null as is_there`
  if (!schema?.is_there) return []
  return sql<Applied[]>`select number, compatible_from from cairn.migration order by number`
}

// SQLSTATEs of our own making, within the class that Postgres leaves to applications.
const OTHER_MIGRATES = 'CN001'
const OTHER_HAS_MIGRATED = 'CN002'

/**
 * All of it as one message, which Postgres carries out whole or not at all. (The driver's `begin` crashes the process when
 * the backend dies in between.) The lock is of the transaction, since poolers share sessions, and is tried, not waited
 * for, so that no transaction stays open meanwhile. The rows of the version table go in first: a second migrator that got
 * past the lock would collide there before it changed anything.
 */
function migrationScript(applied: readonly Applied[], missing: readonly Migration[]): string {
  const creation = `
    create schema if not exists cairn;
    create table cairn.migration (
      number integer primary key,
      name text not null,
      compatible_from integer not null,
      applied_at timestamptz not null default clock_timestamp()
    );`
  const rows = missing.map(({ number, name, compatibleFrom }) => `(${number}, '${name}', ${compatibleFrom})`)
  return `
    begin;
    do $migrate$
    declare
      present integer[] := '{}';
    begin
      if not pg_try_advisory_xact_lock(${MIGRATION_LOCK}) then
        raise exception 'another program migrates' using errcode = '${OTHER_MIGRATES}';
      end if;
      if to_regclass('cairn.migration') is not null then
        execute 'select coalesce(array_agg(number order by number), ''{}'') from cairn.migration' into present;
      end if;
      if present <> '{${applied.map(({ number }) => number).join(',')}}' then
        raise exception 'another program has migrated' using errcode = '${OTHER_HAS_MIGRATED}';
      end if;
    end
    $migrate$;
    ${applied.length === 0 ? creation : ''}
    insert into cairn.migration (number, name, compatible_from) values ${rows.join(', ')};
    ${missing.map(({ sql }) => sql).join('\n;\n')};
    commit;`
}

function refuseNewer(applied: readonly Applied[], migrations: readonly Migration[]): void {
  const known = Math.max(0, ...migrations.map(({ number }) => number))
  const needed = Math.max(0, ...applied.map(({ compatible_from }) => compatible_from))
  if (needed > known) {
    throw new SchemaError(
      `The database's schema needs a program that knows migration ${needed}; this one knows ${known}: upgrade Cairn`,
    )
  }
}
