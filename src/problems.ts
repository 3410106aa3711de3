import { STATUS_CODES } from 'node:http'
import type { FastifyError, FastifyInstance, FastifyReply, FastifyRequest } from 'fastify'
import { drainBody } from './drain-body.ts'
import { INPUT_FORMATS, type InputFormat } from './input-formats.ts'
import { RawJson } from './json-scanner.ts'

/** Every way in which a request can fail, with its status, whether sending it again can help, and its title. */
const CATALOGUE = {
  invalid_json: { status: 400, retryable: false, title: 'The body is not the JSON that was expected' },
  invalid_request: { status: 400, retryable: false, title: 'The request is not valid' },
  unauthenticated: { status: 401, retryable: false, title: 'A valid token is needed' },
  forbidden: { status: 403, retryable: false, title: 'The token does not open this' },
  route_not_found: { status: 404, retryable: false, title: 'There is no such route' },
  job_not_found: { status: 404, retryable: false, title: 'There is no such job' },
  step_not_found: { status: 404, retryable: false, title: 'The job has no such step' },
  method_not_allowed: { status: 405, retryable: false, title: 'The route does not take this method' },
  request_timeout: { status: 408, retryable: true, title: 'The request did not arrive in time' },
  source_changed: { status: 409, retryable: false, title: 'The workflow source has changed' },
  stale_child: { status: 409, retryable: false, title: 'No key maps to this child' },
  job_finished: { status: 409, retryable: false, title: 'The job is finished' },
  job_parked: { status: 409, retryable: false, title: 'The job waits for children' },
  precondition_failed: { status: 412, retryable: false, title: 'The checkpoint has changed' },
  payload_too_large: { status: 413, retryable: false, title: 'The body is too large' },
  checkpoint_full: { status: 413, retryable: false, title: 'The checkpoint is full' },
  uri_too_long: { status: 414, retryable: false, title: 'The URL is too long' },
  unsupported_media_type: { status: 415, retryable: false, title: 'The body must be application/json' },
  unstorable_result: { status: 422, retryable: false, title: 'The store cannot hold this result' },
  headers_too_large: { status: 431, retryable: false, title: 'The request headers are too large' },
  internal: { status: 500, retryable: true, title: 'Something went wrong here' },
  not_supported: { status: 501, retryable: false, title: 'This store does not support the operation' },
  unavailable: { status: 503, retryable: true, title: 'The service cannot do this now' },
} as const satisfies Record<string, { status: number; retryable: boolean; title: string }>

export type ProblemCode = keyof typeof CATALOGUE

export const PROBLEM_CODES = Object.keys(CATALOGUE) as ProblemCode[]

/** Seconds after which a client should send a refused request again. Long enough for a failover to show, short for a user. */
export const RETRY_AFTER_S = 1

export const PROBLEM_MEDIA_TYPE = 'application/problem+json; charset=utf-8'

/** The refusal of a step under another source hash, word for word as Windmill's SDK users know it. */
export const SOURCE_CHANGED_DETAIL =
  'Workflow source code changed between replays. Cannot safely resume from checkpoint — step keys may have shifted. Please restart this workflow.'

/** A failure that a client may read: nothing else of an error ever leaves the process. `cause` goes to the log alone. */
export class Problem extends Error {
  readonly code: ProblemCode
  readonly headers: Readonly<Record<string, string>>

  constructor(code: ProblemCode, detail: string, options: { cause?: unknown; headers?: Record<string, string> } = {}) {
    super(detail, 'cause' in options ? { cause: options.cause } : undefined)
    this.name = 'Problem'
    this.code = code
    this.headers = options.headers ?? {}
  }
}

export function problemStatus(code: ProblemCode): number {
  return CATALOGUE[code].status
}

/** The body of an error reply: RFC 9457, with Cairn's code, whether a repeat can help, and the request's id. */
export function problemDocument(problem: Problem, requestId: string) {
  const { status, retryable, title } = CATALOGUE[problem.code]
  return {
    type: `urn:cairn:problem:${problem.code}`,
    title,
    status,
    detail: problem.message,
    code: problem.code,
    retryable,
    request_id: requestId,
  }
}

/** A whole HTTP/1.1 response, for where no request could be read. The connection ends with it. */
export function problemResponse(problem: Problem, requestId: string): string {
  const body = JSON.stringify(problemDocument(problem, requestId))
  const status = problemStatus(problem.code)
  return [
    `HTTP/1.1 ${status} ${STATUS_CODES[status]}`,
    `content-type: ${PROBLEM_MEDIA_TYPE}`,
    `content-length: ${Buffer.byteLength(body)}`,
    'connection: close',
    `x-request-id: ${requestId}`,
    '',
    body,
  ].join('\r\n')
}

/** Makes `app` answer every failure, its own and the framework's, as a problem. */
export function setProblemHandler(app: FastifyInstance): void {
  app.setErrorHandler((error: FastifyError | Problem, request, reply) => answerProblem(request, reply, error))
  // Before a body is read and found wrong for a route that is not there.
  app.addHook('onRequest', (request, _reply, done) => done(request.is404 ? routeNotFound(request) : undefined))
  app.setNotFoundHandler((request, reply) => answerProblem(request, reply, routeNotFound(request)))
}

function routeNotFound(request: FastifyRequest): Problem {
  return new Problem('route_not_found', `There is no ${request.method} ${shown(path(request.url))}.`)
}

/** Sends the problem that `error` amounts to, once the client can read it. */
export async function answerProblem(
  request: FastifyRequest,
  reply: FastifyReply,
  error: unknown,
): Promise<FastifyReply> {
  await drainBody(request.raw)
  return sendProblem(request, reply, error)
}

/** Answers with a problem, and logs what the client does not see. */
function sendProblem(request: FastifyRequest, reply: FastifyReply, error: unknown): FastifyReply {
  const problem = toProblem(error)
  const { status } = CATALOGUE[problem.code]
  if (status >= 500) {
    request.log.error(
      { err: problem.cause ?? problem, code: problem.code, url: request.url, request_id: request.id },
      problem.message,
    )
  }
  if (status === 503) reply.header('retry-after', String(RETRY_AFTER_S))
  return (
    reply
      .code(status)
      // Once more, since what the framework refuses runs no hooks.
      .header('x-request-id', request.id)
      .headers(problem.headers)
      .type(PROBLEM_MEDIA_TYPE)
      .serializer(JSON.stringify)
      .send(problemDocument(problem, request.id))
  )
}

function toProblem(error: unknown): Problem {
  if (error instanceof Problem) return error
  const { code, message, validation, validationContext, statusCode } = error as Partial<FastifyError>
  if (validation?.[0])
    return new Problem('invalid_request', describeViolation(validation[0], validationContext ?? 'body'))
  switch (code) {
    case 'FST_ERR_CTP_INVALID_MEDIA_TYPE':
    case 'FST_ERR_CTP_EMPTY_TYPE':
      return new Problem('unsupported_media_type', 'The body must be sent as application/json, not encoded otherwise.')
    case 'FST_ERR_BAD_URL':
      return new Problem('invalid_request', 'The URL has a percent escape that is not UTF-8.')
    case 'FST_ERR_CTP_INVALID_CONTENT_LENGTH':
      return new Problem('invalid_request', 'The body is not as long as its Content-Length says.')
    case 'FST_ERR_CTP_BODY_TOO_LARGE':
      return new Problem('payload_too_large', message ?? '')
    case 'ECONNRESET':
    case 'ECONNABORTED':
      return new Problem('invalid_request', 'The body ended too early.')
  }
  if (statusCode === 408) return new Problem('request_timeout', 'The request did not arrive in time.')
  return new Problem('internal', 'The request failed for a reason that is in the log under this request_id.', {
    cause: error,
  })
}

type Violation = NonNullable<FastifyError['validation']>[number] & { data?: unknown }

/** One sentence from one of Ajv's errors: which member, what it must be, what it is. */
function describeViolation(violation: Violation, context: string): string {
  const { instancePath, keyword, message, params, data } = violation
  const place = instancePath === '' ? `The ${context}` : instancePath.slice(1).replaceAll('/', '.')
  switch (keyword) {
    case 'required':
      // What the scanner kept whole is not the object that was expected.
      if (data instanceof RawJson) return `${place} must be a JSON object, not ${shown(data)}.`
      return `${place}: the member ${String(params.missingProperty)} is missing.`
    case 'format':
      return `${place} ${INPUT_FORMATS[params.format as InputFormat]?.rule ?? message}, not ${shown(data)}.`
    case 'enum':
      return `${place} must be one of ${(params.allowedValues as unknown[]).join(', ')}, not ${shown(data)}.`
    case 'type': {
      const kinds = [params.type].flat().filter((kind) => kind !== 'null')
      return `${place} must be of type ${kinds.join(' or ')}, not ${shown(data)}.`
    }
    default:
      return `${place} ${message ?? 'is not valid'}, not ${shown(data)}.`
  }
}

const SHOWN_CHARACTERS = 80

/** A value at fault, short enough for a sentence. */
export function shown(value: unknown): string {
  if (Array.isArray(value)) return `an array of ${value.length}`
  if (value !== null && typeof value === 'object') return `a JSON ${'kind' in value ? String(value.kind) : 'object'}`
  const text = typeof value === 'number' ? String(value) : JSON.stringify(value)
  if (text === undefined) return 'nothing'
  return text.length <= SHOWN_CHARACTERS ? text : `${text.slice(0, SHOWN_CHARACTERS).toWellFormed()}…`
}

function path(url: string): string {
  const query = url.indexOf('?')
  return query === -1 ? url : url.slice(0, query)
}
