import fc from 'fast-check'
import type { Action, Ending, IfMatch } from './rules.ts'

// Few values of each sort, so that the same one comes again and again: repeats and collisions are what is looked for.

/** Each can be a parent, a child, a child that dispatches children itself, or all of that in turn. */
export const JOB_COUNT = 4
export const KEYS = ['a', '__proto__', '0', 'a/b', '_step/a'] as const

const ERROR = { name: 'E', message: 'no' }
const FAILURE_OF_A =
  '{"__wmill_error":true,"message":"no","step_key":"a","result":{"error":{"name":"E","message":"no"}}}'

const job = fc.nat({ max: JOB_COUNT - 1 })
const key = fc.constantFrom<string[]>(...KEYS)
const result = fc.constantFrom('1', '{"a": 1.0, "a":2}', 'null', '"\\u0000 \\ud800"', FAILURE_OF_A)
const hash = fc.oneof({ weight: 8, arbitrary: fc.constant('') }, fc.constantFrom('h1', 'h2'))
const startedAt = fc.constantFrom(null, null, null, '2026-12-01T01:45:06.357Z', '2026-12-01T01:45:06+05:30')
const times = fc.record({ started_at: startedAt, duration_ms: fc.constantFrom(null, null, 0, 7, -1) })
const ending: fc.Arbitrary<Ending> = fc.oneof(
  { weight: 3, arbitrary: result.map((result) => ({ result })) },
  { weight: 1, arbitrary: fc.constant({ error: ERROR }) },
)
const inputArgs = fc.constantFrom(null, null, '{}', '{"n":1.50}')
const force = fc.boolean()

const children = fc
  .uniqueArray(fc.tuple(key, job), { maxLength: 3, selector: ([name]) => name })
  .map((pairs) => pairs.sort(([one], [other]) => Buffer.compare(Buffer.from(one), Buffer.from(other))))

/** Each child once: what else is refused before the rules are asked. */
const distinctChildren = children.map((pairs) =>
  pairs.filter(([, id], index) => pairs.findIndex(([, other]) => other === id) === index),
)

const pending = fc.option(
  fc.record({
    mode: fc.constantFrom('parallel', 'sleep'),
    keys: fc.uniqueArray(key, { maxLength: 2 }),
    jobIds: fc.constantFrom<[string, number][]>([], [['a', 1]]),
  }),
)

const put = fc.record({
  kind: fc.constant('put' as const),
  job,
  steps: fc.uniqueArray(fc.tuple(key, result), { maxLength: 3, selector: ([name]) => name }),
  children: distinctChildren,
  pending,
  hash,
  inputArgs,
  executingKey: fc.constantFrom(null, null, 'a'),
  extra: fc.constantFrom(null, null, '{"consumed":[1.0]}'),
  ifMatch: fc.constantFrom<IfMatch>(null, null, 'current', 'other', 'any', 'unknown', 'weak'),
  force,
})

const dispatch = fc
  .record({
    kind: fc.constant('dispatch' as const),
    job,
    mode: fc.constantFrom('sequential', 'parallel', 'sleep', 'approval'),
    children: fc.oneof({ weight: 9, arbitrary: distinctChildren }, { weight: 1, arbitrary: children }),
    mayBeItself: fc.nat({ max: 9 }).map((chance) => chance === 0),
    others: fc.oneof(
      { weight: 2, arbitrary: fc.constant<string[]>([]) },
      { weight: 1, arbitrary: fc.uniqueArray(key, { maxLength: 2 }) },
    ),
    extra: fc.constantFrom(null, '{}', '{"sleep_duration_s":1.50}', '{"approval":true,"form":{"a":null}}'),
    hash,
    inputArgs,
  })
  .map(({ extra, mayBeItself, ...request }): Action => {
    const children = request.children.filter(([, id]) => mayBeItself || id !== request.job)
    const others = request.others.filter((name) => !children.some(([mapped]) => mapped === name))
    const opened = others.length > 0 ? others : children.map(([mapped]) => mapped)
    return { ...request, children, others, entries: extra === null ? [] : opened.map((name) => [name, extra]) }
  })

const record = fc.record({ kind: fc.constant('record' as const), job, key, result, hash, times })

const steps = fc.record({
  kind: fc.constant('steps' as const),
  job,
  steps: fc.uniqueArray(fc.record({ key, ending, times }), {
    minLength: 1,
    maxLength: 3,
    selector: (step) => step.key,
  }),
  hash,
})

/** With `mapped`, which counts through them, a child that some key maps to in place of the given one, if there is any. */
const child = { job, child: job, mapped: fc.option(fc.nat({ max: 11 }), { freq: 4 }) }

export type Choice = (Action & { mapped?: number | null }) | 'again'

/** 'again' = what was sent last. */
export const anyChoice: fc.Arbitrary<Choice> = fc.oneof(
  { weight: 6, arbitrary: record },
  { weight: 5, arbitrary: steps },
  { weight: 3, arbitrary: put },
  { weight: 7, arbitrary: dispatch },
  {
    weight: 3,
    arbitrary: fc.record({ kind: fc.constant('startChild' as const), ...child, started_at: startedAt }),
  },
  { weight: 7, arbitrary: fc.record({ kind: fc.constant('completeChild' as const), ...child, ending, times }) },
  { weight: 3, arbitrary: fc.record({ kind: fc.constant('forgetStep' as const), job, key, force }) },
  { weight: 1, arbitrary: fc.record({ kind: fc.constant('forgetJob' as const), job, force }) },
  {
    weight: 2,
    arbitrary: fc.record({
      kind: fc.constant('describe' as const),
      job,
      name: fc.constantFrom(null, 'order'),
      labels: fc.constantFrom(null, '{}', '{"tenant":"acme"}'),
      inputArgs,
      hash,
    }),
  },
  { weight: 1, arbitrary: fc.record({ kind: fc.constant('completeJob' as const), job, ending }) },
  { weight: 2, arbitrary: fc.record({ kind: fc.constant('reopen' as const), job }) },
  { weight: 5, arbitrary: fc.constant('again' as const) },
)
