import { type Static, Type } from '@sinclair/typebox'
import type { Store } from '../db/store.ts'
import type { App } from '../src/app.ts'
import {
  CHECKPOINT_FIELDS,
  Checkpoint,
  type CheckpointField,
  ChildIds,
  JobId,
  JsonObject,
  PendingSteps,
  SourceHash,
  StepKey,
  Version,
} from '../src/checkpoint.ts'
import { OTHERS, type RawJson, SPAN } from '../src/json-scanner.ts'
import { BODY_PROBLEMS, checkedByHand, nullable, problemReplies } from '../src/openapi.ts'
import { Problem, shown } from '../src/problems.ts'
import {
  present,
  requireChildren,
  requireFormat,
  requireMap,
  requireMembers,
  requireRawObject,
} from '../src/raw-members.ts'
import { Force } from './jobs.ts'
import { sendRawJsonPieces } from './raw-json-reply.ts'

const REPLACEMENT_SHAPE = {
  members: {
    source_hash: 'value',
    completed_steps: { each: 'raw' },
    pending_steps: { members: { mode: 'value', keys: { items: 'value' }, job_ids: { each: 'value' } }, span: true },
    input_args: 'raw',
    job_ids: { each: 'value' },
    _executing_key: 'value',
  },
  others: 'raw',
} as const

const Replacement = Type.Object(
  {
    source_hash: nullable(SourceHash),
    completed_steps: Type.Optional(checkedByHand<unknown>(Checkpoint.properties.completed_steps)),
    pending_steps: Type.Optional(checkedByHand<unknown>(PendingSteps)),
    input_args: Type.Optional(checkedByHand<unknown>(JsonObject)),
    job_ids: Type.Optional(checkedByHand<unknown>(ChildIds)),
    _executing_key: nullable(StepKey),
  },
  {
    additionalProperties: true,
    description: 'What is absent becomes empty; members that Cairn does not know are kept.',
    examples: [{ completed_steps: { charge_card: { receipt: 'r-17' } } }],
  },
)
type ReplacementBody = Static<typeof Replacement>

export async function checkpointRoutes(app: App, { store }: { store: Store }): Promise<void> {
  app.put(
    '/jobs/:id/checkpoint',
    {
      schema: {
        operationId: 'putCheckpoint',
        summary: 'Replace the whole checkpoint; the timeline stays, and no hash is checked',
        tags: ['engines'],
        params: Type.Object({ id: JobId }),
        querystring: Force,
        headers: Type.Object({ 'if-match': Type.Optional(Type.String({ examples: ['"6618adca36e89.2"'] })) }),
        body: Replacement,
        response: {
          200: Type.Object(
            { job_id: Type.String({ format: 'uuid' }), version: Version },
            { description: 'The checkpoint is what was sent.' },
          ),
          ...problemReplies(...BODY_PROBLEMS, 'job_parked', 'job_finished', 'precondition_failed', 'checkpoint_full'),
        },
      },
      config: { shape: REPLACEMENT_SHAPE },
    },
    async (request, reply) => {
      const jobId = request.params.id.toLowerCase()
      const version = await store.putCheckpoint(jobId, {
        ...readReplacement(request.body),
        ifVersions: readIfMatch(request.headers['if-match']),
        force: request.query.force === 'true',
      })
      return reply.header('etag', `"${version}"`).send({ job_id: jobId, version })
    },
  )

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

function readReplacement(body: ReplacementBody) {
  const { completed_steps, pending_steps, input_args, job_ids } = body
  const inputArgs = present(input_args)
  const children = present(job_ids) === undefined ? [] : requireChildren(job_ids, 'job_ids')
  const others = (body as { [OTHERS]?: readonly (readonly [string, RawJson])[] })[OTHERS] ?? []
  const extra = others.map(([name, value]) => `${JSON.stringify(name)}:${value.text()}`)
  return {
    sourceHash: body.source_hash ?? '',
    steps: present(completed_steps) === undefined ? [] : readSteps(completed_steps),
    pending: present(pending_steps) === undefined ? null : readPending(pending_steps),
    inputArgs: inputArgs === undefined ? '{}' : requireRawObject(inputArgs, 'input_args').text(),
    children,
    executingKey: body._executing_key ?? null,
    extra: extra.length === 0 ? null : `{${extra.join(',')}}`,
  }
}

function readSteps(value: unknown) {
  return requireMap(value, 'completed_steps').entries.map(([key, result]) => ({
    key: requireFormat(key, 'step-key', 'A key of completed_steps'),
    result: result as RawJson,
  }))
}

/** All three members are required, as by Windmill's reader. */
function readPending(value: unknown) {
  const members = requireMembers(value, 'pending_steps')
  if (typeof members.mode !== 'string') {
    throw new Problem('invalid_request', `pending_steps.mode must be a text, not ${shown(members.mode)}.`)
  }
  if (!Array.isArray(members.keys)) {
    throw new Problem('invalid_request', `pending_steps.keys must be a JSON array, not ${shown(members.keys)}.`)
  }
  requireChildren(members.job_ids, 'pending_steps.job_ids')
  const keys = members.keys.map((key, index) => requireFormat(key, 'step-key', `pending_steps.keys.${index}`))
  return { text: (members[SPAN] as RawJson).text(), keys }
}

/** The versions that an If-Match header names; null without one. A weak tag matches nothing (RFC 9110, section 13.1.1). */
function readIfMatch(header: string | undefined): string[] | null {
  if (header === undefined) return null
  return header.split(',').map((part) => {
    const tag = part.trim()
    if (tag === '*') return tag
    const version = /^(?:W\/)?"([^"]*)"$/.exec(tag)?.[1]
    if (version === undefined)
      throw new Problem('invalid_request', `If-Match must be versions in double quotes, not ${shown(header)}.`)
    // A quoted asterisk is a version like any other, and none that a job ever has.
    return tag.startsWith('W/') || version === '*' ? `W/${version}` : version
  })
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
