import assert from 'node:assert/strict'
import { existsSync, readFileSync } from 'node:fs'
import test from 'node:test'
import { fileURLToPath } from 'node:url'
import { CONFIG_VARIABLES } from '../src/config.ts'
import { PROBLEM_CODES, problemStatus } from '../src/problems.ts'

const ROOT = new URL('../', import.meta.url)
const README = new URL('README.md', ROOT)
const { scripts } = JSON.parse(readFileSync(new URL('package.json', ROOT), 'utf8')) as {
  scripts: Record<string, string>
}

/** Top-level files and folders: a name in the text that begins with one of these is a path of the checkout. */
const ROOMS = ['src', 'routes', 'db', 'test', 'bench', 'clients', 'examples', 'ops', 'web']
/** Variables of the Windmill SDKs, of Postgres, of npm and of the tests, which are no configuration of the service. */
const FOREIGN_VARIABLE = /^(WM_\w+|BASE_INTERNAL_URL|BASE_URL|PG[A-Z]+|NODE_\w+|UPDATE_OPENAPI|CAIRN_\w+)$/

const text = existsSync(README) ? readFileSync(README, 'utf8') : undefined
const skip = text === undefined && 'there is no README.md yet'

function fencedBlocks(): string[] {
  return [...(text ?? '').matchAll(/^ *(`{3,}|~{3,})[^\n]*\n(.*?)^ *\1 *$/gms)].map(([, , block]) => block ?? '')
}

function inlineCode(): string[] {
  const prose = (text ?? '').replace(/^ *(`{3,}|~{3,})[^\n]*\n.*?^ *\1 *$/gms, '')
  return [...prose.matchAll(/(`+)(.+?)\1/g)].map(([, , code]) => (code ?? '').trim())
}

function allCode(): string[] {
  return [...fencedBlocks(), ...inlineCode()]
}

/** The cells of each table row whose first cell is code, without the marks. */
function tableRows(): string[][] {
  return (text ?? '')
    .split('\n')
    .filter((line) => /^\|\s*`/.test(line))
    .map((line) =>
      line
        .split(/(?<!\\)\|/)
        .slice(1, -1)
        .map((cell) => cell.trim()),
    )
}

function codesIn(cell: string): string[] {
  return [...cell.matchAll(/`([^`]+)`/g)].map(([, code]) => code ?? '')
}

test('every npm script that README.md names exists', { skip }, () => {
  const builtIn = ['install', 'ci', 'exec', 'i', 'init', 'pack', 'view', 'help']
  for (const code of allCode()) {
    for (const [, run, name = ''] of code.matchAll(/\bnpm (run )?([a-z][\w:-]*)/g)) {
      if (run === undefined && builtIn.includes(name)) continue
      assert.ok(name in scripts, `npm ${run ?? ''}${name}`)
    }
  }
})

test('every file and folder that README.md names exists', { skip }, () => {
  const links = [...(text ?? '').matchAll(/\]\((?!https?:|#|mailto:)([^)#\s]+)/g)].map(([, target]) => target ?? '')
  const named = allCode().flatMap((code) =>
    [...code.matchAll(/(?<![\w./@:-])(?:\.\/)?((?:[\w.-]+\/)*[\w.-]+)/g)]
      .map(([, path]) => (path ?? '').replace(/[.:]+$/, ''))
      .filter((path) => path.includes('/') && ROOMS.includes(path.split('/')[0] as string)),
  )
  const files = allCode().filter((code) =>
    /^[A-Z][\w.-]*\.(md|ya?ml)$|^(Dockerfile|LICENSE|[\w-]+\.(ya?ml|json))$/.test(code),
  )
  for (const path of [...links, ...named, ...files]) {
    if (path.includes('*')) continue
    assert.ok(existsSync(fileURLToPath(new URL(path, ROOT))), path)
  }
})

test('every program that README.md starts with node exists', { skip }, () => {
  for (const block of fencedBlocks())
    for (const [, path] of block.matchAll(/\bnode (?:--\S+ (?:tsx )?)*([\w./-]+\.[cm]?[jt]s)\b/g))
      assert.ok(existsSync(fileURLToPath(new URL(path as string, ROOT))), path)
})

test('every environment variable that README.md sets or names is read', { skip }, () => {
  const known: string[] = CONFIG_VARIABLES.map(({ name }) => name)
  for (const code of allCode()) {
    const set = [...code.matchAll(/(?:^|[\s;&])(?:export |-e |--env )?([A-Z][A-Z0-9]*(?:_[A-Z0-9]+)*)=/g)]
    const whole = /^[A-Z][A-Z0-9]*(_[A-Z0-9]+)+$/.exec(code)
    for (const name of [...set.map(([, name]) => name as string), ...(whole ? [whole[0]] : [])]) {
      if (FOREIGN_VARIABLE.test(name)) continue
      assert.ok(known.includes(name), name)
    }
  }
})

test('the table of variables in README.md has each variable with its default, in the order of src/config.ts', {
  skip,
}, () => {
  const known: string[] = CONFIG_VARIABLES.map(({ name }) => name)
  const rows = tableRows().filter(([first]) => known.includes(codesIn(first ?? '')[0] ?? ''))
  assert.deepEqual(
    rows.map(([first, second]) => [codesIn(first ?? '')[0], codesIn(second ?? '')[0] ?? '']),
    CONFIG_VARIABLES.map((variable) => [variable.name, variable.default]),
  )
})

test('the table of errors in README.md, where there is one, has exactly the codes with their statuses', {
  skip,
}, () => {
  const codes: string[] = PROBLEM_CODES
  const rows = tableRows().filter(([first]) => codes.includes(codesIn(first ?? '')[0] ?? ''))
  if (rows.length === 0) return
  assert.deepEqual(rows.map(([first]) => codesIn(first ?? '')[0]).sort(), [...codes].sort())
  for (const [first, ...rest] of rows) {
    const code = codesIn(first ?? '')[0] as (typeof PROBLEM_CODES)[number]
    assert.ok(
      rest.some((cell) => cell.includes(String(problemStatus(code)))),
      `${code} has ${problemStatus(code)}`,
    )
  }
})

test('every route that README.md shows is one of openapi.yaml', { skip }, () => {
  const openapi = readFileSync(new URL('openapi.yaml', ROOT), 'utf8')
  const patterns = [...openapi.matchAll(/^ {2}(\/\S*):$/gm)].map(
    ([, path]) => new RegExp(`^${(path as string).replace(/\{\w+\}/g, '[^/]+')}$`),
  )
  for (const code of allCode())
    for (const [, path] of code.matchAll(/\b(?:GET|POST|PUT|DELETE) (\/[^\s?`'"]*)/g))
      assert.ok(
        patterns.some((pattern) => pattern.test(path as string)),
        path,
      )
})
