import { readFileSync } from 'node:fs'
import type { SwaggerOptions } from '@fastify/swagger'
import { type TSchema, Type } from '@sinclair/typebox'
import type { FastifySchema } from 'fastify'
import { Checkpoint, Job, JobList, Timeline } from './checkpoint.ts'
import { PROBLEM_CODES, type ProblemCode, problemStatus } from './problems.ts'

const { version } = JSON.parse(readFileSync(new URL('../package.json', import.meta.url), 'utf8')) as { version: string }

export const ProblemDocument = Type.Object(
  {
    type: Type.String({ description: 'urn:cairn:problem:<code>' }),
    title: Type.String(),
    status: Type.Integer(),
    detail: Type.String({ description: 'What was wrong, with the value at fault.' }),
    code: Type.Unsafe<ProblemCode>({ type: 'string', enum: PROBLEM_CODES }),
    retryable: Type.Boolean({ description: 'Whether the same request can succeed later.' }),
    request_id: Type.String({ description: 'Under which the log has more.' }),
  },
  { $id: 'Problem', description: 'RFC 9457 problem details.' },
)

/** The schemas that replies refer to by name, so that generated clients have one type for each. */
export const SHARED_SCHEMAS: TSchema[] = [
  ProblemDocument,
  { ...Checkpoint, $id: 'Checkpoint' },
  { ...Timeline, $id: 'Timeline' },
  { ...Job, $id: 'Job' },
  { ...JobList, $id: 'JobList' },
]

/** What any request can meet, whatever it asks for. */
const GENERAL_PROBLEMS: ProblemCode[] = [
  'invalid_request',
  'request_timeout',
  'uri_too_long',
  'headers_too_large',
  'internal',
  'unavailable',
]
/** What any request with a body can meet besides. */
export const BODY_PROBLEMS: ProblemCode[] = ['invalid_json', 'payload_too_large', 'unsupported_media_type']

/** The problem replies of an operation, by status. */
export function problemReplies(...codes: ProblemCode[]): Record<number, unknown> {
  const byStatus = new Map<number, ProblemCode[]>()
  for (const code of [...GENERAL_PROBLEMS, ...codes]) {
    byStatus.set(problemStatus(code), [...(byStatus.get(problemStatus(code)) ?? []), code])
  }
  const replies: Record<number, unknown> = {}
  for (const [status, names] of [...byStatus].sort(([a], [b]) => a - b)) {
    replies[status] = {
      description: names.join(', '),
      content: { 'application/problem+json': { schema: { $ref: 'Problem#' } } },
    }
  }
  return replies
}

/**
 * A member that handlers check themselves, since the scanner keeps it unparsed: Ajv lets it pass, and the description
 * shows `schema`.
 */
export function checkedByHand<T>(schema: TSchema) {
  return Type.Unsafe<T>({ documentedAs: schema })
}

/** Puts what `checkedByHand` documents in its place. */
function withDocumentation(node: unknown): unknown {
  if (Array.isArray(node)) return node.map(withDocumentation)
  if (node === null || typeof node !== 'object') return node
  if ('documentedAs' in node) return withDocumentation(node.documentedAs)
  return Object.fromEntries(Object.entries(node).map(([name, value]) => [name, withDocumentation(value)]))
}

/** An optional member, for which null counts as absent. */
export function nullable<S extends TSchema>(schema: S) {
  return Type.Optional(Type.Unsafe<S['static'] | null>({ ...schema, type: [schema.type, 'null'] }))
}

export const openapiDocument: SwaggerOptions = {
  openapi: {
    openapi: '3.1.0',
    info: {
      title: 'Cairn',
      version,
      description:
        'Durable step checkpoints for workflows: record each finished step, read the checkpoint back, and no finished step runs twice.',
      license: { name: 'Apache-2.0', identifier: 'Apache-2.0' },
    },
    tags: [
      { name: 'engines', description: 'Parking jobs on children, sleeps and approvals; replacing checkpoints.' },
      { name: 'jobs', description: 'Describing, listing, finishing and forgetting jobs.' },
      { name: 'recording', description: 'Recording finished steps.' },
      { name: 'reading', description: 'Reading checkpoints, results, timelines and jobs.' },
      { name: 'operations', description: 'For orchestrators and tools.' },
    ],
  },
  transform: ({ schema, url }) => ({ schema: withDocumentation(schema) as FastifySchema, url }),
  refResolver: { buildLocalReference: (json, _base, _fragment, index) => String(json.$id ?? `schema-${index}`) },
}
