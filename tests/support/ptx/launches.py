"""polyhead's launches, run by the emulator in place of a card."""

import contextlib
import importlib
import itertools
from collections import Counter
from unittest.mock import patch

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import compute_cache_key, create_function_from_signature

from ptx.machine import Machine
from ptx.memory import Global
from ptx.program import Fault, parse

SHARED = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10}
AT_ONCE = 8
"""Blocks that run in lockstep."""


def leaves(signature, x):
    """(type, value) of what a launch passes on."""
    if isinstance(signature, tuple):
        for kind, part in zip(signature, x, strict=False):
            yield from leaves(kind, part)
    elif signature != "constexpr":
        yield signature, x


def span(x):
    """(address, bytes, shape) of a tensor."""
    size = 0 if 0 in x.shape else 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), size * x.itemsize, str(tuple(x.shape))


class Emulator:
    """A card of a capability; what it has run, and the races that there were."""

    def __init__(self, capability):
        self.capability, self.target = capability, GPUTarget("cuda", capability, 32)
        self.backend, self.binders, self.compiled = make_backend(self.target), {}, {}
        self.programs, self.races, self.change = {}, Counter(), lambda program: program

    def launch(self, launch):
        """In place of `Launch.__call__`: bound as triton binds it, compiled, run."""
        if not all(launch.grid):
            return
        kernel, options = launch.kernel, {"num_warps": launch.warps, "num_stages": launch.stages}
        if kernel not in self.binders:
            self.binders[kernel] = create_function_from_signature(kernel.signature, kernel.params, self.backend)
        bound, found, rest = self.binders[kernel](*launch.args, **options)
        key = kernel, compute_cache_key({}, found, rest)
        made, signature, constants, attributes = kernel._pack_args(self.backend, options, bound, found, rest)
        if key not in self.compiled:
            source = ASTSource(kernel, signature, constants, attributes)
            built = triton.compile(source, target=self.target, options=made.__dict__)
            self.compiled[key] = parse(built.asm["ptx"]), built.metadata.shared
        program, shared = self.compiled[key]
        if shared > SHARED[self.capability]:
            raise Fault(f"{shared} bytes of shared memory, of {SHARED[self.capability]}")
        given = [x for name, arg in zip(signature, launch.args, strict=False) for _, x in leaves(signature[name], arg)]
        self.run(launch, self.change(program), shared, given)

    def run(self, launch, program, shared, given):
        tensors = [x for x in given if hasattr(x, "data_ptr")]
        values = [x.data_ptr() if hasattr(x, "data_ptr") else x for x in given]
        names = [name for name, _ in program.parameters]
        parameters = dict.fromkeys(names, 0) | dict(zip(names, values, strict=False))
        grid, memory = (*launch.grid, 1, 1)[:3], Global([span(x) for x in tensors])
        if max(grid[1:]) > 65_535:
            raise Fault(f"a grid of {grid}")
        every = [*itertools.product(*map(range, grid))]
        for first in range(0, len(every), AT_ONCE):
            machine = Machine(program, parameters, every[first : first + AT_ONCE], grid, launch.warps, shared, memory)
            self.races.update(machine.run())
        self.programs[program.name] = program


@contextlib.contextmanager
def emulated(capability):
    """All launches within run on such a card; the op's tensors lie in the CPU's memory."""
    emulator, limit = Emulator(capability), SHARED[capability]
    names = ("triton_tiles", "cards", "hyla.triton", "relational.triton", "hyla.triton.kernels")
    tiles, cards, *places = (importlib.import_module(f"polyhead.ops.{name}") for name in names)
    with contextlib.ExitStack() as held:
        held.enter_context(patch.object(tiles.Launch, "__call__", lambda launch: emulator.launch(launch)))
        held.enter_context(patch.object(cards, "INTERPRETED", True))
        for place in places:
            held.enter_context(patch.object(place, "shared_memory", lambda device: limit))
        yield emulator
