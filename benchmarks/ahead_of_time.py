"""Compile the Triton kernels for cards that need not be there, and hold what comes out to a recorded budget.

    python benchmarks/ahead_of_time.py --json docs/results/kernels/ahead_of_time.json      # all that is shipped
    python benchmarks/ahead_of_time.py --quick                                 # one configuration of each kernel

For each kernel and configuration, on sm_80 (A100), sm_86 and sm_89 (99 KB of shared memory for a program, as most
cards have; what the op refuses there is left out) and sm_90 (H100, H200): registers per thread, bytes of stack (what
spills out of registers), shared memory, instructions that multiply matrices on tensor cores; of the longest loop, which
goes over tiles, its instructions and barriers, and the pairs of a tile.  The file grows by a row at a time.  Called
again, it takes from there what the same triton compiled of the same code, whatever its comments were.  The exit code is
1 if any breaks ahead_of_time_budget.json: `stack` says how many bytes may spill, by the longest key that fits;
`shared` is what a block may have on the card; 16-bit kernels must use tensor cores; no product may have a single
column, which triton compiles wrongly.  What polyhead refuses is compiled once a kernel, to see why: sm_75, sm_120,
AMD's gfx942, float64 (`refused`; such rows break nothing).  Nothing is run.
"""

import argparse
import hashlib
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # kernels that run in Python cannot be compiled

import torch
import triton
from card.source import written
from torch import Tensor
from triton.backends.compiler import GPUTarget

from polyhead.ops.call import AttentionCall
from polyhead.ops.hyla.triton import too_large_for
from polyhead.ops.hyla.triton.kernels import launches as hyla_launches, prepare
from polyhead.ops.linear.triton import CHUNK
from polyhead.ops.linear.triton.kernels import launches as linear_launches
from polyhead.ops.relational.triton.launches import (
    OutputGradients,
    PartialGradients,
    RelationalKernelCall,
    backward_launches,
    forward_launches,
)
from polyhead.ops.triton_tiles import Launch, limits

INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_]+)([^;]*)")
JUMP = re.compile(r"0x([0-9a-f]+)")
BUDGET = pathlib.Path(__file__).with_name("ahead_of_time_budget.json")
T = 4096
WIDE = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Card:
    """What is compiled for; where it is `refused`, "auto" does not take the kernels, and nothing is promised."""

    name: str
    target: GPUTarget
    refused: str = ""


CARDS = tuple(Card(f"sm_{n}", GPUTarget("cuda", n, 32)) for n in (80, 86, 89, 90))
QUICK_CARDS = CARDS[0], CARDS[-1]
REFUSED = (
    Card("sm_75", GPUTarget("cuda", 75, 32), "compute capability 7.5"),
    Card("sm_120", GPUTarget("cuda", 120, 32), "compute capability 12.0"),
    Card("gfx942", GPUTarget("hip", "gfx942", 64), "a card of AMD"),
)


@dataclass(frozen=True)
class Case:
    """A shape that kernels are compiled for; `name` is what the budget and the table call it."""

    op: str
    name: str
    dtype: torch.dtype
    make: Callable[[int], list[Launch]]  # given the shared memory of the card, as tiles may follow it
    tf32: bool = False

    def launches(self, shared: int) -> list[Launch]:
        """All that a call and its gradients launch."""
        matmul = torch.backends.cuda.matmul
        before = matmul.fp32_precision
        matmul.fp32_precision = "tf32" if self.tf32 else "ieee"
        try:
            return self.make(shared)
        finally:
            matmul.fp32_precision = before

    def rounded(self) -> "Case":
        """The same with TF32 allowed."""
        return replace(self, name=f"{self.name}, tf32", tf32=True)


@dataclass(frozen=True)
class Row:
    """What a compiler made of one kernel."""

    kernel: str
    case: str
    card: str
    registers: int
    stack: int
    shared: int
    tensor_cores: int
    broken: str
    refused: str = ""
    loop: int = 0
    barriers: int = 0
    pairs: int = 0
    source: str = ""


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def packed() -> Tensor:
    return empty(5, dtype=torch.int32)


# ------------------------------------------------------------------------------------------------- what can be launched
def hyla(
    h: int,
    d: int,
    dtype: torch.dtype,
    *,
    full: bool = False,
    causal: bool = True,
    normalise: str = "rms_heads",
    act: str = "relu",
) -> Case:
    """`full`: with a bias, a mask, packed sequences and a window."""

    def make(shared: int) -> list[Launch]:
        q, k, v = (empty(1, T, h, d, dtype=dtype) for _ in range(3))
        call = AttentionCall(q, k, v, causal=causal, normalise=normalise, act=act)
        if full:
            bias, mask = empty(h, 2 * T - 1, dtype=dtype), empty(1, 1, 1, T, dtype=torch.bool)
            call = replace(call, bias=bias, mask=mask, cu_seqlens=packed(), window=512)
        return [] if too_large_for(q, shared) else hyla_launches(replace(prepare(call), shared=shared))

    extras = ", all limits" * full + ", not causal" * (not causal)
    extras += f", {normalise}" * (normalise != "rms_heads") + f", {act}" * (act != "relu")
    return Case("hyla", f"{name(dtype)} h {h} d {d}{extras}", dtype, make)


def relational(h: int, d: int, r: int, dtype: torch.dtype, *, full: bool = False, by_offset: bool = False) -> Case:
    """r relations, of width d."""

    def make(shared: int) -> list[Launch]:
        q, k = empty(1, T, h, d, dtype=dtype), empty(1, T, h, d, dtype=dtype)
        q_rel, k_rel = empty(1, T, r, d, dtype=dtype), empty(1, T, r, d, dtype=dtype)
        symbols = empty(1, 2 * T - 1 if by_offset else T, h, d, dtype=dtype)
        bias, look = (empty(h, 2 * T - 1, dtype=dtype), empty(1, T, dtype=torch.bool)) if full else (None, None)
        masks = limits(look, packed() if full else None, 512 if full else None, T)
        call = RelationalKernelCall(q, k, q_rel, k_rel, symbols, bias, masks, True, d**-0.5, "relu", by_offset, shared)
        stat, softmax = (empty(1, *rows, h, T, dtype=torch.float32) for rows in ((), (2,)))
        above = OutputGradients(empty(1, T, h, d, dtype=dtype), empty(1, T, h, r, dtype=dtype), softmax, stat)
        out = above.dretrieved, above.drelated, softmax
        return [*forward_launches(call, out), *backward_launches(call, above, PartialGradients.empty(call))]

    extras = ", all limits" * full + ", by offset" * by_offset
    return Case("relational", f"{name(dtype)} h {h} d {d} r {r}{extras}", dtype, make)


def linear(d: int, dtype: torch.dtype, *, full: bool = False) -> Case:
    """`full`: packed sequences, the one limit that the kernels know."""

    def make(_: int) -> list[Launch]:
        q, k, v = (empty(1, T, 8, d, dtype=dtype) for _ in range(3))
        return linear_launches(q, k, v, empty(T, dtype=torch.int32) if full else None, CHUNK)

    return Case("linear", f"{name(dtype)} d {d}{', packed' * full}", dtype, make)


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


QUICK = (
    linear(64, torch.bfloat16, full=True),
    hyla(8, 32, torch.bfloat16, full=True),
    hyla(8, 32, torch.bfloat16, normalise="softmax"),
    relational(8, 32, 8, torch.bfloat16, full=True, by_offset=True),
)
"""The first launch of each kernel in these."""


def shipped() -> Iterator[Case]:
    """Widths, dtypes and limits that are compiled apart."""
    yield from QUICK
    yield from (hyla(h, d, dtype) for dtype in WIDE for h, d in ((8, 16), (8, 32), (8, 64), (16, 32), (16, 64)))
    yield from (hyla(8, 64, torch.bfloat16, full=True), hyla(8, 64, torch.bfloat16, causal=False))
    yield from (hyla(8, 64, torch.bfloat16, act="identity"), hyla(32, 32, torch.bfloat16), hyla(8, 128, torch.bfloat16))
    yield from (hyla(8, 64, torch.bfloat16, normalise=normalise) for normalise in ("softmax", "identity"))
    yield from (relational(8, d, r, dtype) for dtype in WIDE for d, r in ((16, 8), (32, 8), (64, 8), (64, 32)))
    yield from (relational(8, 64, 8, torch.bfloat16, full=True), relational(8, 64, 8, torch.bfloat16, by_offset=True))
    yield from (relational(h, 32, r, torch.bfloat16) for h, r in ((8, 1), (1, 1), (8, 17)))
    yield from (hyla(8, d, torch.float32, full=full).rounded() for d in (16, 32, 64) for full in (False, True))
    yield from (relational(8, d, 8, torch.float32, full=d == 64).rounded() for d in (32, 64))
    yield from (linear(d, dtype) for dtype in WIDE for d in (16, 32, 64, 128, 256))
    yield linear(64, torch.float32).rounded()


def double() -> Iterator[Case]:
    """What no card is given."""
    yield from (linear(32, torch.float64), hyla(8, 16, torch.float64), relational(8, 16, 8, torch.float64))


# ----------------------------------------------------------------------------------------------------- what comes of it
def longest_loop(code: str) -> tuple[int, int]:
    """Instructions and barriers between the jump backwards that goes farthest and where it goes.

    >>> longest_loop("/*0000*/ BAR.SYNC 0x0 ; /*0010*/ @P0 BRA 0x0 ; /*0020*/ EXIT ;")
    (2, 1)
    """
    found = [(int(at, 16), name, rest) for at, name, rest in INSTRUCTION.findall(code)]
    jumps = [(at, int(to[1], 16)) for at, name, rest in found if name == "BRA" and (to := JUMP.search(rest))]
    last, first = max(((at, to) for at, to in jumps if to < at), key=lambda jump: jump[0] - jump[1], default=(-1, 0))
    names = [name for at, name, _ in found if first <= at <= last]
    return len(names), names.count("BAR")


def inspect(cubin: bytes) -> tuple[int, int, int, tuple[int, int]]:
    """Registers, bytes of stack, tensor-core instructions of a compiled kernel, and its longest loop."""
    tool = triton.knobs.nvidia.cuobjdump.path
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, code = (
            subprocess.run([tool, flag, file.name], capture_output=True, text=True, check=True, encoding="utf-8").stdout
            for flag in ("--dump-resource-usage", "-sass")
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if found is None:
        raise SystemExit(f"ahead_of_time: {tool} says nothing of registers: {usage[:200]}")
    return int(found[1]), int(found[2]), len(re.findall(r"\b(?:HMMA|HGMMA)\b", code)), longest_loop(code)


def allowed(stack: dict[str, int], kernel: str, case: str, card: str) -> int:
    """Bytes of stack, by the longest key of the budget that fits: words of the kernel, the case and the card."""
    words = {*f"{kernel} {case} {card}".replace(",", "").split(), "any"}
    return stack[max((key for key in stack if words.issuperset(key.split())), key=lambda key: (key != "any", len(key)))]


def digest(launch: Launch, card: Card) -> str:
    """Of all that makes a compiled kernel: its code and what it calls, what is compiled in, the compiler, the card.

    Not of docstrings, comments and line numbers, as triton's own hash is.
    """
    source = launch.source()
    given = [*source.signature.items()], [(path, str(x)) for path, x in source.constants.items()], source.attrs
    what = written(launch.kernel), given, launch.warps, launch.stages, triton.__version__, card.name
    return hashlib.sha256(str(what).encode()).hexdigest()[:12]


def compiled(launch: Launch, case: Case, card: Card, budget: dict[str, Any], known: dict[str, Row]) -> Row:
    """One kernel on one card; `known` are rows of an earlier run, by their source."""
    source = digest(launch, card)
    if source in known and not known[source].broken:
        row = replace(known[source], case=case.name)
        return replace(row, broken="; ".join(over(row, budget, half=halves(case, card))))
    return replace(fresh(launch, case, card, budget), source=source)


def fresh(launch: Launch, case: Case, card: Card, budget: dict[str, Any]) -> Row:
    """`compiled` now."""
    kernel = launch.kernel.fn.__name__
    kernel = kernel if kernel.startswith(case.op) else f"{case.op}_{kernel}"
    options = {"num_warps": launch.warps, "num_stages": launch.stages}
    refused = card.refused or ("float64" if case.dtype == torch.float64 else "")
    try:
        made = triton.compile(launch.source(), target=card.target, options=options)
        registers, stack, cores, loop = inspect(made.asm["cubin"]) if "cubin" in made.asm else (0, 0, 0, (0, 0))
    except Exception as error:
        text = f"{type(error).__name__}: {(str(error).strip() or 'no word').splitlines()[-1]}"
        return Row(kernel, case.name, card.name, 0, 0, 0, 0, f"does not compile: {text}", refused)
    sight = getattr(launch.args[-1], "sight", None)
    pairs = sight.queries * sight.keys if sight else 0
    row = Row(kernel, case.name, card.name, registers, stack, made.metadata.shared, cores, "", refused, *loop, pairs)
    found = [*over(row, budget, half=halves(case, card)), *narrow(made.asm["ttir"])]
    return replace(row, broken="; ".join(found))


def halves(case: Case, card: Card) -> bool:
    """Is it one of the 16-bit kernels, which must use tensor cores?"""
    return case.dtype.itemsize == 2 and card.target.backend == "cuda"


def over(row: Row, budget: dict[str, Any], *, half: bool) -> Iterator[str]:
    """What of a kernel breaks the budget, in words."""
    if row.stack > (most := allowed(budget["stack"], row.kernel, row.case, row.card)):
        yield f"{row.stack} bytes of stack, {most} allowed"
    if row.shared > (most := budget["shared"][row.card]):
        yield f"{row.shared} bytes of shared memory, {most} allowed"
    if row.tensor_cores == 0 and half:
        yield "no tensor cores"


def narrow(code: str) -> Iterator[str]:
    """Whether a product has a single column."""
    if re.search(r"tt\.dot .*-> tensor<(?:\d+x)+1xf\d+", code):
        yield "a product with a single column"


def measure(
    cases: Iterable[Case],
    budget: dict[str, Any],
    cards: Iterable[Card],
    known: dict[str, Row],
    *,
    quick: bool,
    in_turn: bool = False,
) -> Iterator[Row]:
    """Each kernel of each case, or only the first of each kernel, on each card, or in turn on one of them."""
    seen, cards, own = set(), tuple(cards), {}
    for case in cases:
        for card in cards:
            for launch in case.launches(budget["shared"][card.name]):
                compiled_in = None if quick else (launch.args[-1], str(launch.source().signature))
                what = launch.kernel, card.name, compiled_in
                mine = own.setdefault(launch.kernel, cards[len(own) % len(cards)])
                if what not in seen and (card is mine or not in_turn):
                    seen.add(what)
                    yield compiled(launch, case, card, budget, known)


def wanted(options: argparse.Namespace, budget: dict[str, Any], known: dict[str, Row]) -> Iterator[Row]:
    """All rows."""
    cases = [case for case in (QUICK if options.quick else shipped()) if options.only in case.op]
    cards = QUICK_CARDS if options.quick else CARDS
    yield from measure(cases, budget, cards, known, quick=options.quick, in_turn=options.quick)
    if not options.quick:
        yield from measure([case for case in QUICK if options.only in case.op], budget, REFUSED, known, quick=True)
        yield from measure([case for case in double() if options.only in case.op], budget, CARDS[:1], known, quick=True)


def read(path: pathlib.Path | None) -> dict[str, Row]:
    """Rows of an earlier run, by their source."""
    if path is None or not path.exists():
        return {}
    rows = json.loads(path.read_text(encoding="utf-8"))["kernels"]
    return {row["source"]: Row(**row) for row in rows if "source" in row}


def write(path: pathlib.Path | None, rows: list[Row]) -> None:
    """A line a row."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    command = f"python benchmarks/ahead_of_time.py --json {path}"
    head = json.dumps({"command": command, "triton": triton.__version__, "torch": torch.__version__})
    lines = ",\n  ".join(json.dumps(asdict(row)) for row in rows)
    path.write_text(f'{head[:-1]}, "kernels": [\n  {lines}\n]}}\n', encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one configuration of each kernel, for one card")
    parser.add_argument("--only", default="", help="kernels whose name contains this")
    parser.add_argument("--budget", type=pathlib.Path, default=BUDGET, help="another budget")
    parser.add_argument("--json", type=pathlib.Path, help="write the table there")
    options = parser.parse_args()
    print(f"triton {triton.__version__}\n{'kernel':28} {'case':42} card   reg  stack  shared  cores  loop")
    rows: list[Row] = []
    known = read(options.json)
    others = [row for row in known.values() if options.only not in row.kernel]
    for row in wanted(options, json.loads(options.budget.read_text(encoding="utf-8")), known):
        rows.append(row)
        numbers = f"{row.registers:3} {row.stack:6} {row.shared:7} {row.tensor_cores:6} {row.loop:5}"
        told = row.broken + f" (refused: {row.refused})" * bool(row.refused)
        print(f"{row.kernel:28} {row.case:42} {row.card} {numbers}  {told}", flush=True)
        write(options.json, others + rows)
    broken = [row for row in rows if row.broken and not row.refused]
    print(f"{len(rows)} compiled, {len(broken)} over the budget")
    return 1 if broken or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
