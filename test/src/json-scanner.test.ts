import assert from 'node:assert/strict'
import { isUtf8 } from 'node:buffer'
import { test } from 'node:test'
import fc from 'fast-check'
import type { JsonScanner, ScanLimits, Shape } from '../../src/json-scanner.ts'
import {
  createJsonScanner,
  InvalidJson,
  JsonMap,
  MAX_VALUE_BYTES,
  OTHERS,
  RawJson,
  SPAN,
  scanJson,
} from '../../src/json-scanner.ts'

const LIMITS: ScanLimits = { maxDepth: 512 }
const BOM = Buffer.from([0xef, 0xbb, 0xbf])

function scanText(text: string, shape: Shape = 'raw', limits = LIMITS): unknown {
  return scanJson(Buffer.from(text), shape, limits)
}

/** Feeds the body in pieces; each call gets a Buffer of its own, as when a receiving buffer is outgrown. */
function scanInPieces(body: Buffer, shape: Shape, cuts: readonly number[]): unknown {
  const scanner = createJsonScanner(shape, LIMITS)
  for (const cut of cuts) scanner.advance(grown(body, cut), cut)
  return scanner.finish(grown(body, body.length), body.length)
}

/** What a receiving buffer looks like when `length` bytes have come: there is rubbish behind them. */
function grown(body: Buffer, length: number): Buffer {
  return Buffer.concat([body.subarray(0, length), Buffer.from('"}]\\ rubbish')])
}

function everyCut(body: Buffer): number[] {
  return Array.from({ length: body.length }, (_, i) => i + 1)
}

function faultOf(run: () => unknown): InvalidJson {
  try {
    run()
  } catch (error) {
    if (error instanceof InvalidJson) return error
    throw error
  }
  throw new assert.AssertionError({ message: 'the body was accepted' })
}

function outcomeOf(run: () => unknown): { value: unknown } | { code: string; position: number } {
  try {
    return { value: run() }
  } catch (error) {
    if (!(error instanceof InvalidJson)) throw error
    return { code: error.code, position: error.position }
  }
}

function parseReference(body: Buffer): { accepted: boolean; value?: unknown } {
  try {
    return { accepted: true, value: JSON.parse(new TextDecoder('utf-8', { fatal: true }).decode(body)) }
  } catch {
    return { accepted: false }
  }
}

/** Results made comparable: spans as text, symbols and maps as plain data. */
function plain(value: unknown): unknown {
  if (value instanceof RawJson) return { raw: value.text(), kind: value.kind, isFailure: value.isFailure }
  if (value instanceof JsonMap) return { map: value.entries.map(([k, v]) => [k, plain(v)]), span: value.span.text() }
  if (Array.isArray(value)) return value.map(plain)
  if (typeof value !== 'object' || value === null) return value
  return Reflect.ownKeys(value).map((key) => [String(key), plain((value as Record<string | symbol, unknown>)[key])])
}

function rawOf(value: unknown): RawJson {
  assert.ok(value instanceof RawJson)
  return value
}

// ---- against JSON.parse ----------------------------------------------------------------------------------------

const whitespace = fc.stringMatching(/^[ \t\r\n]{0,2}$/)

const number = fc.oneof(
  fc.double({ noNaN: true, noDefaultInfinity: true }).map(String),
  fc.bigInt().map(String),
  fc.constantFrom('-0', '0', '1e400', '1E+2', '1.50', '0.0e-0', '-1.5E-7'),
)

const string = fc.oneof(
  fc.string({ unit: 'grapheme' }).map((s) => JSON.stringify(s)),
  fc.string({ unit: 'binary' }).map((s) => JSON.stringify(s)),
  fc
    .array(
      fc.constantFrom(
        'a',
        'é',
        '漢',
        '😀',
        '\\u0000',
        '\\ud83e',
        '\\uDE00',
        '\\/',
        '\\n',
        '\\"',
        '\\\\',
        ' ',
        '\u2028',
        '\x7f',
      ),
    )
    .map((parts) => `"${parts.join('')}"`),
  fc.constantFrom('"__wmill_error"', '"\\u005f_wmill_error"', '"__proto__"', '"key"', '"\\u006bey"', '"result"'),
)

/** JSON text with whitespace, duplicate members and every way to write a number or a string. */
const { json } = fc.letrec<{ json: string }>((tie) => ({
  json: fc.oneof(
    { maxDepth: 4, depthIdentifier: 'json', withCrossShrink: true },
    fc.constantFrom('null', 'true', 'false'),
    number,
    string,
    fc
      .array(fc.tuple(whitespace, tie('json'), whitespace), { maxLength: 4, depthIdentifier: 'json' })
      .map((items) => `[${items.map((item) => item.join('')).join(',')}]`),
    fc
      .array(fc.tuple(whitespace, string, whitespace, fc.constant(':'), tie('json'), whitespace), {
        maxLength: 4,
        depthIdentifier: 'json',
      })
      .map((members) => `{${members.map((member) => member.join('')).join(',')}}`),
  ),
}))

const document = fc.tuple(whitespace, json, whitespace).map((parts) => Buffer.from(parts.join('')))

const mutated = fc
  .tuple(
    document,
    fc.array(
      fc.tuple(
        fc.nat(),
        fc.constantFrom('replace', 'insert', 'delete', 'cut'),
        fc.nat({ max: 255 }),
        fc.constantFrom(...'{}[],:"\\-+.0123456789eEtrufalsn \t\n\u0000u'),
      ),
      { minLength: 1, maxLength: 3 },
    ),
  )
  .map(([body, changes]) => {
    let bytes = [...body]
    for (const [at, change, byte, character] of changes) {
      const index = at % (bytes.length + 1)
      const inserted = byte < 48 ? byte * 5 : character.charCodeAt(0)
      if (change === 'cut') bytes = bytes.slice(0, index)
      else bytes.splice(index, change === 'insert' ? 0 : 1, ...(change === 'delete' ? [] : [inserted]))
    }
    return Buffer.from(bytes)
  })

const junk = fc.oneof(
  fc.uint8Array({ maxLength: 12 }).map((bytes) => Buffer.from(bytes)),
  fc
    .array(
      fc.constantFrom(
        '{',
        '}',
        '[',
        ']',
        ',',
        ':',
        '"',
        '\\',
        '-',
        '+',
        '.',
        '0',
        '1',
        'e',
        'E',
        'true',
        'null',
        'fals',
        ' ',
        '\n',
        '"a"',
        '\\u00',
        'NaN',
        '\ufeff',
        'é',
      ),
      { maxLength: 10 },
    )
    .map((parts) => Buffer.from(parts.join(''))),
)

const cutsAt = fc.array(fc.nat(), { maxLength: 6 })

function cutsIn(body: Buffer, points: readonly number[]): number[] {
  return points.map((point) => point % (body.length + 1)).sort((a, b) => a - b)
}

function assertAgrees(body: Buffer, points: readonly number[]): void {
  const reference = parseReference(body)
  const whole = outcomeOf(() => scanJson(body, 'raw', LIMITS))
  assert.equal('value' in whole, reference.accepted, JSON.stringify(whole))
  for (const cuts of [cutsIn(body, points), everyCut(body)]) {
    assert.deepEqual(plain(outcomeOf(() => scanInPieces(body, 'raw', cuts))), plain(whole))
  }
  if (!('value' in whole)) return
  const raw = rawOf(whole.value)
  assert.deepEqual(JSON.parse(raw.text()), reference.value)
  const text = new TextDecoder().decode(body)
  assert.equal(raw.text(), text.replace(/^[ \t\r\n]+|[ \t\r\n]+$/g, ''))
  const value = reference.value as Record<string, unknown>
  assert.equal(raw.isFailure, raw.kind === 'object' && value.__wmill_error === true)
  assert.equal(raw.kind, value === null ? 'null' : Array.isArray(value) ? 'array' : typeof value)
}

test('valid JSON is accepted with its exact text, however it is cut into chunks', () => {
  fc.assert(
    fc.property(document, cutsAt, (body, points) => {
      assert.ok(parseReference(body).accepted)
      assertAgrees(body, points)
    }),
    { numRuns: 500 },
  )
})

test('damaged JSON is refused exactly when JSON.parse refuses it', () => {
  fc.assert(fc.property(mutated, cutsAt, assertAgrees), { numRuns: 2000 })
})

test('junk is refused exactly when JSON.parse refuses it', () => {
  fc.assert(fc.property(junk, cutsAt, assertAgrees), { numRuns: 2000 })
})

test('every byte after every prefix is judged as JSON.parse judges it', () => {
  const prefixes = [
    '',
    ' ',
    '[',
    '[1',
    '[1,',
    '{',
    '{"a"',
    '{"a":',
    '{"a":1',
    '{"a":1,',
    '"',
    '"\\',
    '"\\u',
    '"\\u00e',
    '-',
    '0',
    '-0',
    '1',
    '1.',
    '1.5',
    '1e',
    '1e+',
    '1e5',
    't',
    'tru',
    'true',
    'null',
    '[]',
    '{}',
  ]
  const endings = ['', '"', ']', '}', ':1}', 'ull']
  for (const prefix of prefixes) {
    for (let byte = 0; byte < 256; byte++) {
      for (const ending of endings) {
        const body = Buffer.concat([Buffer.from(prefix), Buffer.from([byte]), Buffer.from(ending)])
        const accepted = 'value' in outcomeOf(() => scanJson(body, 'raw', LIMITS))
        assert.equal(accepted, parseReference(body).accepted, JSON.stringify(body.toString('latin1')))
      }
    }
  }
})

const ENVELOPE: Shape = {
  members: {
    key: 'value',
    result: 'raw',
    map: { each: 'raw' },
    deep: { each: { members: { key: 'value' }, span: true } },
    list: { items: { members: { key: 'value', result: 'raw' } } },
  },
  span: true,
  others: 'raw',
}

test('a shape gives the same whether the body comes at once or in pieces, and what JSON.parse gives', () => {
  const name = fc.constantFrom(
    'key',
    '\\u006bey',
    'result',
    'map',
    'deep',
    'list',
    'other',
    '1',
    '0',
    '__proto__',
    '__wmill_error',
  )
  const inner = fc.oneof(
    json,
    fc.array(fc.tuple(name, json)).map((members) => `{${members.map(([n, v]) => `"${n}":${v}`)}}`),
  )
  const value = fc.oneof(
    inner,
    fc.array(inner, { maxLength: 3 }).map((items) => `[${items}]`),
    fc.array(fc.tuple(name, inner), { maxLength: 4 }).map((members) => `{${members.map(([n, v]) => `"${n}":${v}`)}}`),
  )
  const body = fc
    .array(fc.tuple(name, value), { maxLength: 6 })
    .map((members) => Buffer.from(`{${members.map(([n, v]) => `"${n}" : ${v}`).join(' , ')}}`))
  fc.assert(
    fc.property(body, cutsAt, (bytes, points) => {
      const whole = scanJson(bytes, ENVELOPE, LIMITS)
      for (const cuts of [cutsIn(bytes, points), everyCut(bytes)]) {
        assert.deepEqual(plain(scanInPieces(bytes, ENVELOPE, cuts)), plain(whole))
      }
      assertFits(ENVELOPE, whole, JSON.parse(bytes.toString()))
    }),
    { numRuns: 500 },
  )
})

/** Compares with what JSON.parse makes of the same text: the last of several members counts there, too. */
function assertFits(shape: Shape, scanned: unknown, parsed: unknown): void {
  if (shape === 'value') {
    assert.deepEqual(scanned, parsed)
  } else if (typeof shape === 'object' && 'items' in shape && Array.isArray(parsed)) {
    assert.ok(Array.isArray(scanned))
    assert.equal(scanned.length, parsed.length)
    for (const [i, item] of scanned.entries()) assertFits(shape.items, item, parsed[i])
  } else if (typeof shape === 'object' && 'each' in shape && isObject(parsed)) {
    assert.ok(scanned instanceof JsonMap)
    assertSpan(scanned.span, parsed)
    assert.deepEqual(scanned.entries.map(([name]) => name).sort(), Object.keys(parsed).sort())
    for (const [name, value] of scanned.entries) assertFits(shape.each, value, parsed[name])
  } else if (typeof shape === 'object' && 'members' in shape && isObject(parsed)) {
    assertMembersFit(shape, scanned as Record<string | symbol, unknown>, parsed)
  } else {
    assertSpan(scanned, parsed)
  }
}

function assertMembersFit(
  shape: Extract<Shape, { members: unknown }>,
  scanned: Record<string | symbol, unknown>,
  parsed: Record<string, unknown>,
): void {
  const known = Object.keys(shape.members)
  assert.equal(Object.getPrototypeOf(scanned), null)
  assert.deepEqual(
    Object.keys(scanned),
    known.filter((name) => Object.hasOwn(parsed, name)),
  )
  for (const name of Object.keys(scanned)) assertFits(shape.members[name] as Shape, scanned[name], parsed[name])
  assert.equal(SPAN in scanned, shape.span === true)
  if (shape.span) assertSpan(scanned[SPAN], parsed)
  assert.equal(OTHERS in scanned, shape.others === 'raw')
  if (shape.others !== 'raw') return
  const others = scanned[OTHERS] as ReadonlyArray<readonly [string, RawJson]>
  const unknown = Object.keys(parsed).filter((name) => !known.includes(name))
  assert.deepEqual(others.map(([name]) => name).sort(), unknown.sort())
  for (const [name, raw] of others) assertSpan(raw, parsed[name])
}

function assertSpan(scanned: unknown, parsed: unknown): void {
  const raw = rawOf(scanned)
  assert.deepEqual(JSON.parse(raw.text()), parsed)
  assert.equal(raw.isFailure, isObject(parsed) && parsed.__wmill_error === true)
}

function isObject(value: unknown): value is Record<string, unknown> {
  return typeof value === 'object' && value !== null && !Array.isArray(value)
}

// ---- grammar, case by case -------------------------------------------------------------------------------------

test('a number keeps its digits, and what JSON does not know as a number is refused', () => {
  for (const text of [
    '-0',
    '0',
    '1e400',
    '1E+2',
    '1.0',
    '12345678901234567890',
    '0.1000000000000000055511151231257827',
  ]) {
    assert.equal(rawOf(scanText(text)).text(), text)
    assert.equal(rawOf(scanText(` ${text} `)).text(), text)
    assert.equal(rawOf((scanText(`[${text}]`, { items: 'raw' }) as unknown[])[0]).text(), text)
  }
  for (const text of [
    '01',
    '-01',
    '1.',
    '.5',
    '+1',
    '-',
    '1e',
    '1e+',
    '1.e1',
    '0x10',
    '1_000',
    'NaN',
    'Infinity',
    '-Infinity',
    '--1',
  ]) {
    for (const around of [text, `[${text}]`, `{"a":${text}}`]) {
      assert.equal(faultOf(() => scanText(around)).code, 'syntax', around)
    }
  }
})

test('escapes and half surrogates are kept as they were written', () => {
  const text = '"\\u0000 \\ud83e \\uDD80 \\/ \\" \\\\ \u2028"'
  assert.equal(rawOf(scanText(text)).text(), text)
  assert.equal(scanText('"\\ud83e"', 'value'), '\ud83e')
})

test('bad escapes and raw control characters are refused', () => {
  for (const text of [
    '"\\x41"',
    '"\\u12g4"',
    '"\\u123"',
    '"\\U0041"',
    '"\\\'"',
    '"\t"',
    '"\n"',
    '"\u0000"',
    '"a\u001fb"',
  ]) {
    assert.equal(faultOf(() => scanText(text)).code, 'syntax', JSON.stringify(text))
  }
})

test('a fault is named with its position and a short piece of what was found', () => {
  const cases: Array<[string, number, string]> = [
    ['{"key": "a", "result": NaN}', 23, 'Unexpected token NaN at byte 23: NaN and Infinity are not JSON'],
    ['[-Infinity]', 2, 'Unexpected token Infinity at byte 2: NaN and Infinity are not JSON'],
    ['[1,]', 3, 'Unexpected token ] at byte 3: expected a value'],
    ['{"a":1,}', 7, 'Unexpected token } at byte 7: expected a name in double quotes'],
    ["{'a':1}", 1, "Unexpected token ' at byte 1: expected a name in double quotes or }"],
    ['{"a" 1}', 5, 'Unexpected token 1 at byte 5: expected a colon after the name'],
    ['{"a":1]', 6, 'Unexpected token ] at byte 6: expected a comma or } after the member'],
    ['[1}', 2, 'Unexpected token } at byte 2: expected a comma or ] after the item'],
    ['[01]', 2, 'Unexpected token 1 at byte 2: a number has no leading zeros'],
    ['undefined', 0, 'Unexpected token undefined at byte 0: expected a value'],
    [`nul${'l'.repeat(100)}`, 4, `Unexpected token ${'l'.repeat(20)} at byte 4: expected nothing more after the value`],
    [`nu${'x'.repeat(100)}`, 0, `Unexpected token nu${'x'.repeat(18)} at byte 0: expected a value`],
    ['{}\u0000', 2, 'Unexpected token 0x00 at byte 2: expected nothing more after the value'],
    ['"é"漢', 4, 'Unexpected token 漢 at byte 4: expected nothing more after the value'],
    ['\u00a01', 0, 'Unexpected token 0xc2 at byte 0: expected a value'],
    ['"a\nb"', 2, 'Unexpected token 0x0a at byte 2: control characters in strings must be escaped'],
  ]
  for (const [text, position, message] of cases) {
    const fault = faultOf(() => scanText(text))
    assert.deepEqual([fault.code, fault.position, fault.message], ['syntax', position, message])
  }
})

test('a body that ends too early is told so, and an empty one in its own words', () => {
  const cases: Array<[string, string]> = [
    ['{"a":[1,2', 'The body ended too early, at byte 9: the JSON is incomplete'],
    ['{"a":"xyz', 'The body ended too early, at byte 9: the string that begins at byte 5 is not closed'],
    ['"\\u00', 'The body ended too early, at byte 5: the string that begins at byte 0 is not closed'],
    ['-', 'The body ended too early, at byte 1: the JSON is incomplete'],
    ['tru', 'The body ended too early, at byte 3: the JSON is incomplete'],
    ['', 'The body is empty: expected a JSON value'],
    [' \r\n\t', 'The body is empty: expected a JSON value'],
    ['\ufeff', 'The body is empty: expected a JSON value'],
  ]
  for (const [text, message] of cases) {
    const fault = faultOf(() => scanText(text))
    assert.deepEqual([fault.code, fault.position, fault.message], ['syntax', Buffer.byteLength(text), message])
  }
})

test('a fault is thrown by the chunk that makes it certain, and again by each later call', () => {
  const body = Buffer.from('{"result": [1, x')
  const scanner = createJsonScanner('raw', LIMITS)
  scanner.advance(body, body.length - 1)
  const fault = faultOf(() => scanner.advance(body, body.length))
  assert.equal(
    faultOf(() => scanner.advance(body, body.length)),
    fault,
  )
  assert.equal(
    faultOf(() => scanner.finish(body, body.length)),
    fault,
  )
})

// ---- UTF-8 -----------------------------------------------------------------------------------------------------

test('one leading byte order mark is tolerated, also in pieces; a second one or half of one is not', () => {
  const body = Buffer.concat([BOM, Buffer.from('{"a":1}')])
  const raw = rawOf(scanInPieces(body, 'raw', everyCut(body)))
  assert.deepEqual([raw.start, raw.end, raw.text()], [3, 10, '{"a":1}'])
  assert.equal(faultOf(() => scanJson(Buffer.concat([BOM, body]), 'raw', LIMITS)).position, 3)
  for (const half of [[0xef], [0xef, 0xbb], [0xef, 0xbb, 0x31], [0xfe, 0xff, 0x31]]) {
    assert.equal(faultOf(() => scanJson(Buffer.from(half), 'raw', LIMITS)).code, 'syntax')
  }
  assert.equal(faultOf(() => scanText('[\ufeff1]')).code, 'syntax')
})

test('invalid UTF-8 in a string is refused with its position', () => {
  const faults = [
    [0xff],
    [0xfe],
    [0x80],
    [0xbf],
    [0xc0, 0x80],
    [0xc1, 0xbf],
    [0xe0, 0x80, 0x80],
    [0xe0, 0x9f, 0xbf],
    [0xf0, 0x80, 0x80, 0x80],
    [0xf0, 0x8f, 0xbf, 0xbf],
    [0xed, 0xa0, 0x80],
    [0xed, 0xbf, 0xbf],
    [0xed, 0xa0, 0xbd, 0xed, 0xb8, 0x80],
    [0xf4, 0x90, 0x80, 0x80],
    [0xf5, 0x80, 0x80, 0x80],
    [0xc3],
    [0xe6, 0xbc],
    [0xf0, 0x9f, 0x98],
    [0xc3, 0x41],
    [0xe6, 0x41],
  ]
  for (const fault of faults) {
    for (const before of ['', 'abc', 'é漢😀', 'é'.repeat(5000), '漢'.repeat(3000), 'a'.repeat(4095)]) {
      const start = Buffer.from(`{"a":"${before}`)
      const body = Buffer.concat([start, Buffer.from(fault), Buffer.from(`${before}"}`)])
      assert.throws(() => new TextDecoder('utf-8', { fatal: true }).decode(body))
      const thrown = faultOf(() => scanJson(body, 'raw', LIMITS))
      assert.deepEqual([thrown.code, thrown.position], ['utf8', start.length])
    }
  }
  const inName = Buffer.from([0x7b, 0x22, 0xff, 0x22, 0x3a, 0x31, 0x7d])
  assert.equal(faultOf(() => scanJson(inName, { each: 'raw' }, LIMITS)).code, 'utf8')
})

test('any bytes in a string are judged as a fatal TextDecoder judges them, wherever the fault lies', () => {
  const piece = fc.oneof(
    fc.string({ unit: 'grapheme' }).map((s) => Buffer.from(s.replace(/["\\\p{Cc}]/gu, ''))),
    fc.uint8Array({ min: 0x80, maxLength: 3 }).map((bytes) => Buffer.from(bytes)),
  )
  fc.assert(
    fc.property(fc.array(piece), fc.nat({ max: 5000 }), (pieces, padding) => {
      const body = Buffer.concat([Buffer.from(`"${'p'.repeat(padding)}`), ...pieces, Buffer.from('"')])
      const outcome = outcomeOf(() => scanJson(body, 'raw', LIMITS))
      assert.equal('value' in outcome, parseReference(body).accepted)
      if ('value' in outcome) return
      assert.equal(outcome.code, 'utf8')
      assert.ok(isUtf8(body.subarray(0, outcome.position)))
      const sizes = [1, 2, 3, 4].map((size) => body.subarray(outcome.position, outcome.position + size))
      assert.ok(!sizes.some((bytes) => isUtf8(bytes)), 'the bytes at the position named are sound')
    }),
    { numRuns: 1000 },
  )
})

test('a fault at the end of a large body is found without delay', () => {
  const body = Buffer.concat([Buffer.from(`"${'é'.repeat(15_000_000)}`), Buffer.from([0xff, 0x22])])
  const started = performance.now()
  assert.equal(faultOf(() => scanJson(body, 'raw', LIMITS)).position, body.length - 2)
  assert.ok(performance.now() - started < 2000)
})

// ---- limits ----------------------------------------------------------------------------------------------------

test('nesting at the limit is accepted and one level more is refused, counted from the value kept', () => {
  const shape: Shape = { members: { result: 'raw', map: { each: 'raw' }, key: 'value' }, others: 'ignore' }
  const nest = (depth: number) => '['.repeat(depth) + ']'.repeat(depth)
  const objects = (depth: number) => '{"a":'.repeat(depth) + 1 + '}'.repeat(depth)
  for (const maxDepth of [1, 3, 512]) {
    for (const around of ['#', '{"result":#}', '{"unknown":#}', '{"map":{"a":#}}', '{"key":#}']) {
      const wanted: Shape = around === '#' ? 'raw' : shape
      for (const make of [nest, objects]) {
        scanText(around.replace('#', make(maxDepth)), wanted, { maxDepth })
        const fault = faultOf(() => scanText(around.replace('#', make(maxDepth + 1)), wanted, { maxDepth }))
        assert.equal(fault.code, 'too_deep')
        assert.match(fault.message, new RegExp(`\\b${maxDepth} levels`))
      }
    }
  }
  assert.equal(rawOf(scanText('1', 'raw', { maxDepth: 0 })).text(), '1')
  assert.equal(faultOf(() => scanText('[]', 'raw', { maxDepth: 0 })).code, 'too_deep')
  scanText('[[],[],{"a":[]}]', 'raw', { maxDepth: 3 })
})

test('millions of levels are refused at the first one too many', () => {
  for (const unit of ['[', '{"a":', '[{"":']) {
    const body = Buffer.alloc(10_000_000, unit)
    const fault = faultOf(() => scanJson(body, { members: { result: 'raw' } }, LIMITS))
    assert.equal(fault.code, 'too_deep')
    assert.ok(fault.position < 513 * unit.length + unit.length)
  }
})

test('a value to be parsed has a length limit; a longer one that a later member replaces is no fault', () => {
  const fits = `"${'a'.repeat(MAX_VALUE_BYTES - 2)}"`
  const over = `"${'a'.repeat(MAX_VALUE_BYTES - 1)}"`
  const shape: Shape = { members: { key: 'value', keys: { items: 'value' } } }
  assert.equal((scanText(`{"key":${fits}}`, shape) as { key: string }).key.length, MAX_VALUE_BYTES - 2)
  for (const body of [`{"key":${over}}`, `{"key":1,"key":${over}}`]) {
    const fault = faultOf(() => scanText(body, shape))
    assert.equal(fault.code, 'too_long')
    assert.match(fault.message, /^Member "key" is longer than 65536 bytes/)
  }
  assert.match(faultOf(() => scanText(`{"keys":["a",${over}]}`, shape)).message, /^Member "keys"/)
  assert.deepEqual(plain(scanText(`{"key":${over},"key":2}`, shape)), [['key', 2]])
})

test('objects to be parsed are bounded together, since parsing them is slow', () => {
  const item = `[${'{},'.repeat(20_000)}1]`
  const fault = faultOf(() => scanText(`[${Array(20).fill(item)}]`, { items: 'value' }))
  assert.equal(fault.code, 'too_long')
  assert.equal((scanText(`[${Array(10).fill(item)}]`, { items: 'value' }) as unknown[]).length, 10)
})

test('the number of kept entries is bounded, over all maps, lists and other members together', () => {
  const limits = { maxDepth: 512, maxItems: 3 }
  const shape: Shape = { members: { map: { each: 'raw' }, lists: { items: { items: 'raw' } } }, others: 'raw' }
  for (const body of ['[1,2,3,4]', '[[],[],[],[]]'])
    assert.equal(faultOf(() => scanText(body, { items: 'raw' }, limits)).code, 'too_many')
  assert.equal((scanText('[1,2,3]', { items: 'raw' }, limits) as unknown[]).length, 3)
  assert.match(
    faultOf(() => scanText('{"map":{"a":1,"b":2,"c":3,"d":4}}', shape, limits)).message,
    /^More than 3 entries/,
  )
  assert.equal(faultOf(() => scanText('{"map":{"a":1,"b":2},"x":3,"lists":[[]]}', shape, limits)).code, 'too_many')
  assert.equal(faultOf(() => scanText('{"lists":[[1,2,3]]}', shape, limits)).code, 'too_many')
  scanText('{"map":{"a":1,"a":2,"a":3,"a":4},"x":1,"x":2,"x":3,"lists":[1]}', shape, limits)
  scanText(
    '{"map":{"a":1,"b":2,"c":3},"map":{"d":1,"e":2,"f":3},"lists":[[1,2]],"map":1,"lists":[[1],2]}',
    { members: { map: { each: 'raw' } } },
    limits,
  )
  scanText('{"lists":[[1,2]],"lists":[[3,4]],"lists":[[5,6]]}', shape, limits)
  scanText('[[1,2,3,4,5]]', { items: 'raw' }, limits)
  scanText('{"a":[1,2],"a":[3,4],"a":[5,6]}', { each: { items: 'raw' } }, limits)
})

test('100,000 entries are kept unless a limit is given', () => {
  const items = (count: number) => `[${Array(count).fill('0')}]`
  assert.equal((scanText(items(100_000), { items: 'value' }) as unknown[]).length, 100_000)
  assert.equal(faultOf(() => scanText(items(100_001), { items: 'value' })).code, 'too_many')
})

// ---- shapes ----------------------------------------------------------------------------------------------------

test('of a member given twice the last counts, completely', () => {
  const shape: Shape = { members: { key: 'value', result: 'raw', map: { each: 'value' } } }
  const scan = (text: string) => plain(scanText(text, shape))
  assert.deepEqual(scan('{"key":"a","\\u006bey":"b"}'), [['key', 'b']])
  assert.deepEqual(scan('{"map":{"a":1},"map":{"b":2}}'), [['map', { map: [['b', 2]], span: '{"b":2}' }]])
  assert.deepEqual(scan('{"map":{"a":1},"map":7}'), [['map', { raw: '7', kind: 'number', isFailure: false }]])
  assert.deepEqual(scan('{"map":7,"map":{}}'), [['map', { map: [], span: '{}' }]])
  assert.deepEqual(scan('{"result":{"__wmill_error":true},"result":{}}'), [
    ['result', { raw: '{}', kind: 'object', isFailure: false }],
  ])
})

test('a map keeps the order of first appearance and the last value, and any name is data', () => {
  const text = '{"b":1,"2":2,"__proto__":3,"1":4,"b":5,"\\u0061":6,"a":7,"":8,"\\ud83e":9,"é":10}'
  const map = scanText(text, { each: 'value' })
  assert.ok(map instanceof JsonMap)
  assert.deepEqual(map.entries, [
    ['b', 5],
    ['2', 2],
    ['__proto__', 3],
    ['1', 4],
    ['a', 7],
    ['', 8],
    ['\ud83e', 9],
    ['é', 10],
  ])
  assert.equal(map.span.text(), text)
})

test('a name that is kept has a length limit, one that is ignored has none', () => {
  const name = 'n'.repeat(MAX_VALUE_BYTES)
  assert.equal(faultOf(() => scanText(`{"${name}":1}`, { each: 'raw' })).code, 'too_long')
  assert.deepEqual(plain(scanText(`{"${name}":1,"key":2}`, { members: { key: 'value' } })), [['key', 2]])
})

test('a value of another kind than its shape is delivered raw', () => {
  const shapes: Shape[] = [{ members: { a: 'value' } }, { each: 'value' }, { items: 'value' }]
  for (const [i, shape] of shapes.entries()) {
    for (const text of ['1', '"a"', 'null', 'true', i < 2 ? '[1,{"a":2}]' : '{"a":[1]}']) {
      const raw = rawOf(scanText(` ${text} `, shape))
      assert.equal(raw.text(), text)
      assert.equal(raw.byteLength, text.length)
    }
  }
  assert.equal(rawOf(scanText('{"__wmill_error":true}', { items: 'raw' })).isFailure, true)
})

test('unknown members are ignored, or kept in order with their exact text', () => {
  const text = '{"x": [1, 2] ,"key":"a","__proto__":{"y":1.0},"x":"\\u0041"}'
  assert.deepEqual(plain(scanText(text, { members: { key: 'value' } })), [['key', 'a']])
  const kept = scanText(text, { members: { key: 'value' }, others: 'raw' }) as { [OTHERS]: Array<[string, RawJson]> }
  assert.deepEqual(
    kept[OTHERS].map(([name, raw]) => [name, raw.text()]),
    [
      ['x', '"\\u0041"'],
      ['__proto__', '{"y":1.0}'],
    ],
  )
})

test('a shape may name __proto__ as a member, and no prototype is touched', () => {
  const object = scanText('{"__proto__":{"polluted":1}}', { members: { ['__proto__']: 'value' } }) as object
  assert.equal(Object.getPrototypeOf(object), null)
  assert.deepEqual(Object.keys(object), ['__proto__'])
  assert.equal(({} as { polluted?: number }).polluted, undefined)
})

test('the span of an object has no whitespace around it and everything in it', () => {
  const object = scanText(' {"steps" : [ {"key":"a" , "z":1.0 } ,{ } ] } ', {
    members: { steps: { items: { members: { key: 'value' }, span: true } } },
  }) as { steps: Array<{ key?: string; [SPAN]: RawJson }> }
  assert.deepEqual(
    object.steps.map((step) => [step.key, step[SPAN].text()]),
    [
      ['a', '{"key":"a" , "z":1.0 }'],
      [undefined, '{ }'],
    ],
  )
})

test('a span is of the buffer that finish was given', () => {
  const body = Buffer.from('{"result":[1]}')
  const scanner: JsonScanner = createJsonScanner({ members: { result: 'raw' } }, LIMITS)
  scanner.advance(Buffer.from(body), 12)
  const { result } = scanner.finish(body, body.length) as { result: RawJson }
  assert.equal(result.bytes, body)
  assert.deepEqual([result.start, result.end, result.byteLength, result.text()], [10, 13, 3, '[1]'])
})

test('only an object whose last member __wmill_error is true is a failure', () => {
  const cases: Array<[string, boolean]> = [
    ['{}', false],
    ['true', false],
    ['["__wmill_error",true]', false],
    ['{"__wmill_error":true}', true],
    [' { "__wmill_error" : true , "message":"x" } ', true],
    ['{"a":{"b":[1]},"__wmill_error":true}', true],
    ['{"__wmill_error":"true"}', false],
    ['{"__wmill_error":false}', false],
    ['{"__wmill_error":1}', false],
    ['{"__wmill_error":[true]}', false],
    ['{"__wmill_error":{"__wmill_error":true}}', false],
    ['{"a":{"__wmill_error":true}}', false],
    ['[{"__wmill_error":true}]', false],
    ['{"a":"__wmill_error","b":true}', false],
    ['{"__wmill_error":false,"__wmill_error":true}', true],
    ['{"__wmill_error":true,"__wmill_error":null}', false],
    ['{"__wmill_error":true,"a":{"__wmill_error":false},"b":false}', true],
    ['{"\\u005f_wmill\\u005Ferror":true}', true],
    ['{"\\u005f_wmill_erro\\u0072\\u0000":true}', false],
    ['{"__wmill_erro":true}', false],
    ['{"__wmill_error2":true}', false],
    ['{"__wmill\\/error":true}', false],
  ]
  for (const [text, expected] of cases) {
    const body = Buffer.from(text)
    assert.equal(rawOf(scanInPieces(body, 'raw', everyCut(body))).isFailure, expected, text)
    assert.equal(
      rawOf((scanText(`{"result":${text}}`, { members: { result: 'raw' } }) as { result: RawJson }).result).isFailure,
      expected,
      text,
    )
    const kept = scanText(`{"__wmill_error":true,"x":${text}}`, { members: {}, span: true, others: 'raw' }) as {
      [SPAN]: RawJson
      [OTHERS]: Array<[string, RawJson]>
    }
    assert.equal(kept[OTHERS][1]?.[1].isFailure, expected, text)
    assert.equal(kept[SPAN].isFailure, true)
    const map = scanText(text, { each: 'raw' })
    assert.equal((map instanceof JsonMap ? map.span : rawOf(map)).isFailure, expected, text)
  }
})

test('a large body in chunks of 64 KiB gives its result untouched', () => {
  const result = `[${'{"a":"b\\"\\u00e9é","n":[1.0,true,null]},'.repeat(60_000)}0]`
  const body = Buffer.from(`{"key":"a","result":${result},"duration_ms":12}`)
  const cuts = Array.from({ length: Math.floor(body.length / 65536) }, (_, i) => (i + 1) * 65536)
  const scanner = createJsonScanner({ members: { key: 'value', result: 'raw', duration_ms: 'value' } }, LIMITS)
  for (const cut of cuts) scanner.advance(body, cut)
  const scanned = scanner.finish(body, body.length) as { key: string; result: RawJson; duration_ms: number }
  assert.equal(scanned.key, 'a')
  assert.equal(scanned.duration_ms, 12)
  assert.ok(scanned.result.text() === result)
})
