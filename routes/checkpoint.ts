import { Type } from '@sinclair/typebox'
import type { Store } from '../db/store.ts'
import type { App } from '../src/app.ts'
import { CHECKPOINT_FIELDS, type CheckpointField, JobId } from '../src/checkpoint.ts'
import { problemReplies } from '../src/openapi.ts'
import { Problem, shown } from '../src/problems.ts'
import { sendRawJsonPieces } from './raw-json-reply.ts'

export async function checkpointRoutes(app: App, { store }: { store: Store }): Promise<void> {
  app.get(
    '/jobs/:id/checkpoint',
    {
      schema: {
        operationId: 'getCheckpoint',
        summary: "Read a job's checkpoint; that of an unknown job is empty and has version 0",
        tags: ['reading'],
        params: Type.Object({ id: JobId }),
        querystring: Type.Object({
          fields: Type.Optional(
            Type.String({
              description: `Only these members, separated by commas: ${CHECKPOINT_FIELDS.join(', ')}.`,
              examples: ['job_ids,pending_steps'],
            }),
          ),
        }),
        headers: Type.Object({ 'if-none-match': Type.Optional(Type.String({ examples: ['"6618adca36e89.2"'] })) }),
        response: {
          200: {
            description: 'The checkpoint; its version in the ETag header.',
            headers: { etag: { schema: { type: 'string' } } },
            content: { 'application/json': { schema: { $ref: 'Checkpoint#' } } },
          },
          304: { description: 'The version is the one that the client has.', type: 'null' },
          ...problemReplies(),
        },
      },
    },
    async (request, reply) => {
      const jobId = request.params.id.toLowerCase()
      const fields = request.query.fields === undefined ? undefined : parseFields(request.query.fields)
      const known = request.headers['if-none-match']
      if (known !== undefined) {
        const version = await store.getVersion(jobId)
        if (namesVersion(known, version)) return reply.header('etag', `"${version}"`).code(304).send()
      }
      const { version, body } = await store.getCheckpoint(jobId, fields)
      return sendRawJsonPieces(reply.header('etag', `"${version}"`), body)
    },
  )
}

function parseFields(text: string): CheckpointField[] {
  return text.split(',').map((name) => {
    if (!(CHECKPOINT_FIELDS as readonly string[]).includes(name)) {
      throw new Problem(
        'invalid_request',
        `fields must name members among ${CHECKPOINT_FIELDS.join(', ')}, not ${shown(name)}.`,
      )
    }
    return name as CheckpointField
  })
}

/** Whether an If-None-Match header names the version (weak comparison, RFC 9110, section 13.1.2). */
function namesVersion(header: string, version: string): boolean {
  return header.trim() === '*' || header.split(',').some((tag) => tag.trim().replace(/^W\//, '') === `"${version}"`)
}
