import assert from 'node:assert/strict'
import test from 'node:test'
import fc from 'fast-check'
import { isStepTime, MAX_STEP_TIME_LENGTH } from '../../src/step-time.ts'

const pad = (value: number, width = 2) => String(value).padStart(width, '0')

/** Dates by day number, so that generator and implementation share no calendar. */
const date = fc
  .date({ min: new Date('0000-01-01T00:00:00Z'), max: new Date('9999-12-31T23:59:59Z'), noInvalidDate: true })
  .map((at) => at.toISOString().slice(0, 10))
const minutes = fc.tuple(fc.nat(23), fc.nat(59)).map(([hour, minute]) => `${pad(hour)}:${pad(minute)}`)
const seconds = fc.oneof(
  fc.constant(''),
  fc.nat(59).map((second) => `:${pad(second)}`),
  fc.tuple(fc.nat(59), fc.stringMatching(/^\d{1,30}$/)).map(([second, digits]) => `:${pad(second)}.${digits}`),
)
const offset = fc.oneof(
  fc.constantFrom('', 'Z'),
  fc.tuple(fc.constantFrom('+', '-'), minutes).map((parts) => parts.join('')),
)
const stepTime = fc.tuple(date, minutes, seconds, offset).map(([d, m, s, o]) => `${d}T${m}${s}${o}`)

test('what the SDKs send is a step time', () => {
  for (const text of [
    '2026-12-01T01:45:06.357Z',
    '2026-07-28T10:11:12.123456+00:00',
    '2026-07-28T10:11:12+00:00',
    '2026-07-28T10:11:12.123456+05:30',
    '2026-07-28T10:11:12.123456',
    '2026-07-28T10:11',
    '2026-07-28T10:11-00:00',
  ])
    assert.equal(isStepTime(text), true, text)
})

test('every real date and time with any number of digits is a step time, and Date can read it', () => {
  fc.assert(
    fc.property(stepTime, (text) => {
      assert.equal(isStepTime(text), true)
      assert.ok(!Number.isNaN(new Date(text).getTime()))
    }),
    { numRuns: 2000 },
  )
})

test('what Date writes is a step time', () => {
  fc.assert(
    fc.property(
      fc.date({
        min: new Date('0000-01-01T00:00:00Z'),
        max: new Date('9999-12-31T23:59:59.999Z'),
        noInvalidDate: true,
      }),
      (at) => isStepTime(at.toISOString()),
    ),
  )
})

test('a step time with one character changed, added or removed is refused, or Date can still read it', () => {
  fc.assert(
    fc.property(
      stepTime,
      fc.nat(),
      fc.constantFrom(0, 1),
      fc.string({ maxLength: 1 }),
      (text, index, removed, added) => {
        const at = index % (text.length + 1)
        const changed = text.slice(0, at) + added + text.slice(at + removed)
        return !isStepTime(changed) || !Number.isNaN(new Date(changed).getTime())
      },
    ),
    { numRuns: 5000 },
  )
})

test('29 February is a step time in leap years only', () => {
  for (const year of ['0000', '0004', '2000', '2024']) assert.equal(isStepTime(`${year}-02-29T00:00Z`), true, year)
  for (const year of ['0001', '0100', '1900', '2026', '2100'])
    assert.equal(isStepTime(`${year}-02-29T00:00Z`), false, year)
})

test('a day that its month does not have is refused', () => {
  for (const month of [4, 6, 9, 11]) {
    assert.equal(isStepTime(`2026-${pad(month)}-30T00:00Z`), true)
    assert.equal(isStepTime(`2026-${pad(month)}-31T00:00Z`), false)
  }
  for (const day of ['2026-02-30', '2026-01-32', '2026-01-00', '2026-00-10', '2026-13-10'])
    assert.equal(isStepTime(`${day}T00:00Z`), false, day)
})

test('hour 24, minute 60, second 60 and offsets beyond a day are refused', () => {
  for (const time of ['24:00', '24:00:00', '23:60', '23:59:60', '12:00+24:00', '12:00+00:60'])
    assert.equal(isStepTime(`2026-06-30T${time}`), false, time)
})

test('other ways to write a time are refused', () => {
  for (const text of [
    '',
    'tomorrow',
    '2026-06-30',
    '2026-06-30 10:00Z',
    '2026-06-30t10:00Z',
    '2026-06-30T10:00z',
    '2026-06-30T10Z',
    '2026-06-30T10:00.5Z',
    '2026-06-30T10:00:00.Z',
    '2026-06-30T10:00:00,5Z',
    '2026-06-30T10:00:00+0530',
    '2026-06-30T10:00:00+05',
    '2026-06-30T10:00:00Z\n',
    ' 2026-06-30T10:00:00Z',
    '20260630T100000Z',
    '+002026-06-30T10:00:00Z',
    '-2026-06-30T10:00:00Z',
    '12026-06-30T10:00:00Z',
    '٢٠٢٦-06-30T10:00:00Z',
    '1782813600',
  ])
    assert.equal(isStepTime(text), false, text)
})

test('a step time has at most 64 characters', () => {
  const start = '2026-06-30T10:00:00.'
  assert.equal(isStepTime(`${start}${'1'.repeat(MAX_STEP_TIME_LENGTH - start.length - 1)}Z`), true)
  assert.equal(isStepTime(`${start}${'1'.repeat(MAX_STEP_TIME_LENGTH - start.length)}Z`), false)
  assert.equal(MAX_STEP_TIME_LENGTH, 64)
})
