import type { AddressInfo } from 'node:net'
import pino, { type Logger } from 'pino'
import { parseDatabaseUrl } from '../db/database-url.ts'
import { createJournalStore } from '../db/journal-store.ts'
import { migrate, SchemaError } from '../db/migrate.ts'
import { buildApp } from './app.ts'
import { type Config, ConfigError, readConfig } from './config.ts'
import { type EmbeddedPostgres, EmbeddedPostgresError, startEmbeddedPostgres } from './embedded-postgres.ts'

// The driver would read it behind the back of DATABASE_URL, and has no option that means "unset".
delete process.env.PGTARGETSESSIONATTRS

/** Milliseconds in which a signal is the first one's echo: npm passes on the Ctrl-C that the terminal sent to all. */
const SIGNAL_ECHO_MS = 250

/** Something outside that a start needs cannot be had. */
class StartError extends Error {}

/** What stops a start is told in one line: the operator can mend it, and a stack would hide it. */
function isOperatorError(error: unknown): error is Error {
  return (
    error instanceof StartError ||
    error instanceof ConfigError ||
    error instanceof SchemaError ||
    error instanceof EmbeddedPostgresError
  )
}

async function main(command: string | undefined): Promise<void> {
  const config = readConfig(process.env)
  const logger = pino({ level: config.logLevel })
  const embedded = config.database.url === undefined ? await startEmbedded(config, logger) : undefined
  try {
    const connection = connectionTo(embedded?.url ?? (config.database.url as string), config, logger)
    if (config.migrate !== 'off' || command === 'migrate') {
      await migrateSchema(config, { connection, command, logger }).catch((error: unknown) => {
        throw new StartError(
          `The database of ${embedded ? 'DATA_DIR' : 'DATABASE_URL'} cannot be used: ${inOneLine(error)}`,
        )
      })
    }
    if (command === 'migrate') {
      await embedded?.stop()
      return
    }
    await serve(config, { connection, embedded, logger })
  } catch (error) {
    await embedded?.stop()
    throw error
  }
}

type Connection = ReturnType<typeof parseDatabaseUrl>['connection']

function connectionTo(url: string, config: Config, logger: Logger): Connection {
  const { passwordFile } = config.database
  const { connection, warnings } = parseDatabaseUrl(url, passwordFile === undefined ? {} : { passwordFile })
  for (const warning of warnings) logger.warn(warning)
  return connection
}

function startEmbedded(config: Config, logger: Logger): Promise<EmbeddedPostgres> {
  return startEmbeddedPostgres({ dataDir: config.dataDir, log: (line) => logger.info(line) })
}

async function migrateSchema(
  config: Config,
  run: { connection: Connection; command: string | undefined; logger: Logger },
) {
  const { migrationUrl } = config.database
  await migrate({
    connection: migrationUrl === undefined ? run.connection : connectionTo(migrationUrl, config, run.logger),
    mode: config.migrate === 'verify' && run.command !== 'migrate' ? 'verify' : 'auto',
    log: (line) => run.logger.info(line),
  })
}

interface Parts {
  connection: Connection
  embedded: EmbeddedPostgres | undefined
  logger: Logger
}

async function serve(config: Config, { connection, embedded, logger }: Parts): Promise<void> {
  const store = createJournalStore({
    connection,
    prepare: config.database.prepare,
    poolMax: config.database.poolMax,
    limits: config.limits,
    onWriteFailure: (err, requests) => logger.warn({ err, requests }, 'A statement that records steps failed'),
  })
  let stopping = false
  let stoppedAt = 0
  const app = await buildApp({ store, limits: config.limits, logger, isStopping: () => stopping })
  await app.listen({ host: config.host, port: config.port }).catch((error: unknown) => {
    throw new StartError(`HOST ${config.host}, PORT ${config.port}: ${inOneLine(error)}`)
  })

  const stop = (signal: NodeJS.Signals) => {
    if (stopping) {
      // Whoever sends a second signal does not want to wait.
      if (performance.now() - stoppedAt > SIGNAL_ECHO_MS) process.exit(1)
      return
    }
    stopping = true
    stoppedAt = performance.now()
    logger.info({ signal }, 'Stopping')
    setTimeout(() => {
      logger.error(`Not stopped after ${config.shutdownTimeoutMs} ms: giving up`)
      process.exit(1)
    }, config.shutdownTimeoutMs).unref()
    app
      .close()
      .then(() => store.close())
      .then(() => embedded?.stop())
      .then(
        () => process.exit(0),
        (error) => {
          logger.fatal(error)
          process.exit(1)
        },
      )
  }
  process.on('SIGTERM', stop)
  process.on('SIGINT', stop)
  announce({ address: app.server.address() as AddressInfo, embedded, logger })
}

/** The first lines: for a person where the database is embedded or a terminal looks on, as a log line otherwise. */
function announce({
  address,
  embedded,
  logger,
}: {
  address: AddressInfo
  embedded: EmbeddedPostgres | undefined
  logger: Logger
}) {
  const host = address.family === 'IPv6' ? `[${address.address}]` : address.address
  const url = `http://${host}:${address.port}`
  if (!embedded && !process.stdout.isTTY) {
    logger.info({ url }, 'Listening')
    return
  }
  const lines = [
    `Cairn listens on ${url}`,
    ...(embedded?.notes ?? ['Data: in the Postgres of DATABASE_URL']),
    'Try:',
    `  curl -X POST ${url}/jobs/01939a7e-5b5c-7f3e-9d41-3c7f8a1d2e4b/inline-checkpoint -H 'content-type: application/json' -d '{"key":"greet","result":"hello"}'`,
    `  curl ${url}/jobs/01939a7e-5b5c-7f3e-9d41-3c7f8a1d2e4b/checkpoint`,
  ]
  process.stdout.write(`${lines.join('\n')}\n`)
}

main(process.argv[2]).catch((error: unknown) => {
  process.stderr.write(`Cairn cannot start: ${isOperatorError(error) ? error.message : describe(error)}\n`)
  process.exit(1)
})

function describe(error: unknown): string {
  return (error as Error).stack ?? String(error)
}

function inOneLine(error: unknown): string {
  const { code, message } = error as NodeJS.ErrnoException
  return code ? `${message} (${code})` : message
}
