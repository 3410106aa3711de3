import assert from 'node:assert/strict'
import { spawn } from 'node:child_process'
import { once } from 'node:events'
import fs from 'node:fs/promises'
import os from 'node:os'
import path from 'node:path'
import { type TestContext, test } from 'node:test'
import { fileURLToPath } from 'node:url'

const SCRIPT = fileURLToPath(new URL('../../ops/ensure-installed.mjs', import.meta.url))

/** A project with one dependency that lies in its own folder, so that npm needs no network. */
async function makeProject(t: TestContext): Promise<string> {
  const root = await fs.mkdtemp(path.join(os.tmpdir(), 'cairn-install-'))
  t.after(() => fs.rm(root, { recursive: true, force: true }))
  const bricks = { name: 'bricks', version: '1.0.0' }
  const house = { name: 'house', version: '1.0.0' }
  await fs.mkdir(path.join(root, 'bricks'))
  await writeJson(path.join(root, 'bricks', 'package.json'), bricks)
  await writeJson(path.join(root, 'package.json'), { ...house, devDependencies: { bricks: 'file:bricks' } })
  await writeJson(path.join(root, 'package-lock.json'), {
    ...house,
    lockfileVersion: 3,
    requires: true,
    packages: {
      '': { ...house, devDependencies: { bricks: 'file:bricks' } },
      bricks: { version: '1.0.0', dev: true },
      'node_modules/bricks': { resolved: 'bricks', link: true },
    },
  })
  return root
}

function writeJson(file: string, value: unknown): Promise<void> {
  return fs.writeFile(file, JSON.stringify(value))
}

async function ensureInstalled(root: string, env: NodeJS.ProcessEnv = {}): Promise<{ code: number; stderr: string }> {
  const child = spawn(process.execPath, [SCRIPT, root], {
    env: { ...process.env, ...env },
    stdio: ['ignore', 'ignore', 'pipe'],
  })
  let stderr = ''
  child.stderr.on('data', (chunk) => {
    stderr += chunk
  })
  const [code] = await once(child, 'close')
  return { code, stderr }
}

async function installedAt(root: string): Promise<number> {
  return (await fs.stat(path.join(root, 'node_modules', '.package-lock.json'))).mtimeMs
}

test('a bare clone is installed, dev dependencies too, and the next call does nothing', async (t) => {
  const root = await makeProject(t)
  const first = await ensureInstalled(root, { NODE_ENV: 'production' })
  assert.equal(first.code, 0, first.stderr)
  assert.match(first.stderr, /^cairn: installing /)
  await fs.access(path.join(root, 'node_modules', 'bricks', 'package.json'))
  const before = await installedAt(root)
  assert.deepEqual(await ensureInstalled(root), { code: 0, stderr: '' })
  assert.equal(await installedAt(root), before)
  assert.deepEqual((await fs.readdir(root)).sort(), ['bricks', 'node_modules', 'package-lock.json', 'package.json'])
})

test('two calls at once both succeed, and only one of them installs', async (t) => {
  const root = await makeProject(t)
  const both = await Promise.all([ensureInstalled(root), ensureInstalled(root)])
  assert.deepEqual(
    both.map(({ code }) => code),
    [0, 0],
    both.map(({ stderr }) => stderr).join('\n'),
  )
  assert.equal(both.filter(({ stderr }) => stderr.includes('cairn: installing ')).length, 1)
})

test('what was deleted from node_modules, or has another version than the lock file says, is installed again', async (t) => {
  const root = await makeProject(t)
  await ensureInstalled(root)
  await fs.rm(path.join(root, 'node_modules', 'bricks'))
  assert.match((await ensureInstalled(root)).stderr, /installing/)
  const hidden = path.join(root, 'node_modules', '.package-lock.json')
  await fs.writeFile(
    hidden,
    (await fs.readFile(hidden, 'utf8')).replace('"resolved": "bricks"', '"resolved": "stones"'),
  )
  assert.match((await ensureInstalled(root)).stderr, /installing/)
  assert.equal((await ensureInstalled(root)).stderr, '')
})

test('the lock of a process that died is taken over', async (t) => {
  const root = await makeProject(t)
  const dead = spawn(process.execPath, ['--version'], { stdio: 'ignore' })
  await once(dead, 'exit')
  await fs.writeFile(path.join(root, '.installing'), `${dead.pid} 1`)
  assert.equal((await ensureInstalled(root)).code, 0)
  assert.ok(!(await fs.readdir(root)).includes('.installing'))
})

test('a failed install exits non-zero and says what failed', async (t) => {
  const root = await makeProject(t)
  await writeJson(path.join(root, 'package.json'), { name: 'house', dependencies: { mortar: 'file:mortar' } })
  const { code, stderr } = await ensureInstalled(root)
  assert.notEqual(code, 0)
  assert.match(stderr, /npm ci failed/)
})
