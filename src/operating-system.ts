import { execFile } from 'node:child_process'
import { randomUUID } from 'node:crypto'
import type { Stats } from 'node:fs'
import fs from 'node:fs/promises'
import os from 'node:os'

export interface RunUser {
  name: string
  uid: number
  gid: number
}

// Neither the caller's locale nor its PG* variables may change what initdb and the server do.
export const POSTGRES_ENV = {
  LC_ALL: 'C',
  TZ: 'UTC',
  PATH: '/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin',
}

export function identityOf(runUser: RunUser | undefined): { uid?: number; gid?: number } {
  return runUser ? { uid: runUser.uid, gid: runUser.gid } : {}
}

/** Runs a program to its end; `output` is what it wrote to both streams, or why it could not be run. */
export function run(
  program: string,
  args: string[],
  runUser?: RunUser,
  input?: string,
): Promise<{ ok: boolean; output: string }> {
  return new Promise((resolve) => {
    const options = { ...identityOf(runUser), cwd: '/', env: POSTGRES_ENV }
    const child = execFile(program, args, options, (error, stdout, stderr) => {
      const output = `${stdout}${stderr}`.trim()
      resolve({ ok: error === null, output: output || (error?.message ?? '') })
    })
    // A program that ends early closes its input; its exit code tells the rest.
    child.stdin?.on('error', () => {})
    child.stdin?.end(input)
  })
}

export function isErrno(error: unknown): error is NodeJS.ErrnoException {
  return error instanceof Error && 'code' in error && 'syscall' in error
}

export function unlessMissing(error: unknown): undefined {
  if (!isErrno(error) || error.code !== 'ENOENT') throw error
}

export function unlessThere(error: unknown): undefined {
  if (!isErrno(error) || error.code !== 'EEXIST') throw error
}

export async function statIfThere(file: string): Promise<Stats | undefined> {
  return fs.lstat(file).catch(unlessMissing)
}

export async function readIfThere(file: string): Promise<string | undefined> {
  return fs.readFile(file, 'utf8').catch(unlessMissing)
}

export async function writeFileAtomically(file: string, content: string, mode = 0o644): Promise<void> {
  const draft = `${file}.${randomUUID()}`
  await fs.writeFile(draft, content, { mode, flush: true })
  await fs.rename(draft, file)
}

export async function syncDir(dir: string): Promise<void> {
  const handle = await fs.open(dir)
  await handle.sync().finally(() => handle.close())
}

/** When a running process was started, in some constant notation; undefined if there is no such process. */
export async function startTimeOf(pid: number): Promise<string | undefined> {
  if (os.platform() === 'linux') {
    const stat = await readIfThere(`/proc/${pid}/stat`)
    // proc(5): the name in parentheses may hold anything; state is the 1st field behind it, start time the 20th.
    const fields = stat?.slice(stat.lastIndexOf(')') + 2).split(' ')
    if (!fields?.[19] || fields[0] === 'Z' || fields[0] === 'X') return undefined
    return `${fields[19]}@${(await readIfThere('/proc/sys/kernel/random/boot_id'))?.trim()}`
  }
  const { ok, output } = await run('ps', ['-o', 'lstart=', '-p', String(pid)])
  return ok && output !== '' ? output : undefined
}
