import { once } from 'node:events'
import { closeSync, fsyncSync, openSync, writeSync } from 'node:fs'
import { setTimeout as wait } from 'node:timers/promises'
import { StepSuspend, step } from 'windmill-client'
import { runWorkflow } from '../../examples/typescript/runner.ts'
import { type HardStep, makeGroups } from './hundred-steps.ts'

// Runs the hundred steps as a process that can be killed, and logs each execution and each outcome to a file.
const { JOB_ID = '', LOG_FILE = '', PREFIX = '', HANG_AT = '-1' } = process.env
const groups = makeGroups(PREFIX)
const hanging = groups.flat()[Number(HANG_AT)]?.key
/** Longer than a test waits; an end all the same, should nobody be left to kill this process. */
const HANG_MS = 120_000
const log = openSync(LOG_FILE, 'a')
const logged = new Map<string, string>()

function write(entry: object): void {
  writeSync(log, `${JSON.stringify(entry)}\n`)
  fsyncSync(log)
}

async function hundredSteps(): Promise<void> {
  for (const group of groups) await Promise.all(group.map(runStep))
}

async function runStep({ name, key, run }: HardStep): Promise<void> {
  const outcome = await step(name, async () => {
    write({ executed: key })
    if (key === hanging) await wait(HANG_MS)
    await wait(2)
    return run()
  }).then(
    (value) => ({ value }),
    (error) => {
      if (error instanceof StepSuspend) throw error
      return { error: { name: error.name, message: error.message, record: error.result, step_key: error.step_key } }
    },
  )
  // Each round of a replay sees it again; it is worth a line when it is new or, which must not be, another one.
  const text = JSON.stringify(outcome)
  if (logged.get(key) === text) return
  logged.set(key, text)
  write({ outcome: key, ...outcome })
}

process.stdout.write('READY\n')
await once(process.stdin, 'data')
process.stdin.destroy()
await runWorkflow(JOB_ID, hundredSteps)
closeSync(log)
