import { randomUUID } from 'node:crypto'
import type { Socket } from 'node:net'
import swagger from '@fastify/swagger'
import type { TypeBoxTypeProvider } from '@fastify/type-provider-typebox'
import Fastify, { type FastifyBaseLogger, type FastifyInstance, type FastifyRequest, LogController } from 'fastify'
import type { Store } from '../db/store.ts'
import { checkpointRoutes } from '../routes/checkpoint.ts'
import { childRoutes } from '../routes/children.ts'
import { dispatchRoutes } from '../routes/dispatch.ts'
import { healthRoutes } from '../routes/health.ts'
import { jobRoutes } from '../routes/jobs.ts'
import { openapiRoutes } from '../routes/openapi.ts'
import { recordRoutes } from '../routes/record.ts'
import { stepRoutes } from '../routes/steps.ts'
import { timelineRoutes } from '../routes/timeline.ts'
import { INPUT_FORMATS } from './input-formats.ts'
import { openapiDocument, SHARED_SCHEMAS } from './openapi.ts'
import { answerProblem, Problem, problemResponse, setProblemHandler } from './problems.ts'
import { BAD_ESCAPE, parseQuery } from './query.ts'
import { type BodyLimits, setBodyParser } from './request-body.ts'

/** Octets of a request's line and headers: a key of 1,024 octets, percent-encoded, in a URL with several of them. */
export const MAX_HEADER_BYTES = 32 * 1024
/** Octets of a URL; beyond, 414. */
export const MAX_URL_BYTES = 24 * 1024
/** Milliseconds that an idle connection stays open: longer than the 60 s of common balancers, which then close first. */
export const KEEP_ALIVE_TIMEOUT_MS = 75_000
/** Milliseconds in which a request, its body included, must have arrived. */
export const REQUEST_TIMEOUT_MS = 120_000

export interface AppOptions {
  store: Store
  limits: BodyLimits
  logger: FastifyBaseLogger
  /** Turns true when the process begins to stop: /readyz then says so, and balancers look elsewhere. */
  isStopping?: () => boolean
}

export type App = FastifyInstance<
  import('node:http').Server,
  import('node:http').IncomingMessage,
  import('node:http').ServerResponse,
  FastifyBaseLogger,
  TypeBoxTypeProvider
>

/** The service without its process: no environment, no listening, no I/O but through `store`. */
export async function buildApp(options: AppOptions): Promise<App> {
  const app = Fastify({
    loggerInstance: options.logger,
    logController: new LogController({ disableRequestLogging: true }),
    genReqId: requestId,
    // A logger of its own for each request costs more than the few lines that name a request: those give its id.
    childLoggerFactory: (logger) => logger,
    return503OnClosing: false,
    keepAliveTimeout: KEEP_ALIVE_TIMEOUT_MS,
    requestTimeout: REQUEST_TIMEOUT_MS,
    // Node would answer a request without Host by itself, with nothing that says why.
    http: { maxHeaderSize: MAX_HEADER_BYTES, requireHostHeader: false },
    clientErrorHandler: answerBrokenRequest,
    frameworkErrors: (error, request, reply) => void answerProblem(request as FastifyRequest, reply, error),
    bodyLimit: options.limits.maxBodyBytes,
    routerOptions: { maxParamLength: MAX_URL_BYTES, querystringParser: parseQuery },
    ajv: {
      // Nothing that comes in is coerced, defaulted or dropped. `verbose` puts the value at fault into the error.
      customOptions: {
        coerceTypes: false,
        useDefaults: false,
        removeAdditional: false,
        allowUnionTypes: true,
        verbose: true,
        keywords: ['documentedAs'],
        formats: Object.fromEntries(Object.entries(INPUT_FORMATS).map(([name, format]) => [name, format.validate])),
      },
    },
  }).withTypeProvider<TypeBoxTypeProvider>() as unknown as App

  // An expectation that is not known is passed over (RFC 9110, section 10.1.1, leaves the choice); Node would answer bare.
  app.server.on('checkExpectation', (request, response) => app.server.emit('request', request, response))
  setProblemHandler(app)
  setBodyParser(app, options.limits)
  app.addHook('onRequest', (request, reply, done) => {
    reply.header('x-request-id', request.id)
    if (request.url.length > MAX_URL_BYTES) {
      return done(new Problem('uri_too_long', `The URL must be at most ${MAX_URL_BYTES} bytes long.`))
    }
    if (request.headers.host === undefined && request.raw.httpVersion === '1.1') {
      return done(new Problem('invalid_request', 'The header Host is missing.'))
    }
    const query = request.query as { [BAD_ESCAPE]?: string }
    if (query[BAD_ESCAPE] !== undefined) {
      return done(
        new Problem('invalid_request', `The query has a percent escape that is not UTF-8: ${query[BAD_ESCAPE]}`),
      )
    }
    done()
  })

  await app.register(swagger, openapiDocument)
  const methodsByUrl = collectMethods(app)
  for (const schema of SHARED_SCHEMAS) app.addSchema(schema)
  await app.register(recordRoutes, options)
  await app.register(checkpointRoutes, options)
  await app.register(stepRoutes, options)
  await app.register(timelineRoutes, options)
  await app.register(jobRoutes, options)
  await app.register(dispatchRoutes, options)
  await app.register(childRoutes, options)
  await app.register(healthRoutes, options)
  await app.register(openapiRoutes)
  refuseOtherMethods(app, methodsByUrl)
  return app
}

const REQUEST_ID = /^[\w.:/+=@-]{1,128}$/

/** The caller's id, if it is one that can stand in a log line, or a new one. */
function requestId(request: { headers: Record<string, string | string[] | undefined> }): string {
  const given = request.headers['x-request-id']
  return typeof given === 'string' && REQUEST_ID.test(given) ? given : randomUUID()
}

/** Which methods each URL pattern of `app` has, filled while routes are added. */
function collectMethods(app: App): Map<string, Set<string>> {
  const methodsByUrl = new Map<string, Set<string>>()
  app.addHook('onRoute', ({ url, method }) => {
    const methods = methodsByUrl.get(url) ?? new Set()
    for (const name of [method].flat()) methods.add(name)
    methodsByUrl.set(url, methods)
  })
  return methodsByUrl
}

/** Gives each URL a 405 with `Allow` for the methods that it does not have. */
function refuseOtherMethods(app: App, methodsByUrl: Map<string, Set<string>>): void {
  for (const [url, methods] of [...methodsByUrl]) {
    const allow = [...methods].join(', ')
    app.route({
      url,
      method: app.supportedMethods.filter((method) => !methods.has(method)),
      schema: { hide: true },
      onRequest: (request, _reply, done) => {
        const detail = `${request.method} is not among the methods of this route: ${allow}.`
        done(new Problem('method_not_allowed', detail, { headers: { allow } }))
      },
      handler: () => {},
    })
  }
}

/** Answers what Node's HTTP parser refuses, in the form of every other problem. */
function answerBrokenRequest(error: NodeJS.ErrnoException, socket: Socket): void {
  if (error.code === 'ECONNRESET' || !socket.writable) {
    socket.destroy()
    return
  }
  socket.end(problemResponse(brokenRequestProblem(error.code), randomUUID()))
}

function brokenRequestProblem(code: string | undefined): Problem {
  switch (code) {
    case 'HPE_HEADER_OVERFLOW':
      return new Problem(
        'headers_too_large',
        `The request line and headers must be at most ${MAX_HEADER_BYTES} bytes long.`,
      )
    case 'ERR_HTTP_REQUEST_TIMEOUT':
      return new Problem('request_timeout', `The request must arrive within ${REQUEST_TIMEOUT_MS / 1000} s.`)
    default:
      return new Problem('invalid_request', 'This is not an HTTP request that can be read.')
  }
}
