import { request, type Service } from '../support.ts'
import type { Action, Ending, IfMatch, Times } from './rules.ts'

export interface RequestContext {
  idOf(job: number): string
  /** The version of a job as the test last saw it. */
  versionOf(job: number): string
}

/** Sends what the action says and gives the answer. */
export function send(service: Service, action: Action, context: RequestContext) {
  const { line, body, headers } = requestOf(action, context)
  return request(service, line, {
    ...(body !== undefined && { body }),
    headers: { ...(body !== undefined && { 'content-type': 'application/json' }), ...headers },
  })
}

function requestOf(
  action: Action,
  context: RequestContext,
): { line: string; body?: string; headers?: Record<string, string> } {
  const job = `/jobs/${context.idOf(action.job)}`
  switch (action.kind) {
    case 'record': {
      const { key, result, hash, times } = action
      return {
        line: `POST ${job}/inline-checkpoint`,
        body: object({ key: text(key), result, ...timesOf(times), ...hashOf(hash) }),
      }
    }
    case 'steps': {
      const steps = action.steps.map(({ key, ending, times }) => ({
        key: text(key),
        ...endingOf(ending),
        ...timesOf(times),
      }))
      const hash = hashOf(action.hash)
      const single = steps.length === 1 ? steps[0] : undefined
      return {
        line: `POST ${job}/steps`,
        body: object(single ? { ...single, ...hash } : { steps: `[${steps.map(object).join(',')}]`, ...hash }),
      }
    }
    case 'put': {
      const { pending, inputArgs, executingKey, extra, hash } = action
      const body = object({
        ...hashOf(hash),
        completed_steps: map(action.steps),
        job_ids: idMap(action.children, context),
        ...(pending && { pending_steps: pendingOf(pending, context) }),
        ...(inputArgs !== null && { input_args: inputArgs }),
        ...(executingKey !== null && { _executing_key: text(executingKey) }),
      })
      return {
        line: `PUT ${job}/checkpoint?force=${action.force}`,
        body: extra === null ? body : `${body.slice(0, -1)},${extra.slice(1)}`,
        ...(action.ifMatch && { headers: { 'if-match': ifMatch(action.ifMatch, context.versionOf(action.job)) } }),
      }
    }
    case 'dispatch': {
      const { mode, children, others, entries, hash, inputArgs } = action
      const keys = [...children.map(([key]) => key), ...others]
      return {
        line: `POST ${job}/dispatch`,
        body: object({
          mode: text(mode),
          ...(others.length > 0 && { keys: JSON.stringify(keys) }),
          job_ids: idMap(children, context),
          ...(entries.length > 0 && { entries: map(entries) }),
          ...(inputArgs !== null && { input_args: inputArgs }),
          ...hashOf(hash),
        }),
      }
    }
    case 'startChild':
      return {
        line: `POST ${job}/children/${context.idOf(action.child)}/start`,
        body: object(timesOf({ started_at: action.started_at, duration_ms: null })),
      }
    case 'completeChild':
      return {
        line: `POST ${job}/children/${context.idOf(action.child)}/complete`,
        body: object({ ...endingOf(action.ending), ...timesOf(action.times) }),
      }
    case 'forgetStep':
      return { line: `DELETE ${job}/steps/${encodeURIComponent(action.key)}?force=${action.force}` }
    case 'forgetJob':
      return { line: `DELETE ${job}?force=${action.force}` }
    case 'describe': {
      const { name, labels, inputArgs, hash } = action
      const body = {
        ...(name !== null && { name: text(name) }),
        ...(labels !== null && { labels }),
        ...(inputArgs !== null && { input_args: inputArgs }),
        ...hashOf(hash),
      }
      return { line: `PUT ${job}`, body: object(body) }
    }
    case 'completeJob':
      return { line: `POST ${job}/complete`, body: object(endingOf(action.ending)) }
    case 'reopen':
      return { line: `POST ${job}/reopen` }
  }
}

const text = (value: string) => JSON.stringify(value)

/** From names to JSON texts. The names are known ones; see `map` for arbitrary names. */
function object(members: Record<string, string>): string {
  return map(Object.entries(members))
}

function map(members: readonly (readonly [string, string])[]): string {
  return `{${members.map(([name, json]) => `${text(name)}:${json}`).join(',')}}`
}

function idMap(children: readonly (readonly [string, number])[], { idOf }: RequestContext): string {
  return map(children.map(([key, child]) => [key, text(idOf(child))]))
}

function pendingOf(
  { mode, keys, jobIds }: { mode: string; keys: string[]; jobIds: [string, number][] },
  context: RequestContext,
): string {
  return object({ mode: text(mode), keys: JSON.stringify(keys), job_ids: idMap(jobIds, context) })
}

function timesOf({ started_at, duration_ms }: Times): Record<string, string> {
  return {
    ...(started_at !== null && { started_at: text(started_at) }),
    ...(duration_ms !== null && { duration_ms: String(duration_ms) }),
  }
}

function hashOf(hash: string): Record<string, string> {
  return hash === '' ? {} : { source_hash: text(hash) }
}

function endingOf(ending: Ending): Record<string, string> {
  return 'result' in ending ? { result: ending.result } : { error: JSON.stringify(ending.error) }
}

function ifMatch(kind: NonNullable<IfMatch>, version: string): string {
  const tags = { current: `"x", "${version}"`, other: '"x", "*"', any: '*', unknown: '"0"', weak: `W/"${version}"` }
  return tags[kind]
}
