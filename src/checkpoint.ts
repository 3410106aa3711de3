import { Type } from '@sinclair/typebox'

/** UTF-8 octets of a step key: generous for a name, and short enough to be indexed whole. */
export const MAX_KEY_BYTES = 1024
/** Milliseconds; the largest whole number that every JSON reader keeps exactly. */
export const MAX_DURATION_MS = Number.MAX_SAFE_INTEGER
/** The version of a job that is not known. */
export const VERSION_OF_NOTHING = '0'
/** Characters of a source hash: room for any digest, written any way. */
export const MAX_SOURCE_HASH_LENGTH = 1024

/** Characters of a job's name, and of a label's name and value: text for people and filters. */
export const MAX_NAME_LENGTH = 1024
/** Labels of one job. */
export const MAX_LABELS = 64
/** Steps in one request of POST /jobs/:id/steps. */
export const MAX_STEPS_PER_REQUEST = 1000

export const JobId = Type.String({
  format: 'job-id',
  description: 'A UUID, in upper or lower case.',
  examples: ['01939a7e-5b5c-7f3e-9d41-3c7f8a1d2e4b'],
})

export const StepKey = Type.String({
  format: 'step-key',
  description: `1 to ${MAX_KEY_BYTES} octets of UTF-8: any text but U+0000 and lone surrogates.`,
  examples: ['charge_card'],
})

/** Any JSON. Between the network and the database it is never parsed: handlers meet it as RawJson. */
export const StepResult = Type.Unknown({
  description: 'Any JSON, null included.',
  examples: [{ receipt: 'r-17', amount: 12.5 }],
})

export const StartedAt = Type.String({
  format: 'step-time',
  description:
    'When the step began: YYYY-MM-DDThh:mm[:ss[.digits]] with Z, an offset, or nothing for UTC. Kept verbatim.',
  examples: ['2026-12-01T01:45:06.357Z'],
})

export const DurationMs = Type.Integer({
  maximum: MAX_DURATION_MS,
  description: 'How long the step ran, in whole milliseconds. A negative one counts as absent.',
  examples: [120],
})

export const SourceHash = Type.String({
  format: 'source-hash',
  description: 'Identifies the workflow source. Empty or absent: no drift check.',
  examples: ['9f86d081'],
})

export const JobName = Type.String({
  format: 'job-name',
  description: 'For people and filters.',
  examples: ['order-1234'],
})

/** `{name, message, ..}`: kept verbatim inside the failure marker of the Windmill SDKs. */
export const StepError = Type.Object(
  { name: Type.String(), message: Type.String() },
  {
    additionalProperties: true,
    description: 'What a failed step raised; any further members are kept.',
    examples: [{ name: 'TimeoutError', message: 'no answer in 30 s' }],
  },
)

export const Labels = Type.Record(Type.String(), Type.String(), {
  description: `At most ${MAX_LABELS}; names without a colon.`,
  examples: [{ tenant: 'acme' }],
})

export const JsonObject = Type.Record(Type.String(), Type.Unknown(), {
  description: 'Any JSON object.',
  examples: [{ order: 1234 }],
})

export const ChildIds = Type.Record(Type.String(), Type.String({ format: 'uuid' }), {
  description: "Children's job ids by key.",
  examples: [{ resize: '01939a7e-5b5c-7f3e-9d41-3c7f8a1d2e4c' }],
})

export const Version = Type.String({
  description: 'Opaque; changes with every change of the checkpoint and never comes back. "0": unknown job.',
  examples: ['6618adca36e89.2'],
})

export const PendingSteps = Type.Object(
  {
    mode: Type.String({ description: 'sequential, parallel, sleep or approval.' }),
    keys: Type.Array(StepKey),
    job_ids: Type.Record(Type.String(), Type.String({ format: 'uuid' })),
  },
  { description: 'What the job waits for; absent when nothing is pending.' },
)

/** A job's checkpoint, as Windmill's worker and SDKs know it. */
export const Checkpoint = Type.Object(
  {
    source_hash: Type.String({ description: '"" until the first non-empty hash is seen.' }),
    completed_steps: Type.Record(Type.String(), StepResult, {
      description: 'The result of each finished step, by key.',
    }),
    pending_steps: Type.Optional(PendingSteps),
    input_args: Type.Record(Type.String(), Type.Unknown()),
    job_ids: Type.Record(Type.String(), Type.String({ format: 'uuid' }), {
      description: 'Every child ever dispatched, by key.',
    }),
    _executing_key: Type.Optional(Type.String({ description: 'The step that a child job is to run.' })),
  },
  { additionalProperties: true },
)

/** The members of a checkpoint that can be asked for by name. */
export const CHECKPOINT_FIELDS = [
  'source_hash',
  'completed_steps',
  'pending_steps',
  'input_args',
  'job_ids',
  '_executing_key',
] as const
export type CheckpointField = (typeof CHECKPOINT_FIELDS)[number]

export const TimelineEntry = Type.Object({
  kind: Type.Union([Type.Literal('step'), Type.Literal('child')]),
  key: Type.Optional(StepKey),
  child_job_id: Type.Optional(Type.String({ format: 'uuid' })),
  name: Type.String(),
  status: Type.Union([Type.Literal('running'), Type.Literal('completed'), Type.Literal('failed')]),
  scheduled_for: Type.String({ description: 'As the client sent it.' }),
  started_at: Type.Optional(Type.String({ description: 'As the client sent it.' })),
  duration_ms: Type.Optional(Type.Integer()),
  bytes: Type.Optional(Type.Integer({ description: "Octets of the step's result." })),
  position: Type.Integer(),
})

export const Timeline = Type.Object({
  entries: Type.Array(TimelineEntry),
  next: Type.Union([Type.Integer(), Type.Null()], { description: 'The `after` of the next page; null at the end.' }),
})

export const Job = Type.Object({
  id: Type.String({ format: 'uuid' }),
  parent_id: Type.Union([Type.String({ format: 'uuid' }), Type.Null()], {
    description: 'Of a child that got its checkpoint at a dispatch: the job that dispatched it.',
  }),
  name: Type.Union([Type.String(), Type.Null()]),
  labels: Type.Record(Type.String(), Type.String()),
  status: Type.Union([Type.Literal('open'), Type.Literal('completed'), Type.Literal('failed')]),
  source_hash: Type.String(),
  step_count: Type.Integer(),
  failed_count: Type.Integer(),
  bytes: Type.Integer({ description: "Octets of the steps' results together." }),
  pending_keys: Type.Array(Type.String()),
  version: Version,
  created_at: Type.String({ format: 'date-time' }),
  updated_at: Type.String({ format: 'date-time' }),
  finished_at: Type.Union([Type.String({ format: 'date-time' }), Type.Null()]),
  result: Type.Optional(
    Type.Unknown({
      description: 'What a finished job ended with, verbatim; not in lists. A failed job: the failure marker.',
    }),
  ),
})

export const JobList = Type.Object({
  jobs: Type.Array(Job),
  next_cursor: Type.Union([Type.String(), Type.Null()], {
    description: 'The `cursor` of the next page; null at the end.',
  }),
})
