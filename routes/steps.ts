import { type Static, Type } from '@sinclair/typebox'
import type { StepWrite, Store } from '../db/store.ts'
import type { App } from '../src/app.ts'
import {
  DurationMs,
  JobId,
  MAX_STEPS_PER_REQUEST,
  SourceHash,
  StartedAt,
  StepError,
  StepKey,
  StepResult,
  Version,
} from '../src/checkpoint.ts'
import { BODY_PROBLEMS, checkedByHand, nullable, problemReplies } from '../src/openapi.ts'
import { Problem, shown } from '../src/problems.ts'
import { present } from '../src/raw-members.ts'
import { failureMarker, OUTCOME_SHAPES, readOutcome } from '../src/step-outcome.ts'
import { Force } from './jobs.ts'
import { sendRawJson, sendRawJsonPieces } from './raw-json-reply.ts'
import { readTiming } from './record.ts'

const STEP_SHAPES = {
  ...OUTCOME_SHAPES,
  key: 'value',
  started_at: 'value',
  duration_ms: 'value',
  source_hash: 'value',
} as const

const Outcome = {
  result: Type.Optional(StepResult),
  error: Type.Optional(checkedByHand<unknown>(StepError)),
  started_at: nullable(StartedAt),
  duration_ms: nullable(DurationMs),
}

const Step = Type.Object(
  { key: StepKey, ...Outcome, source_hash: nullable(SourceHash) },
  { description: 'Exactly one of result and error.' },
)

const Body = Type.Object(
  {
    key: nullable(StepKey),
    ...Outcome,
    steps: Type.Optional(
      Type.Array(Step, {
        minItems: 1,
        maxItems: MAX_STEPS_PER_REQUEST,
        description: 'Several at once: all are recorded or none.',
      }),
    ),
    source_hash: nullable(SourceHash),
  },
  {
    description: 'Either one step, with its key, or steps.',
    examples: [
      { key: 'ask_model', result: { answer: 'yes' } },
      {
        steps: [
          { key: 'a', result: 1 },
          { key: 'b', result: 2 },
        ],
      },
    ],
  },
)

const Recorded = Type.Boolean({ description: 'False: the key had a result, which stands and is given.' })

/** Cairn's own contract: the first write of a key stands. */
function recordStepsRoute(app: App, store: Store): void {
  app.post(
    '/jobs/:id/steps',
    {
      schema: {
        operationId: 'recordSteps',
        summary: 'Record finished steps; the first write of a key stands, and who comes later is given it',
        tags: ['recording'],
        params: Type.Object({ id: JobId }),
        body: Body,
        response: {
          200: Type.Object(
            {
              job_id: Type.String({ format: 'uuid' }),
              version: Version,
              key: Type.Optional(StepKey),
              recorded: Type.Optional(Recorded),
              result: Type.Optional(StepResult),
              steps: Type.Optional(
                Type.Array(Type.Object({ key: StepKey, recorded: Recorded, result: Type.Optional(StepResult) })),
              ),
            },
            { description: 'One step: what stands. Several: what became of each.' },
          ),
          201: Type.Object(
            { job_id: Type.String({ format: 'uuid' }), key: StepKey, version: Version, recorded: Recorded },
            { description: 'The one step is recorded.' },
          ),
          ...problemReplies(...BODY_PROBLEMS, 'source_changed', 'job_finished', 'checkpoint_full'),
        },
      },
      config: {
        shape: { members: { ...STEP_SHAPES, steps: { items: { members: STEP_SHAPES } }, source_hash: 'value' } },
      },
      preValidation: (request, _reply, done) => {
        // Null counts as absent, and the scanner keeps it unparsed where a list was expected.
        if (present((request.body as { steps?: unknown } | undefined)?.steps) === undefined) delete request.body?.steps
        done()
      },
    },
    async (request, reply) => {
      const jobId = request.params.id.toLowerCase()
      const { body } = request
      const steps = readSteps(body)
      const { version, steps: outcomes } = await store.recordSteps({
        jobId,
        sourceHash: readSourceHash(body),
        firstStands: true,
        steps,
      })
      const told = outcomes.map(({ recorded, stored }, index) => [
        Buffer.from(`"key":${JSON.stringify(steps[index]?.key)},"recorded":${recorded}`),
        ...(stored ? [Buffer.from(',"result":'), stored] : []),
      ])
      const head = Buffer.from(`{"job_id":"${jobId}","version":"${version}",`)
      if (body.steps) {
        const list = told.flatMap((pieces, index) => [Buffer.from(index === 0 ? '{' : '},{'), ...pieces])
        return sendRawJson(reply, Buffer.concat([head, Buffer.from('"steps":['), ...list, Buffer.from('}]}')]))
      }
      reply.code(outcomes[0]?.recorded ? 201 : 200)
      return sendRawJson(reply, Buffer.concat([head, ...(told[0] ?? []), Buffer.from('}')]))
    },
  )
}

/** The one step of a body or its several. */
function readSteps(body: Static<typeof Body>): StepWrite[] {
  if (body.steps === undefined) {
    if (typeof body.key !== 'string')
      throw new Problem('invalid_request', 'Either key or steps must be given, not neither.')
    return [readStep(body.key, body, '')]
  }
  const single = (['key', 'result', 'error', 'started_at', 'duration_ms'] as const).find((name) =>
    name === 'result' ? body.result !== undefined : present(body[name]) !== undefined,
  )
  if (single) throw new Problem('invalid_request', `${single} and steps must not be given together.`)
  const keys = new Set<string>()
  return body.steps.map((step, index) => {
    if (keys.has(step.key)) throw new Problem('invalid_request', `steps has the key ${shown(step.key)} twice.`)
    keys.add(step.key)
    return readStep(step.key, step, `steps.${index}: `)
  })
}

/** All steps of a request are recorded under one hash, whether it stands beside them or in each. */
function readSourceHash(body: Static<typeof Body>): string {
  const hashes = new Set([body.source_hash, ...(body.steps ?? []).map((step) => step.source_hash)].filter(Boolean))
  const [hash = '', other] = [...hashes] as string[]
  if (other !== undefined) {
    throw new Problem(
      'invalid_request',
      `source_hash must be the same everywhere, not ${shown(hash)} and ${shown(other)}.`,
    )
  }
  return hash
}

function readStep(
  key: string,
  step: Parameters<typeof readTiming>[0] & { result?: unknown; error?: unknown },
  place: string,
): StepWrite {
  const outcome = readOutcome(step, place)
  return { key, result: 'result' in outcome ? outcome.result : failureMarker(outcome, key), ...readTiming(step) }
}

export async function stepRoutes(app: App, { store }: { store: Store }): Promise<void> {
  recordStepsRoute(app, store)

  app.delete(
    '/jobs/:id/steps/:key',
    {
      schema: {
        operationId: 'forgetStep',
        summary: 'Forget one step, so that it runs again',
        tags: ['recording'],
        params: Type.Object({ id: JobId, key: StepKey }),
        querystring: Force,
        response: {
          204: Type.Null({
            description: 'The job has no such step of its own any more; what a child sees of its parent stays.',
          }),
          ...problemReplies('job_parked'),
        },
      },
    },
    async (request, reply) => {
      const { id, key } = request.params
      await store.forgetStep(id.toLowerCase(), key, request.query.force === 'true')
      return reply.code(204).send(null)
    },
  )

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
      return sendRawJsonPieces(reply, await store.getSteps(request.params.id.toLowerCase(), [...keys]))
    },
  )
}
