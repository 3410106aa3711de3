import { type Static, Type } from '@sinclair/typebox'
import type { Store } from '../db/store.ts'
import type { App } from '../src/app.ts'
import { ChildIds, JobId, JsonObject, SourceHash, StepKey, Version } from '../src/checkpoint.ts'
import { type RawJson, SPAN } from '../src/json-scanner.ts'
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

// Of a timeline entry, given by Cairn itself.
const ENTRY_MEMBERS = ['scheduled_for', 'started_at', 'name', 'duration_ms'] as const

const SHAPE = {
  members: {
    mode: 'value',
    keys: { items: 'value' },
    job_ids: { each: 'value' },
    input_args: 'raw',
    source_hash: 'value',
    entries: {
      each: { members: { scheduled_for: 'raw', started_at: 'raw', name: 'raw', duration_ms: 'raw' }, span: true },
    },
  },
} as const

const Body = Type.Object(
  {
    mode: Type.Unsafe<string>({ type: 'string', enum: ['sequential', 'parallel', 'sleep', 'approval'] }),
    keys: Type.Optional(
      checkedByHand<unknown>(
        Type.Array(StepKey, {
          description: 'All that the job waits for; unless given, the keys of job_ids in text order.',
        }),
      ),
    ),
    job_ids: Type.Optional(checkedByHand<unknown>(ChildIds)),
    input_args: Type.Optional(checkedByHand<unknown>(JsonObject)),
    source_hash: nullable(SourceHash),
    entries: Type.Optional(
      checkedByHand<unknown>(
        Type.Record(Type.String(), JsonObject, {
          description: 'What the timeline shows of a sleep or an approval, by key.',
        }),
      ),
    ),
  },
  { examples: [{ mode: 'parallel', job_ids: { resize: '01939a7e-5b5c-7f3e-9d41-3c7f8a1d2e4c' } }] },
)

export const ParkedReply = {
  job_id: Type.String({ format: 'uuid' }),
  version: Version,
  pending_keys: Type.Array(StepKey, {
    description: 'What the job still waits for as a whole; empty when nothing is pending.',
  }),
}

export async function dispatchRoutes(app: App, { store }: { store: Store }): Promise<void> {
  app.post(
    '/jobs/:id/dispatch',
    {
      schema: {
        operationId: 'dispatch',
        summary: 'Park a job on children, a sleep or an approval; sent again it changes nothing',
        tags: ['engines'],
        params: Type.Object({ id: JobId }),
        body: Body,
        response: {
          200: Type.Object(ParkedReply, { description: 'The job waits.' }),
          ...problemReplies(...BODY_PROBLEMS, 'source_changed', 'job_finished', 'stale_child'),
        },
      },
      config: { shape: SHAPE },
    },
    async (request) => {
      const jobId = request.params.id.toLowerCase()
      const { version, pendingKeys } = await store.dispatch(jobId, readDispatch(jobId, request.body))
      return { job_id: jobId, version, pending_keys: pendingKeys }
    },
  )
}

function readDispatch(jobId: string, body: Static<typeof Body>) {
  const children = present(body.job_ids) === undefined ? [] : requireChildren(body.job_ids, 'job_ids')
  if (children.some(({ childId }) => childId === jobId)) {
    throw new Problem('invalid_request', `job_ids names the job ${jobId} itself as its child.`)
  }
  const childKeys = children.map(({ key }) => key)
  const keys = present(body.keys) === undefined ? inTextOrder(childKeys) : requireKeys(body.keys)
  if (keys.length === 0)
    throw new Problem('invalid_request', 'keys must name at least one key, and none is in job_ids either.')
  const lacking = childKeys.find((key) => !keys.includes(key))
  if (lacking !== undefined)
    throw new Problem('invalid_request', `keys must include ${shown(lacking)}, which job_ids has.`)
  const inputArgs = present(body.input_args)
  return {
    mode: body.mode,
    keys,
    children: [...children].sort((a, b) => keys.indexOf(a.key) - keys.indexOf(b.key)),
    inputArgs: inputArgs === undefined ? null : requireRawObject(inputArgs, 'input_args').text(),
    sourceHash: body.source_hash ?? '',
    entries: present(body.entries) === undefined ? [] : readEntries(body.entries, keys),
  }
}

/** Order of Unicode code points, which is that of UTF-8 and of Postgres' "C", and not that of UTF-16. */
function inTextOrder(keys: string[]): string[] {
  return [...keys].sort((a, b) => Buffer.compare(Buffer.from(a), Buffer.from(b)))
}

function requireKeys(value: unknown): string[] {
  if (!Array.isArray(value)) throw new Problem('invalid_request', `keys must be a JSON array, not ${shown(value)}.`)
  const keys = value.map((key, index) => requireFormat(key, 'step-key', `keys.${index}`))
  const twice = keys.find((key, index) => keys.indexOf(key) !== index)
  if (twice !== undefined) throw new Problem('invalid_request', `keys names ${shown(twice)} twice.`)
  return keys
}

function readEntries(value: unknown, keys: string[]) {
  return requireMap(value, 'entries').entries.map(([key, entry]) => {
    if (!keys.includes(key)) throw new Problem('invalid_request', `entries has ${shown(key)}, which keys has not.`)
    const members = requireMembers(entry, `entries.${key}`)
    const own = ENTRY_MEMBERS.find((name) => members[name] !== undefined)
    if (own) throw new Problem('invalid_request', `entries.${key}.${own} is not for a client to give.`)
    return { key, extra: compactObject(members[SPAN] as RawJson) }
  })
}

/** An object's text with nothing between its braces and its members, so that members can be put before them. */
export function compactObject(object: RawJson): string {
  return `{${object.text().slice(1, -1).trim()}}`
}
