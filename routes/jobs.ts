import { Type } from '@sinclair/typebox'
import type { Store } from '../db/store.ts'
import type { App } from '../src/app.ts'
import { JobId } from '../src/checkpoint.ts'
import { problemReplies } from '../src/openapi.ts'
import { Problem } from '../src/problems.ts'

export async function jobRoutes(app: App, { store }: { store: Store }): Promise<void> {
  app.get(
    '/jobs/:id',
    {
      schema: {
        operationId: 'getJob',
        summary: 'Read what a job is and how far it got',
        tags: ['reading'],
        params: Type.Object({ id: JobId }),
        response: {
          200: { description: 'The job.', content: { 'application/json': { schema: { $ref: 'Job#' } } } },
          ...problemReplies('job_not_found'),
        },
      },
    },
    async (request) => {
      const job = await store.getJob(request.params.id.toLowerCase())
      if (!job) throw new Problem('job_not_found', `Nothing is known of job ${request.params.id}.`)
      return job
    },
  )
}
