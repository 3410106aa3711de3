import type { IncomingMessage } from 'node:http'

/** Octets of a refused body that are read and dropped before it is answered. */
const DRAIN_BYTES = 64 * 1024 * 1024
/** Milliseconds that this may take; for a slower client the answer comes while it still sends. */
const DRAIN_MS = 5000

/**
 * Reads what is left of a refused body, within bounds. A client that sends all before it reads would otherwise find its
 * connection reset, and take a refusal for a fault that passes.
 */
export function drainBody(request: IncomingMessage): Promise<void> | undefined {
  const { 'content-length': length, 'transfer-encoding': encoding } = request.headers
  if (request.complete || (length === undefined && encoding === undefined)) return undefined
  return new Promise((resolve) => {
    let drained = 0
    const timer = setTimeout(finish, DRAIN_MS)
    function count(chunk: Buffer) {
      drained += chunk.length
      if (drained > DRAIN_BYTES) finish()
    }
    function finish() {
      clearTimeout(timer)
      request.off('data', count)
      resolve()
    }
    request.on('data', count)
    for (const event of ['end', 'error', 'close']) request.once(event, finish)
    request.resume()
  })
}
