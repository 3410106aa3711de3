import { readFileSync } from 'node:fs'
import { readFile } from 'node:fs/promises'
import { isIP } from 'node:net'
import { userInfo } from 'node:os'
import { createSecureContext } from 'node:tls'

/** Port of a host that names none. */
export const DEFAULT_DATABASE_PORT = 5432
/** What `pg_stat_activity` shows, unless the URL says otherwise. */
export const DEFAULT_APPLICATION_NAME = 'cairn'
/** Seconds, per attempt. libpq waits for ever; a write has 9 s in all, and a second attempt must fit into them. */
export const DEFAULT_CONNECT_TIMEOUT_S = 4
/** Seconds without traffic until TCP asks whether the peer is still there, as in the driver. */
export const DEFAULT_KEEPALIVE_IDLE_S = 60
/** Seconds. Connections are replaced now and then, so that memory of long-lived backends is given back. */
export const DEFAULT_MAX_LIFETIME_S = 45 * 60
/** Seconds. The driver's own pause grows to 20 s, long after a database is back from a restart. */
export const MAX_RECONNECT_PAUSE_S = 1

/** TLS options that are laid over the driver's own; see `tls.connect`. */
export interface DatabaseTlsOptions {
  rejectUnauthorized: boolean
  host?: string
  servername?: string
  ca?: string
  crl?: string
  cert?: string
  key?: string
  passphrase?: string
  minVersion?: TlsVersion
  maxVersion?: TlsVersion
  checkServerIdentity?: () => undefined
}

/**
 * Options for the constructor of npm `postgres` 3.4.9. Everything that it would otherwise take from `PG*` variables is
 * set, except `target_session_attrs`: without a value here it reads `PGTARGETSESSIONATTRS`, and no value means "any".
 */
export interface DatabaseConnectionOptions {
  /** In truth an array, as is `port`: the driver's types know a text alone, and it cuts that at the colons of IPv6. */
  host: string
  port: number
  /** Of a Unix socket; `host` and `port` are then not used. */
  path?: string
  database: string
  username: string
  /** A function even without a password, since the driver takes `PGPASSWORD` for an empty text. Never rejects. */
  password: string | (() => string | Promise<string>)
  ssl: 'require' | 'prefer' | false | DatabaseTlsOptions
  sslnegotiation: 'direct' | null
  connection: { application_name: string; options?: string }
  connect_timeout: number
  keep_alive: number
  idle_timeout: number
  max_lifetime: number
  max_pipeline: number
  backoff: (attempts: number) => number
  max: number
  prepare: boolean
  fetch_types: boolean
  debug: false
  publications: string
  target_session_attrs?: TargetSessionAttrs
}

/** A URL that cannot be used. The message names the parameter at fault, never the password or the URL. */
export class DatabaseUrlError extends Error {
  override name = 'DatabaseUrlError'
}

const TARGET_SESSION_ATTRS = ['read-write', 'read-only', 'primary', 'standby', 'prefer-standby'] as const
type TargetSessionAttrs = (typeof TARGET_SESSION_ATTRS)[number]
const TLS_VERSIONS = ['TLSv1', 'TLSv1.1', 'TLSv1.2', 'TLSv1.3'] as const
type TlsVersion = (typeof TLS_VERSIONS)[number]
const SSL_MODES = ['disable', 'allow', 'prefer', 'require', 'verify-ca', 'verify-full'] as const

/** Parameters that are understood; the rest of libpq's list is below. */
const UNDERSTOOD = new Set(
  ['host', 'hostaddr', 'port', 'dbname', 'user', 'password', 'application_name', 'fallback_application_name'].concat(
    ['options', 'connect_timeout', 'target_session_attrs', 'keepalives', 'keepalives_idle', 'sslmode'],
    ['sslnegotiation', 'sslrootcert', 'sslcert', 'sslkey', 'sslpassword', 'sslcrl', 'ssl_min_protocol_version'],
    ['ssl_max_protocol_version', 'channel_binding'],
  ),
)

/** What these ask of libpq in the values listed is what the driver does anyway. Any other value is refused. */
const ALREADY_SO: Record<string, RegExp> = {
  client_encoding: /^(auto|utf-?8|unicode)$/i,
  gssencmode: /^(disable|prefer)$/,
  krbsrvname: /^/,
  gsslib: /^/,
  gssdelegation: /^0$/,
  load_balance_hosts: /^disable$/,
  max_protocol_version: /^/,
  min_protocol_version: /^3\.0$/,
  replication: /^(false|off|no|0)$/,
  sslcertmode: /^allow$/,
  sslcompression: /^[01]$/,
  sslsni: /^1$/,
  tcp_user_timeout: /^0$/,
}

/** libpq's tuning that Node's sockets do not have, and what poolers, providers and other drivers put into URLs. */
const IGNORED = new Set(
  ['keepalives_interval', 'keepalives_count', 'tcp_user_timeout'].concat(
    ['pgbouncer', 'connection_limit', 'pool_timeout', 'pool_mode', 'pool_size', 'max_idle_connection_lifetime'],
    ['socket_timeout', 'schema', 'statement_cache_size', 'prepared_statements', 'supa', 'workaround', 'sslaccept'],
    ['sslidentity', 'uselibpqcompat', 'single_use_connections'],
  ),
)

/**
 * Reads a Postgres URL as libpq does (PostgreSQL manual, "Connection URIs"), `PG*` variables and the files under
 * `~/.postgresql` left aside: without `sslrootcert`, certificates are checked against the public authorities, and
 * without a host it is `localhost`. `allow` counts as `prefer`.
 * `warnings` says what is ignored. Throws DatabaseUrlError.
 */
export function parseDatabaseUrl(
  url: string,
  options: { passwordFile?: string } = {},
): { connection: DatabaseConnectionOptions; warnings: string[] } {
  const parameters = splitUrl(url)
  const warnings = checkParameters(parameters)
  const { hosts, ports, path, addresses } = readHosts(parameters)
  const username = parameters.get('user') || userInfo().username
  const password = parameters.get('password')
  if (password && options.passwordFile !== undefined)
    warnings.push('The database URL has a password of its own, so the password file is not used for it')

  const connection: DatabaseConnectionOptions = {
    host: addresses as unknown as string,
    port: ports as unknown as number,
    database: parameters.get('dbname') || username,
    username,
    password: password || (options.passwordFile === undefined ? () => '' : openPasswordFile(options.passwordFile)),
    ssl: path === undefined ? readTls(parameters, { hosts, addresses, warnings }) : false,
    sslnegotiation: readSslNegotiation(parameters),
    connection: {
      application_name:
        parameters.get('application_name') || parameters.get('fallback_application_name') || DEFAULT_APPLICATION_NAME,
    },
    connect_timeout: readConnectTimeout(parameters),
    keep_alive: readKeepAlive(parameters),
    idle_timeout: 0,
    max_lifetime: DEFAULT_MAX_LIFETIME_S,
    max_pipeline: 100,
    backoff: reconnectPause,
    max: 10,
    prepare: true,
    fetch_types: true,
    debug: false,
    publications: 'alltables',
  }
  if (path !== undefined) connection.path = path
  const startupOptions = parameters.get('options')
  if (startupOptions) connection.connection.options = startupOptions
  const target = parameters.get('target_session_attrs') || 'any'
  if (target !== 'any') connection.target_session_attrs = oneOf('target_session_attrs', target, TARGET_SESSION_ATTRS)
  return { connection, warnings }
}

/** The URL's parts and its parameters under libpq's names, decoded; as in libpq, the last one of a name counts. */
function splitUrl(url: string): Map<string, string> {
  const parameters = new Map<string, string>()
  const rest = /^postgres(?:ql)?:\/\/(.*)$/s.exec(url)?.[1]
  if (rest === undefined) throw new DatabaseUrlError('A database URL begins with postgres:// or postgresql://')

  const [, credentials, hosts = '', database, query] =
    /^(?:([^@/]*)@)?([^/?]*)(?:\/([^?]*))?(?:\?(.*))?$/s.exec(rest) ?? []
  // An @ further on is what is left of a password that was not encoded: libpq would take half of it for a host.
  if (hosts.includes('@') || database?.includes('@')) throw new DatabaseUrlError(ENCODE_PASSWORD)
  if (credentials !== undefined) {
    const [user = '', ...password] = credentials.split(':')
    parameters.set('user', decode('user', user))
    if (password.length > 0) parameters.set('password', decode('password', password.join(':')))
  }
  if (hosts !== '') {
    const parts = hosts.split(',').map((host) => /^(\[[^\]]*\]|[^:]*)(?::(.*))?$/s.exec(host))
    parameters.set('host', parts.map((part) => decode('host', stripBrackets(part?.[1] ?? ''))).join(','))
    if (parts.some((part) => part?.[2])) parameters.set('port', parts.map((part) => part?.[2] ?? '').join(','))
  }
  if (database) parameters.set('dbname', decode('dbname', database))

  for (const pair of query ? query.split('&') : []) {
    const [, rawName = pair, value] = /^([^=]*)=(.*)$/s.exec(pair) ?? []
    const name = decode('list of parameters', rawName)
    if (!/^\w+$/.test(name)) throw new DatabaseUrlError(ENCODE_PASSWORD)
    if (value === undefined) throw new DatabaseUrlError(`The database URL's parameter ${quote(name)} has no value`)
    // libpq takes JDBC's `ssl=true` for this.
    if (name === 'ssl' && value === 'true') parameters.set('sslmode', 'require')
    else parameters.set(name, decode(name, value))
  }
  return parameters
}

const ENCODE_PASSWORD =
  'The database URL cannot be taken apart: in user and password, @ is written %40, / %2F, : %3A, ? %3F and % %25'

function decode(name: string, text: string): string {
  try {
    const decoded = decodeURIComponent(text)
    if (!decoded.includes('\0')) return decoded
  } catch {
    // Falls through to the same refusal.
  }
  throw new DatabaseUrlError(
    `The database URL's ${name} is not percent-encoded UTF-8 text without %00 (a % is written %25)`,
  )
}

function stripBrackets(host: string): string {
  return host.replace(/^\[(.*)\]$/s, '$1')
}

/** Refuses what is unknown or asks for what the driver cannot do; gives a warning for what is left aside. */
function checkParameters(parameters: Map<string, string>): string[] {
  const refused: string[] = []
  const ignored: string[] = []
  for (const [name, value] of parameters) {
    if (UNDERSTOOD.has(name) || value === '') continue
    if (Object.hasOwn(ALREADY_SO, name) && ALREADY_SO[name]?.test(value)) continue
    if (IGNORED.has(name)) ignored.push(name)
    else if (Object.hasOwn(ALREADY_SO, name)) refused.push(`${name}=${value}`)
    else refused.push(name)
  }
  if (refused.length > 0)
    throw new DatabaseUrlError(`Not supported in the database URL: ${refused.map(quote).join(', ')}`)

  const warnings: string[] = []
  if (ignored.length > 0) warnings.push(`Ignored in the database URL: ${ignored.join(', ')}`)
  if (parameters.get('pgbouncer') === 'true')
    warnings.push(
      'The database URL has pgbouncer=true: behind a pooler in transaction mode, set DATABASE_PREPARE=false',
    )
  const channelBinding = oneOf('channel_binding', parameters.get('channel_binding') || 'prefer', CHANNEL_BINDINGS)
  if (channelBinding === 'require')
    warnings.push(
      'channel_binding=require in the database URL is not enforced; sslmode=verify-full keeps imposters out',
    )
  return warnings
}

const CHANNEL_BINDINGS = ['disable', 'prefer', 'require'] as const

interface Hosts {
  /** As the URL names them: what certificates are checked against. */
  hosts: string[]
  /** What is connected to. */
  addresses: string[]
  ports: number[]
  path?: string
}

function readHosts(parameters: Map<string, string>): Hosts {
  const hostaddr = parameters.get('hostaddr')
  const addresses = hostaddr ? hostaddr.split(',') : undefined
  const hosts = parameters
    .get('host')
    ?.split(',')
    .map((host) => host || 'localhost') ??
    addresses ?? ['localhost']
  if (addresses !== undefined) {
    if (addresses.length !== hosts.length)
      throw new DatabaseUrlError('In the database URL, hostaddr must list as many addresses as there are hosts')
    const wrong = addresses.find((address) => isIP(address) === 0)
    if (wrong !== undefined)
      throw new DatabaseUrlError(`The database URL's hostaddr ${quote(wrong)} is not an IP address`)
  }

  const ports = (parameters.get('port') ?? '').split(',').map(readPort)
  if (ports.length !== 1 && ports.length !== hosts.length)
    throw new DatabaseUrlError('In the database URL, port must list one port, or as many as there are hosts')
  const allPorts = ports.length === 1 ? hosts.map(() => ports[0] ?? DEFAULT_DATABASE_PORT) : ports

  const [directory, ...more] = addresses === undefined ? hosts.filter((host) => /^[/@]/.test(host)) : []
  if (directory === undefined) return { hosts, addresses: addresses ?? hosts, ports: allPorts }
  if (more.length > 0 || hosts.length > 1 || directory.startsWith('@'))
    throw new DatabaseUrlError('A Unix socket in the database URL must be a path, and the only host')
  return { hosts, addresses: hosts, ports: allPorts, path: `${directory}/.s.PGSQL.${allPorts[0]}` }
}

/** The text is left out of the message: behind an unencoded `/` or `:`, it is a piece of the password. */
function readPort(text: string): number {
  if (text === '') return DEFAULT_DATABASE_PORT
  const port = /^\d{1,5}$/.test(text) ? Number(text) : 0
  if (port >= 1 && port <= 65_535) return port
  throw new DatabaseUrlError(`The database URL's port is not a whole number from 1 to 65535. ${ENCODE_PASSWORD}`)
}

/** How the driver encrypts, from libpq's `ssl*` parameters. Files are read now: a fault in one shows at start. */
function readTls(
  parameters: Map<string, string>,
  { hosts, addresses, warnings }: { hosts: string[]; addresses: string[]; warnings: string[] },
): DatabaseConnectionOptions['ssl'] {
  const rootCert = parameters.get('sslrootcert') || undefined
  const defaultMode = rootCert === 'system' ? 'verify-full' : 'prefer'
  const mode = oneOf('sslmode', parameters.get('sslmode') || defaultMode, SSL_MODES)
  if (rootCert === 'system' && mode !== 'verify-full')
    throw new DatabaseUrlError(`sslrootcert=system in the database URL needs sslmode=verify-full, not ${mode}`)
  if (mode === 'disable') return false

  const files = ['sslrootcert', 'sslcert', 'sslkey', 'sslcrl'].filter((name) => parameters.get(name))
  if (mode === 'allow' || mode === 'prefer') {
    if (files.length > 0)
      warnings.push(
        `Not used with sslmode=${mode} in the database URL: ${files.join(', ')} (sslmode=verify-full uses them)`,
      )
    return 'prefer'
  }

  const verified = mode !== 'require' || rootCert !== undefined
  const tls: DatabaseTlsOptions = { rejectUnauthorized: verified, ...readTlsFiles(parameters) }
  // libpq: with a root certificate, `require` is `verify-ca`.
  if (verified && mode !== 'verify-full') tls.checkServerIdentity = () => undefined
  const [host = ''] = hosts
  if (mode === 'verify-full' && hosts.length > 1 && (hosts !== addresses || hosts.some((name) => isIP(name) !== 0)))
    throw new DatabaseUrlError(
      'With sslmode=verify-full, several hosts in the database URL must be names without hostaddr',
    )
  // The driver gives TLS no name to check for an IP address, and Node would check for "localhost".
  if (hosts.length === 1 && isIP(host) !== 0) tls.host = host
  else if (hosts.length === 1 && hosts !== addresses) tls.servername = host
  return Object.keys(tls).length === 1 && !verified ? 'require' : tls
}

function readTlsFiles(parameters: Map<string, string>): Partial<DatabaseTlsOptions> {
  const files: Partial<DatabaseTlsOptions> = {}
  const rootCert = parameters.get('sslrootcert')
  if (rootCert && rootCert !== 'system') files.ca = readText('sslrootcert', rootCert)
  const [cert, key, crl] = [parameters.get('sslcert'), parameters.get('sslkey'), parameters.get('sslcrl')]
  if (Boolean(cert) !== Boolean(key)) throw new DatabaseUrlError('In the database URL, sslcert and sslkey go together')
  if (cert && key) Object.assign(files, { cert: readText('sslcert', cert), key: readText('sslkey', key) })
  if (crl) files.crl = readText('sslcrl', crl)
  const passphrase = parameters.get('sslpassword')
  if (passphrase) files.passphrase = passphrase
  const [min, max] = [parameters.get('ssl_min_protocol_version'), parameters.get('ssl_max_protocol_version')]
  if (min) files.minVersion = oneOf('ssl_min_protocol_version', min, TLS_VERSIONS)
  if (max) files.maxVersion = oneOf('ssl_max_protocol_version', max, TLS_VERSIONS)
  try {
    // The driver's own attempt would throw where nobody catches it, and end the process.
    createSecureContext(files)
  } catch (error) {
    throw new DatabaseUrlError(`The TLS settings of the database URL do not work: ${(error as Error).message}`)
  }
  return files
}

function readSslNegotiation(parameters: Map<string, string>): 'direct' | null {
  const negotiation = oneOf('sslnegotiation', parameters.get('sslnegotiation') || 'postgres', ['postgres', 'direct'])
  if (negotiation === 'postgres') return null
  const mode = parameters.get('sslmode') || (parameters.get('sslrootcert') === 'system' ? 'verify-full' : 'prefer')
  if (mode === 'disable' || mode === 'allow' || mode === 'prefer')
    throw new DatabaseUrlError('sslnegotiation=direct in the database URL needs sslmode=require or stricter')
  return 'direct'
}

/** As in libpq, zero and less mean no limit. */
function readConnectTimeout(parameters: Map<string, string>): number {
  return Math.max(0, readInteger(parameters, 'connect_timeout') ?? DEFAULT_CONNECT_TIMEOUT_S)
}

function readKeepAlive(parameters: Map<string, string>): number {
  if (readInteger(parameters, 'keepalives') === 0) return 0
  return readInteger(parameters, 'keepalives_idle') || DEFAULT_KEEPALIVE_IDLE_S
}

function readInteger(parameters: Map<string, string>, name: string): number | undefined {
  const text = parameters.get(name)
  if (!text) return undefined
  if (/^[+-]?\d{1,9}$/.test(text)) return Number(text)
  throw new DatabaseUrlError(`The database URL's ${name} is ${quote(text)}; expected a whole number`)
}

function oneOf<const T extends string>(name: string, value: string, allowed: readonly T[]): T {
  const found = allowed.find((candidate) => candidate === value)
  if (found !== undefined) return found
  throw new DatabaseUrlError(`The database URL's ${name} is ${quote(value)}; expected ${allowed.join(', ')}`)
}

/**
 * Gives a function that reads the password as the file has it at that moment, without the line break at its end. A file
 * that vanishes later leaves the last password standing: the driver calls this where a rejection would end the process.
 * Throws DatabaseUrlError if the file cannot be read now, or is empty.
 */
export function openPasswordFile(path: string): () => Promise<string> {
  let password = stripLineBreak(readText('password file', path))
  if (password === '') throw new DatabaseUrlError(`The password file ${quote(path)} is empty`)
  return async () => {
    const text = await readFile(path, 'utf8').catch(() => '')
    password = stripLineBreak(text) || password
    return password
  }
}

function stripLineBreak(text: string): string {
  return text.replace(/\r?\n$/, '')
}

function readText(what: string, path: string): string {
  try {
    return readFileSync(path, 'utf8')
  } catch (error) {
    throw new DatabaseUrlError(`The ${what} ${quote(path)} cannot be read (${(error as NodeJS.ErrnoException).code})`)
  }
}

/** Seconds to wait before the next attempt: 10 to 20 ms at first, then longer, with jitter against a herd. */
function reconnectPause(attempts: number): number {
  return Math.min(MAX_RECONNECT_PAUSE_S, 0.01 * 2 ** attempts) * (0.5 + Math.random() / 2)
}

function quote(text: string): string {
  return JSON.stringify(text)
}
