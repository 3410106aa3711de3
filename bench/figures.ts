/** What a run of requests came to; times in milliseconds, unless the name says seconds. */
export interface LoadFigures {
  requests: number
  seconds: number
  requestsPerSecond: number
  p50: number
  p99: number
  max: number
}

export function summarise(latencies: number[], seconds: number): LoadFigures {
  const sorted = Float64Array.from(latencies).sort()
  return {
    requests: sorted.length,
    seconds,
    requestsPerSecond: sorted.length / seconds,
    p50: percentile(sorted, 0.5),
    p99: percentile(sorted, 0.99),
    max: sorted.at(-1) ?? Number.NaN,
  }
}

/** Nearest-rank percentile of ascending numbers. */
export function percentile(sorted: ArrayLike<number>, share: number): number {
  return sorted[Math.max(0, Math.ceil(share * sorted.length) - 1)] ?? Number.NaN
}

export function median(values: number[]): number {
  return percentile(
    values.toSorted((a, b) => a - b),
    0.5,
  )
}

/** The member-wise median of several rounds: what a table quotes. */
export function medianOfRounds(rounds: LoadFigures[]): LoadFigures {
  const of = (pick: (round: LoadFigures) => number): number => median(rounds.map(pick))
  return {
    requests: of((round) => round.requests),
    seconds: of((round) => round.seconds),
    requestsPerSecond: of((round) => round.requestsPerSecond),
    p50: of((round) => round.p50),
    p99: of((round) => round.p99),
    max: of((round) => round.max),
  }
}

/** Three significant digits, thousands with commas. */
export function short(value: number): string {
  if (!Number.isFinite(value)) return String(value)
  if (Math.abs(value) >= 100) return Math.round(value).toLocaleString('en-US')
  return String(Number(value.toPrecision(3)))
}

export function markdownTable(header: string[], rows: string[][]): string {
  const line = (cells: string[]): string => `| ${cells.join(' | ')} |`
  return [line(header), line(header.map(() => '---')), ...rows.map(line)].join('\n')
}
