/** One `step()` call: `run` gives or throws what the step's function does; `outcome` is what the workflow must see. */
export interface HardStep {
  name: string
  key: string
  run: () => unknown
  outcome: Outcome
}

/** `cause` is the name of the error that the step's function threw: the SDK itself always throws a TaskError. */
export type Outcome = { value: unknown } | { error: { name: 'TaskError'; message: string; cause?: string } }

type Work = Pick<HardStep, 'run' | 'outcome'>

const BIG_TEXT = `"\\\n\u0000\ud83d${'żółw 🐢 '.repeat(100_000)}`

/** A step's name, what its function returns, and what JSON makes of that if it is another value. */
const VALUES: [name: string, value: unknown, seen?: unknown][] = [
  ['__proto__', 'a step of this name'],
  ['constructor', { constructor: 1, toString: 2 }],
  ['toString', JSON.parse('{"__proto__": {"polluted": true}, "a": 1}')],
  ['_checkpoint', { completed_steps: {} }],
  ['_step/a', [1]],
  ['a.b', { 'a.b': { '{x}': 0 } }],
  ['a/../b?c=d#e%41', 'a path'],
  [' ', ' '],
  ['line\nbreak\ttab', 'text\r\n'],
  ['"quoted" \\ and 🐢', '🐢'],
  ['0', 0],
  // 1,022 bytes, and 1,024 with a prefix of two.
  ['ż'.repeat(511), 'a long key'],
  ['null', null],
  ['undefined', undefined, null],
  ['false', false],
  ['empty text', ''],
  ['empty array', []],
  ['empty object', {}],
  ['NUL', { 'a\u0000b': 'c\u0000' }],
  ['half surrogates', ['\ud83e', '\udd16', '\udd16\ud83e', 'a\ud83e']],
  ['text that looks like JSON', ['42', '{"a":1}', 'null', 'NaN']],
  [
    'numbers',
    [Number.POSITIVE_INFINITY, -0, 0.1, 5e-324, 1.7976931348623157e308, 2 ** 53],
    [null, 0, 0.1, 5e-324, 1.7976931348623157e308, 2 ** 53],
  ],
  ['not a number', Number.NaN, null],
  ['bigint', 12345678901234567890n, '12345678901234567890'],
  ['date', new Date(1e12), '2001-09-09T01:46:40.000Z'],
  ['map', new Map([[1, 2]]), {}],
  ['function', () => 1, null],
  ['deep', nest(500)],
  ['big text', BIG_TEXT],
  ['many members', Object.fromEntries(Array.from({ length: 5_000 }, (_, i) => [`member ${i}`, { i }]))],
]

/** As VALUES: what the step throws, then the message (undefined: the SDK's own) and the name that a reader must see. */
const FAILURES: [name: string, thrown: unknown, message: string | undefined, cause?: string][] = [
  ['fails', new Error('No stock'), 'No stock', 'Error'],
  ['fails by its type', new RangeError('Out of range'), 'Out of range', 'RangeError'],
  ['fails with hard text', new Error('a\u0000b \ud83e "quoted" 🐢'), 'a\u0000b \ud83e "quoted" 🐢', 'Error'],
  ['fails with members', Object.assign(new Error('Refused'), { code: 'E1', at: { line: 1 } }), 'Refused', 'Error'],
  ['fails with a text', 'just text', 'just text'],
  ['fails with null', null, 'null'],
  ['fails with an object', { reason: 'none' }, '[object Object]'],
  ['fails without a message', new Error(''), undefined, 'Error'],
]

/** A hundred steps. Those of a group run in one Promise.all, the groups one after the other. `prefix`: 0 to 2 bytes. */
export function makeGroups(prefix: string): HardStep[][] {
  const values = VALUES.map(([name, value, seen = value]) => ({ name, ...gives(value, seen) }))
  const failures = FAILURES.map(([name, thrown, message = `Step '${prefix}${name}' failed`, cause]) => ({
    name,
    ...fails(thrown, { message, cause }),
  }))
  // Ten steps of one name: the SDK numbers them in the order of the calls.
  const again = Array.from({ length: 10 }, (_, i) => ({ name: 'again', ...gives({ i }) }))
  const mixed = Array.from({ length: 40 }, (_, i) => ({
    name: `mixed ${i}`,
    ...(i % 5 === 0
      ? fails(new TypeError(`No ${i}`), { message: `No ${i}`, cause: 'TypeError' })
      : gives([i, 'x'.repeat(i)])),
  }))
  const last = Array.from({ length: 12 }, (_, i) => ({ name: `last ${i}`, ...gives(i) }))

  const counts = new Map<string, number>()
  const named = ({ name, ...work }: Work & { name: string }): HardStep => {
    const count = (counts.get(name) ?? 0) + 1
    counts.set(name, count)
    const full = prefix + name
    return { name: full, key: count === 1 ? full : `${full}_${count}`, ...work }
  }
  return [
    ...values.slice(0, 20).map((step) => [step]),
    again,
    values.slice(20),
    ...[0, 10, 20, 30].map((from) => mixed.slice(from, from + 10)),
    ...failures.map((step) => [step]),
    ...last.map((step) => [step]),
  ].map((group) => group.map(named))
}

function gives(value: unknown, seen = value): Work {
  return { run: () => value, outcome: { value: seen } }
}

function fails(thrown: unknown, { message, cause }: { message: string; cause?: string | undefined }): Work {
  return {
    run: () => {
      throw thrown
    },
    outcome: { error: { name: 'TaskError', message, ...(cause === undefined ? {} : { cause }) } },
  }
}

function nest(levels: number): unknown {
  let value: unknown = 'bottom'
  for (let level = 0; level < levels; level++) value = level % 2 ? [value] : { a: value }
  return value
}
