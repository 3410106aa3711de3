import { MAX_KEY_BYTES, MAX_NAME_LENGTH, MAX_SOURCE_HASH_LENGTH } from './checkpoint.ts'
import { isStepTime } from './step-time.ts'

export const UUID = /^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$/i

const NIL_UUID = '00000000-0000-0000-0000-000000000000'

/** Whether a Postgres text can hold it, and every JSON reader can read it. */
export function isStorableText(text: string): boolean {
  return !text.includes('\u0000') && text.isWellFormed()
}

/** The text formats that schemas name, with the rule as an error tells it. */
export const INPUT_FORMATS = {
  'job-id': {
    validate: (text: string) => UUID.test(text),
    rule: 'must be a UUID',
  },
  'step-key': {
    validate: (text: string) => {
      // UTF-8 has at least one octet and at most three for each UTF-16 unit.
      const shortEnough = text.length * 3 <= MAX_KEY_BYTES || Buffer.byteLength(text) <= MAX_KEY_BYTES
      return text.length > 0 && shortEnough && isStorableText(text)
    },
    rule: `must be 1 to ${MAX_KEY_BYTES} bytes of UTF-8 text without U+0000 and without lone surrogates`,
  },
  'step-time': {
    validate: isStepTime,
    rule: 'must be a real date and time like 2026-12-01T01:45:06.357Z',
  },
  'source-hash': {
    validate: (text: string) => text.length <= MAX_SOURCE_HASH_LENGTH && isStorableText(text),
    rule: `must be at most ${MAX_SOURCE_HASH_LENGTH} characters without U+0000 and without lone surrogates`,
  },
  'job-name': {
    validate: (text: string) => text.length > 0 && text.length <= MAX_NAME_LENGTH && isStorableText(text),
    rule: `must be 1 to ${MAX_NAME_LENGTH} characters without U+0000 and without lone surrogates`,
  },
  'id-prefix': {
    validate: (text: string) => text.length > 0 && text.length <= 36 && UUID.test(text + NIL_UUID.slice(text.length)),
    rule: 'must be the beginning of a UUID',
  },
  'natural-number': {
    validate: (text: string) => /^\d{1,15}$/.test(text),
    rule: 'must be a whole number',
  },
} as const satisfies Record<string, { validate: (text: string) => boolean; rule: string }>

export type InputFormat = keyof typeof INPUT_FORMATS
