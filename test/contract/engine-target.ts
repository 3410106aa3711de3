import assert from 'node:assert/strict'
import { json, type Reply, request, type Service } from '../support.ts'
import { CONTRACT_TARGETS, type ContractTarget, contract } from './target.ts'

/** The stores in which engines write by Cairn. In the others the tables' owner does, and the routes are `not_supported`. */
const STORES_WITH_ENGINES: readonly string[] = ['journal']

/** States a part of the engines' contract once for each store that has it. */
export function engineContract(title: string, state: (target: ContractTarget) => void): void {
  contract(title, (target) => {
    if (STORES_WITH_ENGINES.includes(target.name)) state(target)
  })
}

assert.ok(CONTRACT_TARGETS.some(({ name }) => STORES_WITH_ENGINES.includes(name)))

/** Sends JSON as it stands; the line is like `PUT /jobs/<id>`. */
export function send(service: Service, line: string, body?: string, headers: Record<string, string> = {}) {
  return request(service, line, {
    ...(body !== undefined && { body }),
    headers: { ...(body !== undefined && { 'content-type': 'application/json' }), ...headers },
  })
}

/** The parsed body of an answer that must have this status. */
export async function answered(status: number, reply: Promise<Reply>) {
  const { status: given, text } = await reply
  assert.equal(given, status, text)
  return text === '' ? undefined : JSON.parse(text)
}

export interface Parked {
  version: string
  pending_keys: string[]
}

/** Dispatches children by key, and whatever else the body is to have. */
export function dispatch(
  service: Service,
  jobId: string,
  body: { job_ids?: Record<string, string>; mode?: string } & Record<string, unknown>,
): Promise<Reply> {
  return send(service, `POST /jobs/${jobId}/dispatch`, JSON.stringify({ mode: 'parallel', ...body }))
}

export async function dispatched(...[service, jobId, body]: Parameters<typeof dispatch>): Promise<Parked> {
  return answered(200, dispatch(service, jobId, body))
}

export function completeChild(service: Service, jobId: string, childId: string, body: string): Promise<Reply> {
  return send(service, `POST /jobs/${jobId}/children/${childId}/complete`, body)
}

export function startChild(service: Service, jobId: string, childId: string, body?: string): Promise<Reply> {
  return send(service, `POST /jobs/${jobId}/children/${childId}/start`, body)
}

export function putCheckpoint(service: Service, jobId: string, body: string, headers?: Record<string, string>) {
  return send(service, `PUT /jobs/${jobId}/checkpoint`, body, headers)
}

export async function readJob(service: Service, jobId: string) {
  return json(await request(service, `GET /jobs/${jobId}`))
}
