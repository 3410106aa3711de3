import { randomUUID } from 'node:crypto'
import os from 'node:os'
import { after } from 'node:test'
import postgres from 'postgres'
import { startDatabaseServer } from './database-server.ts'

/** For a test file that runs alone, without test/run.ts. */
let ownServer: ReturnType<typeof startDatabaseServer> | undefined

// Registered while the file loads, so that it belongs to the whole file and not to the test that came first.
after(stopOwnServer)

async function stopOwnServer(): Promise<void> {
  const server = await ownServer
  await server?.stop()
}

function startOwnServer(): ReturnType<typeof startDatabaseServer> {
  for (const signal of ['SIGINT', 'SIGTERM'] as const) {
    process.once(signal, () => stopOwnServer().finally(() => process.exit(128 + os.constants.signals[signal])))
  }
  return startDatabaseServer()
}

/** The URL of a role that may create databases, on the server that the tests share. */
export async function serverUrl(): Promise<string> {
  const given = process.env.CAIRN_TEST_DATABASE_URL ?? process.env.CAIRN_TEST_POSTGRES_URL
  if (given) return given
  ownServer ??= startOwnServer()
  return (await ownServer).url
}

/**
 * A fresh, empty database, or a copy of the database `template` (to which nobody may be connected meanwhile).
 * It is dropped after the test `t`, whoever is still connected.
 */
export async function createDatabase(
  t: { after(fn: () => Promise<void>): void },
  options: { template?: string } = {},
): Promise<{ url: string; name: string; drop(): Promise<void> }> {
  const server = await serverUrl()
  const name = `cairn_test_${randomUUID().replaceAll('-', '')}`
  await execute(server, `CREATE DATABASE ${name} TEMPLATE "${options.template ?? 'template0'}"`)
  const drop = () => execute(server, `DROP DATABASE IF EXISTS ${name} WITH (FORCE)`)
  t.after(drop)
  const url = new URL(server)
  url.pathname = `/${name}`
  return { url: url.href, name, drop }
}

async function execute(url: string, statement: string): Promise<void> {
  const sql = postgres(url, { max: 1, fetch_types: false, onnotice: () => {} })
  try {
    await sql.unsafe(statement)
  } finally {
    await sql.end()
  }
}
