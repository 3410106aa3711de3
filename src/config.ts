import { resolve } from 'node:path'
import { DatabaseUrlError, openPasswordFile, parseDatabaseUrl } from '../db/database-url.ts'

const KIB = 1024
const MIB = 1024 * KIB
const GIB = 1024 * MIB

/** Loopback: without a token check, only programs on this machine may reach the service. */
export const DEFAULT_HOST = '127.0.0.1'
/** The usual port of an HTTP service that needs no privilege to listen. 0 = any free port. */
export const DEFAULT_PORT = 8080
/** All pools of a process together; a tenth of Postgres's usual `max_connections`, so that several replicas fit. */
export const DEFAULT_DATABASE_POOL_MAX = 10
/** One connection each for writes, the slow lane, reads and the readiness probe: with fewer, one starves another. */
export const MIN_DATABASE_POOL_MAX = 4
/** Ten times the `max_connections` that Postgres ships with: more than this is a typing error. */
export const MAX_DATABASE_POOL_MAX = 1000
/** Prepared statements save a parse and a plan a call; only transaction poolers cannot carry them. */
export const DEFAULT_DATABASE_PREPARE = true
/** Beside the checkout, so that a bare clone keeps its data where its user sees it. */
export const DEFAULT_DATA_DIR = './.data'
/** The store with Cairn's own tables, which needs nothing but a Postgres. */
export const DEFAULT_STORE = 'journal'
/** Migrates at start: replicas that start together settle it by a lock. */
export const DEFAULT_MIGRATE = 'auto'
/** A step's result is a few KB; 32 MiB lets a file pass and keeps one request from holding up the others. */
export const DEFAULT_MAX_BODY_BYTES = 32 * MIB
/** Less than this could not hold a failed step's record with its stack. */
export const MIN_MAX_BODY_BYTES = KIB
/** The bodies in flight together are bounded by 256 MiB, so no single one can be larger. */
export const MAX_MAX_BODY_BYTES = 256 * MIB
/** Deeper than data that people write, and shallow enough for recursive readers (Python's limit is 1,000). */
export const DEFAULT_MAX_RESULT_DEPTH = 512
/**
 * Postgres reads JSON by recursion and stops at `max_stack_depth`: at its default of 2 MB, version 15 takes
 * 13,000 levels and 18 takes 16,000 (measured, x86-64). A third of that leaves room for the functions around it and
 * for other machines.
 */
export const MAX_MAX_RESULT_DEPTH = 4096
/** Ten times the largest workflow measured; a loop that never ends is stopped before it fills the disk. */
export const DEFAULT_MAX_STEPS_PER_JOB = 100_000
/** A replay reads every step: beyond ten million it would take minutes, whatever the database allows. */
export const MAX_MAX_STEPS_PER_JOB = 10_000_000
/** The most that a `jsonb` document can hold, so that a checkpoint still fits where Windmill would keep it. */
export const DEFAULT_MAX_CHECKPOINT_BYTES = 256 * MIB
/** As for a body: less could not hold one failed step. */
export const MIN_MAX_CHECKPOINT_BYTES = KIB
/** No client reads a larger checkpoint in one answer; a figure beyond it is a typing error. */
export const MAX_MAX_CHECKPOINT_BYTES = 64 * GIB
/** Starts, stops and faults, not requests that went well. */
export const DEFAULT_LOG_LEVEL = 'info'
/** Seconds. Under the 30 s that Kubernetes waits before it kills, with time left to close the database. */
export const DEFAULT_SHUTDOWN_TIMEOUT_S = 25
/** Ten minutes: no orchestrator waits longer for a service that answers within 9 s. */
export const MAX_SHUTDOWN_TIMEOUT_S = 600

/** The levels of pino, and `silent`. */
export const LOG_LEVELS = ['trace', 'debug', 'info', 'warn', 'error', 'fatal', 'silent'] as const
/** What happens to the schema at start: migrate it, only check that it is current, or neither. */
export const MIGRATE_MODES = ['auto', 'verify', 'off'] as const

/** Every variable that is read, in the README's order. `default` is what an unset one counts as; '' = absent. */
export const CONFIG_VARIABLES = [
  {
    name: 'HOST',
    default: DEFAULT_HOST,
    description: 'Address or host name to listen on. One that is not loopback refuses to start unless `AUTH=off`.',
  },
  { name: 'PORT', default: `${DEFAULT_PORT}`, description: 'Port to listen on; 0 = any free one.' },
  {
    name: 'AUTH',
    default: '',
    description: '`off` lets everybody who can reach the service read and write every job.',
  },
  {
    name: 'DATABASE_URL',
    default: '',
    description: 'Postgres to use; unset = the embedded one. The URL parameters of libpq mean what they mean in libpq.',
  },
  {
    name: 'DATABASE_PASSWORD_FILE',
    default: '',
    description: 'File with the password for `DATABASE_URL`, read anew for every connection.',
  },
  {
    name: 'DATABASE_POOL_MAX',
    default: `${DEFAULT_DATABASE_POOL_MAX}`,
    description: `Postgres connections of this process, all pools together; at least ${MIN_DATABASE_POOL_MAX}.`,
  },
  {
    name: 'DATABASE_PREPARE',
    default: `${DEFAULT_DATABASE_PREPARE}`,
    description: '`false` behind a pooler in transaction mode: no prepared statements.',
  },
  {
    name: 'DATABASE_MIGRATION_URL',
    default: '',
    description: 'Postgres URL for migrations alone, for a role that owns the schema; unset = `DATABASE_URL`.',
  },
  { name: 'DATA_DIR', default: DEFAULT_DATA_DIR, description: 'Directory of the embedded database.' },
  { name: 'STORE', default: DEFAULT_STORE, description: '`journal`: tables of its own.' },
  {
    name: 'MIGRATE',
    default: DEFAULT_MIGRATE,
    description: '`auto` migrates at start; `verify` starts only if the schema is current; `off` does neither.',
  },
  {
    name: 'MAX_BODY_BYTES',
    default: formatBytes(DEFAULT_MAX_BODY_BYTES),
    description: `Largest request body, ${formatBytes(MIN_MAX_BODY_BYTES)} to ${formatBytes(MAX_MAX_BODY_BYTES)}.`,
  },
  {
    name: 'MAX_RESULT_DEPTH',
    default: `${DEFAULT_MAX_RESULT_DEPTH}`,
    description: `Deepest nesting of a result, 1 to ${MAX_MAX_RESULT_DEPTH}.`,
  },
  { name: 'MAX_STEPS_PER_JOB', default: `${DEFAULT_MAX_STEPS_PER_JOB}`, description: 'Most steps of one job.' },
  {
    name: 'MAX_CHECKPOINT_BYTES',
    default: formatBytes(DEFAULT_MAX_CHECKPOINT_BYTES),
    description: 'Most bytes of results in one job.',
  },
  { name: 'LOG_LEVEL', default: DEFAULT_LOG_LEVEL, description: `One of ${LOG_LEVELS.join(', ')}.` },
  {
    name: 'SHUTDOWN_TIMEOUT_S',
    default: `${DEFAULT_SHUTDOWN_TIMEOUT_S}`,
    description: 'Seconds from SIGTERM to the end of requests that are still running.',
  },
] as const satisfies ReadonlyArray<{ name: string; default: string; description: string }>

type VariableName = (typeof CONFIG_VARIABLES)[number]['name']

/** The whole configuration, checked and deeply frozen. Sizes in bytes, times in milliseconds. */
export interface Config {
  readonly host: string
  readonly port: number
  readonly database: {
    /** Absent: the embedded database. */
    readonly url?: string
    readonly passwordFile?: string
    readonly poolMax: number
    readonly prepare: boolean
    readonly migrationUrl?: string
  }
  /** Absolute. */
  readonly dataDir: string
  readonly store: 'journal'
  readonly migrate: (typeof MIGRATE_MODES)[number]
  readonly limits: {
    readonly maxBodyBytes: number
    readonly maxResultDepth: number
    readonly maxStepsPerJob: number
    readonly maxCheckpointBytes: number
  }
  readonly logLevel: (typeof LOG_LEVELS)[number]
  readonly shutdownTimeoutMs: number
  /** `loopback`: no token asked for, and only this machine reaches the service. `off`: the operator wants it open. */
  readonly auth: 'off' | 'loopback'
}

/** The environment does not make a configuration. The message names every variable at fault, and no secret. */
export class ConfigError extends Error {
  override name = 'ConfigError'
}

/** `parse` gives undefined for a text that is not what `expected` says. */
interface Format<T> {
  expected: string
  parse: (text: string) => T | undefined
}

/** Reads the environment; an empty variable counts as unset, unknown ones are ignored. Throws ConfigError. */
export function readConfig(env: Record<string, string | undefined>): Config {
  const faults: string[] = []

  function read<T>(name: VariableName, format: Format<T>): T {
    const text = env[name] || defaultOf(name)
    const value = format.parse(text)
    if (value !== undefined) return value
    faults.push(`${name} is ${JSON.stringify(text)}; expected ${format.expected}`)
    return format.parse(defaultOf(name)) as T
  }

  const url = env.DATABASE_URL || undefined
  const migrationUrl = env.DATABASE_MIGRATION_URL || undefined
  const passwordFile = env.DATABASE_PASSWORD_FILE || undefined
  if (url === undefined) {
    if (migrationUrl !== undefined)
      faults.push('DATABASE_MIGRATION_URL is set; expected DATABASE_URL to be set as well')
    if (passwordFile !== undefined)
      faults.push('DATABASE_PASSWORD_FILE is set; expected DATABASE_URL to be set as well')
  }
  for (const [name, fault] of [
    ['DATABASE_URL', url && findDatabaseFault(() => parseDatabaseUrl(url))],
    ['DATABASE_MIGRATION_URL', migrationUrl && findDatabaseFault(() => parseDatabaseUrl(migrationUrl))],
    ['DATABASE_PASSWORD_FILE', passwordFile && findDatabaseFault(() => openPasswordFile(passwordFile))],
  ])
    if (fault) faults.push(`${name}: ${fault}`)

  const auth: Config['auth'] = read('AUTH', oneOf(['', 'off'])) === 'off' ? 'off' : 'loopback'
  const host = read('HOST', HOST)
  if (auth !== 'off' && !isLoopback(host))
    faults.push(
      `HOST is ${JSON.stringify(host)}; expected a loopback address, or AUTH=off: this version checks no tokens, so ` +
        'everybody who can reach that address could read and write every job',
    )

  const config: Config = {
    host,
    port: read('PORT', wholeNumber(0, 65_535)),
    database: Object.freeze({
      ...(url === undefined ? {} : { url }),
      ...(passwordFile === undefined ? {} : { passwordFile }),
      poolMax: read('DATABASE_POOL_MAX', wholeNumber(MIN_DATABASE_POOL_MAX, MAX_DATABASE_POOL_MAX)),
      prepare: read('DATABASE_PREPARE', oneOf(['true', 'false'])) === 'true',
      ...(migrationUrl === undefined ? {} : { migrationUrl }),
    }),
    dataDir: resolve(env.DATA_DIR || DEFAULT_DATA_DIR),
    store: read('STORE', STORE),
    migrate: read('MIGRATE', oneOf(MIGRATE_MODES)),
    limits: Object.freeze({
      maxBodyBytes: read('MAX_BODY_BYTES', bytes(MIN_MAX_BODY_BYTES, MAX_MAX_BODY_BYTES)),
      maxResultDepth: read('MAX_RESULT_DEPTH', wholeNumber(1, MAX_MAX_RESULT_DEPTH)),
      maxStepsPerJob: read('MAX_STEPS_PER_JOB', wholeNumber(1, MAX_MAX_STEPS_PER_JOB)),
      maxCheckpointBytes: read('MAX_CHECKPOINT_BYTES', bytes(MIN_MAX_CHECKPOINT_BYTES, MAX_MAX_CHECKPOINT_BYTES)),
    }),
    logLevel: read('LOG_LEVEL', oneOf(LOG_LEVELS)),
    shutdownTimeoutMs: read('SHUTDOWN_TIMEOUT_S', wholeNumber(1, MAX_SHUTDOWN_TIMEOUT_S)) * 1000,
    auth,
  }
  if (faults.length > 0)
    throw new ConfigError(`The environment cannot be used:\n${faults.map((f) => `  ${f}`).join('\n')}`)
  return Object.freeze(config)
}

const HOST: Format<string> = {
  expected: 'an address or a host name, without a port',
  parse: (text) => (/^[\w.:%-]+$/.test(text) && !/^[^:]+:\d+$/.test(text) ? text : undefined),
}

const STORE: Format<'journal'> = {
  expected: 'journal (windmill is not available yet in this version)',
  parse: (text) => (text === 'journal' ? text : undefined),
}

function wholeNumber(min: number, max: number): Format<number> {
  return {
    expected: `a whole number from ${min} to ${max}`,
    parse: (text) => within(/^\d+$/.test(text) ? Number(text) : NaN, min, max),
  }
}

function bytes(min: number, max: number): Format<number> {
  const units: Record<string, number> = { '': 1, KiB: KIB, MiB: MIB, GiB: GIB }
  return {
    expected: `a number of bytes from ${formatBytes(min)} to ${formatBytes(max)} (plain, or with KiB, MiB or GiB)`,
    parse: (text) => {
      const [, digits, unit = ''] = /^(\d+)(KiB|MiB|GiB)?$/.exec(text) ?? []
      return within(Number(digits) * (units[unit] ?? NaN), min, max)
    },
  }
}

function oneOf<const T extends string>(values: readonly T[]): Format<T> {
  return { expected: values.filter(Boolean).join(' or '), parse: (text) => values.find((value) => value === text) }
}

function within(value: number, min: number, max: number): number | undefined {
  return value >= min && value <= max ? value : undefined
}

function formatBytes(count: number): string {
  for (const [unit, size] of [
    ['GiB', GIB],
    ['MiB', MIB],
    ['KiB', KIB],
  ] as const)
    if (count % size === 0) return `${count / size}${unit}`
  return `${count}`
}

function defaultOf(name: VariableName): string {
  return CONFIG_VARIABLES.find((variable) => variable.name === name)?.default ?? ''
}

function isLoopback(host: string): boolean {
  return /^(127(\.\d{1,3}){3}|::1|localhost)$/i.test(host)
}

function findDatabaseFault(use: () => unknown): string | undefined {
  try {
    use()
  } catch (error) {
    if (error instanceof DatabaseUrlError) return error.message
    throw error
  }
}
