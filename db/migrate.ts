import { readdirSync, readFileSync } from 'node:fs'
import postgres from 'postgres'
import type { DatabaseConnectionOptions } from './database-url.ts'

/** Any number, the same in every version of Cairn: who migrates holds the advisory lock of this key. */
const MIGRATION_LOCK = 4_702_394_921_427_752n
/** Milliseconds between two attempts to get the lock, and until a migrator gives up on another one. */
const LOCK_POLL_MS = 100
const LOCK_TIMEOUT_MS = 120_000

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
  const sql = postgres({
    ...options.connection,
    max: 1,
    fetch_types: false,
    prepare: false,
    onnotice: () => {},
    idle_timeout: 0,
  } as postgres.Options<Record<string, never>>)
  try {
    if (options.mode === 'verify') return verify(await appliedMigrations(sql), migrations)
    const deadline = Date.now() + LOCK_TIMEOUT_MS
    while (!(await migrateUnderLock(sql, migrations, options.log))) {
      if (Date.now() > deadline)
        throw new SchemaError(`Another program has been migrating for ${LOCK_TIMEOUT_MS / 1000} s`)
      await new Promise((resolve) => setTimeout(resolve, LOCK_POLL_MS))
    }
  } finally {
    await sql.end({ timeout: 1 })
  }
}

interface Applied {
  number: number
  compatible_from: number
}

async function appliedMigrations(sql: postgres.Sql): Promise<Applied[]> {
  const [present] = await sql`select to_regclass('cairn.migration') is not null as is_there`
  if (!present?.is_there) return []
  return sql<Applied[]>`select number, compatible_from from cairn.migration order by number`
}

/** False when another program holds the lock. A transaction-level lock, since poolers share sessions. */
async function migrateUnderLock(sql: postgres.Sql, migrations: readonly Migration[], log?: (line: string) => void) {
  return sql.begin(async (transaction) => {
    const [lock] = await transaction`select pg_try_advisory_xact_lock(${MIGRATION_LOCK.toString()}::bigint) as held`
    if (!lock?.held) return false
    const applied = await appliedMigrations(transaction as unknown as postgres.Sql)
    refuseNewer(applied, migrations)
    const known = new Set(applied.map(({ number }) => number))
    const missing = migrations.filter(({ number }) => !known.has(number))
    if (missing.length > 0 && applied.length === 0) {
      await transaction.unsafe(`
        create schema if not exists cairn;
        create table cairn.migration (
          number integer primary key,
          name text not null,
          compatible_from integer not null,
          applied_at timestamptz not null default clock_timestamp()
        )`)
    }
    for (const { number, name, compatibleFrom, sql: statements } of missing) {
      await transaction`insert into cairn.migration (number, name, compatible_from) values (${number}, ${name}, ${compatibleFrom})`
      await transaction.unsafe(statements)
      log?.(`Applied migration ${name}`)
    }
    return true
  })
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

function verify(applied: readonly Applied[], migrations: readonly Migration[]): void {
  refuseNewer(applied, migrations)
  const present = new Set(applied.map(({ number }) => number))
  const missing = migrations.filter(({ number }) => !present.has(number)).map(({ name }) => name)
  if (missing.length > 0) {
    throw new SchemaError(
      `The database lacks ${missing.join(', ')}: run \`npm run migrate\`, or start with MIGRATE=auto`,
    )
  }
}
