import assert from 'node:assert/strict'
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs'
import { tmpdir, userInfo } from 'node:os'
import { join } from 'node:path'
import test, { type TestContext } from 'node:test'
import { rootCertificates } from 'node:tls'
import fc from 'fast-check'
import postgres from 'postgres'
import { type DatabaseTlsOptions, DatabaseUrlError, parseDatabaseUrl } from '../../db/database-url.ts'
import { createDatabase } from '../postgres.ts'

/** The options for a URL that must not cause a warning. */
function connect(url: string) {
  const { connection, warnings } = parseDatabaseUrl(url)
  assert.deepEqual(warnings, [])
  return connection
}

/** The message of the DatabaseUrlError that the URL ends in. */
function refusal(url: string, options: { passwordFile?: string } = {}): string {
  try {
    parseDatabaseUrl(url, options)
  } catch (error) {
    assert.ok(error instanceof DatabaseUrlError, String(error))
    return error.message
  }
  assert.fail(`Accepted: ${url}`)
}

function tlsOf(url: string): DatabaseTlsOptions {
  const { ssl } = connect(url)
  assert.ok(typeof ssl === 'object')
  return ssl
}

function temporaryFile(t: TestContext, name: string, text: string): string {
  const directory = mkdtempSync(join(tmpdir(), 'cairn-url-'))
  t.after(() => rmSync(directory, { recursive: true }))
  writeFileSync(join(directory, name), text)
  return join(directory, name)
}

test('the parts of a URL become the options of the driver', () => {
  const connection = connect('postgresql://ada:s3cret@db.example:6432/cairn')
  assert.deepEqual(connection.host, ['db.example'])
  assert.deepEqual(connection.port, [6432])
  assert.equal(connection.username, 'ada')
  assert.equal(connection.password, 's3cret')
  assert.equal(connection.database, 'cairn')
  assert.equal(connection.ssl, 'prefer')
  assert.deepEqual(connection.connection, { application_name: 'cairn' })
})

test('what a URL leaves out takes the defaults of libpq', () => {
  const connection = connect('postgres://')
  assert.deepEqual([connection.host, connection.port], [['localhost'], [5432]])
  assert.equal(connection.username, userInfo().username)
  assert.equal(connection.database, userInfo().username)
  assert.equal(connect('postgres://ada@db').database, 'ada')
})

test('any user, password and database name survive percent-encoding', () => {
  const name = fc.string({ unit: 'grapheme', minLength: 1 }).filter((text) => !text.includes('\0'))
  fc.assert(
    fc.property(name, name, name, (user, password, database) => {
      const [u, p, d] = [user, password, database].map(encodeURIComponent)
      for (const url of [`postgres://${u}:${p}@db/${d}`, `postgres://db?user=${u}&password=${p}&dbname=${d}`]) {
        const connection = connect(url)
        assert.deepEqual([connection.username, connection.password, connection.database], [user, password, database])
      }
    }),
  )
})

test('a plus sign stands for itself', () => {
  assert.equal(connect('postgres://u:a+b@db/x').password, 'a+b')
  assert.equal(connect('postgres://db/x?password=a+b').password, 'a+b')
})

test('parameters override the parts before them, and the last of a name counts', () => {
  const connection = connect('postgres://u@db:1/x?host=other&port=2&dbname=y&user=v&user=w')
  assert.deepEqual(
    [connection.host, connection.port, connection.database, connection.username],
    [['other'], [2], 'y', 'w'],
  )
})

test('several hosts keep their own ports', () => {
  assert.deepEqual(hostsOf('postgres://a:1,b:2/x'), [
    ['a', 'b'],
    [1, 2],
  ])
  assert.deepEqual(hostsOf('postgres://a,b:2/x'), [
    ['a', 'b'],
    [5432, 2],
  ])
  assert.deepEqual(hostsOf('postgres:///x?host=a,b&port=7'), [
    ['a', 'b'],
    [7, 7],
  ])
  assert.deepEqual(hostsOf('postgres://[::1]:1,[fe80::1]/x'), [
    ['::1', 'fe80::1'],
    [1, 5432],
  ])
  assert.match(refusal('postgres:///x?host=a,b,c&port=1,2'), /port must list/)
})

function hostsOf(url: string) {
  const { host, port } = connect(url)
  return [host, port]
}

test('hostaddr is where to connect, and host the name in the certificate', () => {
  const connection = connect('postgres://db.example/x?hostaddr=10.0.0.7&sslmode=verify-full')
  assert.deepEqual(connection.host, ['10.0.0.7'])
  assert.deepEqual(connection.ssl, { rejectUnauthorized: true, servername: 'db.example' })
  assert.match(refusal('postgres://a,b/x?hostaddr=10.0.0.7'), /as many addresses/)
  assert.match(refusal('postgres://a/x?hostaddr=b'), /not an IP address/)
})

test('a host that is a path is a Unix socket, without TLS', () => {
  for (const url of [
    'postgres://%2Fvar%2Frun/x',
    'postgres:///x?host=/var/run',
    'postgres:///x?host=/var/run&sslmode=require',
  ]) {
    const connection = connect(url)
    assert.equal(connection.path, '/var/run/.s.PGSQL.5432')
    assert.equal(connection.ssl, false)
  }
  assert.match(refusal('postgres:///x?host=/var/run,db'), /only host/)
})

test('sslmode means what it means in libpq', () => {
  const modes = { disable: false, allow: 'prefer', prefer: 'prefer', require: 'require' }
  for (const [mode, ssl] of Object.entries(modes))
    assert.equal(connect(`postgres://db/x?sslmode=${mode}`).ssl, ssl, mode)
  assert.equal(connect('postgres://db/x?ssl=true').ssl, 'require')

  const full = tlsOf('postgres://db/x?sslmode=verify-full')
  assert.deepEqual(full, { rejectUnauthorized: true })
  const ca = tlsOf('postgres://db/x?sslmode=verify-ca')
  assert.equal(ca.rejectUnauthorized, true)
  assert.equal(ca.checkServerIdentity?.(), undefined)
  assert.match(refusal('postgres://db/x?sslmode=no-verify'), /sslmode is "no-verify"; expected disable, allow/)
})

test('a certificate for an IP address is checked against that address', () => {
  assert.equal(tlsOf('postgres://10.0.0.7/x?sslmode=verify-full').host, '10.0.0.7')
  assert.match(refusal('postgres://10.0.0.7,10.0.0.8/x?sslmode=verify-full'), /several hosts/)
})

test('with a root certificate, sslmode=require checks it but not the host name', (t) => {
  const file = temporaryFile(t, 'ca.pem', rootCertificates[0] ?? '')
  const tls = tlsOf(`postgres://db/x?sslmode=require&sslrootcert=${file}`)
  assert.equal(tls.rejectUnauthorized, true)
  assert.equal(tls.ca, rootCertificates[0])
  assert.equal(tls.checkServerIdentity?.(), undefined)
  assert.equal(tlsOf(`postgres://db/x?sslmode=verify-full&sslrootcert=${file}`).checkServerIdentity, undefined)
})

test('sslrootcert=system checks everything, and nothing weaker goes with it', () => {
  assert.deepEqual(tlsOf('postgres://db/x?sslrootcert=system'), { rejectUnauthorized: true })
  assert.match(refusal('postgres://db/x?sslrootcert=system&sslmode=require'), /needs sslmode=verify-full/)
})

test('a certificate file that is absent or broken is refused at start', (t) => {
  assert.match(refusal('postgres://db/x?sslmode=require&sslrootcert=/nowhere/ca.pem'), /"\/nowhere\/ca.pem".*ENOENT/)
  const file = temporaryFile(t, 'broken.pem', 'no key')
  assert.match(refusal(`postgres://db/x?sslmode=require&sslcert=${file}&sslkey=${file}`), /TLS settings/)
  assert.match(refusal(`postgres://db/x?sslmode=require&sslcert=${file}`), /go together/)
})

test('certificates that sslmode=prefer would not use are named in a warning', () => {
  const { connection, warnings } = parseDatabaseUrl('postgres://db/x?sslrootcert=/etc/ca.pem')
  assert.equal(connection.ssl, 'prefer')
  assert.match(warnings.join(), /^Not used with sslmode=prefer .*sslrootcert/)
})

test('sslnegotiation=direct needs TLS', () => {
  assert.equal(connect('postgres://db/x?sslnegotiation=direct&sslmode=require').sslnegotiation, 'direct')
  assert.equal(connect('postgres://db/x?sslnegotiation=postgres').sslnegotiation, null)
  assert.match(refusal('postgres://db/x?sslnegotiation=direct'), /needs sslmode=require/)
})

test('application_name comes before fallback_application_name', () => {
  const name = (query: string) => connect(`postgres://db/x?${query}`).connection.application_name
  assert.equal(name('application_name=a%20b&fallback_application_name=c'), 'a b')
  assert.equal(name('fallback_application_name=c'), 'c')
})

test('options go to the server as they are', () => {
  const { connection } = connect('postgres://db/x?options=-c%20geqo%3Doff')
  assert.deepEqual(connection, { application_name: 'cairn', options: '-c geqo=off' })
})

test('connect_timeout and keepalives are seconds, and zero turns them off', () => {
  assert.equal(connect('postgres://db/x?connect_timeout=7').connect_timeout, 7)
  assert.equal(connect('postgres://db/x?connect_timeout=0').connect_timeout, 0)
  assert.equal(connect('postgres://db/x?connect_timeout=-1').connect_timeout, 0)
  assert.match(refusal('postgres://db/x?connect_timeout=7s'), /connect_timeout is "7s"/)
  assert.equal(connect('postgres://db/x?keepalives=0&keepalives_idle=9').keep_alive, 0)
  assert.equal(connect('postgres://db/x?keepalives=1&keepalives_idle=9').keep_alive, 9)
})

test('target_session_attrs takes the names of libpq', () => {
  for (const target of ['read-write', 'read-only', 'primary', 'standby', 'prefer-standby'])
    assert.equal(connect(`postgres://a,b/x?target_session_attrs=${target}`).target_session_attrs, target)
  assert.equal(connect('postgres://db/x?target_session_attrs=any').target_session_attrs, undefined)
  assert.match(refusal('postgres://db/x?target_session_attrs=master'), /target_session_attrs is "master"/)
})

test('parameters that ask for what the driver does anyway pass in silence', () => {
  connect('postgres://db/x?gssencmode=prefer&krbsrvname=postgres&channel_binding=prefer&client_encoding=UTF8&sslsni=1')
})

test('what providers and poolers add is ignored with one warning that names all of it', () => {
  const { connection, warnings } = parseDatabaseUrl(
    'postgres://db/x?connection_limit=1&schema=public&pool_timeout=0&supa=x',
  )
  assert.deepEqual(warnings, ['Ignored in the database URL: connection_limit, schema, pool_timeout, supa'])
  assert.deepEqual(connection.connection, { application_name: 'cairn' })
})

test('pgbouncer=true suggests DATABASE_PREPARE=false', () => {
  assert.match(parseDatabaseUrl('postgres://db/x?pgbouncer=true').warnings.join('\n'), /DATABASE_PREPARE=false/)
})

test('channel_binding=require gives a warning that it is not enforced', () => {
  const { warnings } = parseDatabaseUrl('postgres://db/x?sslmode=require&channel_binding=require')
  assert.equal(warnings.length, 1)
  assert.match(warnings.join(), /channel_binding=require .* not enforced/)
})

test('parameters that are unknown, or that cannot be honoured, are all named', () => {
  for (const query of [
    'passfile=/a',
    'service=a',
    'gssencmode=require',
    'require_auth=scram-sha-256',
    'search_path=a',
    '__proto__=a',
  ])
    assert.ok(refusal(`postgres://db/x?${query}`).includes(query.split('=')[0] ?? ''), query)
  assert.match(refusal('postgres://db/x?frobnicate=1&service=b&ssl=maybe'), /"frobnicate", "service", "ssl"/)
  assert.match(refusal('postgres://db/x?application_name'), /"application_name" has no value/)
})

test('other schemes and ports that are none are refused', () => {
  for (const url of ['', 'db/x', 'mysql://db/x', 'http://db/x', 'host=db dbname=x', 'POSTGRES://db/x'])
    assert.match(refusal(url), /begins with postgres:\/\//, url)
  for (const port of ['0', '65536', 'x', '5432x']) assert.match(refusal(`postgres://db:${port}/x`), /port/, port)
})

test('no refusal shows a piece of a password that was not encoded', () => {
  fc.assert(
    fc.property(fc.stringMatching(/^sesame[/@:?%#&=0-9]{1,4}sesame$/), (password) => {
      try {
        parseDatabaseUrl(`postgres://ada:${password}@db.example/cairn?frobnicate=1`)
      } catch (error) {
        assert.ok(error instanceof DatabaseUrlError)
        assert.doesNotMatch(error.message, /sesame/)
      }
    }),
    { numRuns: 2000 },
  )
})

test('a password file is read anew for each connection', async (t) => {
  const passwordFile = temporaryFile(t, 'password', 'first\n')
  const { connection } = parseDatabaseUrl('postgres://u@db/x', { passwordFile })
  const { password } = connection
  assert.ok(typeof password === 'function')
  assert.equal(await password(), 'first')
  writeFileSync(passwordFile, ' second \r\n')
  assert.equal(await password(), ' second ')
  rmSync(passwordFile)
  assert.equal(await password(), ' second ')
})

test('a password file that is absent or empty is refused', (t) => {
  assert.match(refusal('postgres://u@db/x', { passwordFile: '/nowhere/password' }), /"\/nowhere\/password".*ENOENT/)
  assert.match(refusal('postgres://u@db/x', { passwordFile: temporaryFile(t, 'password', '\n') }), /is empty/)
})

test('a password in the URL stands before the file, and a warning says so', (t) => {
  const passwordFile = temporaryFile(t, 'password', 'other')
  const { connection, warnings } = parseDatabaseUrl('postgres://u:own@db/x', { passwordFile })
  assert.equal(connection.password, 'own')
  assert.match(warnings.join(), /password file is not used/)
})

test('the driver takes nothing from PG* variables', async (t) => {
  const names = ['HOST', 'PORT', 'USER', 'USERNAME', 'DATABASE', 'PASSWORD', 'APPNAME', 'SSL', 'SSLNEGOTIATION'].concat(
    ['IDLE_TIMEOUT', 'CONNECT_TIMEOUT', 'MAX_LIFETIME', 'MAX_PIPELINE', 'BACKOFF', 'KEEP_ALIVE', 'PREPARE', 'DEBUG'],
    ['FETCH_TYPES', 'PUBLICATIONS', 'MAX'],
  )
  const { connection } = parseDatabaseUrl('postgres://')
  const before = optionsOf(connection)
  for (const name of names) {
    const variable = `PG${name}`
    const old = process.env[variable]
    t.after(() => {
      if (old === undefined) delete process.env[variable]
      else process.env[variable] = old
    })
    process.env[variable] = '77'
  }
  assert.deepEqual(optionsOf(connection), before)
})

/** What the driver makes of the options; it connects to nothing before the first query. */
function optionsOf(connection: ReturnType<typeof connect>) {
  const { shared, parsers, serializers, ...options } = postgres({ ...connection }).options as unknown as Record<
    string,
    unknown
  >
  return options
}

test('a URL as providers hand them out connects', async (t) => {
  const { url } = await createDatabase(t)
  const added = 'channel_binding=require&pgbouncer=true&connection_limit=1&options=-c%20geqo%3Doff'
  const { connection, warnings } = parseDatabaseUrl(`${url}?${added}`)
  assert.equal(warnings.length, 3)
  const sql = postgres({ ...connection, max: 1 })
  t.after(() => sql.end())
  const [row] = await sql`SELECT current_setting('application_name') AS name, current_setting('geqo') AS geqo`
  assert.deepEqual({ ...row }, { name: 'cairn', geqo: 'off' })
})

test('a password that changed in its file is used by the next connection', async (t) => {
  const { url } = await createDatabase(t)
  const role = `cairn_url_test_${process.pid}`
  const roleUrl = new URL(url)
  roleUrl.username = role
  roleUrl.password = ''
  const passwordFile = temporaryFile(t, 'password', 'first\n')
  const { connection } = parseDatabaseUrl(roleUrl.href, { passwordFile })
  const whoConnects = async () => {
    const sql = postgres({ ...connection, max: 1 })
    return sql`SELECT current_user AS name`.then(([row]) => row?.name).finally(() => sql.end())
  }

  const admin = postgres({ ...parseDatabaseUrl(url).connection, max: 1 })
  await admin.unsafe(`CREATE ROLE ${role} LOGIN PASSWORD 'first'`)
  try {
    assert.equal(await whoConnects(), role)
    await admin.unsafe(`ALTER ROLE ${role} PASSWORD 'second'`)
    writeFileSync(passwordFile, 'second\n')
    assert.equal(await whoConnects(), role)
  } finally {
    await admin.unsafe(`DROP ROLE ${role}`)
    await admin.end()
  }
})
