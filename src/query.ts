/** On a parsed query whose escapes are not UTF-8: the part at fault. */
export const BAD_ESCAPE: unique symbol = Symbol('bad escape')

type Query = Record<string | symbol, string | string[]>

/**
 * Parses a query string as forms are encoded: `+` is a space; a name given several times has all its values. Unlike common
 * parsers it does not let a broken escape pass as text, since a step key read wrongly names another step.
 */
export function parseQuery(text: string): Query {
  const query: Query = Object.create(null)
  if (text === '') return query
  for (const part of text.split('&')) {
    if (part === '') continue
    const equals = part.indexOf('=')
    try {
      const name = decode(equals === -1 ? part : part.slice(0, equals))
      const value = equals === -1 ? '' : decode(part.slice(equals + 1))
      const present = query[name]
      query[name] = present === undefined ? value : [present, value].flat()
    } catch {
      query[BAD_ESCAPE] = part.slice(0, 80)
    }
  }
  return query
}

function decode(text: string): string {
  return decodeURIComponent(text.replaceAll('+', ' '))
}
