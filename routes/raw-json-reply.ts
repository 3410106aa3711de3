import { Readable } from 'node:stream'
import type { FastifyReply } from 'fastify'

/** Milliseconds after which a reader that takes nothing is dropped. */
export const READER_STALL_MS = 30_000

const JSON_MEDIA_TYPE = 'application/json; charset=utf-8'

/**
 * Sends JSON that is there already, past the serializer of the route's schema. A short one is better given as a string:
 * Node then writes head and body to the socket at once.
 */
export function sendRawJson(reply: unknown, json: Buffer | string): FastifyReply {
  return (reply as FastifyReply).type(JSON_MEDIA_TYPE).serializer(asItIs).send(json)
}

function asItIs(json: string): string {
  return json
}

/** Sends JSON in pieces as the client takes them. If they fail half-way the connection breaks: nothing short looks whole. */
export function sendRawJsonPieces(reply: unknown, pieces: AsyncIterable<Buffer>): FastifyReply {
  const { raw } = reply as FastifyReply
  // The reply's own timeout: a listener on the socket would stay behind with every reply of a kept-alive connection.
  raw.setTimeout(READER_STALL_MS, () => raw.destroy())
  return (reply as FastifyReply).type(JSON_MEDIA_TYPE).send(Readable.from(pieces, { objectMode: false }))
}
