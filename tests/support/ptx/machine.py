"""Registers, control flow of threads, and the loop over instructions."""

from collections import defaultdict

import numpy as np

from ptx.memory import Shared
from ptx.program import Fault

TYPES = {
    **{f"{kind}{bits}": np.dtype(f"u{bits // 8}") for kind in "bu" for bits in (8, 16, 32, 64)},
    **{f"s{bits}": np.dtype(f"i{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"f{bits}": np.dtype(f"f{bits // 8}") for bits in (16, 32, 64)},
    "pred": np.dtype(bool),
}
LONGEST = 10**7


def width(register):
    """The dtype of a register, by its name."""
    for start, kind in (("%rs", np.uint16), ("%rd", np.uint64), ("%p", np.bool_)):
        if register.startswith(start):
            return np.dtype(kind)
    return np.dtype(np.uint32)


class Machine:
    """Some blocks of a launch; `parameters` are numbers by name."""

    def __init__(self, program, parameters, blocks, grid, warps, shared, memory):
        self.program, self.parameters, self.memory = program, parameters, memory
        each, n = warps * 32, len(blocks)
        self.threads, self.each = each * n, each
        self.everyone = np.ones(self.threads, bool)
        self.block_of = np.repeat(np.arange(n), each)
        place = np.tile(np.arange(each, dtype=np.uint32), n)
        self.warp_of = (place // 32).astype(np.int64)
        zero, where = place * 0, np.array(blocks, np.uint32)[self.block_of]
        self.special = {"%tid.x": place, "%tid.y": zero, "%tid.z": zero, "%ntid.x": zero + np.uint32(each)}
        self.special |= {"%laneid": place % 32}
        self.special |= {f"%ctaid.{axis}": np.ascontiguousarray(where[:, n]) for n, axis in enumerate("xyz")}
        self.special |= {f"%nctaid.{axis}": zero + np.uint32(size) for axis, size in zip("xyz", grid, strict=True)}
        self.registers = {}
        self.shared = Shared(n, max(16, shared), self.block_of, self.warp_of)
        self.copies = defaultdict(lambda: [[]])  # block -> groups of copies under way, the last still open
        self.count = 0

    # ------------------------------------------------------------------------------------------------------ operands
    def get(self, operand, kind):
        """An operand of every thread, as a type."""
        dtype = TYPES[kind]
        if operand.startswith("%"):
            x = self.special.get(operand)
            x = self._register(operand) if x is None else x
            if x.dtype.itemsize > dtype.itemsize:
                x = x.astype(f"u{dtype.itemsize}")
            if x.dtype.itemsize < dtype.itemsize:
                raise Fault(f"{operand} is too narrow for {kind}")
            return x.view(dtype)
        return np.full(self.threads, constant(operand, dtype))

    def _register(self, name):
        if name not in self.registers:  # compilers leave unused registers undefined
            kind = width(name)
            self.registers[name] = np.full(self.threads, False if kind.kind == "b" else ~kind.type(0), kind)
        return self.registers[name]

    def put(self, register, x, on):
        """Write a register of the threads that are on."""
        register = register.partition("|")[0]
        if register == "_":
            return
        kind = width(register)
        if kind.kind != "b":
            x = np.ascontiguousarray(x)
            x = x.view(kind) if x.dtype.itemsize == kind.itemsize else x.astype(kind)
        if on is not self.everyone:
            x = np.where(on, x, self._register(register))
        self.registers[register] = np.ascontiguousarray(x)

    def address(self, operand, kind):
        """Of `[%r1 + 16]`."""
        base, _, offset = operand.strip("[] ").partition("+")
        x = self.get(base.strip(), kind)
        return x + TYPES[kind].type(int(offset) % 2 ** (8 * TYPES[kind].itemsize)) if offset.strip() else x

    def whole_warps(self, on, size=32):
        """A Fault unless all threads of a group do the same."""
        groups = on.reshape(-1, size)
        if (groups.any(1) != groups.all(1)).any():
            raise Fault("in a part of a warp")

    # ---------------------------------------------------------------------------------------------------------- flow
    def run(self):
        """All threads to the end; the races that there were."""
        from ptx.instructions import handler

        self.handlers = [handler(x.name) for x in self.program.code]
        self._flow(0, self.everyone, len(self.program.code))
        return self.shared.races

    def _flow(self, at, on, stop):
        """From an instruction on; threads that part meet where their ways do."""
        code = self.program.code
        while at != stop:
            x = code[at]
            self.count += 1
            if self.count > LONGEST:
                raise Fault("it does not end")
            own = on if x.guard is None else self._guarded(x, on)
            if x.name in ("ret", "exit"):
                if on is not self.everyone and stop != len(code):
                    raise Fault("some threads return")
                return
            if x.name.startswith("bra"):
                at = self._branch(at, own, on)
                continue
            if own.any():
                try:
                    self.handlers[at](self, x, own, at)
                except Fault as fault:
                    raise Fault(f"{self.program.name}, {x.text or x.name}: {fault}") from None
            at += 1

    def _guarded(self, x, on):
        chosen = self.get(x.guard, "pred") == x.wanted
        if on is self.everyone:
            return on if chosen.all() else chosen
        return chosen & on

    def _branch(self, at, taken, on):
        """Where all go on."""
        target, rest = self.program.labels[self.program.code[at].operands[0]], on & ~taken
        if not rest.any():
            return target
        if not taken.any():
            return at + 1
        meeting = self.program.meetings[at]
        self._flow(target, taken, meeting)
        self._flow(at + 1, rest, meeting)
        return meeting


def constant(text, dtype):
    """A number that is written out, 0f and 0d as bits."""
    if text == "global_smem":
        return dtype.type(0)
    if text.startswith(("0f", "0d")):
        return np.array(int(text[2:], 16), f"u{len(text) // 2 - 1}").view(dtype)[()]
    if dtype.kind == "b":
        return text in ("1", "-1", "true")
    if dtype.kind == "f":
        return dtype.type(float(text))
    bits = int(text.rstrip("U"), 0) % 2 ** (8 * dtype.itemsize)
    return np.array(bits, f"u{dtype.itemsize}").view(dtype)[()]
