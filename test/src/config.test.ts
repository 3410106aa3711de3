import assert from 'node:assert/strict'
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join, resolve } from 'node:path'
import test from 'node:test'
import { CONFIG_VARIABLES, ConfigError, readConfig } from '../../src/config.ts'

const MIB = 1024 * 1024

/** The message of the ConfigError that the environment ends in. */
function refusal(env: Record<string, string | undefined>): string {
  try {
    readConfig(env)
  } catch (error) {
    assert.ok(error instanceof ConfigError, String(error))
    return error.message
  }
  assert.fail('The environment was accepted')
}

test('an empty environment gives the documented defaults', () => {
  assert.deepEqual(readConfig({}), {
    host: '127.0.0.1',
    port: 8080,
    database: { poolMax: 10, prepare: true },
    dataDir: resolve('.data'),
    store: 'journal',
    migrate: 'auto',
    limits: { maxBodyBytes: 32 * MIB, maxResultDepth: 512, maxStepsPerJob: 100_000, maxCheckpointBytes: 256 * MIB },
    logLevel: 'info',
    shutdownTimeoutMs: 25_000,
    auth: 'loopback',
  })
})

test('every variable reaches the configuration', (t) => {
  const directory = mkdtempSync(join(tmpdir(), 'cairn-config-'))
  t.after(() => rmSync(directory, { recursive: true }))
  const passwordFile = join(directory, 'password')
  writeFileSync(passwordFile, 'secret\n')
  const env = {
    HOST: '0.0.0.0',
    PORT: '0',
    AUTH: 'off',
    DATABASE_URL: 'postgres://u@db/cairn',
    DATABASE_PASSWORD_FILE: passwordFile,
    DATABASE_POOL_MAX: '4',
    DATABASE_PREPARE: 'false',
    DATABASE_MIGRATION_URL: 'postgresql://owner:pw@db/cairn',
    DATA_DIR: '/var/lib/cairn',
    STORE: 'journal',
    MIGRATE: 'verify',
    MAX_BODY_BYTES: '1KiB',
    MAX_RESULT_DEPTH: '4096',
    MAX_STEPS_PER_JOB: '7',
    MAX_CHECKPOINT_BYTES: '2GiB',
    LOG_LEVEL: 'silent',
    SHUTDOWN_TIMEOUT_S: '1',
  }
  assert.deepEqual(Object.keys(env).sort(), CONFIG_VARIABLES.map(({ name }) => name).sort())
  assert.deepEqual(readConfig(env), {
    host: '0.0.0.0',
    port: 0,
    database: {
      url: env.DATABASE_URL,
      passwordFile,
      poolMax: 4,
      prepare: false,
      migrationUrl: env.DATABASE_MIGRATION_URL,
    },
    dataDir: '/var/lib/cairn',
    store: 'journal',
    migrate: 'verify',
    limits: { maxBodyBytes: 1024, maxResultDepth: 4096, maxStepsPerJob: 7, maxCheckpointBytes: 2048 * MIB },
    logLevel: 'silent',
    shutdownTimeoutMs: 1000,
    auth: 'off',
  })
})

test('setting every variable to its documented default changes nothing', () => {
  const env = Object.fromEntries(CONFIG_VARIABLES.map((variable) => [variable.name, variable.default]))
  assert.deepEqual(readConfig(env), readConfig({}))
})

test('an empty variable counts as unset', () => {
  const env = Object.fromEntries(CONFIG_VARIABLES.map(({ name }) => [name, '']))
  assert.deepEqual(readConfig(env), readConfig({}))
})

test('variables that Cairn does not know are ignored', () => {
  assert.deepEqual(readConfig({ PATH: '/bin', PGHOST: 'elsewhere', __proto__: 'x' }), readConfig({}))
})

test('the configuration is frozen at every depth', () => {
  const isDeeplyFrozen = (value: unknown): boolean =>
    typeof value !== 'object' ||
    value === null ||
    (Object.isFrozen(value) && Object.values(value).every(isDeeplyFrozen))
  assert.ok(isDeeplyFrozen(readConfig({})))
})

test('every bad variable is named at once, with its value and what is expected', () => {
  const bad = {
    HOST: 'http://localhost',
    PORT: '65536',
    AUTH: 'on',
    DATABASE_POOL_MAX: '3',
    DATABASE_PREPARE: 'no',
    STORE: 'redis',
    MIGRATE: 'always',
    MAX_BODY_BYTES: '257MiB',
    MAX_RESULT_DEPTH: '4097',
    MAX_STEPS_PER_JOB: '0',
    MAX_CHECKPOINT_BYTES: '1023',
    LOG_LEVEL: 'verbose',
    SHUTDOWN_TIMEOUT_S: '-1',
  }
  const lines = refusal(bad).split('\n')
  for (const [name, value] of Object.entries(bad))
    assert.ok(
      lines.some((line) => line.trim().startsWith(`${name} is "${value}"; expected `)),
      `${name} is missing from:\n${lines.join('\n')}`,
    )
  assert.equal(lines.length, 1 + Object.keys(bad).length)
})

test('numbers are written in digits alone', () => {
  for (const text of ['1e3', '80 ', ' 80', '80x', '0x50', '8_080', '80.0', '+80', '-80', 'NaN', '٨٠'])
    assert.match(refusal({ PORT: text }), /^ {2}PORT is /m, text)
})

test('sizes take KiB, MiB and GiB, and no other unit', () => {
  assert.equal(readConfig({ MAX_BODY_BYTES: '2048' }).limits.maxBodyBytes, 2048)
  assert.equal(readConfig({ MAX_BODY_BYTES: '16MiB' }).limits.maxBodyBytes, 16 * MIB)
  for (const text of ['16MB', '16M', '16 MiB', '16mib', 'MiB', '1.5MiB', '99999999999999999999GiB'])
    assert.match(refusal({ MAX_BODY_BYTES: text }), /^ {2}MAX_BODY_BYTES is /m, text)
})

test('the windmill store is named as not available yet', () => {
  assert.match(refusal({ STORE: 'windmill' }), /windmill is not available yet/)
})

test('a host that others can reach is refused unless AUTH=off', () => {
  for (const host of ['0.0.0.0', '::', '192.168.1.5', 'cairn.example', '128.0.0.1', '::ffff:10.0.0.1']) {
    assert.match(refusal({ HOST: host }), /AUTH=off/, host)
    assert.equal(readConfig({ HOST: host, AUTH: 'off' }).host, host)
  }
  for (const host of ['127.0.0.1', '127.8.9.10', '::1', 'localhost'])
    assert.equal(readConfig({ HOST: host }).auth, 'loopback', host)
  assert.equal(readConfig({ AUTH: 'off' }).auth, 'off')
})

test('a database URL that cannot be used is refused without showing its password', () => {
  for (const url of [
    'mysql://u:hunter2@db/cairn',
    'postgres://u:hunter2@db/cairn?nonsense=1',
    'postgres://u:hunter2@db:port/cairn',
    'postgres://u:hun/ter2@db/cairn',
    'postgres://u:hunter2@@db/cairn',
    'postgres://u:hunter2%@db/cairn',
    'hunter2',
  ])
    for (const env of [{ DATABASE_URL: url }, { DATABASE_URL: 'postgres://db/cairn', DATABASE_MIGRATION_URL: url }]) {
      const message = refusal(env)
      assert.match(message, 'DATABASE_MIGRATION_URL' in env ? /DATABASE_MIGRATION_URL: / : /DATABASE_URL: /)
      assert.doesNotMatch(message, /hunter|ter2/)
    }
})

test('a password file that is absent or empty is refused by name', (t) => {
  const directory = mkdtempSync(join(tmpdir(), 'cairn-config-'))
  t.after(() => rmSync(directory, { recursive: true }))
  const file = join(directory, 'password')
  const env = { DATABASE_URL: 'postgres://db/cairn', DATABASE_PASSWORD_FILE: file }
  assert.match(refusal(env), /DATABASE_PASSWORD_FILE: .*ENOENT/)
  writeFileSync(file, '\n')
  assert.match(refusal(env), /DATABASE_PASSWORD_FILE: .*empty/)
})

test('settings of a database that is not used are refused', () => {
  const message = refusal({ DATABASE_MIGRATION_URL: 'postgres://db/cairn', DATABASE_PASSWORD_FILE: '/nowhere' })
  assert.match(message, /DATABASE_MIGRATION_URL is set; expected DATABASE_URL/)
  assert.match(message, /DATABASE_PASSWORD_FILE is set; expected DATABASE_URL/)
})
