import { isUtf8 } from 'node:buffer'

/** Longest span, in bytes, of a `'value'` member, and of a name that is kept. */
export const MAX_VALUE_BYTES = 64 * 1024

/** Objects and arrays that one body may have parsed as `'value'`, together: 1 MiB of `{},` costs JSON.parse 0.1 s. */
const MAX_PARSED_BYTES = 1024 * 1024

const DEFAULT_MAX_ITEMS = 100_000
const EXCERPT_LENGTH = 20
const UTF8_BLOCK = 4096
const FAILURE_NAME = '__wmill_error'

/** In the object of a `span: true` shape: the {@link RawJson} of the object itself. */
export const SPAN: unique symbol = Symbol('span')

/** In the object of an `others: 'raw'` shape: its unknown members, `ReadonlyArray<readonly [name, RawJson]>`. */
export const OTHERS: unique symbol = Symbol('others')

/**
 * How a part of the body is treated. A value whose kind does not fit (a number for `members`) is delivered as
 * {@link RawJson}, for the schema check that follows to refuse.
 *
 * - `'value'`: parsed; at most {@link MAX_VALUE_BYTES} long
 * - `'raw'`: kept as {@link RawJson}, never parsed
 * - `members`: an object with known members (ASCII names) -> an object without prototype; unknown members are
 *   checked and ignored, or kept under {@link OTHERS}
 * - `each`: an object with arbitrary names -> {@link JsonMap}
 * - `items`: an array -> an array
 */
export type Shape =
  | 'value'
  | 'raw'
  | { members: Record<string, Shape>; span?: true; others?: 'ignore' | 'raw' }
  | { each: Shape }
  | { items: Shape }

export type JsonKind = 'object' | 'array' | 'string' | 'number' | 'boolean' | 'null'

export type InvalidJsonCode = 'syntax' | 'utf8' | 'too_deep' | 'too_long' | 'too_many'

export interface ScanLimits {
  /** Nesting inside one raw or ignored value, counted from that value: a scalar is 0 deep, `[]` is 1. */
  maxDepth: number
  /** Values kept in all `items`, `each` and `others` together; 100,000 unless given. */
  maxItems?: number
}

export interface JsonScanner {
  /**
   * Scans on from where the last call stopped, up to `length`. `bytes` holds all that was received so far, from
   * offset 0; it may be another Buffer at each call. Throws {@link InvalidJson} as soon as a fault is certain.
   */
  advance(bytes: Buffer, length: number): void
  /** Scans the rest, checks that the document is complete and UTF-8, and gives the value that the shape describes. */
  finish(bytes: Buffer, length: number): unknown
}

/** Why a body was refused. The message may be shown to the client; `position` is a byte offset in the body. */
export class InvalidJson extends Error {
  override readonly name = 'InvalidJson'
  readonly code: InvalidJsonCode
  readonly position: number

  constructor(code: InvalidJsonCode, position: number, message: string) {
    super(message)
    this.code = code
    this.position = position
  }
}

// The scanner meets its bytes in Buffers that are outgrown; values made on the way find the last one here.
interface Source {
  bytes: Buffer
}

interface Span {
  start: number
  end: number
  kind: JsonKind
  isFailure: boolean
}

/** A JSON value kept as the bytes that came, without the whitespace around it. */
export class RawJson {
  readonly #source: Source
  readonly start: number
  readonly end: number
  readonly kind: JsonKind
  /** The value is an object whose last top-level member named `__wmill_error` is exactly `true`. */
  readonly isFailure: boolean

  constructor(source: Source, span: Span) {
    this.#source = source
    this.start = span.start
    this.end = span.end
    this.kind = span.kind
    this.isFailure = span.isFailure
  }

  /** The whole body; the value is at `start` up to, not including, `end`. */
  get bytes(): Buffer {
    return this.#source.bytes
  }

  get byteLength(): number {
    return this.end - this.start
  }

  text(): string {
    return this.#source.bytes.toString('utf8', this.start, this.end)
  }
}

/** An object used as a map: in order of first appearance; of a repeated name the last value. */
export class JsonMap {
  readonly entries: ReadonlyArray<readonly [string, unknown]>
  readonly span: RawJson

  constructor(entries: ReadonlyArray<readonly [string, unknown]>, span: RawJson) {
    this.entries = entries
    this.span = span
  }
}

// ---- shapes, compiled once -------------------------------------------------------------------------------------

interface LeafShape {
  treat: 'value' | 'raw' | 'ignore'
}

interface MembersShape {
  treat: 'members'
  names: string[]
  shapes: CompiledShape[]
  keepsSpan: boolean
  keepsOthers: boolean
}

interface ManyShape {
  treat: 'each' | 'items'
  child: CompiledShape
}

type CompiledShape = LeafShape | MembersShape | ManyShape

const VALUE_SHAPE: LeafShape = { treat: 'value' }
const RAW_SHAPE: LeafShape = { treat: 'raw' }
const IGNORE_SHAPE: LeafShape = { treat: 'ignore' }

const compiledShapes = new WeakMap<object, CompiledShape>()

function compileShape(shape: Shape): CompiledShape {
  if (shape === 'value') return VALUE_SHAPE
  if (shape === 'raw') return RAW_SHAPE
  let compiled = compiledShapes.get(shape)
  if (compiled === undefined) {
    if ('members' in shape) compiled = compileMembers(shape)
    else if ('each' in shape) compiled = { treat: 'each', child: compileShape(shape.each) }
    else compiled = { treat: 'items', child: compileShape(shape.items) }
    compiledShapes.set(shape, compiled)
  }
  return compiled
}

function compileMembers(shape: Extract<Shape, { members: unknown }>): MembersShape {
  const names = Object.keys(shape.members)
  return {
    treat: 'members',
    names,
    shapes: Object.values(shape.members).map(compileShape),
    keepsSpan: shape.span === true,
    keepsOthers: shape.others === 'raw',
  }
}

// ---- what the automaton remembers between chunks ---------------------------------------------------------------

// Expectations between tokens. Those up to LAST_BETWEEN let whitespace pass.
const AFTER_MEMBER = 0
const AFTER_ITEM = 1
const VALUE = 2
const NAME = 3
const COLON = 4
const FIRST_NAME = 5
const FIRST_ITEM = 6
const DONE = 7
const LAST_BETWEEN = DONE
// Inside a token.
const STRING = 8
const ESCAPE = 9
const HEX = 10
const INTEGER = 11
const FRACTION = 12
const EXPONENT = 13
const ZERO = 14
const MINUS = 15
const POINT = 16
const EXPONENT_MARK = 17
const EXPONENT_SIGN = 18
const LITERAL = 19
// At the very start, where a byte order mark may stand.
const BOM_FIRST = 20
const BOM_SECOND = 21
const BOM_THIRD = 22

const IGNORED_SLOT = -1
const KEPT_SLOT = -2

/** An object or array whose shape is known: open while on the stack, afterwards a value of its parent. */
interface Frame {
  shape: MembersShape | ManyShape
  start: number
  end: number
  failed: boolean
  failureNext: boolean
  /** Where the next value goes: an index of `known`, IGNORED_SLOT, or KEPT_SLOT for `kept[place]`. */
  slot: number
  place: number
  known: Array<Node | undefined>
  names: string[]
  kept: Array<Node | undefined>
  places: Map<string, number> | undefined
  /** Scanner's `items` when it opened; once closed, the items within it. */
  items: number
}

type Node = Frame | RawJson

interface Scan {
  root: CompiledShape
  maxDepth: number
  maxItems: number
  source: Source
  position: number
  expect: number
  /** By depth, what follows a value there. */
  after: number[]
  depth: number
  /** Open frames; what is deeper than `frames.length` lies in a value without structure of its own. */
  frames: Frame[]
  base: number
  /** Depth at which the names of a raw object are looked at, for `__wmill_error`; -1 for none. */
  watched: number
  failed: boolean
  failureNext: boolean
  tokenStart: number
  isName: boolean
  escaped: boolean
  hexDigits: number
  literal: readonly number[]
  matched: number
  valueStart: number
  valueKind: JsonKind
  items: number
  result: Node | undefined
  fault: InvalidJson | undefined
}

const NOTHING = Buffer.alloc(0)
const NO_CHILDREN: never[] = []
const TRUE = [...Buffer.from('true')]
const FALSE = [...Buffer.from('false')]
const NULL = [...Buffer.from('null')]

// The bytes that the grammar gives a meaning.
const QUOTE = 0x22
const BACKSLASH = 0x5c
const COMMA = 0x2c
const COLON_SIGN = 0x3a
const OPEN_BRACE = 0x7b
const CLOSE_BRACE = 0x7d
const OPEN_BRACKET = 0x5b
const CLOSE_BRACKET = 0x5d
const DIGIT_0 = 0x30
const DIGIT_1 = 0x31
const DIGIT_9 = 0x39
const DASH = 0x2d
const PLUS = 0x2b
const DOT = 0x2e
const SPACE = 0x20
const LOWER_E = 0x65
const UPPER_E = 0x45
const LOWER_F = 0x66
const LOWER_N = 0x6e
const LOWER_T = 0x74
const LOWER_U = 0x75

const STRING_STOP = new Uint8Array(256)
STRING_STOP.fill(1, 0, SPACE)
STRING_STOP[QUOTE] = 1
STRING_STOP[BACKSLASH] = 1

/** By the letter behind the backslash, the character meant; 0 for letters that are no simple escape. */
const ESCAPED_UNIT = new Uint8Array(256)
for (const [i, byte] of Buffer.from('"\\/bfnrt').entries()) ESCAPED_UNIT[byte] = '"\\/\b\f\n\r\t'.charCodeAt(i)

/** The digit's value and one; 0 for what is no hexadecimal digit. */
const HEX_DIGIT = new Uint8Array(256)
for (const byte of Buffer.from('0123456789abcdefABCDEF')) {
  HEX_DIGIT[byte] = Number.parseInt(String.fromCharCode(byte), 16) + 1
}

const WHITESPACE = new Uint8Array(256)
for (const byte of Buffer.from(' \t\n\r')) WHITESPACE[byte] = 1

/** A scanner for one body. Accepts what `JSON.parse` accepts of the decoded text, and one leading byte order mark. */
export function createJsonScanner(shape: Shape, limits: ScanLimits): JsonScanner {
  return new ShapedScanner(startScan(shape, limits))
}

// A class and not closures: one is made for each request.
class ShapedScanner implements JsonScanner {
  readonly #scan: Scan

  constructor(scan: Scan) {
    this.#scan = scan
  }

  advance(bytes: Buffer, length: number): void {
    advance(this.#scan, bytes, length)
  }

  finish(bytes: Buffer, length: number): unknown {
    return finish(this.#scan, bytes, length)
  }
}

/** Scans a body that is there as a whole. */
export function scanJson(bytes: Buffer, shape: Shape, limits: ScanLimits): unknown {
  return finish(startScan(shape, limits), bytes, bytes.length)
}

function startScan(shape: Shape, limits: ScanLimits): Scan {
  return {
    root: compileShape(shape),
    maxDepth: limits.maxDepth,
    maxItems: limits.maxItems ?? DEFAULT_MAX_ITEMS,
    source: { bytes: NOTHING },
    position: 0,
    expect: BOM_FIRST,
    after: [DONE],
    depth: 0,
    frames: [],
    base: 0,
    watched: -1,
    failed: false,
    failureNext: false,
    tokenStart: 0,
    isName: false,
    escaped: false,
    hexDigits: 0,
    literal: NULL,
    matched: 0,
    valueStart: 0,
    valueKind: 'null',
    items: 0,
    result: undefined,
    fault: undefined,
  }
}

// One function on purpose: its state lives in local variables, and no call is made per byte or per token.
function advance(scan: Scan, bytes: Buffer, length: number): void {
  if (scan.fault !== undefined) throw scan.fault
  const { after, maxDepth } = scan
  let { position, expect, depth, base, watched, failureNext, tokenStart, isName, escaped, literal, matched } = scan

  while (position < length) {
    const byte = bytes[position] as number

    if (expect <= LAST_BETWEEN) {
      if (byte <= SPACE) {
        if (WHITESPACE[byte] === 0) throw unexpected(scan, bytes, { length, position, expect })
        while (++position < length && bytes[position] === SPACE) {}
        continue
      }
      if (expect <= AFTER_ITEM) {
        if (byte === COMMA) {
          position++
          if (expect === AFTER_ITEM) {
            expect = VALUE
          } else if (position < length && bytes[position] === QUOTE) {
            tokenStart = position++
            isName = true
            escaped = false
            expect = STRING
          } else {
            expect = NAME
          }
          continue
        }
      } else if (expect === VALUE || (expect === FIRST_ITEM && byte !== CLOSE_BRACKET)) {
        if (depth === base) {
          beginValue(scan, byte, position)
          base = scan.base
          watched = scan.watched
        } else if (failureNext) {
          scan.failed = byte === LOWER_T
          failureNext = false
        }
        if (byte === OPEN_BRACE || byte === OPEN_BRACKET) {
          depth++
          if (depth - base > maxDepth) throw tooDeep(scan, position)
          expect = byte === OPEN_BRACE ? FIRST_NAME : FIRST_ITEM
          after[depth] = byte === OPEN_BRACE ? AFTER_MEMBER : AFTER_ITEM
        } else if (byte === QUOTE) {
          tokenStart = position
          isName = false
          expect = STRING
        } else if (byte >= DIGIT_1 && byte <= DIGIT_9) {
          expect = INTEGER
        } else if (byte === DIGIT_0) {
          expect = ZERO
        } else if (byte === DASH) {
          expect = MINUS
        } else if (byte === LOWER_T || byte === LOWER_F || byte === LOWER_N) {
          literal = byte === LOWER_T ? TRUE : byte === LOWER_F ? FALSE : NULL
          matched = 1
          expect = LITERAL
        } else {
          throw unexpected(scan, bytes, { length, position, expect })
        }
        position++
        continue
      } else if (expect === COLON) {
        if (byte !== COLON_SIGN) throw unexpected(scan, bytes, { length, position, expect })
        expect = VALUE
        position++
        continue
      } else if (expect === NAME || expect === FIRST_NAME) {
        if (byte === QUOTE) {
          tokenStart = position++
          isName = true
          escaped = false
          expect = STRING
          continue
        }
      }
      const closes =
        (byte === CLOSE_BRACE && (expect === AFTER_MEMBER || expect === FIRST_NAME)) ||
        (byte === CLOSE_BRACKET && (expect === AFTER_ITEM || expect === FIRST_ITEM))
      if (!closes) throw unexpected(scan, bytes, { length, position, expect })
      position++
      depth--
      if (depth <= base) {
        if (depth < base) closeFrame(scan, position)
        else endValue(scan, position)
        base = scan.base
      }
      expect = after[depth] as number
      continue
    }

    if (expect === STRING) {
      let found = byte
      for (;;) {
        while (position < length - 4) {
          const stops =
            (STRING_STOP[bytes[position] as number] as number) |
            (STRING_STOP[bytes[position + 1] as number] as number) |
            (STRING_STOP[bytes[position + 2] as number] as number) |
            (STRING_STOP[bytes[position + 3] as number] as number)
          if (stops !== 0) break
          position += 4
        }
        found = bytes[position] as number
        while (STRING_STOP[found] === 0 && ++position < length) found = bytes[position] as number
        if (found !== BACKSLASH || position >= length - 6) break
        if (ESCAPED_UNIT[bytes[position + 1] as number] !== 0) position += 2
        else if (isUnicodeEscape(bytes, position)) position += 6
        else break
        escaped = true
      }
      if (position === length) break
      if (found === QUOTE) {
        position++
        if (!isName) {
          if (depth === base) endValue(scan, position)
          expect = after[depth] as number
          continue
        }
        if (depth === base) {
          takeName(scan, bytes, { start: tokenStart, end: position, escaped })
        } else if (depth === watched && position - tokenStart >= FAILURE_NAME.length + 2) {
          failureNext = spells(bytes, { start: tokenStart, end: position, escaped }, FAILURE_NAME)
        }
        if (position < length && bytes[position] === COLON_SIGN) {
          position++
          expect = VALUE
        } else {
          expect = COLON
        }
        continue
      }
      if (found !== BACKSLASH) throw unexpected(scan, bytes, { length, position, expect })
      escaped = true
      position++
      expect = ESCAPE
      continue
    }

    if (expect === INTEGER || expect === FRACTION || expect === EXPONENT || expect === ZERO) {
      let found = byte
      if (expect === ZERO) {
        if (found >= DIGIT_0 && found <= DIGIT_9) throw unexpected(scan, bytes, { length, position, expect })
      } else {
        while (found >= DIGIT_0 && found <= DIGIT_9 && ++position < length) found = bytes[position] as number
        if (position === length) break
      }
      if (found === DOT && (expect === INTEGER || expect === ZERO)) {
        expect = POINT
        position++
      } else if ((found === LOWER_E || found === UPPER_E) && expect !== EXPONENT) {
        expect = EXPONENT_MARK
        position++
      } else {
        if (depth === base) endValue(scan, position)
        expect = after[depth] as number
        if (found === COMMA && expect === AFTER_ITEM) {
          expect = VALUE
          position++
        }
      }
      continue
    }

    switch (expect) {
      case ESCAPE:
        if (ESCAPED_UNIT[byte] !== 0) {
          expect = STRING
        } else if (byte === LOWER_U) {
          expect = HEX
          scan.hexDigits = 0
        } else {
          throw unexpected(scan, bytes, { length, position, expect })
        }
        break
      case HEX:
        if (HEX_DIGIT[byte] === 0) throw unexpected(scan, bytes, { length, position, expect })
        scan.hexDigits++
        if (scan.hexDigits === 4) expect = STRING
        break
      case LITERAL:
        if (byte !== literal[matched]) {
          throw unexpected(scan, bytes, { length, position: position - matched, expect: VALUE })
        }
        matched++
        if (matched === literal.length) {
          if (depth === base) endValue(scan, position + 1)
          expect = after[depth] as number
        }
        break
      case MINUS:
        if (byte >= DIGIT_1 && byte <= DIGIT_9) expect = INTEGER
        else if (byte === DIGIT_0) expect = ZERO
        else throw unexpected(scan, bytes, { length, position, expect })
        break
      case POINT:
        if (byte < DIGIT_0 || byte > DIGIT_9) throw unexpected(scan, bytes, { length, position, expect })
        expect = FRACTION
        break
      case EXPONENT_MARK:
        if (byte === PLUS || byte === DASH) expect = EXPONENT_SIGN
        else if (byte >= DIGIT_0 && byte <= DIGIT_9) expect = EXPONENT
        else throw unexpected(scan, bytes, { length, position, expect })
        break
      case EXPONENT_SIGN:
        if (byte < DIGIT_0 || byte > DIGIT_9) throw unexpected(scan, bytes, { length, position, expect })
        expect = EXPONENT
        break
      case BOM_FIRST:
        if (byte !== 0xef) {
          expect = VALUE
          continue
        }
        expect = BOM_SECOND
        break
      default: {
        if (byte !== (expect === BOM_SECOND ? 0xbb : 0xbf)) {
          throw unexpected(scan, bytes, { length, position: 0, expect: VALUE })
        }
        expect = expect === BOM_SECOND ? BOM_THIRD : VALUE
      }
    }
    position++
  }

  scan.position = position
  scan.expect = expect
  scan.depth = depth
  scan.failureNext = failureNext
  scan.tokenStart = tokenStart
  scan.isName = isName
  scan.escaped = escaped
  scan.literal = literal
  scan.matched = matched
}

function isUnicodeEscape(bytes: Buffer, position: number): boolean {
  return (
    bytes[position + 1] === LOWER_U &&
    HEX_DIGIT[bytes[position + 2] as number] !== 0 &&
    HEX_DIGIT[bytes[position + 3] as number] !== 0 &&
    HEX_DIGIT[bytes[position + 4] as number] !== 0 &&
    HEX_DIGIT[bytes[position + 5] as number] !== 0
  )
}

function finish(scan: Scan, bytes: Buffer, length: number): unknown {
  advance(scan, bytes, length)
  const { expect, depth } = scan
  const endsNumber = expect === INTEGER || expect === FRACTION || expect === EXPONENT || expect === ZERO
  if (endsNumber && depth === 0) endValue(scan, length)
  else if (expect !== DONE) throw endedEarly(scan, length)
  const body = bytes.subarray(0, length)
  if (!isUtf8(body)) {
    const position = findUtf8Fault(body)
    const found = hexByte(body[position] as number)
    throw refuse(scan, new InvalidJson('utf8', position, `Invalid UTF-8 at byte ${position}: ${found}`))
  }
  scan.source.bytes = bytes
  return deliver(scan, scan.result as Node, { shape: scan.root, name: undefined, parsedBytes: { total: 0 } })
}

// ---- values of known shape -------------------------------------------------------------------------------------

/** Opens a frame if the shape here wants one and the byte fits; otherwise notes where the value begins. */
function beginValue(scan: Scan, byte: number, position: number): void {
  const frame = scan.frames[scan.base - 1]
  const shape = frame === undefined ? scan.root : shapeOfNext(frame)
  if (frame !== undefined) {
    if (frame.failureNext) frame.failed = byte === LOWER_T
    if (frame.shape.treat === 'items') {
      frame.place = frame.kept.push(undefined) - 1
      countItem(scan, position)
    }
  }
  if (opensFrame(shape, byte)) {
    scan.frames.push(openFrame(shape, position, scan.items))
    scan.base++
    scan.watched = -1
    return
  }
  scan.watched = shape.treat === 'ignore' || shape.treat === 'value' || byte !== OPEN_BRACE ? -1 : scan.base + 1
  scan.failed = false
  scan.valueStart = position
  scan.valueKind = kindOf(byte)
}

function opensFrame(shape: CompiledShape, byte: number): shape is MembersShape | ManyShape {
  if (byte === OPEN_BRACE) return shape.treat === 'members' || shape.treat === 'each'
  return byte === OPEN_BRACKET && shape.treat === 'items'
}

function shapeOfNext(frame: Frame): CompiledShape {
  const shape = frame.shape
  if (shape.treat !== 'members') return shape.child
  if (frame.slot >= 0) return shape.shapes[frame.slot] as CompiledShape
  return frame.slot === KEPT_SLOT ? RAW_SHAPE : IGNORE_SHAPE
}

function openFrame(shape: MembersShape | ManyShape, start: number, items: number): Frame {
  const keeps = shape.treat !== 'members' || shape.keepsOthers
  return {
    shape,
    start,
    end: start,
    failed: false,
    failureNext: false,
    slot: KEPT_SLOT,
    place: 0,
    known: shape.treat === 'members' ? [] : NO_CHILDREN,
    names: keeps ? [] : NO_CHILDREN,
    kept: keeps ? [] : NO_CHILDREN,
    places: undefined,
    items,
  }
}

function kindOf(byte: number): JsonKind {
  if (byte === QUOTE) return 'string'
  if (byte === OPEN_BRACE) return 'object'
  if (byte === OPEN_BRACKET) return 'array'
  if (byte === LOWER_T || byte === LOWER_F) return 'boolean'
  return byte === LOWER_N ? 'null' : 'number'
}

function endValue(scan: Scan, end: number): void {
  const frame = scan.frames[scan.base - 1]
  if (frame !== undefined && frame.slot === IGNORED_SLOT) return
  const span = { start: scan.valueStart, end, kind: scan.valueKind, isFailure: scan.failed }
  putValue(scan, frame, new RawJson(scan.source, span))
}

function closeFrame(scan: Scan, end: number): void {
  const frame = scan.frames.pop() as Frame
  frame.end = end
  frame.items = scan.items - frame.items
  scan.base--
  putValue(scan, scan.frames[scan.base - 1], frame)
}

function putValue(scan: Scan, frame: Frame | undefined, value: Node): void {
  if (frame === undefined) scan.result = value
  else if (frame.slot >= 0) frame.known[frame.slot] = value
  else frame.kept[frame.place] = value
}

interface NameSpan {
  /** Of the opening quote. */
  start: number
  /** Behind the closing quote. */
  end: number
  escaped: boolean
}

/** Decides where the value that follows this name goes, and lets go of an earlier value of the same name. */
function takeName(scan: Scan, bytes: Buffer, span: NameSpan): void {
  const frame = scan.frames[scan.base - 1] as Frame
  const shape = frame.shape
  frame.failureNext = spells(bytes, span, FAILURE_NAME)
  if (shape.treat === 'members') {
    frame.slot = findMember(shape, bytes, span)
    if (frame.slot >= 0) {
      forget(scan, frame.known[frame.slot])
      frame.known[frame.slot] = undefined
      return
    }
    if (!shape.keepsOthers) return
    frame.slot = KEPT_SLOT
  }
  if (span.end - span.start > MAX_VALUE_BYTES) {
    const message = `The name at byte ${span.start} is longer than ${MAX_VALUE_BYTES} bytes`
    throw refuse(scan, new InvalidJson('too_long', span.start, message))
  }
  const name = decodeName(bytes, span)
  frame.places ??= new Map()
  const place = frame.places.get(name)
  if (place === undefined) {
    countItem(scan, span.start)
    frame.place = frame.names.push(name) - 1
    frame.places.set(name, frame.place)
    frame.kept.push(undefined)
  } else {
    forget(scan, frame.kept[place])
    frame.kept[place] = undefined
    frame.place = place
  }
}

function forget(scan: Scan, value: Node | undefined): void {
  if (value !== undefined && !(value instanceof RawJson)) scan.items -= value.items
}

function countItem(scan: Scan, position: number): void {
  scan.items++
  if (scan.items <= scan.maxItems) return
  const message = `More than ${scan.maxItems} entries, the limit, at byte ${position}`
  throw refuse(scan, new InvalidJson('too_many', position, message))
}

function findMember(shape: MembersShape, bytes: Buffer, span: NameSpan): number {
  const names = shape.names
  for (let i = 0; i < names.length; i++) if (spells(bytes, span, names[i] as string)) return i
  return IGNORED_SLOT
}

/** Whether the name in the body is this ASCII name, perhaps with escapes. Bodies full of escaped names stay cheap. */
function spells(bytes: Buffer, span: NameSpan, name: string): boolean {
  const end = span.end - 1
  let position = span.start + 1
  if (!span.escaped && end - position !== name.length) return false
  for (let i = 0; i < name.length; i++) {
    if (position >= end) return false
    let unit = bytes[position++] as number
    if (unit === BACKSLASH) {
      const letter = bytes[position++] as number
      unit = ESCAPED_UNIT[letter] as number
      if (letter === LOWER_U) {
        unit = 0
        for (let digit = 0; digit < 4; digit++)
          unit = unit * 16 + (HEX_DIGIT[bytes[position++] as number] as number) - 1
      }
    }
    if (unit !== name.charCodeAt(i)) return false
  }
  return position === end
}

function decodeName(bytes: Buffer, span: NameSpan): string {
  if (span.escaped) return JSON.parse(bytes.toString('utf8', span.start, span.end))
  return bytes.toString('utf8', span.start + 1, span.end - 1)
}

interface Delivery {
  shape: CompiledShape
  /** Of the nearest member around the value; undefined at the root. */
  name: string | undefined
  parsedBytes: { total: number }
}

/** Turns what the scan kept into what the shape promises. Recurses as deep as the shape, not as the body. */
function deliver(scan: Scan, node: Node, delivery: Delivery): unknown {
  const { shape, name, parsedBytes } = delivery
  if (node instanceof RawJson) return shape.treat === 'value' ? parseValue(scan, node, delivery) : node
  if (shape.treat === 'members') return deliverMembers(scan, node, delivery)
  const { child } = shape as ManyShape
  if (shape.treat === 'items') {
    return node.kept.map((kept) => deliver(scan, kept as Node, { shape: child, name, parsedBytes }))
  }
  const entries = node.names.map((entry, i): [string, unknown] => [
    entry,
    deliver(scan, node.kept[i] as Node, { shape: child, name: entry, parsedBytes }),
  ])
  return new JsonMap(entries, spanOf(scan, node))
}

function deliverMembers(scan: Scan, frame: Frame, { parsedBytes }: Delivery): unknown {
  const shape = frame.shape as MembersShape
  const object = Object.create(null)
  for (let i = 0; i < shape.names.length; i++) {
    const node = frame.known[i]
    if (node === undefined) continue
    const name = shape.names[i] as string
    object[name] = deliver(scan, node, { shape: shape.shapes[i] as CompiledShape, name, parsedBytes })
  }
  if (shape.keepsSpan) object[SPAN] = spanOf(scan, frame)
  if (shape.keepsOthers) object[OTHERS] = frame.names.map((name, i) => [name, frame.kept[i]])
  return object
}

function spanOf(scan: Scan, frame: Frame): RawJson {
  const { start, end, failed } = frame
  return new RawJson(scan.source, { start, end, kind: 'object', isFailure: failed })
}

function parseValue(scan: Scan, raw: RawJson, { name, parsedBytes }: Delivery): unknown {
  if (raw.kind === 'object' || raw.kind === 'array') parsedBytes.total += raw.byteLength
  if (raw.byteLength > MAX_VALUE_BYTES || parsedBytes.total > MAX_PARSED_BYTES) {
    const what = name === undefined ? 'The body' : `Member ${JSON.stringify(shorten(name))}`
    const limit = raw.byteLength > MAX_VALUE_BYTES ? MAX_VALUE_BYTES : MAX_PARSED_BYTES
    const message =
      limit === MAX_VALUE_BYTES
        ? `${what} is longer than ${limit} bytes, the limit, at byte ${raw.start}`
        : `${what} brings the members of its kind to more than ${limit} bytes, the limit, at byte ${raw.start}`
    throw refuse(scan, new InvalidJson('too_long', raw.start, message))
  }
  const text = raw.text()
  // Most values are strings without escapes, and slicing is faster than parsing.
  return raw.kind === 'string' && !text.includes('\\') ? text.slice(1, -1) : JSON.parse(text)
}

// ---- faults ----------------------------------------------------------------------------------------------------

/** Remembers the fault, so that a scanner used again after it throws the same. */
function refuse(scan: Scan, fault: InvalidJson): InvalidJson {
  scan.fault = fault
  return fault
}

function tooDeep(scan: Scan, position: number): InvalidJson {
  const message = `Nested more than ${scan.maxDepth} levels deep, the limit, at byte ${position}`
  return refuse(scan, new InvalidJson('too_deep', position, message))
}

interface Place {
  length: number
  position: number
  expect: number
}

function unexpected(scan: Scan, bytes: Buffer, { length, position, expect }: Place): InvalidJson {
  const byte = bytes[position] as number
  const found = excerpt(bytes.subarray(0, length), position)
  const hint = explain(expect, byte, found)
  const message = `Unexpected token ${found} at byte ${position}: ${hint}`
  return refuse(scan, new InvalidJson('syntax', position, message))
}

const EXPECTED: Record<number, string> = {
  [AFTER_MEMBER]: 'expected a comma or } after the member',
  [AFTER_ITEM]: 'expected a comma or ] after the item',
  [VALUE]: 'expected a value',
  [NAME]: 'expected a name in double quotes',
  [COLON]: 'expected a colon after the name',
  [FIRST_NAME]: 'expected a name in double quotes or }',
  [FIRST_ITEM]: 'expected a value or ]',
  [DONE]: 'expected nothing more after the value',
  [STRING]: 'control characters in strings must be escaped',
  [ESCAPE]: 'no such escape',
  [HEX]: 'expected four hexadecimal digits after \\u',
  [ZERO]: 'a number has no leading zeros',
  [MINUS]: 'expected a digit after the minus sign',
  [POINT]: 'expected a digit after the decimal point',
  [EXPONENT_MARK]: 'expected a digit or a sign in the exponent',
  [EXPONENT_SIGN]: 'expected a digit in the exponent',
}

function explain(expect: number, byte: number, found: string): string {
  if ((byte === 0x4e || byte === 0x49) && (expect === VALUE || expect === FIRST_ITEM || expect === MINUS)) {
    if ('NaN'.startsWith(found) || 'Infinity'.startsWith(found)) return 'NaN and Infinity are not JSON'
  }
  return EXPECTED[expect] as string
}

/** The token at fault as it can be shown: a word of at most 20 characters, one character, or a byte in hex. */
function excerpt(bytes: Buffer, position: number): string {
  let end = position
  while (end < bytes.length && end - position < EXCERPT_LENGTH && isWordByte(bytes[end] as number)) end++
  if (end > position) return bytes.toString('latin1', position, end)
  const byte = bytes[position] as number
  if (byte > SPACE && byte < 0x7f) return String.fromCharCode(byte)
  if (byte < 0x80) return hexByte(byte)
  const character = String.fromCodePoint(bytes.toString('utf8', position, position + 4).codePointAt(0) as number)
  return /[\p{L}\p{N}\p{P}\p{S}]/u.test(character) && character !== '\ufffd' ? character : hexByte(byte)
}

function isWordByte(byte: number): boolean {
  const letter = byte | SPACE
  return (
    (letter >= 0x61 && letter <= 0x7a) ||
    (byte >= DIGIT_0 && byte <= DIGIT_9) ||
    byte === 0x5f ||
    byte === DASH ||
    byte === PLUS
  )
}

function hexByte(byte: number): string {
  return `0x${byte.toString(16).padStart(2, '0')}`
}

function shorten(name: string): string {
  return name.length > EXCERPT_LENGTH ? `${name.slice(0, EXCERPT_LENGTH)}..` : name
}

function endedEarly(scan: Scan, length: number): InvalidJson {
  if (scan.depth === 0 && (scan.expect === VALUE || scan.expect === BOM_FIRST)) {
    return refuse(scan, new InvalidJson('syntax', length, 'The body is empty: expected a JSON value'))
  }
  const inString = scan.expect === STRING || scan.expect === ESCAPE || scan.expect === HEX
  const missing = inString
    ? `the string that begins at byte ${scan.tokenStart} is not closed`
    : 'the JSON is incomplete'
  return refuse(scan, new InvalidJson('syntax', length, `The body ended too early, at byte ${length}: ${missing}`))
}

/** Byte offset of the first sequence that is not UTF-8 (RFC 3629: no overlong forms, surrogates, or above U+10FFFF). */
function findUtf8Fault(bytes: Buffer): number {
  let position = 0
  // Whole blocks first: the check is native, and a call of it per character takes seconds for a large body.
  for (let end = UTF8_BLOCK; end < bytes.length; end += UTF8_BLOCK) {
    while (end > position && isContinuation(bytes[end] as number)) end--
    if (end === position || !isUtf8(bytes.subarray(position, end))) break
    position = end
  }
  while (position < bytes.length) {
    const size = utf8SequenceSize(bytes[position] as number)
    if (size === 0 || !isUtf8(bytes.subarray(position, position + size))) break
    position += size
  }
  return position
}

function isContinuation(byte: number): boolean {
  return (byte & 0xc0) === 0x80
}

function utf8SequenceSize(lead: number): number {
  if (lead < 0x80) return 1
  if (lead < 0xc2 || lead > 0xf4) return 0
  if (lead < 0xe0) return 2
  return lead < 0xf0 ? 3 : 4
}
