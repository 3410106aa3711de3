import { randomUUID } from 'node:crypto'
import { chmod, mkdtemp, rm } from 'node:fs/promises'
import os from 'node:os'
import path from 'node:path'
import { after } from 'node:test'
import postgres from 'postgres'
import { type EmbeddedPostgres, startEmbeddedPostgres } from '../src/embedded-postgres.ts'

let ownServer: Promise<EmbeddedPostgres> | undefined

/** For a test file that runs alone, without test/run.ts. */
async function startOwnServer(): Promise<EmbeddedPostgres> {
  const dataDir = await mkdtemp(path.join(os.tmpdir(), 'cairn-test-'))
  await chmod(dataDir, 0o711)
  return startEmbeddedPostgres({ dataDir, settings: { max_connections: '200' } })
}

// Registered while the file loads, so that it belongs to the whole file and not to the test that came first.
after(async () => {
  const server = await ownServer
  if (!server) return
  await server.stop()
  for (const dir of [path.dirname(server.clusterDir), server.dataDir]) await rm(dir, { recursive: true, force: true })
})

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
