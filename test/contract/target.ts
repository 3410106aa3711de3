import { after, describe } from 'node:test'
import type postgres from 'postgres'
import { newJobId, openScope, type Scope, type Service, type ServiceOptions, startApp } from '../support.ts'

/** A store under the contract, with a service over it. */
export interface ContractTarget {
  name: string
  start(scope: Scope, options?: ServiceOptions): Promise<Service>
  /** The id of a job that takes steps and has none. */
  newJob(service: Service): Promise<string>
  /** Locks what a write to the job must lock, in a transaction that `sql` has begun. */
  lockJob(sql: postgres.Sql, jobId: string): Promise<unknown>
  /** Where the stores differ by design. */
  differences: {
    /** A result comes back byte for byte; otherwise as the same JSON value, every digit included. */
    keepsText: boolean
    /** U+0000, lone surrogates and numbers of any size can be stored; otherwise they are `unstorable_result`. */
    storesEveryJson: boolean
    /** Any UUID names a job; otherwise one that is not known is `job_not_found`. */
    takesAnyJob: boolean
    /** The first hash that a request names becomes the job's; otherwise the job has it from elsewhere. */
    adoptsHash: boolean
  }
}

const journal: ContractTarget = {
  name: 'journal',
  start: startApp,
  newJob: async () => newJobId(),
  lockJob: (sql, jobId) => sql`select from cairn.job where id = ${jobId} for update`,
  differences: { keepsText: true, storesEveryJson: true, takesAnyJob: true, adoptsHash: true },
}

export const CONTRACT_TARGETS: readonly ContractTarget[] = [journal]

/** States a part of the contract once for each store. */
export function contract(title: string, state: (target: ContractTarget) => void): void {
  for (const target of CONTRACT_TARGETS) describe(`${title} (${target.name} store)`, () => state(target))
}

/** One service for the tests of a suite, started by the first that asks and closed after the last. */
export function shareService(target: ContractTarget, options?: ServiceOptions): () => Promise<Service> {
  const scope = openScope()
  let started: Promise<Service> | undefined
  after(() => scope.close())
  return () => {
    started ??= target.start(scope, options)
    return started
  }
}
