import type { FastifyInstance, FastifyRequest } from 'fastify'
import { createJsonScanner, InvalidJson, type JsonScanner, RawJson, type Shape } from './json-scanner.ts'
import { Problem, shown } from './problems.ts'

/** Octets of request bodies that are in memory at the same time; beyond, requests are refused with 503. */
export const BODIES_IN_FLIGHT_BYTES = 256 * 1024 * 1024
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
  const inFlight = { bytes: 0 }
  app.removeAllContentTypeParsers()
  app.addContentTypeParser('application/json', (request: FastifyRequest, payload, done) => {
    const encoding = request.headers['content-encoding']
    if (encoding !== undefined && encoding.toLowerCase() !== 'identity') {
      return done(new Problem('unsupported_media_type', `The body must not be encoded, not even as ${encoding}.`))
    }
    const declared = Number(request.headers['content-length'] ?? 0)
    if (declared > limits.maxBodyBytes) return done(tooLarge(limits.maxBodyBytes))
    const { shape = 'value', bodyOptional = shape === 'value' } = request.routeOptions.config
    const reader = new BodyReader({ shape, bodyOptional, declared, limits, inFlight, done })
    request.raw.once('close', () => reader.giveBack())
    payload.on('data', (chunk: Buffer) => reader.take(chunk))
    payload.once('end', () => reader.end())
    payload.once('error', (error: Error) => reader.finish(error))
  })
}

interface Reading {
  shape: Shape
  bodyOptional: boolean
  /** Content-Length; 0 if there is none. */
  declared: number
  limits: BodyLimits
  /** Of all bodies together. */
  inFlight: { bytes: number }
  done: (error: Error | null, value?: unknown) => void
}

// A class and not closures: one is made for each request.
class BodyReader {
  readonly #reading: Reading
  readonly #scanner: JsonScanner
  #body: Buffer = Buffer.alloc(0)
  #length = 0
  #counted = 0
  #over = false

  constructor(reading: Reading) {
    this.#reading = reading
    this.#scanner = createJsonScanner(reading.shape, { maxDepth: reading.limits.maxResultDepth })
  }

  take(chunk: Buffer): void {
    if (this.#over) return
    try {
      this.#append(chunk)
      this.#scanner.advance(this.#body, this.#length)
    } catch (error) {
      this.finish(toProblem(error))
    }
  }

  end(): void {
    if (this.#over) return
    const { shape, bodyOptional } = this.#reading
    if (this.#length === 0 && bodyOptional) {
      this.finish(null)
      return
    }
    try {
      const value = this.#scanner.finish(this.#body, this.#length)
      this.finish(shape !== 'value' && value instanceof RawJson ? notAnObject(value) : null, value)
    } catch (error) {
      this.finish(toProblem(error))
    }
  }

  finish(error: Error | null, value?: unknown): void {
    if (this.#over) return
    this.#over = true
    if (error) {
      this.#body = Buffer.alloc(0)
      this.giveBack()
    }
    this.#reading.done(error, value)
  }

  giveBack(): void {
    this.#reading.inFlight.bytes -= this.#counted
    this.#counted = 0
  }

  #append(chunk: Buffer): void {
    const { limits, inFlight } = this.#reading
    if (this.#length + chunk.length > limits.maxBodyBytes) throw tooLarge(limits.maxBodyBytes)
    if (inFlight.bytes + chunk.length > BODIES_IN_FLIGHT_BYTES) {
      throw new Problem('unavailable', 'Too many large bodies are under way.')
    }
    this.#counted += chunk.length
    inFlight.bytes += chunk.length
    const length = this.#length + chunk.length
    if (this.#length === 0) {
      this.#body = chunk
    } else {
      if (length > this.#body.length) this.#grow(length)
      chunk.copy(this.#body, this.#length)
    }
    this.#length = length
  }

  #grow(needed: number): void {
    const { declared, limits } = this.#reading
    const doubled = Math.max(FIRST_CAPACITY, Math.min(needed * 2, limits.maxBodyBytes))
    const grown = Buffer.allocUnsafe(declared >= needed ? declared : doubled)
    this.#body.copy(grown, 0, 0, this.#length)
    this.#body = grown
  }
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
