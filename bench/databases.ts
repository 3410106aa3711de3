import postgres from 'postgres'

/** The one Postgres server of a run, on which each measured server gets a database of its own. */
export interface DatabaseServer {
  version: string
  settings: Record<string, string>
  createDatabase(name: string): Promise<string>
  /** Empties a contender's tables and writes out what earlier rounds left dirty, so that no round pays for another's. */
  settle(options: { truncate?: { url: string; tables: string } }): Promise<void>
  stop(): Promise<void>
}

const REPORTED_SETTINGS = ['fsync', 'synchronous_commit', 'full_page_writes', 'shared_buffers', 'max_wal_size']

/** Connects as a role that may create databases and run CHECKPOINT; the databases made here are dropped by `stop`. */
export async function connectDatabaseServer(adminUrl: string): Promise<DatabaseServer> {
  const admin = postgres(adminUrl, { max: 1, onnotice: () => {} })
  const created: string[] = []
  const rows =
    await admin`SELECT name, current_setting(name) AS value FROM pg_settings WHERE name = ANY(${REPORTED_SETTINGS})`
  const settings = Object.fromEntries(rows.map((row) => [row.name, row.value]))
  if (settings.fsync !== 'on' || settings.synchronous_commit !== 'on')
    throw new Error('The benchmark needs fsync and synchronous_commit on: without them it measures no durable write')
  const [server] = await admin`SHOW server_version`

  const createDatabase = async (name: string): Promise<string> => {
    const database = `cairn_bench_${process.pid}_${name}`
    await admin`CREATE DATABASE ${admin(database)} TEMPLATE template0 ENCODING 'UTF8'`
    created.push(database)
    const url = new URL(adminUrl)
    url.pathname = `/${database}`
    return url.href
  }

  const settle: DatabaseServer['settle'] = async ({ truncate }) => {
    if (truncate !== undefined) {
      const own = postgres(truncate.url, { max: 1, onnotice: () => {} })
      await own.unsafe(`TRUNCATE ${truncate.tables}`)
      await own.end()
    }
    await admin`CHECKPOINT`
  }

  const stop = async (): Promise<void> => {
    for (const database of created) await admin`DROP DATABASE IF EXISTS ${admin(database)} WITH (FORCE)`
    await admin.end()
  }

  return { version: String(server?.server_version), settings, createDatabase, settle, stop }
}
