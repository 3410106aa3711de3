import { Type } from '@sinclair/typebox'
import type { Store } from '../db/store.ts'
import type { App } from '../src/app.ts'
import { JobId, StepKey, StepResult } from '../src/checkpoint.ts'
import { problemReplies } from '../src/openapi.ts'
import { Problem, shown } from '../src/problems.ts'
import { sendRawJson } from './raw-json-reply.ts'

export async function stepRoutes(app: App, { store }: { store: Store }): Promise<void> {
  app.get(
    '/jobs/:id/steps/:key',
    {
      schema: {
        operationId: 'getStep',
        summary: 'Read one result, raw',
        tags: ['reading'],
        params: Type.Object({ id: JobId, key: StepKey }),
        response: {
          200: { description: 'The result as it was sent.', content: { 'application/json': { schema: StepResult } } },
          ...problemReplies('step_not_found'),
        },
      },
    },
    async (request, reply) => {
      const { id, key } = request.params
      const result = await store.getStep(id.toLowerCase(), key)
      if (!result) throw new Problem('step_not_found', `Job ${id} has no result for the step ${shown(key)}.`)
      return sendRawJson(reply, result)
    },
  )

  app.get(
    '/jobs/:id/steps',
    {
      schema: {
        operationId: 'getSteps',
        summary: 'Read several results, or those of keys that do not fit into a path',
        tags: ['reading'],
        params: Type.Object({ id: JobId }),
        querystring: Type.Object({
          key: Type.Unsafe<string | string[]>({
            type: ['string', 'array'],
            format: 'step-key',
            items: StepKey,
            description: 'May be given several times.',
          }),
        }),
        response: {
          200: Type.Object(
            { steps: Type.Array(Type.Object({ key: StepKey, result: StepResult })) },
            { description: 'Those that exist, in the order asked for.' },
          ),
          ...problemReplies(),
        },
      },
    },
    async (request, reply) => {
      const keys = new Set([request.query.key].flat())
      return sendRawJson(reply, await store.getSteps(request.params.id.toLowerCase(), [...keys]))
    },
  )
}
