import { Type } from '@sinclair/typebox'
import type { Store } from '../db/store.ts'
import type { App } from '../src/app.ts'
import { DurationMs, JobId, StartedAt, StepError, StepKey, StepResult } from '../src/checkpoint.ts'
import { BODY_PROBLEMS, checkedByHand, nullable, problemReplies } from '../src/openapi.ts'
import { OUTCOME_SHAPES, readOutcome } from '../src/step-outcome.ts'
import { ParkedReply } from './dispatch.ts'
import { readTiming } from './record.ts'

const Reply = Type.Object(
  { ...ParkedReply, key: StepKey },
  { description: "The child's key, and what the job still waits for." },
)
const Params = Type.Object({ id: JobId, child_id: JobId })

export async function childRoutes(app: App, { store }: { store: Store }): Promise<void> {
  app.post(
    '/jobs/:id/children/:child_id/start',
    {
      schema: {
        operationId: 'startChild',
        summary: 'Note in the timeline that a child began',
        tags: ['engines'],
        params: Params,
        body: Type.Object(
          { started_at: nullable(StartedAt) },
          { examples: [{ started_at: '2026-12-01T01:45:06.357Z' }] },
        ),
        response: { 200: Reply, ...problemReplies(...BODY_PROBLEMS, 'stale_child', 'job_finished') },
      },
      config: { shape: { members: { started_at: 'value' } }, bodyOptional: true },
      preValidation: (request, _reply, done) => {
        request.body ??= {}
        done()
      },
    },
    async (request) => {
      const jobId = request.params.id.toLowerCase()
      const childId = request.params.child_id.toLowerCase()
      const { key, version, pendingKeys } = await store.startChild(jobId, childId, request.body.started_at ?? null)
      return { job_id: jobId, key, version, pending_keys: pendingKeys }
    },
  )

  app.post(
    '/jobs/:id/children/:child_id/complete',
    {
      schema: {
        operationId: 'completeChild',
        summary: "Record a child's result under the key that maps to it",
        tags: ['engines'],
        params: Params,
        body: Type.Object(
          {
            result: Type.Optional(StepResult),
            error: Type.Optional(checkedByHand<unknown>(StepError)),
            started_at: nullable(StartedAt),
            duration_ms: nullable(DurationMs),
          },
          { description: 'Exactly one of result and error.', examples: [{ result: { width: 640 }, duration_ms: 120 }] },
        ),
        response: { 200: Reply, ...problemReplies(...BODY_PROBLEMS, 'stale_child', 'job_finished', 'checkpoint_full') },
      },
      config: { shape: { members: { ...OUTCOME_SHAPES, started_at: 'value', duration_ms: 'value' } } },
    },
    async (request) => {
      const jobId = request.params.id.toLowerCase()
      const childId = request.params.child_id.toLowerCase()
      const end = { ...readOutcome(request.body), ...readTiming(request.body) }
      const { key, version, pendingKeys } = await store.completeChild(jobId, childId, end)
      return { job_id: jobId, key, version, pending_keys: pendingKeys }
    },
  )
}
