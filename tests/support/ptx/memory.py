"""Memory: the tensors of a launch, and the shared memory of its blocks with the accesses of warps between barriers."""

import ctypes
from collections import Counter

import numpy as np

from ptx.program import Fault

NOBODY, SEVERAL = -1, -2


class Global:
    """The tensors of a launch, where they lie; each is (address, bytes, name)."""

    def __init__(self, tensors):
        spans = []
        for start, size, name in sorted(tensors):
            if not size:
                continue
            if spans and start < spans[-1][1]:  # views of one tensor
                spans[-1][1] = max(spans[-1][1], start + size)
            else:
                spans.append([start, start + size, name])
        self.starts = np.array([x[0] for x in spans], np.uint64)
        self.ends = np.array([x[1] for x in spans], np.uint64)
        self.bytes = [np.ctypeslib.as_array((ctypes.c_uint8 * (b - a)).from_address(a)) for a, b, _ in spans]

    def _pieces(self, address, size):
        """(threads, bytes of a tensor, places in it), tensor by tensor."""
        at = np.searchsorted(self.starts, address, side="right").astype(np.int64) - 1
        outside = (at < 0) | (address + np.uint64(size) > self.ends[np.maximum(at, 0)])
        if outside.any():
            raise Fault(f"{outside.sum()} threads are outside of all tensors, the first at {address[outside][0]:#x}")
        if (address % np.uint64(size)).any():
            raise Fault(f"an address is no multiple of {size}")
        for n in np.unique(at):
            own = at == n
            yield own, self.bytes[n], (address[own] - self.starts[n]).astype(np.int64)[:, None] + np.arange(size)

    def load(self, address, size):
        """(threads, bytes)."""
        out = np.empty((len(address), size), np.uint8)
        for own, memory, where in self._pieces(address, size):
            out[own] = memory[where]
        return out

    def store(self, address, data):
        for own, memory, where in self._pieces(address, data.shape[1]):
            memory[where] = data[own]


class Shared:
    """`size` bytes for each of some blocks; poisoned at first.  `races` counts (kind, instruction)."""

    def __init__(self, blocks, size, block_of, warp_of):
        self.size, self.block_of, self.warp_of = size, block_of, warp_of
        self.bytes = np.full(blocks * size, 0xFF, np.uint8)
        self.epoch = np.zeros(blocks, np.int64)  # barriers so far
        self.written, self.read = (np.full(blocks * size, -1, np.int64) for _ in range(2))  # in which epoch last
        self.writer, self.reader = (np.full(blocks * size, NOBODY, np.int64) for _ in range(2))
        self.races = Counter()

    def places(self, address, size, threads):
        """(threads, bytes) numbers of bytes, of some threads; each one's warp, and how many barriers it has passed."""
        own = address[threads].astype(np.int64)
        if len(own) and (own.min() < 0 or own.max() + size > self.size):
            raise Fault(f"byte {own.max() + size} of {self.size} of shared memory")
        if (own % size).any():
            raise Fault(f"a shared address is no multiple of {size}")
        block = self.block_of[threads]
        where = (own + block * self.size)[:, None] + np.arange(size)
        return where, self.warp_of[threads][:, None], self.epoch[block][:, None]

    def note(self, kind, clash, place):
        if clash.any():
            self.races[kind, place] += int(clash.sum())

    def load(self, address, size, threads, place):
        """(threads, bytes), noting who reads."""
        where, warp, now = self.places(address, size, threads)
        self.note("read after write", (self.written[where] == now) & (self.writer[where] != warp), place)
        shared = (self.read[where] == now) & (self.reader[where] != warp)
        self.read[where], self.reader[where] = now, warp
        self.reader[where[shared | (self.reader[where] != warp)]] = SEVERAL
        return self.bytes[where]

    def store(self, address, data, threads, place):
        """Bytes of all threads, written for some, noting who writes."""
        (where, warp, now), own = self.places(address, data.shape[1], threads), data[threads]
        self.note("write after write", (self.written[where] == now) & (self.writer[where] != warp), place)
        self.note("write after read", (self.read[where] == now) & (self.reader[where] != warp), place)
        self.written[where], self.writer[where] = now, warp
        self.bytes[where] = own
        self.note("two warps, one instruction", (self.writer[where] != warp) & (self.bytes[where] != own), place)

    def announce(self, address, size, threads, place):
        """A copy is under way: it may land at once, and must not be read before it is waited for."""
        where, warp, now = self.places(address, size, threads)
        self.note("copy into what others read", (self.read[where] == now) & (self.reader[where] != warp), place)
        self.bytes[where] = 0xFF
