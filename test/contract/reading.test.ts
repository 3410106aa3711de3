import assert from 'node:assert/strict'
import test from 'node:test'
import {
  assertProblem,
  json,
  newJobId,
  readCheckpoint,
  readTimeline,
  record,
  recorded,
  request,
  type Service,
} from '../support.ts'
import { contract, shareService } from './target.ts'

contract('Reading a checkpoint', (target) => {
  const start = shareService(target)

  async function jobWithSteps(...keys: string[]) {
    const service = await start()
    const jobId = await target.newJob(service)
    for (const key of keys) await recorded(record(service, jobId, { key, result: JSON.stringify({ of: key }) }))
    return { service, jobId }
  }

  test('the checkpoint of a job that is not known is empty and has version 0', {
    skip: !target.differences.takesAnyJob,
  }, async () => {
    const service = await start()
    const reply = await readCheckpoint(service, newJobId())
    assert.equal(reply.status, 200)
    assert.deepEqual(json(reply), { source_hash: '', completed_steps: {}, input_args: {}, job_ids: {} })
    assert.equal(reply.headers.etag, '"0"')
    assert.match(String(reply.headers['content-type']), /^application\/json/)
  })

  test('reading creates nothing', { skip: !target.differences.takesAnyJob }, async () => {
    const service = await start()
    const jobId = newJobId()
    for (const path of ['checkpoint', 'steps/a', 'steps?key=a', 'timeline'])
      await request(service, `GET /jobs/${jobId}/${path}`)
    assertProblem(await request(service, `GET /jobs/${jobId}`), 'job_not_found', new RegExp(jobId))
  })

  test('a checkpoint has its known members, and those that are not set are absent', async () => {
    const { service, jobId } = await jobWithSteps('a', 'b')
    assert.deepEqual(json(await readCheckpoint(service, jobId)), {
      source_hash: '',
      completed_steps: { a: { of: 'a' }, b: { of: 'b' } },
      input_args: {},
      job_ids: {},
    })
  })

  test('fields picks members, and ships no others', async () => {
    const { service, jobId } = await jobWithSteps('a')
    const pick = async (fields: string) => {
      const reply = await request(service, `GET /jobs/${jobId}/checkpoint?fields=${fields}`)
      assert.equal(reply.status, 200, reply.text)
      return json(reply)
    }
    assert.deepEqual(await pick('job_ids,pending_steps'), { job_ids: {} })
    assert.deepEqual(await pick('source_hash'), { source_hash: '' })
    assert.deepEqual(await pick('completed_steps%2Cinput_args'), {
      completed_steps: { a: { of: 'a' } },
      input_args: {},
    })
    assert.deepEqual(await pick('_executing_key'), {})
    assert.deepEqual(await pick('source_hash,source_hash'), { source_hash: '' })
    const unknown = await request(service, `GET /jobs/${newJobId()}/checkpoint?fields=completed_steps,pending_steps`)
    if (target.differences.takesAnyJob) assert.deepEqual(json(unknown), { completed_steps: {} })
  })

  test('a field that is not known, and an empty list, are refused with the name', async () => {
    const { service, jobId } = await jobWithSteps('a')
    for (const fields of ['results', 'source_hash,', '', 'Source_hash', 'source_hash%20', '__proto__', 'toString'])
      assertProblem(
        await request(service, `GET /jobs/${jobId}/checkpoint?fields=${fields}`),
        'invalid_request',
        /fields/,
      )
    const twice = await request(service, `GET /jobs/${jobId}/checkpoint?fields=job_ids&fields=source_hash`)
    assertProblem(twice, 'invalid_request', /fields/)
  })

  test('a client that has the version gets 304 and no body, until something changes', async () => {
    const { service, jobId } = await jobWithSteps('a')
    const etag = String((await readCheckpoint(service, jobId)).headers.etag)
    const ask = (known: string) =>
      request(service, `GET /jobs/${jobId}/checkpoint`, { headers: { 'if-none-match': known } })
    for (const known of [etag, `W/${etag}`, `"x", ${etag}`, `"x",W/${etag} ,"y"`, '*']) {
      const reply = await ask(known)
      assert.deepEqual([reply.status, reply.text, reply.headers.etag], [304, '', etag], known)
    }
    for (const known of ['"0"', '"x"', etag.slice(1, -1), '']) assert.equal((await ask(known)).status, 200, known)
    await recorded(record(service, jobId, { key: 'b', result: '1' }))
    const changed = await ask(etag)
    assert.equal(changed.status, 200)
    assert.notEqual(changed.headers.etag, etag)
  })

  test('HEAD gives the headers alone', async () => {
    const { service, jobId } = await jobWithSteps('a')
    const head = await request(service, `HEAD /jobs/${jobId}/checkpoint`)
    assert.equal(head.status, 200)
    assert.equal(head.headers.etag, (await readCheckpoint(service, jobId)).headers.etag)
    assert.equal(head.text, '')
  })

  test('a step that is not there is 404, of a known job and of an unknown one', async () => {
    const { service, jobId } = await jobWithSteps('a')
    assertProblem(await request(service, `GET /jobs/${jobId}/steps/b`), 'step_not_found', /"b"/)
    if (target.differences.takesAnyJob)
      assertProblem(await request(service, `GET /jobs/${newJobId()}/steps/a`), 'step_not_found')
  })

  test('several steps come in the order asked for, each once, without those that are not there', async () => {
    const { service, jobId } = await jobWithSteps('a', 'b', 'c')
    const reply = await request(service, `GET /jobs/${jobId}/steps?key=c&key=nope&key=a&key=c`)
    assert.equal(reply.text, '{"steps":[{"key":"c","result":{"of":"c"}},{"key":"a","result":{"of":"a"}}]}')
    assert.deepEqual(json(await request(service, `GET /jobs/${jobId}/steps?key=nope`)), { steps: [] })
  })

  test('parameters of a query that are not known are ignored', async () => {
    const { service, jobId } = await jobWithSteps('a')
    assert.equal((await request(service, `GET /jobs/${jobId}/checkpoint?x=1&__proto__=2&&=`)).status, 200)
  })
})

contract('Reading a timeline', (target) => {
  const start = shareService(target)

  async function jobWithEntries(count: number) {
    const service = await start()
    const jobId = await target.newJob(service)
    for (let n = 0; n < count; n++) await recorded(record(service, jobId, { key: `k${n}`, result: '1' }))
    return { service, jobId }
  }

  async function readPages(service: Service, jobId: string, limit: number): Promise<string[][]> {
    const pages: string[][] = []
    let after: number | null = 0
    while (after !== null) {
      const reply = await request(service, `GET /jobs/${jobId}/timeline?after=${after}&limit=${limit}`)
      const page: { entries: { key: string; position: number }[]; next: number | null } = json(reply)
      assert.ok(page.entries.every((entry) => entry.position > Number(after)))
      pages.push(page.entries.map((entry) => entry.key))
      after = page.next
    }
    return pages
  }

  test('a job that is not known has no entries', { skip: !target.differences.takesAnyJob }, async () => {
    const service = await start()
    assert.equal((await request(service, `GET /jobs/${newJobId()}/timeline`)).text, '{"entries":[],"next":null}')
  })

  test('pages of any size together have each entry once, in order', async () => {
    const { service, jobId } = await jobWithEntries(7)
    const all = ['k0', 'k1', 'k2', 'k3', 'k4', 'k5', 'k6']
    for (const limit of [1, 2, 3, 6, 7, 8, 10_000]) {
      const pages = await readPages(service, jobId, limit)
      assert.deepEqual(pages.flat(), all)
      assert.equal(pages.length, Math.ceil(all.length / limit), `pages of ${limit}`)
    }
  })

  test('behind the last entry nothing follows', async () => {
    const { service, jobId } = await jobWithEntries(2)
    const [, last] = await readTimeline(service, jobId)
    const reply = await request(service, `GET /jobs/${jobId}/timeline?after=${last?.position}`)
    assert.deepEqual(json(reply), { entries: [], next: null })
    assert.deepEqual(json(await request(service, `GET /jobs/${jobId}/timeline?after=999999999999999`)).entries, [])
  })

  test('an entry carries no result', async () => {
    const service = await start()
    const jobId = await target.newJob(service)
    await recorded(record(service, jobId, { key: 'a', result: '"secret-payload"' }))
    const reply = await request(service, `GET /jobs/${jobId}/timeline`)
    assert.ok(!reply.text.includes('secret-payload'))
  })

  test('a limit or position that is no whole number in range is refused', async () => {
    const { service, jobId } = await jobWithEntries(1)
    for (const query of [
      'limit=0',
      'limit=10001',
      'limit=-1',
      'limit=1.5',
      'limit=',
      'limit=x',
      'limit=1&limit=2',
      'limit=1e3',
    ])
      assertProblem(await request(service, `GET /jobs/${jobId}/timeline?${query}`), 'invalid_request', /limit/)
    for (const query of ['after=-1', 'after=', 'after=x', 'after=1.5', 'after=9999999999999999', 'after=1&after=2'])
      assertProblem(await request(service, `GET /jobs/${jobId}/timeline?${query}`), 'invalid_request', /after/)
  })
})

contract('Reading a job', (target) => {
  const start = shareService(target)

  test('a job that is not known is 404', async () => {
    const jobId = newJobId()
    assertProblem(await request(await start(), `GET /jobs/${jobId}`), 'job_not_found', new RegExp(jobId))
  })

  test('a job tells how far it got', async () => {
    const service = await start()
    const jobId = await target.newJob(service)
    const before = Date.now()
    await recorded(record(service, jobId, { key: 'a', result: '"é"' }))
    const version = await recorded(record(service, jobId, { key: 'b', result: '{"__wmill_error":true}' }))
    const { created_at, updated_at, ...job } = json(await request(service, `GET /jobs/${jobId}`))
    assert.deepEqual(job, {
      id: jobId,
      parent_id: null,
      name: null,
      labels: {},
      status: 'open',
      source_hash: '',
      step_count: 2,
      failed_count: 1,
      bytes: Buffer.byteLength('"é"{"__wmill_error":true}'),
      pending_keys: [],
      version,
      finished_at: null,
    })
    assert.ok(Date.parse(created_at) >= before - 1 && Date.parse(updated_at) >= Date.parse(created_at))
    assert.ok(Date.parse(updated_at) <= Date.now() + 1)
  })
})
