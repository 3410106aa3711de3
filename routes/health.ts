import { Type } from '@sinclair/typebox'
import type { Store } from '../db/store.ts'
import type { App } from '../src/app.ts'
import { problemReplies } from '../src/openapi.ts'
import { Problem } from '../src/problems.ts'

const Ok = Type.Object({ status: Type.Literal('ok') }, { description: 'All is well.', examples: [{ status: 'ok' }] })

export async function healthRoutes(
  app: App,
  { store, isStopping }: { store: Store; isStopping?: () => boolean },
): Promise<void> {
  app.get(
    '/livez',
    {
      schema: {
        operationId: 'checkAlive',
        summary: 'Whether the process runs',
        tags: ['operations'],
        response: { 200: Ok, ...problemReplies() },
      },
    },
    async () => ({ status: 'ok' as const }),
  )

  app.get(
    '/readyz',
    {
      schema: {
        operationId: 'checkReady',
        summary: 'Whether the database answers in time and takes writes',
        tags: ['operations'],
        response: { 200: Ok, ...problemReplies() },
      },
    },
    async () => {
      if (isStopping?.()) throw new Problem('unavailable', 'The service is stopping.')
      await store.checkReady()
      return { status: 'ok' as const }
    },
  )
}
