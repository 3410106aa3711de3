import { randomUUID } from 'node:crypto'
import fs from 'node:fs/promises'
import path from 'node:path'
import { pid as ownPid } from 'node:process'
import { isErrno, readIfThere, startTimeOf, writeFileAtomically } from './operating-system.ts'

interface LockHolder {
  pid: number
  /** Tells a process from a later one with the same pid. */
  startedAt: string
  released: boolean
}

/**
 * Reserves a folder for this process until it unlocks or ends, or tells which process has it.
 * Lock files are numbered; the highest number counts and is never removed but by a higher one. So a stale lock is
 * taken over by creating the next number, which only one process can, and none is ever deleted under its holder.
 */
export async function lockFolder(dir: string): Promise<{ unlock(): Promise<void> } | { heldBy: number }> {
  const startedAt = (await startTimeOf(ownPid)) ?? ''
  for (;;) {
    const newest = Math.max(0, ...(await lockNumbers(dir)))
    const text = newest === 0 ? undefined : await readIfThere(lockFile(dir, newest))
    if (newest > 0 && text === undefined) continue
    const holder = parseHolder(text)
    if (holder && !holder.released && (await startTimeOf(holder.pid)) === holder.startedAt) {
      return { heldBy: holder.pid }
    }
    const mine = newest + 1
    if (!(await createLockFile(dir, mine, { pid: ownPid, startedAt, released: false }))) continue
    const others = (await lockNumbers(dir)).filter((number) => number !== mine)
    if (others.some((number) => number > mine)) {
      await fs.rm(lockFile(dir, mine), { force: true })
      continue
    }
    for (const number of others) await fs.rm(lockFile(dir, number), { force: true })
    const released = JSON.stringify({ pid: ownPid, startedAt, released: true })
    return { unlock: () => writeFileAtomically(lockFile(dir, mine), released) }
  }
}

function lockFile(dir: string, number: number): string {
  return path.join(dir, `lock.${number}`)
}

async function lockNumbers(dir: string): Promise<number[]> {
  const names = await fs.readdir(dir)
  return names.flatMap((name) => (/^lock\.\d+$/.test(name) ? [Number(name.slice('lock.'.length))] : []))
}

/** By a hard link, so that the file is never there without its content. */
async function createLockFile(dir: string, number: number, holder: LockHolder): Promise<boolean> {
  const draft = path.join(dir, `lock-${randomUUID()}`)
  try {
    await fs.writeFile(draft, JSON.stringify(holder), { mode: 0o644 })
    await fs.link(draft, lockFile(dir, number))
    return true
  } catch (error) {
    if (isErrno(error) && error.code === 'EEXIST') return false
    throw error
  } finally {
    await fs.rm(draft, { force: true })
  }
}

/** A file that a power failure left empty or cut holds no lock. */
function parseHolder(text: string | undefined): LockHolder | undefined {
  try {
    return text === undefined ? undefined : (JSON.parse(text) as LockHolder)
  } catch {
    return undefined
  }
}
