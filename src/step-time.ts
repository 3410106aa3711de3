/**
 * Longest `started_at` that is stored, in characters. The SDKs send at most 32 (microseconds and an offset); twice that
 * leaves room for any clock's digits and bounds what every reader of a timeline has to carry.
 */
export const MAX_STEP_TIME_LENGTH = 64

const STEP_TIME =
  /^(\d{4})-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])T(?:[01]\d|2[0-3]):[0-5]\d(?::[0-5]\d(?:\.\d+)?)?(?:Z|[+-](?:[01]\d|2[0-3]):[0-5]\d)?$/

const DAYS_IN_MONTH = [31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31]

/**
 * Whether a text is a time at which a step can have started: `YYYY-MM-DDThh:mm[:ss[.digits]]`, then `Z`, `+hh:mm`,
 * `-hh:mm` or nothing (read as UTC); a real date, no 24:00, no second 60, at most MAX_STEP_TIME_LENGTH characters.
 * The form is RFC 3339 with upper-case letters, plus what ECMAScript's date-time format leaves out (seconds, offset):
 * whatever passes, `new Date()` can read, as front ends do.
 */
export function isStepTime(text: string): boolean {
  if (text.length > MAX_STEP_TIME_LENGTH) return false
  const match = STEP_TIME.exec(text)
  if (match === null) return false
  const [, year, month, day] = match.map(Number)
  return day !== undefined && day <= daysInMonth(year ?? 0, month ?? 0)
}

function daysInMonth(year: number, month: number): number {
  const isLeapYear = year % 4 === 0 && (year % 100 !== 0 || year % 400 === 0)
  return month === 2 && isLeapYear ? 29 : (DAYS_IN_MONTH[month - 1] ?? 0)
}
