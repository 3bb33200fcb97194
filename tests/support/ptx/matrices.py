"""Fragments of the tensor cores: the elements of each lane, by the tables of the PTX manual."""

import functools
import re

import numpy as np

from ptx.memory import SEVERAL
from ptx.program import Fault, listed

LANE = np.arange(32)
GROUP, PLACE = LANE >> 2, LANE & 3
PAIRS = np.stack([GROUP, GROUP], 1), np.stack([2 * PLACE, 2 * PLACE + 1], 1)
"""Rows and columns of the two numbers that each lane has of an 8 x 8 tile."""


HALVES = {
    "bf16": lambda x: (x.astype(np.uint32) << np.uint32(16)).view(np.float32),
    "f16": lambda x: x.view(np.float16).astype(np.float32),
}
"""From 16 bits to float32."""


def cut(x):
    """A number as a tensor core reads it in tf32."""
    return (x & np.uint32(0xFFFFE000)).view(np.float32)


def numbers(m, operand, kind, size):
    """(threads, numbers) of the registers of a fragment."""
    bits = np.stack([m.get(x, "b32") for x in listed(operand)], 1)
    return cut(bits) if size == 4 else HALVES[kind](bits.view(np.uint16))


def spots(k, kind):
    """(rows, columns) of a and (terms, columns) of b that each of a lane's numbers has, in a product of k terms."""
    if kind == "tf32":
        a = [(GROUP + 8 * (n % 2), PLACE + 4 * (n // 2)) for n in range(k // 2)]
        b = [(PLACE + 4 * n, GROUP) for n in range(k // 4)]
    else:
        a = [(GROUP + 8 * (n // 2 % 2), 2 * PLACE + n % 2 + 8 * (n // 4)) for n in range(k // 2)]
        b = [(2 * PLACE + n % 2 + 8 * (n // 2), GROUP) for n in range(k // 4)]
    return tuple(tuple(np.stack(axis, 1) for axis in zip(*found, strict=True)) for found in (a, b))


RESULT = np.stack([GROUP, GROUP, GROUP + 8, GROUP + 8], 1), np.stack([2 * PLACE, 2 * PLACE + 1] * 2, 1)


def product(name):
    """mma.sync of 16 rows and 8 columns."""
    known = re.search(r"m16n8k(\d+)\.row\.col\.f32\.(tf32|bf16|f16)\.", name)
    if known is None:
        raise Fault(f"no instruction {name} is known")
    k, kind = int(known[1]), known[2]
    size, (of_a, of_b) = 4 if kind == "tf32" else 2, spots(k, kind)

    def step(m, x, on, at):
        m.whole_warps(on)
        target, a, b, c = x.operands
        warps = m.threads // 32
        left, right = np.zeros((warps, 16, k), np.float32), np.zeros((warps, k, 8), np.float32)
        left[:, *of_a] = numbers(m, a, kind, size).reshape(warps, 32, -1)
        right[:, *of_b] = numbers(m, b, kind, size).reshape(warps, 32, -1)
        before = np.stack([m.get(y, "f32") for y in listed(c)], 1)
        with np.errstate(all="ignore"):
            found = (left @ right)[:, *RESULT].reshape(m.threads, 4) + before
        for n, y in enumerate(listed(target)):
            m.put(y, found[:, n], on)

    return step


def load_matrix(count, transposed, m, x, on, at):
    """ldmatrix: 8 x 8 numbers of 16 bits, whose rows the lanes point at."""
    m.whole_warps(on)
    warps, pointing = m.threads // 32, np.tile(8 * count > LANE, m.threads // 32) & on
    rows = np.zeros((m.threads, 16), np.uint8)
    threads = np.flatnonzero(pointing)
    rows[threads] = m.shared.load(m.address(x.operands[1], "u32"), 16, threads, at)
    tiles = rows.reshape(warps, 32, 16)[:, : 8 * count].copy().view(np.uint16).reshape(warps, count, 8, 8)
    tiles = tiles.swapaxes(2, 3) if transposed else tiles
    held = np.ascontiguousarray(tiles[:, :, *PAIRS]).view(np.uint32)[..., 0]
    for n, y in enumerate(listed(x.operands[0])):
        m.put(y, held[:, n].ravel(), on)


def store_matrix(count, transposed, m, x, on, at):
    """stmatrix, the inverse."""
    m.whole_warps(on)
    warps = m.threads // 32
    held = np.stack([m.get(y, "b32") for y in listed(x.operands[1])], 1).reshape(warps, 32, count).swapaxes(1, 2)
    tiles = np.zeros((warps, count, 8, 8), np.uint16)
    tiles[:, :, *PAIRS] = np.ascontiguousarray(held).view(np.uint16).reshape(warps, count, 32, 2)
    tiles = tiles.swapaxes(2, 3) if transposed else tiles
    rows = np.zeros((warps, 32, 16), np.uint8)
    rows[:, : 8 * count] = np.ascontiguousarray(tiles).view(np.uint8).reshape(warps, 8 * count, 16)
    pointing = np.flatnonzero(np.tile(8 * count > LANE, warps) & on)
    m.shared.store(m.address(x.operands[0], "u32"), rows.reshape(m.threads, 16), pointing, at)


# ------------------------------------------------------------------------------------------- four warps together: wgmma
SWIZZLE = {1: 128, 2: 64, 3: 32, 0: 16}
"""Mode of a descriptor -> bytes of a row of its tiles."""


def described(m, operand):
    """(start, distance along rows, between groups of rows, mode) of a matrix in shared memory, for each four warps."""
    word = m.get(operand, "b64").reshape(-1, 128)
    if (word != word[:, :1]).any():
        raise Fault("warps of a group name different matrices")
    word = word[:, 0]
    start, lead, stride = ((word >> np.uint64(n) & np.uint64(0x3FFF)).astype(np.int64) << 4 for n in (0, 16, 32))
    if (word >> np.uint64(49) & np.uint64(7)).any():
        raise Fault("a matrix that begins within a pattern")
    return start, lead, stride, (word >> np.uint64(62)).astype(np.int64)


def from_shared(m, operand, shape, size, across, at):
    """(groups, rows, terms, bytes); `across`: rows lie side by side, not terms."""
    (rows, depth), (start, lead, stride, mode) = shape, described(m, operand)
    if len(set(mode)) > 1:
        raise Fault("modes differ")
    width = SWIZZLE[int(mode[0])]
    r, c, each = np.arange(rows)[:, None], np.arange(depth)[None], width // size
    start, lead, stride = (x[:, None, None] for x in (start, lead, stride))
    if across:
        address = start + r // each * lead + r % each * size + c // 8 * stride + c % 8 * width
    else:
        if depth * size > width:
            raise Fault("more terms than a pattern has")
        address = start + r // 8 * stride + r % 8 * width + c * size
    address = address ^ ((address >> 7 & {128: 7, 64: 3, 32: 1, 16: 0}[width]) << 4)
    first = np.arange(0, m.threads, 128)
    where = (address + m.block_of[first][:, None, None] * m.shared.size)[..., None] + np.arange(size)
    if address.min() < 0 or address.max() + size > m.shared.size:
        raise Fault("beyond shared memory")
    now = m.shared.epoch[m.block_of[first]][:, None, None, None]
    m.shared.note("read after write", m.shared.written[where] == now, at)
    m.shared.read[where], m.shared.reader[where] = now, SEVERAL
    return m.shared.bytes[where]


def group_product(name):
    """wgmma.mma_async of 64 rows; the right matrix lies in shared memory, the left one may."""
    (columns, k), kind = map(int, re.search(r"n(\d+)k(\d+)\.", name).groups()), name.rpartition(".")[2]
    size, thread, n = 4 if kind == "tf32" else 2, np.arange(128), np.arange(columns // 2)
    row = 16 * (thread // 32) + (thread % 32 >> 2)
    to_row = row[:, None] + 8 * (n // 2 % 2)
    to_column = 8 * (n // 4) + 2 * (thread % 4)[:, None] + n % 2
    of_row, of_term = (np.tile(x, (4, 1)) for x in spots(k, kind)[0])
    of_row = of_row + 16 * (thread // 32)[:, None]

    def value(raw):
        raw = np.ascontiguousarray(raw)
        return cut(raw.view(np.uint32)[..., 0]) if size == 4 else HALVES[kind](raw.view(np.uint16)[..., 0])

    def step(m, x, on, at):
        m.whole_warps(on, 128)
        target, a, b, kept, sign_a, sign_b, *across = x.operands
        groups, in_registers = m.threads // 128, a.startswith("{")
        if (int(sign_a), int(sign_b)) != (1, 1) or on is not m.everyone:
            raise Fault("negated, or of some warps")
        across_a, across_b = (0, *map(int, across), 0)[:2] if in_registers else (*map(int, across), 0, 0)[:2]
        if in_registers:
            left = np.zeros((groups, 64, k), np.float32)
            left[:, of_row, of_term] = numbers(m, a, kind, size).reshape(groups, 128, -1)
        else:
            left = value(from_shared(m, a, (64, k), size, across_a, at))
        right = value(from_shared(m, b, (columns, k), size, across_b, at))
        before = np.stack([m.get(y, "f32") for y in listed(target)], 1).reshape(groups, 128, -1)
        keeps = m.get(kept, "pred").reshape(groups, 128)[:, 0] if kept.startswith("%") else np.full(groups, kept != "0")
        with np.errstate(all="ignore"):
            found = (left @ right.swapaxes(1, 2))[:, to_row, to_column] + np.where(keeps[:, None, None], before, 0)
        for i, y in enumerate(listed(target)):
            m.put(y, found.reshape(m.threads, -1)[:, i], on)

    return step


def handler(name):
    """The handler of the instruction of that name."""
    if name.startswith("wgmma"):
        return group_product(name)
    if name.startswith("mma"):
        return product(name)
    move = load_matrix if name.startswith("ldmatrix") else store_matrix
    return functools.partial(move, int(re.search(r"\.x(\d)", name)[1]), ".trans" in name)
