// Step results as a workflow would record them: an object with identifiers, a few members and running text. Text
// matters: Postgres compresses what it moves out of line, and one repeated byte would make that free.

const WORDS =
  'order invoice customer shipped to the warehouse after review amount total pending approved by manager with notes ' +
  'delivery address changed because card was declined retry scheduled for tomorrow morning support ticket opened and ' +
  'refund issued when item arrived damaged in transit carrier confirmed pickup label printed quantity adjusted from ' +
  'stock count mismatch supplier promised replacement next week priority high region north email sent attachment'
const VOCABULARY = WORDS.split(' ')

/** `count` different JSON objects of exactly `bytes` ASCII bytes each (at least 160); the same ones in every run. */
export function makeResults(bytes: number, count: number): string[] {
  const random = randomNumbers(bytes)
  return Array.from({ length: count }, () => makeResult(bytes, random))
}

function makeResult(bytes: number, random: () => number): string {
  const digits = (): string => Math.floor(random() * 0xffffffff).toString(16)
  const known = JSON.stringify({
    id: `${digits()}-${digits()}`,
    ok: random() < 0.9,
    amount: Math.floor(random() * 1e6) / 100,
    items: [Math.floor(random() * 1000), Math.floor(random() * 1000)],
    status: pick(VOCABULARY, random),
    note: '',
  })
  const missing = bytes - known.length
  if (missing < 0) throw new RangeError(`A result of ${bytes} bytes is too small to be realistic`)
  let note = ''
  while (note.length < missing) note += `${pick(VOCABULARY, random)} ${random() < 0.1 ? digits() : ''} `
  return `${known.slice(0, -2)}${note.slice(0, missing)}"}`
}

function pick(words: string[], random: () => number): string {
  return words[Math.floor(random() * words.length)] ?? ''
}

/** Numbers in [0, 1) from a 32-bit linear congruential generator (Numerical Recipes' constants). */
function randomNumbers(seed: number): () => number {
  let state = seed >>> 0
  return () => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0
    return state / 2 ** 32
  }
}
