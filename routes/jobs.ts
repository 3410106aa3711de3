import { type Static, Type } from '@sinclair/typebox'
import type { JobFilter, Store } from '../db/store.ts'
import type { App } from '../src/app.ts'
import {
  JobId,
  JobName,
  JsonObject,
  Labels,
  MAX_LABELS,
  MAX_NAME_LENGTH,
  SourceHash,
  StepError,
  StepResult,
  Version,
} from '../src/checkpoint.ts'
import { isStorableText } from '../src/input-formats.ts'
import { BODY_PROBLEMS, checkedByHand, nullable, problemReplies } from '../src/openapi.ts'
import { Problem, shown } from '../src/problems.ts'
import { present, requireMap, requireRawObject } from '../src/raw-members.ts'
import { failureMarker, OUTCOME_SHAPES, readOutcome } from '../src/step-outcome.ts'
import { sendRawJson } from './raw-json-reply.ts'

/** Jobs of a list page unless the client says otherwise (a screen full), and the most that it may ask for. */
export const DEFAULT_JOBS_LIMIT = 50
export const MAX_JOBS_LIMIT = 1000

const Params = Type.Object({ id: JobId })
const VersionReply = { job_id: Type.String({ format: 'uuid' }), version: Version }

/** `?force=true` insists where a dispatched child still leans on the job's steps. */
export const Force = Type.Object({
  force: Type.Optional(
    Type.Unsafe<'true' | 'false'>({
      type: 'string',
      enum: ['true', 'false'],
      description: 'true: also while a dispatched child is pending.',
    }),
  ),
})

const Description = Type.Object(
  {
    name: nullable(JobName),
    labels: Type.Optional(checkedByHand<unknown>(Labels)),
    input_args: Type.Optional(checkedByHand<unknown>(JsonObject)),
    source_hash: nullable(SourceHash),
  },
  { description: 'What is absent stays as it is.', examples: [{ name: 'order-1234', labels: { tenant: 'acme' } }] },
)

const Filter = Type.Object({
  status: Type.Optional(
    Type.Unsafe<'open' | 'completed' | 'failed'>({ type: 'string', enum: ['open', 'completed', 'failed'] }),
  ),
  name: Type.Optional(JobName),
  label: Type.Optional(Type.String({ description: 'name:value', examples: ['tenant:acme'] })),
  prefix: Type.Optional(
    Type.String({ format: 'id-prefix', description: "The beginning of the job's id.", examples: ['01939a7e'] }),
  ),
  limit: Type.Optional(
    Type.String({
      format: 'natural-number',
      description: `Jobs in a page: 1 to ${MAX_JOBS_LIMIT}; ${DEFAULT_JOBS_LIMIT} unless given.`,
      examples: ['100'],
    }),
  ),
  cursor: Type.Optional(Type.String({ description: 'next_cursor of the page before.' })),
})

export async function jobRoutes(app: App, { store }: { store: Store }): Promise<void> {
  app.get(
    '/jobs/:id',
    {
      schema: {
        operationId: 'getJob',
        summary: 'Read what a job is and how far it got, with its result once it is finished',
        tags: ['jobs'],
        params: Params,
        response: {
          200: { description: 'The job.', content: { 'application/json': { schema: { $ref: 'Job#' } } } },
          ...problemReplies('job_not_found'),
        },
      },
    },
    async (request, reply) => {
      const job = await store.getJob(request.params.id.toLowerCase())
      if (!job) throw new Problem('job_not_found', `Nothing is known of job ${request.params.id}.`)
      return sendRawJson(reply, job)
    },
  )

  app.get(
    '/jobs',
    {
      schema: {
        operationId: 'listJobs',
        summary: 'List jobs, newest created first',
        tags: ['jobs'],
        querystring: Filter,
        response: {
          200: { description: 'A page of jobs.', content: { 'application/json': { schema: { $ref: 'JobList#' } } } },
          ...problemReplies(),
        },
      },
    },
    async (request, reply) => sendRawJson(reply, await store.listJobs(readFilter(request.query))),
  )

  app.put(
    '/jobs/:id',
    {
      schema: {
        operationId: 'describeJob',
        summary: 'Create a job, or describe it anew',
        tags: ['jobs'],
        params: Params,
        body: Description,
        response: {
          200: Type.Object(VersionReply, { description: 'The job was there.' }),
          201: Type.Object(VersionReply, { description: 'The job is created.' }),
          ...problemReplies(...BODY_PROBLEMS, 'source_changed'),
        },
      },
      config: {
        shape: { members: { name: 'value', labels: { each: 'value' }, input_args: 'raw', source_hash: 'value' } },
      },
    },
    async (request, reply) => {
      const jobId = request.params.id.toLowerCase()
      const { version, created } = await store.describeJob(jobId, readDescription(request.body))
      return reply.code(created ? 201 : 200).send({ job_id: jobId, version })
    },
  )

  app.post(
    '/jobs/:id/complete',
    {
      schema: {
        operationId: 'completeJob',
        summary: 'Finish a job with a result or an error; it then takes no new steps',
        tags: ['jobs'],
        params: Params,
        body: Type.Object(
          { result: Type.Optional(StepResult), error: Type.Optional(checkedByHand<unknown>(StepError)) },
          { description: 'Exactly one of result and error.', examples: [{ result: { shipped: true } }] },
        ),
        response: {
          200: Type.Object(VersionReply, { description: 'The job is finished.' }),
          ...problemReplies(...BODY_PROBLEMS, 'job_finished'),
        },
      },
      config: { shape: { members: OUTCOME_SHAPES } },
    },
    async (request) => {
      const jobId = request.params.id.toLowerCase()
      const outcome = readOutcome(request.body)
      const result = 'result' in outcome ? outcome.result : failureMarker(outcome, undefined)
      return { job_id: jobId, version: await store.completeJob(jobId, { result }) }
    },
  )

  app.post(
    '/jobs/:id/reopen',
    {
      schema: {
        operationId: 'reopenJob',
        summary: 'Open a finished job again',
        tags: ['jobs'],
        params: Params,
        response: {
          200: Type.Object(VersionReply, { description: 'The job is open.' }),
          ...problemReplies('job_not_found'),
        },
      },
    },
    async (request) => {
      const jobId = request.params.id.toLowerCase()
      return { job_id: jobId, version: await store.reopenJob(jobId) }
    },
  )

  app.delete(
    '/jobs/:id',
    {
      schema: {
        operationId: 'forgetJob',
        summary: 'Forget a job with its steps and timeline',
        tags: ['jobs'],
        params: Params,
        querystring: Force,
        response: {
          204: Type.Null({ description: 'Nothing is known of the job any more.' }),
          ...problemReplies('job_parked'),
        },
      },
    },
    async (request, reply) => {
      await store.forgetJob(request.params.id.toLowerCase(), request.query.force === 'true')
      return reply.code(204).send(null)
    },
  )
}

function readDescription(body: Static<typeof Description>) {
  const labels = present(body.labels)
  const inputArgs = present(body.input_args)
  return {
    name: body.name ?? null,
    labels: labels === undefined ? null : labelsText(labels),
    inputArgs: inputArgs === undefined ? null : requireRawObject(inputArgs, 'input_args').text(),
    sourceHash: body.source_hash ?? '',
  }
}

/** Labels as JSON text. */
function labelsText(value: unknown): string {
  const { entries } = requireMap(value, 'labels')
  if (entries.length > MAX_LABELS)
    throw new Problem('invalid_request', `labels may be ${MAX_LABELS}, not ${entries.length}.`)
  const members = entries.map(([name, text]) => {
    if (!isLabelText(name) || name.includes(':')) {
      throw new Problem(
        'invalid_request',
        `A label's name must be 1 to ${MAX_NAME_LENGTH} characters without a colon, not ${shown(name)}.`,
      )
    }
    if (!isLabelText(text)) {
      throw new Problem(
        'invalid_request',
        `labels.${name} must be a text of 1 to ${MAX_NAME_LENGTH} characters, not ${shown(text)}.`,
      )
    }
    return `${JSON.stringify(name)}:${JSON.stringify(text)}`
  })
  return `{${members.join(',')}}`
}

function isLabelText(value: unknown): value is string {
  return typeof value === 'string' && value.length > 0 && value.length <= MAX_NAME_LENGTH && isStorableText(value)
}

function readFilter(query: Static<typeof Filter>): JobFilter {
  const limit = Number(query.limit ?? DEFAULT_JOBS_LIMIT)
  if (limit < 1 || limit > MAX_JOBS_LIMIT) {
    throw new Problem('invalid_request', `limit must be 1 to ${MAX_JOBS_LIMIT}, not ${limit}.`)
  }
  return {
    limit,
    ...(query.status !== undefined && { status: query.status }),
    ...(query.name !== undefined && { name: query.name }),
    ...(query.label !== undefined && { label: readLabel(query.label) }),
    ...(query.prefix !== undefined && { prefix: query.prefix.toLowerCase() }),
    ...(query.cursor !== undefined && { cursor: query.cursor }),
  }
}

function readLabel(text: string) {
  const colon = text.indexOf(':')
  const name = text.slice(0, colon)
  const value = text.slice(colon + 1)
  if (colon === -1 || !isLabelText(name) || !isLabelText(value)) {
    throw new Problem('invalid_request', `label must be name:value, not ${shown(text)}.`)
  }
  return { name, value }
}
