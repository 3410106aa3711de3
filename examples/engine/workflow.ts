import { randomUUID } from 'node:crypto'
import { appendFileSync } from 'node:fs'
import { setTimeout as wait } from 'node:timers/promises'
import { parallel, sleep, step, task, workflow } from 'windmill-client'

/** An inline step, three children side by side, a child that fails, a sleep, and a last child. */
export const album = workflow(async ({ photos }: { photos: string[] }) => {
  const album = await step('open album', () => work('open album', { number: randomUUID() }))
  const prints = await parallel(photos, print)
  const cover = await chooseCover(prints)
  await sleep(1)
  return publish(album.number, prints, cover)
})

const print = task(async function print(photo: string) {
  // A run of its own each time, so that a result that was replaced later would be seen.
  return work(`print ${photo}`, { photo, sheet: randomUUID() })
})

const paintCover = task(async function paintCover(photo: string): Promise<string> {
  await work(`paint cover of ${photo}`, null)
  throw new RangeError(`${photo} is too small for a cover`)
})

const publish = task(async function publish(album: string, prints: object[], cover: object) {
  return work('publish', { album, prints, cover })
})

async function chooseCover(prints: { photo: string }[]): Promise<object> {
  try {
    return { painted: await paintCover(prints[0]?.photo ?? 'nothing') }
  } catch (error) {
    // A suspend comes by here too, as does the task's own error in its child: neither is for the workflow to handle.
    if ((error as Error).name !== 'TaskError') throw error
    const { message, result, step_key } = error as Error & { result: unknown; step_key: string }
    record('caught', JSON.stringify({ message, result, step_key }))
    return { plain: message }
  }
}

async function work<T>(name: string, result: T): Promise<T> {
  record('ran', name)
  await wait(Number(process.env.WORK_MS ?? 100))
  return result
}

/** A line for whoever watches, and in EXECUTIONS_FILE, which outlives a kill. */
function record(what: 'ran' | 'caught', detail: string): void {
  console.log(`* ${what} ${detail}`)
  if (process.env.EXECUTIONS_FILE) appendFileSync(process.env.EXECUTIONS_FILE, `${what}\t${process.pid}\t${detail}\n`)
}
