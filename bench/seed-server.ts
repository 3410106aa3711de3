/**
 * The seed: the upstream algorithm behind the same Fastify and driver as Cairn, to measure against. One JSON document
 * per job in `v2_job_status.workflow_as_code_status`; recording a step is BEGIN, SELECT .. FOR UPDATE, parse, put the
 * step into `_checkpoint.completed_steps`, upsert the whole document (bound once), UPDATE its timeline entry by
 * `jsonb_set`, COMMIT. The table has upstream's column and default storage, but no foreign key to the queue, which
 * would only cost the seed time. `POST /ceiling/:id` answers without a database: the load generator's own limit.
 *
 * Usage: PORT=.. DATABASE_URL=.. node --import tsx bench/seed-server.ts <pool size>
 */
import Fastify from 'fastify'
import postgres from 'postgres'

interface StepBody {
  key: string
  result: unknown
  started_at?: string
  duration_ms?: number
  source_hash?: string
}

interface Checkpoint {
  source_hash: string
  completed_steps: Record<string, unknown>
  pending_steps?: { mode: string; keys: string[]; job_ids: Record<string, string> }
  input_args: Record<string, unknown>
  job_ids: Record<string, string>
}

interface StatusDocument {
  _checkpoint?: Checkpoint
  [timelineEntry: string]: unknown
}

const poolSize = Number(process.argv[2])
const sql = postgres(process.env.DATABASE_URL ?? '', { max: poolSize, onnotice: () => {} })
await sql`CREATE TABLE IF NOT EXISTS v2_job_status (
  id uuid PRIMARY KEY, flow_status jsonb, flow_leaf_jobs jsonb, workflow_as_code_status jsonb)`

const app = Fastify({ logger: false, bodyLimit: 32 * 1024 * 1024 })

app.get('/readyz', async () => ({ status: 'ok' }))

app.post<{ Params: { id: string }; Body: StepBody }>('/ceiling/:id', async (request) => ({
  job_id: request.params.id,
  key: request.body.key,
  version: '1',
}))

app.post<{ Params: { id: string }; Body: StepBody }>('/jobs/:id/inline-checkpoint', async (request, reply) => {
  const jobId = request.params.id
  const { key, result, duration_ms } = request.body
  const startedAt = request.body.started_at ?? new Date().toISOString()

  const recorded = await sql.begin(async (tx) => {
    const [row] = await tx<{ workflow_as_code_status: StatusDocument | null }[]>`
      SELECT workflow_as_code_status FROM v2_job_status WHERE id = ${jobId} FOR UPDATE`
    const document = row?.workflow_as_code_status ?? {}
    const checkpoint = document._checkpoint ?? { source_hash: '', completed_steps: {}, input_args: {}, job_ids: {} }
    if (!acceptsHash(checkpoint, request.body.source_hash)) return false
    checkpoint.completed_steps[key] = result
    if (checkpoint.pending_steps?.keys.every((pending) => Object.hasOwn(checkpoint.completed_steps, pending)))
      delete checkpoint.pending_steps
    document._checkpoint = checkpoint
    await tx`
      INSERT INTO v2_job_status (id, workflow_as_code_status) VALUES (${jobId}, ${JSON.stringify(document)}::text::jsonb)
      ON CONFLICT (id) DO UPDATE SET workflow_as_code_status = EXCLUDED.workflow_as_code_status`
    const entry = { scheduled_for: startedAt, started_at: startedAt, name: key, duration_ms }
    await tx`
      UPDATE v2_job_status
      SET workflow_as_code_status =
        jsonb_set(workflow_as_code_status, ARRAY[${`_step/${key}`}], ${JSON.stringify(entry)}::text::jsonb)
      WHERE id = ${jobId}`
    return true
  })
  if (!recorded) return reply.code(409).send({ error: 'Workflow source code changed between replays.' })
  return { job_id: jobId, key }
})

await app.listen({ host: '127.0.0.1', port: Number(process.env.PORT) })

process.once('SIGTERM', async () => {
  await app.close()
  await sql.end({ timeout: 5 })
})

function acceptsHash(checkpoint: Checkpoint, hash: string | undefined): boolean {
  if (hash === undefined || hash === '' || hash === checkpoint.source_hash) return true
  if (checkpoint.source_hash !== '') return false
  checkpoint.source_hash = hash
  return true
}
