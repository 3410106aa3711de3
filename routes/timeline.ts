import { Type } from '@sinclair/typebox'
import type { Store } from '../db/store.ts'
import type { App } from '../src/app.ts'
import { JobId } from '../src/checkpoint.ts'
import { problemReplies } from '../src/openapi.ts'
import { Problem } from '../src/problems.ts'
import { sendRawJson } from './raw-json-reply.ts'

/** Entries of a timeline page unless the client says otherwise, and the most that it may ask for. */
export const DEFAULT_TIMELINE_LIMIT = 1000
export const MAX_TIMELINE_LIMIT = 10_000

export async function timelineRoutes(app: App, { store }: { store: Store }): Promise<void> {
  app.get(
    '/jobs/:id/timeline',
    {
      schema: {
        operationId: 'getTimeline',
        summary: 'Read when steps and children ran, without results; an unknown job has no entries',
        tags: ['reading'],
        params: Type.Object({ id: JobId }),
        querystring: Type.Object({
          after: Type.Optional(
            Type.String({
              format: 'natural-number',
              description: 'Only entries behind this position.',
              examples: ['0'],
            }),
          ),
          limit: Type.Optional(
            Type.String({
              format: 'natural-number',
              description: `Entries in a page: 1 to ${MAX_TIMELINE_LIMIT}; ${DEFAULT_TIMELINE_LIMIT} unless given.`,
              examples: ['100'],
            }),
          ),
        }),
        response: {
          200: {
            description: 'Entries in order of position.',
            content: { 'application/json': { schema: { $ref: 'Timeline#' } } },
          },
          ...problemReplies(),
        },
      },
    },
    async (request, reply) => {
      const limit = Number(request.query.limit ?? DEFAULT_TIMELINE_LIMIT)
      if (limit < 1 || limit > MAX_TIMELINE_LIMIT) {
        throw new Problem('invalid_request', `limit must be 1 to ${MAX_TIMELINE_LIMIT}, not ${limit}.`)
      }
      return sendRawJson(
        reply,
        await store.getTimeline(request.params.id.toLowerCase(), { after: Number(request.query.after ?? 0), limit }),
      )
    },
  )
}
