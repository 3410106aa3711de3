import fs from 'node:fs/promises'
import os from 'node:os'
import path from 'node:path'
import { EmbeddedPostgresError, startEmbeddedPostgres } from '../src/embedded-postgres.ts'

const PREFIX = 'cairn-test-'
const ABANDONED_AFTER_MS = 60 * 60 * 1000

/** An embedded server in a temporary folder, which goes with it. */
export async function startDatabaseServer(): Promise<{ url: string; stop(): Promise<void> }> {
  await removeAbandoned()
  const dataDir = await makeDataDir()
  try {
    const server = await startEmbeddedPostgres({ dataDir, settings: { max_connections: '200' }, log: console.error })
    const stop = () => server.stop().then(() => removeDataDir(dataDir))
    return { url: server.url, stop }
  } catch (error) {
    await removeDataDir(dataDir)
    throw error
  }
}

/**
 * A temporary folder for an embedded database. `mkdtemp` alone makes one that root's Postgres, running as another
 * user, cannot enter: its data would land in /var/lib/cairn.
 */
export async function makeDataDir(): Promise<string> {
  const dir = await fs.mkdtemp(path.join(os.tmpdir(), PREFIX))
  await fs.chmod(dir, 0o711)
  return dir
}

/** Removes the folder, and the data too where that had to be put elsewhere. */
export async function removeDataDir(dataDir: string): Promise<void> {
  const link = await fs.readlink(path.join(dataDir, 'postgres')).catch(() => undefined)
  if (link !== undefined) await fs.rm(path.dirname(link), { recursive: true, force: true })
  await fs.rm(dataDir, { recursive: true, force: true })
}

/** What earlier runs left behind when they were killed: their servers are taken over, and stopped. */
async function removeAbandoned(): Promise<void> {
  for (const name of await fs.readdir(os.tmpdir())) {
    if (!name.startsWith(PREFIX)) continue
    const dataDir = path.join(os.tmpdir(), name)
    const stats = await fs.stat(dataDir).catch(() => undefined)
    if (!stats || stats.uid !== process.geteuid?.()) continue
    const isServed = await fs.stat(path.join(dataDir, 'postgres', 'postmaster.pid')).catch(() => undefined)
    if (!isServed && Date.now() - stats.mtimeMs < ABANDONED_AFTER_MS) continue
    try {
      const server = isServed && (await startEmbeddedPostgres({ dataDir, settings: { max_connections: '200' } }))
      await server?.stop()
      await removeDataDir(dataDir)
    } catch (error) {
      // It is in use, or another run is just removing it.
      if (!(error instanceof EmbeddedPostgresError)) throw error
    }
  }
}
