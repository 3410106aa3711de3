import type { FastifyInstance, FastifyRequest } from 'fastify'
import { createJsonScanner, InvalidJson, RawJson, type Shape } from './json-scanner.ts'
import { Problem, shown } from './problems.ts'

/** Octets of request bodies that are in memory at the same time; beyond, requests are refused with 503. */
export const BODIES_IN_FLIGHT_BYTES = 256 * 1024 * 1024
/** Octets of a refused body that are still read, so that a client which sends before it reads gets the answer. */
const DRAIN_BYTES = 64 * 1024 * 1024
const FIRST_CAPACITY = 64 * 1024

declare module 'fastify' {
  interface FastifyContextConfig {
    /** How the route's body is scanned. A route without one has no use for a body, and lets a small one pass. */
    shape?: Shape
    /** A body of no octets counts as absent, as it does for routes without a shape. */
    bodyOptional?: boolean
  }
}

export interface BodyLimits {
  maxBodyBytes: number
  maxResultDepth: number
}

/**
 * Makes `app` read JSON bodies by the scanner, chunk by chunk as they arrive, so that no body, however large, holds the
 * event loop for long. What the schema then sees are parsed small members, and `RawJson` for the rest.
 */
export function setBodyParser(app: FastifyInstance, limits: BodyLimits): void {
  let bytesInFlight = 0
  app.removeAllContentTypeParsers()
  app.addContentTypeParser('application/json', (request: FastifyRequest, payload, done) => {
    const encoding = request.headers['content-encoding']
    if (encoding !== undefined && encoding.toLowerCase() !== 'identity') {
      return done(new Problem('unsupported_media_type', `The body must not be encoded, not even as ${encoding}.`))
    }
    const { shape = 'value', bodyOptional = shape === 'value' } = request.routeOptions.config
    const scanner = createJsonScanner(shape, { maxDepth: limits.maxResultDepth })
    const declared = Number(request.headers['content-length'] ?? 0)
    if (declared > limits.maxBodyBytes) return done(tooLarge(limits.maxBodyBytes))
    let body: Buffer = Buffer.alloc(0)
    let length = 0
    let taken = 0
    let over = false

    function finish(error: Error | null, value?: unknown) {
      if (over) return
      over = true
      if (error) {
        body = Buffer.alloc(0)
        giveBack()
      }
      done(error, value)
    }

    function giveBack() {
      bytesInFlight -= taken
      taken = 0
    }

    function append(chunk: Buffer) {
      taken += chunk.length
      bytesInFlight += chunk.length
      if (length === 0) {
        body = chunk
      } else {
        if (length + chunk.length > body.length) {
          const doubled = Math.max(FIRST_CAPACITY, Math.min((length + chunk.length) * 2, limits.maxBodyBytes))
          const grown = Buffer.allocUnsafe(declared >= length + chunk.length ? declared : doubled)
          body.copy(grown, 0, 0, length)
          body = grown
        }
        chunk.copy(body, length)
      }
      length += chunk.length
    }

    request.raw.once('close', giveBack)
    payload.on('data', (chunk: Buffer) => {
      if (over) {
        length += chunk.length
        if (length > limits.maxBodyBytes + DRAIN_BYTES) request.raw.destroy()
        return
      }
      if (length + chunk.length > limits.maxBodyBytes) return finish(tooLarge(limits.maxBodyBytes))
      if (bytesInFlight + chunk.length > BODIES_IN_FLIGHT_BYTES) {
        return finish(new Problem('unavailable', 'Too many large bodies are under way.'))
      }
      append(chunk)
      try {
        scanner.advance(body, length)
      } catch (error) {
        finish(toProblem(error))
      }
    })
    payload.once('end', () => {
      if (over) return
      if (length === 0 && bodyOptional) return finish(null)
      try {
        const value = scanner.finish(body, length)
        finish(shape !== 'value' && value instanceof RawJson ? notAnObject(value) : null, value)
      } catch (error) {
        finish(toProblem(error))
      }
    })
    payload.once('error', (error: Error) => finish(error))
  })
}

function tooLarge(maxBodyBytes: number): Problem {
  return new Problem('payload_too_large', `The body must be at most ${maxBodyBytes} bytes long.`)
}

function notAnObject(value: RawJson): Problem {
  return new Problem('invalid_request', `The body must be a JSON object, not ${shown(value)}.`)
}

function toProblem(error: unknown): Error {
  return error instanceof InvalidJson ? new Problem('invalid_json', error.message) : (error as Error)
}
