import assert from 'node:assert/strict'
import { spawn } from 'node:child_process'
import { randomUUID } from 'node:crypto'
import { once } from 'node:events'
import { readFile } from 'node:fs/promises'
import { text } from 'node:stream/consumers'
import { test } from 'node:test'
import { fileURLToPath } from 'node:url'
import { createDatabase } from '../postgres.ts'
import { startService } from '../service-process.ts'

const ROOT = fileURLToPath(new URL('../..', import.meta.url))

interface Run {
  code: number | null
  signal: NodeJS.Signals | null
  stdout: string
  stderr: string
}

async function run([command, ...args]: [string, ...string[]], env: Record<string, string>): Promise<Run> {
  const child = spawn(command, args, {
    cwd: ROOT,
    env: { ...process.env, ...env },
    stdio: ['ignore', 'pipe', 'pipe'],
    timeout: 60_000,
  })
  const [[code, signal], stdout, stderr] = await Promise.all([
    once(child, 'close'),
    text(child.stdout),
    text(child.stderr),
  ])
  return { code, signal, stdout, stderr }
}

function findExecuted({ stdout }: Run): string[] {
  return [...stdout.matchAll(/^\* really runs: (.*)$/gm)].map(([, name]) => name as string)
}

function findResult({ stdout }: Run): unknown {
  return JSON.parse(/^Result (.*)$/m.exec(stdout)?.[1] ?? 'null')
}

test('The examples', async (t) => {
  const { url: databaseUrl } = await createDatabase(t)
  const { url } = await startService(t, { databaseUrl })
  const env = { CAIRN_URL: url }

  for (const [name, switches] of [
    ['TypeScript', {}],
    ['TypeScript without the fast path', { WM_WAC_INLINE_FAST_PATH: '0' }],
  ] as const) {
    await t.test(`${name}: killed after the card was charged, it charges it once`, async () => {
      const jobId = randomUUID()
      const order = (...flags: string[]) =>
        run([process.execPath, '--import', 'tsx', 'examples/typescript/order.ts', jobId, ...flags], {
          ...env,
          ...switches,
        })
      const first = await order('--crash')
      assert.equal(first.signal, 'SIGKILL', first.stderr)
      assert.deepEqual(findExecuted(first), ['read cart', 'reserve stock', 'book parcel', 'charge card'])

      const second = await order()
      assert.equal(second.code, 0, second.stderr)
      assert.deepEqual(findExecuted(second), ['add bonus points', 'send receipt'])
      const result = findResult(second) as { tracking: string }
      assert.match(result.tracking, /^[0-9a-f-]{36}$/)
      const { tracking } = result
      assert.deepEqual(result, { reserved: 2, tracking, charged: 1850, bonus: 'none (No such customer)' })

      const third = await order()
      assert.equal(third.code, 0, third.stderr)
      assert.deepEqual(findExecuted(third), [])
      assert.deepEqual(findResult(third), result)
    })
  }

  await t.test('TypeScript: what Cairn refuses ends the run with the reason', async () => {
    const refused = await run([process.execPath, '--import', 'tsx', 'examples/typescript/order.ts', 'not-a-job'], env)
    assert.equal(refused.code, 1)
    assert.match(refused.stderr, /invalid_request: .*UUID/)
  })

  await t.test('curl: each answer is the one that the comments promise', async () => {
    const { code, stdout, stderr } = await run(['sh', 'examples/curl/session.sh'], env)
    assert.equal(code, 0, stderr)
    assert.equal(stderr, '')
    const charged = '{"cents": 1850, "id": 12345678901234567890}'
    const lines = stdout.trimEnd().split('\n')
    assert.equal(lines.length, 8, stdout)
    const [recorded, repeated, chosen, late, checkpoint, one, timeline, refused] = lines as [
      ...[string, string, string, string],
      ...[string, string, string, string],
    ]
    assert.equal(JSON.parse(recorded).key, 'charge card')
    assert.equal(repeated, recorded)
    assert.equal(JSON.parse(chosen).recorded, true)
    const { job_id, key, version } = JSON.parse(chosen)
    assert.deepEqual(JSON.parse(late), { job_id, key, version, recorded: false, result: 'blue' })
    assert.ok(checkpoint.includes(`"completed_steps":{"charge card":${charged},"pick courier":"blue"}`), checkpoint)
    assert.equal(one, charged)
    assert.deepEqual(
      JSON.parse(timeline).entries.map((entry: { key: string }) => entry.key),
      ['charge card', 'pick courier'],
    )
    assert.equal(JSON.parse(refused).code, 'source_changed')
  })

  await t.test('curl: the session can be pasted into an interactive shell', async (t) => {
    const child = spawn('sh', ['-i'], { cwd: ROOT, env: { ...process.env, ...env, PS1: '', PS2: '' }, timeout: 60_000 })
    t.after(() => child.kill('SIGKILL'))
    child.stdin.end(`${await readFile(new URL('../../examples/curl/session.sh', import.meta.url), 'utf8')}echo END\n`)
    const stdout = await text(child.stdout)
    assert.match(stdout, /"code":"source_changed".*\nEND/)
  })
})
