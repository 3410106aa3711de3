import assert from 'node:assert/strict'
import test from 'node:test'
import {
  assertProblem,
  assertUnchanged,
  json,
  newJobId,
  readCheckpoint,
  readResult,
  readTimeline,
  record,
  recorded,
  request,
  type Service,
} from '../support.ts'
import { answered, send } from './engine-target.ts'
import { contract, shareService } from './target.ts'

const STARTED_AT = '2026-12-01T01:45:06.357Z'

function postSteps(service: Service, jobId: string, body: string) {
  return send(service, `POST /jobs/${jobId}/steps`, body)
}

contract('The first write of a step', (target) => {
  const start = shareService(target)
  const text = { skip: !target.differences.keepsText }

  async function freshJob() {
    const service = await start()
    return { service, jobId: await target.newJob(service) }
  }

  test('a new step is answered 201, with the version that the checkpoint then has', async () => {
    const { service, jobId } = await freshJob()
    const { version, ...rest } = await answered(201, postSteps(service, jobId, '{"key":"a","result":1}'))
    assert.deepEqual(rest, { job_id: jobId, key: 'a', recorded: true })
    assert.equal((await readCheckpoint(service, jobId)).headers.etag, `"${version}"`)
  })

  test('who comes later gets what stands, verbatim, and changes nothing', text, async () => {
    const { service, jobId } = await freshJob()
    const first = '{"a": 1.0, "a":"\\u0000 \\ud83e"}'
    const { version } = await answered(201, postSteps(service, jobId, `{"key":"a","result":${first}}`))
    await assertUnchanged(service, jobId, async () => {
      for (const body of [
        '{"key":"a","result":2}',
        `{"key":"a","result":${first}}`,
        `{"key":"a","result":null,"started_at":"${STARTED_AT}","duration_ms":5}`,
        '{"key":"a","error":{"name":"E","message":"late"}}',
      ]) {
        const reply = await postSteps(service, jobId, body)
        assert.equal(reply.status, 200, reply.text)
        assert.ok(reply.text.includes(`"recorded":false,"result":${first}}`), reply.text)
        assert.equal(json(reply).version, version)
      }
    })
  })

  test('a result that is null stands like any other', async () => {
    const { service, jobId } = await freshJob()
    await answered(201, postSteps(service, jobId, '{"key":"a","result":null}'))
    const late = await answered(200, postSteps(service, jobId, '{"key":"a","result":1}'))
    assert.deepEqual([late.recorded, late.result], [false, null])
  })

  test('what stands can be the result of the inline-checkpoint contract, which then still replaces it', async () => {
    const { service, jobId } = await freshJob()
    await recorded(record(service, jobId, { key: 'a', result: '"inline"' }))
    assert.equal((await answered(200, postSteps(service, jobId, '{"key":"a","result":2}'))).result, 'inline')
    await recorded(record(service, jobId, { key: 'a', result: '"later"' }))
    assert.equal((await answered(200, postSteps(service, jobId, '{"key":"a","result":2}'))).result, 'later')
  })

  test('a forgotten step can be written first once more', async (t) => {
    const { service, jobId } = await freshJob()
    await answered(201, postSteps(service, jobId, '{"key":"a","result":1}'))
    const forgotten = await request(service, `DELETE /jobs/${jobId}/steps/a`)
    if (forgotten.status === 501) return t.skip('this store forgets no steps')
    assert.equal(forgotten.status, 204)
    await answered(201, postSteps(service, jobId, '{"key":"a","result":2}'))
    assert.equal(await readResult(service, jobId, 'a'), '2')
  })

  test('of several steps each new one is recorded, and each that stands is given', text, async () => {
    const { service, jobId } = await freshJob()
    await answered(201, postSteps(service, jobId, '{"key":"b","result":{"x": 1.0}}'))
    const reply = await postSteps(
      service,
      jobId,
      `{"steps":[{"key":"a","result":1,"duration_ms":3},{"key":"b","result":2},
        {"key":"c","error":{"name":"E","message":"m"},"started_at":"${STARTED_AT}"}]}`,
    )
    assert.equal(reply.status, 200, reply.text)
    const { version, ...rest } = json(reply)
    assert.deepEqual(rest, {
      job_id: jobId,
      steps: [
        { key: 'a', recorded: true },
        { key: 'b', recorded: false, result: { x: 1 } },
        { key: 'c', recorded: true },
      ],
    })
    assert.ok(reply.text.includes('"result":{"x": 1.0}'))
    assert.equal((await readCheckpoint(service, jobId)).headers.etag, `"${version}"`)
    const entries = await readTimeline(service, jobId)
    assert.deepEqual(
      entries.map(({ key, status, duration_ms }) => [key, status, duration_ms]),
      [
        ['b', 'completed', undefined],
        ['a', 'completed', 3],
        ['c', 'failed', undefined],
      ],
    )
    assert.equal(entries[2]?.started_at, STARTED_AT)
  })

  test('several steps that all stand already change nothing, not even the version', async () => {
    const { service, jobId } = await freshJob()
    const body = '{"steps":[{"key":"a","result":1},{"key":"b","result":2}]}'
    const first = await answered(200, postSteps(service, jobId, body))
    await assertUnchanged(service, jobId, async () => {
      const again = await answered(200, postSteps(service, jobId, body))
      assert.equal(again.version, first.version)
      assert.deepEqual(
        again.steps.map((step: { recorded: boolean }) => step.recorded),
        [false, false],
      )
    })
  })

  test('a thousand steps in one request are all recorded, in their order', async () => {
    const { service, jobId } = await freshJob()
    const keys = Array.from({ length: 1000 }, (_, n) => `k${(n * 7) % 1000}`)
    const steps = keys.map((key) => ({ key, result: key }))
    const answer = await answered(200, postSteps(service, jobId, JSON.stringify({ steps })))
    assert.equal(answer.steps.length, 1000)
    assert.deepEqual(Object.keys(json(await readCheckpoint(service, jobId)).completed_steps), keys)
  })

  test('one step in a list is answered as a list', async () => {
    const { service, jobId } = await freshJob()
    const answer = await answered(200, postSteps(service, jobId, '{"steps":[{"key":"a","result":1}]}'))
    assert.deepEqual(answer.steps, [{ key: 'a', recorded: true }])
  })

  test(
    'an error is stored as the failure marker of the Windmill SDKs, its further members verbatim',
    text,
    async () => {
      const { service, jobId } = await freshJob()
      const error = '{"name":"E", "message":"no \\u0000 card","extra":{"n":1.0}}'
      await answered(201, postSteps(service, jobId, `{"key":"pay \\"x\\"","error":${error}}`))
      const marker = `{"__wmill_error":true,"message":"no \\u0000 card","step_key":"pay \\"x\\"","result":{"error":${error}}}`
      assert.equal(await readResult(service, jobId, 'pay "x"'), marker)
      const [entry] = await readTimeline(service, jobId)
      assert.equal(entry?.status, 'failed')
      const late = await postSteps(service, jobId, '{"key":"pay \\"x\\"","result":"worked"}')
      assert.ok(late.text.includes(`"recorded":false,"result":${marker}}`), late.text)
      // To the SDKs' contract it is an ordinary failed step.
      const repeat = await record(service, jobId, { key: 'pay "x"', result: marker })
      assert.ok(repeat.text.includes(`"failure":${marker}`), repeat.text)
    },
  )

  test('null for an optional member is the same as leaving it out', async () => {
    const { service, jobId } = await freshJob()
    const body =
      '{"key":"a","result":1,"error":null,"steps":null,"started_at":null,"duration_ms":null,"source_hash":null}'
    await answered(201, postSteps(service, jobId, body))
    const several = '{"key":null,"error":null,"steps":[{"key":"b","result":null,"error":null}]}'
    await answered(200, postSteps(service, jobId, several))
    assert.equal(await readResult(service, jobId, 'b'), 'null')
  })

  test('a step under another hash is refused even where its key stands', {
    skip: !target.differences.adoptsHash,
  }, async () => {
    const { service, jobId } = await freshJob()
    await answered(201, postSteps(service, jobId, '{"key":"a","result":1,"source_hash":"h1"}'))
    await assertUnchanged(service, jobId, async () => {
      assertProblem(await postSteps(service, jobId, '{"key":"a","result":1,"source_hash":"h2"}'), 'source_changed')
      const several = '{"steps":[{"key":"a","result":1},{"key":"b","result":1}],"source_hash":"h2"}'
      assertProblem(await postSteps(service, jobId, several), 'source_changed')
    })
    const late = await answered(200, postSteps(service, jobId, '{"key":"a","result":2,"source_hash":"h1"}'))
    assert.equal(late.result, 1)
  })
})

contract('A request for steps that is not valid', (target) => {
  const start = shareService(target)

  async function knownJob() {
    const service = await start()
    const jobId = await target.newJob(service)
    await answered(201, postSteps(service, jobId, '{"key":"there","result":1}'))
    return { service, jobId }
  }

  const step = '{"key":"x","result":1}'
  const faults: [title: string, body: string, detail: RegExp][] = [
    ['both result and error', '{"key":"x","result":1,"error":{"name":"E","message":"m"}}', /result and error.*both/],
    ['neither result nor error', '{"key":"x"}', /result and error.*neither/],
    ['a null result and an error', '{"key":"x","result":null,"error":{"name":"E","message":"m"}}', /both/],
    [
      'both in one of several',
      `{"steps":[${step},{"key":"y","result":1,"error":{"name":"E","message":"m"}}]}`,
      /steps\.1.*both/,
    ],
    ['neither in one of several', `{"steps":[${step},{"key":"y"}]}`, /steps\.1.*neither/],
    ['a key twice', `{"steps":[${step},{"key":"y","result":1},${step}]}`, /"x" twice/],
    ['no steps', '{"steps":[]}', /steps/],
    ['neither key nor steps', '{"result":1}', /key/],
    ['key and steps', `{"key":"y","steps":[${step}]}`, /key and steps/],
    ['result and steps', `{"result":1,"steps":[${step}]}`, /result and steps/],
    ['a time beside steps', `{"started_at":"${STARTED_AT}","steps":[${step}]}`, /started_at and steps/],
    ['steps that are no list', '{"steps":{"key":"x","result":1}}', /steps/],
    ['a step that is no object', `{"steps":[${step},17]}`, /steps\.1/],
    ['a step without a key', '{"steps":[{"result":1}]}', /key/],
    ['an empty key among several', `{"steps":[${step},{"key":"","result":1}]}`, /steps\.1\.key/],
    [
      'a bad time among several',
      `{"steps":[${step},{"key":"y","result":1,"started_at":"tomorrow"}]}`,
      /steps\.1\.started_at/,
    ],
    [
      'a bad duration among several',
      `{"steps":[${step},{"key":"y","result":1,"duration_ms":1.5}]}`,
      /steps\.1\.duration_ms/,
    ],
    ['an error that is no object', '{"key":"x","error":"broken"}', /error/],
    ['an error without a name', '{"key":"x","error":{"message":"m"}}', /error\.name/],
    ['an error without a message', '{"key":"x","error":{"name":"E"}}', /error\.message/],
    ['an error whose message is no text', '{"key":"x","error":{"name":"E","message":17}}', /error\.message/],
    ['an error whose name is null', '{"key":"x","error":{"name":null,"message":"m"}}', /error\.name/],
    ['no object at all', '[1]', /object/],
  ]
  for (const [title, body, detail] of faults) {
    test(`${title}: refused, and everything is as it was`, async () => {
      const { service, jobId } = await knownJob()
      const reply = await assertUnchanged(service, jobId, () => postSteps(service, jobId, body))
      assertProblem(reply, 'invalid_request', detail)
    })
  }

  test('more than 1,000 steps: refused, and everything is as it was', async () => {
    const { service, jobId } = await knownJob()
    const steps = Array.from({ length: 1001 }, (_, n) => ({ key: `k${n}`, result: n }))
    const reply = await assertUnchanged(service, jobId, () => postSteps(service, jobId, JSON.stringify({ steps })))
    assertProblem(reply, 'invalid_request', /steps/)
  })

  test('a refused request to a job that is not known leaves it unknown', async () => {
    const service = await start()
    const jobId = newJobId()
    assertProblem(await postSteps(service, jobId, '{"key":"x"}'), 'invalid_request')
    assert.equal((await readCheckpoint(service, jobId)).headers.etag, '"0"')
    assertProblem(await postSteps(service, 'no-uuid', step), 'invalid_request', /UUID/)
  })
})

contract('Several steps near the limits', (target) => {
  const start = shareService(target, { limits: { maxStepsPerJob: 5 } })

  test('all of them are recorded or none; those that stand take no room', async () => {
    const service = await start()
    const jobId = await target.newJob(service)
    const body = (...keys: string[]) => JSON.stringify({ steps: keys.map((key) => ({ key, result: key })) })
    await answered(200, postSteps(service, jobId, body('a', 'b', 'c', 'd')))
    await assertUnchanged(service, jobId, async () => {
      assertProblem(await postSteps(service, jobId, body('d', 'e', 'f')), 'checkpoint_full')
    })
    await answered(200, postSteps(service, jobId, body('a', 'b', 'c', 'd', 'e')))
    await answered(200, postSteps(service, jobId, '{"key":"a","result":"another"}'))
    assertProblem(await postSteps(service, jobId, '{"key":"f","result":1}'), 'checkpoint_full')
  })
})
