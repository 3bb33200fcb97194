"""The effects of each instruction on registers and memory.  A handler gets machine, instruction, threads and place."""

import functools

import numpy as np

from ptx import matrices
from ptx.machine import TYPES
from ptx.program import Fault, listed

QUIET = (
    "nop", "bar.warp.sync", "membar", "fence", "wgmma.fence", "wgmma.commit", "wgmma.wait", "cp.async.bulk.commit",
)  # fmt: skip
"""Instructions that order what is in order here anyway."""


# ------------------------------------------------------------------------------------------------------------- rounding
def to_bf16(x):
    """To the nearest, ties to even.

    >>> [hex(x) for x in to_bf16(np.array([1.0, 1.00390625, 1.01171875], np.float32))]
    ['0x3f80', '0x3f80', '0x3f82']
    """
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    even = (bits >> np.uint32(16)) & np.uint32(1)
    return np.where(
        np.isnan(x), np.uint16(0x7FFF), ((bits + np.uint32(0x7FFF) + even) >> np.uint32(16)).astype(np.uint16)
    )


def to_tf32(x):
    """To the nearest number with ten bits of the fraction, ties away from 0."""
    return (np.ascontiguousarray(x, np.float32).view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)


# ----------------------------------------------------------------------------------------------------------- arithmetic
def shifted_left(x, n):
    bits = 8 * x.dtype.itemsize
    return np.where(n >= bits, x.dtype.type(0), x << np.minimum(n, bits - 1).astype(x.dtype))


def shifted_right(x, n):
    bits = 8 * x.dtype.itemsize
    y = x >> np.minimum(n, bits - 1).astype(x.dtype)
    return y if x.dtype.kind == "i" else np.where(n >= bits, x.dtype.type(0), y)


def divided(x, y):
    """Towards 0; by 0, anything."""
    if x.dtype.kind == "f":
        return x / y
    y = np.where(y == 0, y.dtype.type(1), y)
    return x // y if x.dtype.kind == "u" else (np.sign(x) * np.sign(y) * (np.abs(x) // np.abs(y))).astype(x.dtype)


def fused(x, y, z):
    if x.dtype == np.float32:  # one rounding
        return (x.astype(np.float64) * y.astype(np.float64) + z).astype(np.float32)
    return x * y + z


def upper(x, y):
    wide = np.int64 if x.dtype.kind == "i" else np.uint64
    return ((x.astype(wide) * y.astype(wide)) >> wide(32)).astype(x.dtype)


ARITHMETIC = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": divided, "fma": fused, "mad": fused,
    "rem": lambda x, y: (x - divided(x, y) * y).astype(x.dtype),
    "min": np.fmin, "max": np.fmax, "neg": np.negative, "abs": np.abs,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert, "tanh": np.tanh,
    "ex2": np.exp2, "lg2": np.log2, "sqrt": np.sqrt, "rcp": np.reciprocal, "sin": np.sin, "cos": np.cos,
    "rsqrt": lambda x: np.reciprocal(np.sqrt(x)), "copysign": lambda x, y: np.copysign(y, x),
}  # fmt: skip

COMPARE = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip


def compared(word, x, y):
    """`ltu` and the like are true of a nan, the others are not."""
    unordered = np.isnan(x) | np.isnan(y) if x.dtype.kind == "f" else np.zeros(x.shape, bool)
    if word in ("nan", "num"):
        return unordered if word == "nan" else ~unordered
    if word not in COMPARE:
        return COMPARE[word.removesuffix("u")](x, y) | unordered
    return COMPARE[word](x, y) & ~unordered


def arithmetic(function, kind, m, x, on, at):
    with np.errstate(all="ignore"):
        m.put(x.operands[0], function(*(m.get(y, kind) for y in x.operands[1:])), on)


def shift(function, kind, m, x, on, at):
    target, value, count = x.operands
    m.put(target, function(m.get(value, kind), m.get(count, "u32")), on)


def wide(name, kind, m, x, on, at):
    """mul.wide and mad.wide: twice as many bits."""
    double = f"{kind[0]}{2 * int(kind[1:])}"
    a, b = (m.get(y, kind).astype(TYPES[double]) for y in x.operands[1:3])
    m.put(x.operands[0], a * b + m.get(x.operands[3], double) if name == "mad" else a * b, on)


def choose_by_comparison(words, m, x, on, at):
    """setp, with another predicate combined or not."""
    with np.errstate(all="ignore"):
        found = compared(words[1], *(m.get(y, words[-1]) for y in x.operands[1:3]))
    if words[2] in ("and", "or"):
        found = ARITHMETIC[words[2]](found, m.get(x.operands[3], "pred"))
    m.put(x.operands[0], found, on)


def both_halves(words, m, x, on, at):
    """setp of pairs of 16-bit numbers, one predicate for each half."""
    half = matrices.HALVES[words[-1].removesuffix("x2")]
    a, b = (m.get(y, "u32") for y in x.operands[1:3])
    for target, shift in zip(x.operands[0].split("|"), (0, 16), strict=True):
        low, other = (half((y >> np.uint32(shift) & np.uint32(0xFFFF)).astype(np.uint16)) for y in (a, b))
        m.put(target, compared(words[1], low, other), on)


def select(kind, m, x, on, at):
    target, a, b, p = x.operands
    m.put(target, np.where(m.get(p, "pred"), m.get(a, kind), m.get(b, kind)), on)


def move(kind, m, x, on, at):
    """mov, which also packs and unpacks."""
    target, source = x.operands
    parts = listed(target if target.startswith("{") else source)
    part = f"b{8 * TYPES[kind].itemsize // len(parts)}"
    if source.startswith("{"):
        whole = np.stack([m.get(y, part) for y in parts], 1).view(TYPES[kind])[:, 0]
        m.put(target, whole, on)
    elif target.startswith("{"):
        cut = np.ascontiguousarray(m.get(source, kind)).view(TYPES[part]).reshape(m.threads, -1)
        for n, y in enumerate(parts):
            m.put(y, cut[:, n], on)
    else:
        m.put(target, m.get(source, kind), on)


PAIRS = {"bf16x2": to_bf16, "f16x2": lambda x: x.astype(np.float16).view(np.uint16)}
NARROW = {"bf16": to_bf16, "tf32": to_tf32, "f16": lambda x: x.astype(np.float16)}
WHOLE = {"rni": np.rint, "rmi": np.floor, "rpi": np.ceil}


def convert(words):
    """cvt: the target's type, then the source's."""
    to, source = [word for word in words if word in TYPES or word in (*PAIRS, *NARROW)][:2]

    def value(m, operand):
        x = matrices.HALVES["bf16"](m.get(operand, "b16")) if source == "bf16" else m.get(operand, source)
        if to in NARROW:
            return NARROW[to](x)
        if x.dtype.kind == "f" and TYPES[to].kind != "f":
            whole = next((function for word, function in WHOLE.items() if word in words), np.trunc)
            limits = np.iinfo(TYPES[to])
            return np.clip(np.nan_to_num(whole(x)), limits.min, limits.max).astype(TYPES[to])
        return x.astype(TYPES[to])

    def step(m, x, on, at):
        with np.errstate(all="ignore"):
            if to in PAIRS:
                high, low = (PAIRS[to](m.get(y, "f32")).astype(np.uint32) for y in x.operands[1:3])
                return m.put(x.operands[0], high << np.uint32(16) | low, on)
            found = value(m, x.operands[1])
            if found.dtype.itemsize == 1:
                found = found.astype(f"{found.dtype.kind}4")
            return m.put(x.operands[0], found, on)

    return step


def bits(signed, m, x, on, at):
    """bfe: some bits of a word."""
    value, first, count = (m.get(y, "u32").astype(np.uint64) for y in x.operands[1:])
    mask = (np.uint64(1) << count) - np.uint64(1)
    found = (value >> first) & mask
    if signed:
        negative = (found >> (np.maximum(count, np.uint64(1)) - np.uint64(1))) & np.uint64(1)
        found = np.where(negative == 1, found | ~mask, found)
    m.put(x.operands[0], found.astype(np.uint32), on)


def permute(m, x, on, at):
    """prmt: four bytes of eight."""
    a, b, how = (np.ascontiguousarray(m.get(y, "b32")) for y in x.operands[1:4])
    given = np.concatenate([a.view(np.uint8).reshape(-1, 4), b.view(np.uint8).reshape(-1, 4)], 1)
    chosen = (how[:, None] >> np.arange(0, 16, 4, dtype=np.uint32)) & np.uint32(15)
    found = np.take_along_axis(given, (chosen & 7).astype(np.int64), 1)
    found = np.where(chosen & 8, np.where(found & 0x80, 0xFF, 0), found).astype(np.uint8)
    m.put(x.operands[0], found.view(np.uint32)[:, 0], on)


def shuffle(mode, m, x, on, at):
    """shfl.sync: a register of another lane."""
    value, other = (m.get(y, "u32").reshape(-1, 32) for y in x.operands[1:3])
    other = other.astype(np.int64)
    lane = np.arange(32)[None]
    source = {"bfly": lane ^ other, "idx": other & 31, "up": lane - other, "down": lane + other}[mode]
    source = np.where((source < 0) | (source > 31), lane, source)
    here = on.reshape(-1, 32)
    if not np.take_along_axis(here, source, 1)[here].all():
        raise Fault("from a lane that is not here")
    m.put(x.operands[0], np.take_along_axis(value, source, 1).ravel(), on)


# --------------------------------------------------------------------------------------------------------------- memory
def parameter(kind, m, x, on, at):
    value, target = m.parameters[x.operands[1].strip("[] ")], TYPES[kind]
    if target.kind == "f":
        return m.put(x.operands[0], np.full(m.threads, value, target), on)
    if isinstance(value, float):
        value = int(np.array(value, f"f{target.itemsize}").view(f"u{target.itemsize}"))
    number = np.array(value % 2 ** (8 * target.itemsize), f"u{target.itemsize}").view(target)
    return m.put(x.operands[0], np.full(m.threads, number), on)


def load(space, kind, m, x, on, at):
    registers, threads = listed(x.operands[0]), np.flatnonzero(on)
    size = len(registers) * TYPES[kind].itemsize
    if space == "shared":
        found = m.shared.load(m.address(x.operands[1], "u32"), size, threads, at)
    else:
        found = m.memory.load(m.address(x.operands[1], "u64")[threads], size)
    numbers = np.ascontiguousarray(found).view(TYPES[kind])
    for n, register in enumerate(registers):
        full = np.zeros(m.threads, TYPES[kind])
        full[threads] = numbers[:, n]
        m.put(register, full, on)


def store(space, kind, m, x, on, at):
    threads = np.flatnonzero(on)
    data = np.stack([m.get(y, kind) for y in listed(x.operands[1])], 1).view(np.uint8).reshape(m.threads, -1)
    if space == "shared":
        m.shared.store(m.address(x.operands[0], "u32"), data, threads, at)
    else:
        m.memory.store(m.address(x.operands[0], "u64")[threads], data[threads])


def copy(m, x, on, at):
    """cp.async: zeros where its source has no bytes; it lands when it is waited for."""
    target, source, size = m.address(x.operands[0], "u32"), m.address(x.operands[1], "u64"), int(x.operands[2], 0)
    taken = on & (m.get(x.operands[3], "u32") > 0) if len(x.operands) > 3 else on
    data = np.zeros((m.threads, size), np.uint8)
    if taken.any():
        data[taken] = m.memory.load(source[taken], size)
    m.shared.announce(target, size, np.flatnonzero(on), at)
    for block in np.unique(m.block_of[on]):
        m.copies[block][-1].append((target, data, np.flatnonzero(on & (m.block_of == block)), at))


def commit(m, x, on, at):
    for block in np.unique(m.block_of[on]):
        m.copies[block].append([])


def wait(m, x, on, at):
    keep = int(x.operands[0]) if x.operands else 0
    for block in np.unique(m.block_of[on]):
        *groups, last = m.copies[block]
        done = max(0, len(groups) - keep)
        for target, data, threads, place in (one for group in groups[:done] for one in group):
            m.shared.store(target, data, threads, place)
        m.copies[block] = [*groups[done:], last]


def barrier(m, x, on, at):
    blocks = on.reshape(-1, m.each)
    if (blocks.any(1) != blocks.all(1)).any():
        raise Fault("a barrier that not all threads reach")
    m.shared.epoch[blocks.all(1)] += 1


# -------------------------------------------------------------------------------------------------------------- by name
NAMED = {
    "bar.sync": barrier, "barrier.sync.aligned": barrier, "prmt.b32": permute, "cp.async.commit_group": commit,
    "cp.async.wait_group": wait, "cp.async.wait_all": wait,
}  # fmt: skip


@functools.cache
def handler(name):
    """The handler of the instruction of that name."""
    words, by = name.split("."), functools.partial
    first, kind = words[0], words[-1]
    if name in NAMED:
        return NAMED[name]
    if name.startswith(QUIET) or name in ("ret", "exit") or first == "bra":
        return lambda m, x, on, at: None
    if name.startswith("cp.async.c"):
        return copy
    if first in ("mma", "wgmma", "ldmatrix", "stmatrix"):
        return matrices.handler(name)
    if first in ("ld", "st"):
        if words[1] == "param":
            return by(parameter, kind)
        space = "shared" if {"shared", "shared::cta"} & {*words} else "global"
        return by(load if first == "ld" else store, space, kind)
    if words[1] == "wide":
        return by(wide, first, kind)
    if first in ("shl", "shr"):
        return by(shift, shifted_left if first == "shl" else shifted_right, kind)
    if first in ("mov", "selp"):
        return by(move if first == "mov" else select, kind)
    if first == "bfe":
        return by(bits, kind == "s32")
    if first == "setp":
        return by(both_halves if kind in PAIRS else choose_by_comparison, words)
    if first == "cvt":
        return convert(words)
    if first == "shfl":
        return by(shuffle, words[2])
    if name == "max.relu.s32":
        return by(arithmetic, lambda x, y: np.maximum(np.maximum(x, y), x.dtype.type(0)), kind)
    if first in ARITHMETIC and kind in TYPES:
        return by(arithmetic, upper if "hi" in words else ARITHMETIC[first], kind)
    raise Fault(f"no instruction {name} is known")
