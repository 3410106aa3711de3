import { type Static, Type } from '@sinclair/typebox'
import type { FastifyReply, FastifyRequest } from 'fastify'
import type { Store } from '../db/store.ts'
import type { App } from '../src/app.ts'
import { DurationMs, JobId, SourceHash, StartedAt, StepKey, StepResult, Version } from '../src/checkpoint.ts'
import type { RawJson } from '../src/json-scanner.ts'
import { BODY_PROBLEMS, nullable, problemReplies } from '../src/openapi.ts'
import { sendRawJson } from './raw-json-reply.ts'

const Body = Type.Object({
  key: StepKey,
  result: StepResult,
  started_at: nullable(StartedAt),
  duration_ms: nullable(DurationMs),
  source_hash: nullable(SourceHash),
})

const SHAPE = {
  members: { key: 'value', result: 'raw', started_at: 'value', duration_ms: 'value', source_hash: 'value' },
} as const

const schema = {
  tags: ['recording'],
  body: Body,
  response: {
    200: Type.Object(
      {
        job_id: Type.String({ format: 'uuid' }),
        key: StepKey,
        version: Version,
        failure: Type.Optional(Type.Unknown({ description: 'The stored record, verbatim, when the step failed.' })),
      },
      { description: 'The step is committed.' },
    ),
    ...problemReplies(...BODY_PROBLEMS, 'source_changed', 'job_finished', 'checkpoint_full'),
  },
}

/** The contract of Windmill's inline checkpoint: one step a request; a key that is there is replaced. */
export async function recordRoutes(app: App, { store }: { store: Store }): Promise<void> {
  app.post(
    '/jobs/:id/inline-checkpoint',
    {
      schema: {
        ...schema,
        operationId: 'recordStep',
        summary: 'Record a finished step; a key that is there is replaced',
        params: Type.Object({ id: JobId }),
      },
      config: { shape: SHAPE },
    },
    (request, reply) => recordStep(store, request, reply),
  )

  app.post(
    '/api/w/:workspace/jobs/wac/inline_checkpoint/:id',
    {
      schema: {
        ...schema,
        operationId: 'recordStepForSdk',
        summary: 'The same, at the path that the Windmill SDKs call',
        params: Type.Object({ workspace: Type.String({ minLength: 1 }), id: JobId }),
      },
      config: { shape: SHAPE },
    },
    (request, reply) => recordStep(store, request, reply),
  )
}

async function recordStep(store: Store, request: FastifyRequest, reply: FastifyReply) {
  const body = request.body as Static<typeof Body>
  const jobId = (request.params as { id: string }).id.toLowerCase()
  const { key, result, source_hash } = body
  const record = result as RawJson
  if (!source_hash) request.log.debug({ job_id: jobId, key }, 'Drift protection is off: the step names no source hash')
  const { version } = await store.recordSteps({
    jobId,
    sourceHash: source_hash ?? '',
    firstStands: false,
    steps: [{ key, result: record, ...readTiming(body) }],
  })
  const failure = record.isFailure ? `,"failure":${record.text()}` : ''
  return sendRawJson(reply, `{"job_id":"${jobId}","key":${JSON.stringify(key)},"version":"${version}"${failure}}`)
}

/** When a step ran, as far as its client says. A negative duration is a clock that stepped back: it tells nothing. */
export function readTiming(body: { started_at?: string | null; duration_ms?: number | null }) {
  const { started_at, duration_ms } = body
  return {
    startedAt: started_at ?? null,
    durationMs: typeof duration_ms === 'number' && duration_ms >= 0 ? duration_ms : null,
  }
}
