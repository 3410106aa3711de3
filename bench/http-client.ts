import net from 'node:net'

/** One answer: HTTP status, body as latin1 text, and how long it took from the first byte sent to the last received. */
export interface Reply {
  status: number
  body: string
  milliseconds: number
}

/** One keep-alive HTTP/1.1 connection that carries one request at a time. */
export interface Connection {
  send(method: 'GET' | 'POST', path: string, body?: string | Buffer): Promise<Reply>
  close(): void
}

interface Waiting {
  resolve(reply: Reply): void
  reject(error: Error): void
  startedAt: number
}

const STALLED_AFTER_MS = 120_000

/**
 * Opens a connection to `http://host:port`. The load generator shares its machine with what it measures, so a request
 * must be cheap: 64 of these took 52 to 73 us of CPU a request, undici's `Client` 88 to 138, `node:http` 181 to 290. In
 * return it knows only answers with `Content-Length` and ASCII string bodies, and a broken connection stays broken.
 */
export async function openConnection(baseUrl: string): Promise<Connection> {
  const { hostname, port, host } = new URL(baseUrl)
  let waiting: Waiting | undefined
  let received: Buffer[] = []
  let receivedBytes = 0
  let expectedBytes = 0
  let broken: Error | undefined

  const fail = (error: Error): void => {
    broken ??= error
    waiting?.reject(broken)
    waiting = undefined
    socket.destroy()
  }

  const settle = (response: Buffer): void => {
    const head = readHead(response)
    if (head === undefined) return
    if (head.contentLength === undefined) {
      fail(new Error(`Answer without Content-Length: ${head.statusLine}`))
      return
    }
    expectedBytes = head.headBytes + head.contentLength
    if (response.length < expectedBytes) return
    const current = waiting
    if (current === undefined || response.length > expectedBytes) {
      fail(new Error('The server sent more than was asked for'))
      return
    }
    waiting = undefined
    received = []
    receivedBytes = 0
    expectedBytes = 0
    const body = response.toString('latin1', head.headBytes)
    current.resolve({ status: head.status, body, milliseconds: performance.now() - current.startedAt })
  }

  const onBytes = (count: number, buffer: Uint8Array): boolean => {
    const chunk = Buffer.from(buffer.buffer, buffer.byteOffset, count)
    if (receivedBytes === 0) settle(chunk)
    // Whatever is not yet a whole answer must be copied: the socket reuses its buffer.
    if (waiting !== undefined) {
      received.push(Buffer.from(chunk))
      receivedBytes += count
      if (received.length > 1 && receivedBytes >= expectedBytes) settle(Buffer.concat(received))
    }
    return true
  }

  const socket = net.connect({
    host: hostname,
    port: Number(port),
    noDelay: true,
    onread: { buffer: Buffer.allocUnsafe(64 * 1024), callback: onBytes },
  })
  await new Promise<void>((resolve, reject) => {
    socket.once('connect', resolve)
    socket.once('error', reject)
  })
  socket.setTimeout(STALLED_AFTER_MS, () => fail(new Error(`No answer within ${STALLED_AFTER_MS} ms`)))
  socket.on('error', fail)
  socket.on('close', () => fail(new Error('The server closed the connection')))

  const send: Connection['send'] = (method, path, body = '') =>
    new Promise((resolve, reject) => {
      if (broken !== undefined) return reject(broken)
      if (waiting !== undefined) return reject(new Error('One request at a time'))
      waiting = { resolve, reject, startedAt: performance.now() }
      const head = `${method} ${path} HTTP/1.1\r\nHost: ${host}\r\n`
      if (method === 'GET') socket.write(`${head}\r\n`, 'latin1')
      else {
        const describedHead = `${head}Content-Type: application/json\r\nContent-Length: ${body.length}\r\n\r\n`
        if (typeof body === 'string') socket.write(describedHead + body, 'latin1')
        else {
          socket.write(describedHead, 'latin1')
          socket.write(body)
        }
      }
    })

  const close = (): void => {
    broken ??= new Error('Closed')
    socket.destroy()
  }

  return { send, close }
}

interface Head {
  statusLine: string
  status: number
  headBytes: number
  contentLength: number | undefined
}

function readHead(response: Buffer): Head | undefined {
  const end = response.indexOf('\r\n\r\n')
  if (end < 0) return undefined
  const head = response.toString('latin1', 0, end)
  const status = Number(head.slice(9, 12))
  const length = /\r\ncontent-length: *(\d+)/i.exec(head)?.[1]
  const contentLength = length === undefined ? (status === 204 || status === 304 ? 0 : undefined) : Number(length)
  return { statusLine: head.slice(0, head.indexOf('\r\n')), status, headBytes: end + 4, contentLength }
}
