"""Run the kernels' PTX on a CPU (tests/support/ptx), for cards that are not here: errors, faults and races.

    python benchmarks/emulate.py --quick                                        a few fixed cases
    python benchmarks/emulate.py --planted                                      some with planted faults
    python benchmarks/emulate.py --cures --json docs/results/kernels/cures.json      cases that were wrong once
    python benchmarks/emulate.py --draws 300 --json docs/results/kernels/emulated.json      random ones, hours

A case is a call of an op on sm_80 or sm_90 in bf16, fp16, fp32 or tf32, with its gradients, against the reference in
float64.  An output or a gradient may be off by twice as much as the reference is: the largest error of the reference in
that dtype, and of 16 references in float64 whose steps are rounded at random as that dtype rounds them (Monte Carlo
arithmetic; card/case.py).  So there is a yardstick where the truth is 0, at the kink of a relu and in tf32, too, and no
case has a margin or a second try.  Errors are norms, of a whole tensor and of its worst row.  Red is also an address
outside of all tensors, a barrier that not all threads reach, and a race in shared memory.

The log grows by a line a case, and goes on after it; cases whose kernels have changed since are run anew.
"""

import argparse
import contextlib
import hashlib
import json
import os
import pathlib
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

os.environ.pop("TRITON_INTERPRET", None)  # kernels that run in Python are not compiled
sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests" / "support"))

import torch
import triton
from card.case import DTYPES, Setting, Shape, parity
from card.source import bare
from ptx.launches import emulated
from ptx.program import Fault

from polyhead.ops.dispatch import resolve
from polyhead.ops.hyla.triton import kernels as hyla_kernels
from polyhead.ops.relational.triton import launches as relational_launches

CPU = Setting(torch.device("cpu"), False, 1)
CAUSAL, RELU, IDENTITY = ("causal", True), ("relation_act", "relu"), ("act", "identity")
TANH = "relation_act", "tanh"
TINY = Shape("hyla", b=1, t=17, s=17, h=2, g=2, d=16, r=2, options=(CAUSAL,))
SHORT = replace(TINY, b=2, t=33, h=1, g=1, d=8, r=3)
RELATIONAL = replace(TINY, op="relational", options=(CAUSAL, RELU))
QUICK = {
    "hyla, strided mask": (90, "bf16", replace(TINY, b=2, t=3, mask=True, options=(IDENTITY,))),
    "relational, one relation": (80, "bf16", replace(RELATIONAL, r=1)),
    "linear": (80, "fp16", replace(TINY, op="linear")),
    "hyla, softmax": (90, "fp32", replace(SHORT, options=(IDENTITY, ("normalise", "softmax")))),
    "relational, softmax": (90, "fp32", replace(SHORT, op="relational", s=33, bias=True, options=(CAUSAL, TANH))),
}
"""Name -> capability, dtype, shape."""


def single(plan: Any) -> Any:
    """The stacks of products with a single column that triton compiles wrongly, as they once were."""

    def planned(call: Any, part: Any, *rest: Any) -> Any:
        C = plan(call, part, *rest)
        many = triton.next_power_of_2(C.q_rel.heads)
        rel = {name: replace(getattr(C, name), heads_padded=many) for name in ("q_rel", "k_rel")}
        return replace(C, related=replace(C.related, width_padded=many), deep_relations=max(16, many), **rel)

    return planned


def unaware(limits: Any) -> Any:
    """Masks read as if they were contiguous."""

    def limited(mask: Any, *rest: Any) -> Any:
        return limits(mask, *rest)._replace(sample=mask.shape[1])

    return limited


def flipped(limits: Any) -> Any:
    """One key that is hidden is seen, or the other way round."""

    def limited(mask: Any, *rest: Any) -> Any:
        mask = mask.clone()
        mask[:, -1] = ~mask[:, -1]
        return limits(mask, *rest)

    return limited


def scaled(settings: Any) -> Any:
    """Scores a little too large."""
    return lambda call: settings(replace(call, scale=1.03 * call.scale))


FAULTS = {
    "a single column": (relational_launches.RelationalKernelCall, "plan", single),
    "a mask read as if contiguous": (hyla_kernels, "limits", unaware),
    "one key of a mask": (hyla_kernels, "limits", flipped),
    "scores 3 % too large": (relational_launches.RelationalKernelCall, "settings", scaled),
}
"""What can be planted -> where it is, and what it makes of it."""


@contextlib.contextmanager
def planted(fault: str) -> Iterator[None]:
    """With a fault; none if its name is empty."""
    if not fault:
        yield
        return
    place, name, change = FAULTS[fault]
    with mock.patch.object(place, name, change(getattr(place, name))):
        yield


def held(capability: int, kind: str, shape: Shape, fault: str = "") -> dict[str, Any]:
    """What came of a case: errors, races, what is red."""
    start = time.process_time()
    row: dict[str, Any] = {"card": f"sm_{capability}", "dtype": kind, "shape": text(shape)}
    with emulated(capability) as card, planted(fault):
        try:
            row |= parity(shape, kind, CPU, calls=1)
        except Fault as found:
            row["red"] = str(found)
        if card.races:
            row["red"] = f"races: {[*card.races]}"
    for name in ("inputs", "first", "second"):
        row.pop(name, None)
    for name in ("errors", "reference"):
        row |= {name: [float(f"{x:.3g}") for x in row[name]]} if name in row else {}
    return row | {"cpu": round(time.process_time() - start, 1)}


def text(shape: Shape) -> str:
    """What of a shape is its own.

    >>> text(Shape("hyla", t=3))
    'hyla, b 2, t 3, s 50, h 8, g 8, d 64, r 8, bias False, mask False, edges (), by_offset False'
    """
    return ", ".join([shape.op, *(f"{name} {x}" for name, x in vars(shape).items() if name not in ("op", "options")),
                      *(f"{name} {x}" for name, x in shape.options)])  # fmt: skip


def drawn(number: int) -> tuple[int, str, Shape]:
    """Case `number`: small, ragged, with what can go wrong."""
    dice = random.Random(number)
    op, kind = dice.choice(("hyla", "relational", "relational", "linear")), dice.choice((*DTYPES, "bf16"))
    h = dice.choice((1, 2, 3, 4, 8, 16) if op == "hyla" else (1, 2, 3, 4, 8))
    g = dice.choice([n for n in range(1, h + 1) if h % n == 0])
    t, s, d = dice.choice((1, 5, 17, 20, 33)), dice.choice((1, 7, 17, 33, 40)), dice.choice((3, 8, 20, 32, 64))
    shape = Shape(
        op, dice.choice((1, 2)), t, s, h, g, min(d, 16) if "32" in kind else d, dice.choice((1, 2, 3, 8, 17, 33))
    )
    options: list[tuple[str, Any]] = [("causal", op == "linear" or dice.random() < 0.6)]
    if op == "linear":
        shape = replace(shape, t=dice.choice((17, 70)), s=dice.choice((40, 130)), mask=dice.random() < 0.3)
    else:
        options += [("window", dice.choice((4, 16, 2**31 - 1)))] if dice.random() < 0.3 else []
        shape = replace(shape, bias=dice.random() < 0.3, mask=dice.random() < 0.3)
    if op == "hyla":
        options += [
            ("normalise", dice.choice(("rms_heads", "softmax", "identity"))),
            ("act", dice.choice(("relu", "identity"))),
        ]
    if op == "relational":
        options.append(("relation_act", dice.choice(("relu", "identity", "gelu", "silu", "tanh"))))
        shape = replace(shape, by_offset=dice.random() < 0.25)
    if dice.random() < 0.2:
        shape = replace(shape, b=1, t=33, s=33, edges=(0, 5, 5, 21, 33))
    return dice.choice((80, 90)), kind, replace(shape, options=tuple(options))


def without_waits() -> Iterator[tuple[str, bool]]:
    """Barriers and waits of a kernel left out one by one: is it noticed?"""
    q, k = (torch.randn(1, n, 8, 16).bfloat16() for n in (16, 36))
    with emulated(80) as card:
        wanted = resolve("hyla", "triton")(q, k, k, act="identity")
        (program,) = card.programs.values()
        for place in [*program.places("bar.sync"), *program.places("cp.async.wait")]:
            card.races.clear()
            card.change = lambda program, place=place: program.without(place)
            came = resolve("hyla", "triton")(q, k, k, act="identity")
            yield (
                f"{place} of {len(program.code)}: {program.code[place].text}",
                bool(card.races) or not torch.equal(came, wanted),
            )


def quick() -> dict[str, Any]:
    """Fixed cases as they are."""
    return {"rows": {name: held(*case) for name, case in QUICK.items()}}


def found_out() -> dict[str, Any]:
    """Fixed cases with planted faults, and barriers left out."""
    of = dict.fromkeys(FAULTS, "relational, one relation") | dict.fromkeys([*FAULTS][1:3], "hyla, strided mask")
    return {
        "faults": {fault: "red" in held(*QUICK[name], fault) for fault, name in of.items()},
        "waits": [*without_waits()],
    }


def cures() -> Iterator[tuple[str, int, str, Shape, str]]:
    """What was wrong once: name, capability, dtype, shape, and the fault that brings it back."""
    wide = replace(RELATIONAL, b=1, t=20, s=20, h=8, g=8, d=64)
    for capability in (80, 90):
        for kind in ("bf16", "fp16", "fp32"):
            for r in (1, 2, 17, 33):
                small = replace(RELATIONAL, t=20, s=20, r=r) if kind == "fp32" else replace(wide, r=r)
                yield f"relational, {small.r} relations", capability, kind, small, "a single column"
            masked = replace(TINY, b=2, t=20, s=33, h=4, g=4, mask=True)
            yield "hyla, strided mask", capability, kind, masked, "a mask read as if contiguous"


def digest(op: str) -> str:
    """Of the kernels of an op and of their launches, without prose, and of the compiler."""
    folder = pathlib.Path(relational_launches.__file__).parents[2]
    files = sorted([*(folder / op / "triton").glob("*.py"), folder / "triton_tiles.py"])
    what = [triton.__version__, *(bare(file.read_text(encoding="utf-8")) for file in files)]
    return hashlib.sha256("".join(what).encode()).hexdigest()[:12]


def write(path: pathlib.Path | None, rows: list[dict[str, Any]]) -> None:
    """A line a row."""
    if path is None:
        return
    command = " ".join(["python", "benchmarks/emulate.py", *sys.argv[1:]])
    head = json.dumps({"command": command, "triton": triton.__version__, "torch": torch.__version__})
    lines = ",\n  ".join(map(json.dumps, rows))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{head[:-1]}, "rows": [\n  {lines}\n]}}\n', encoding="utf-8")


def known(path: pathlib.Path | None, key: str) -> dict[Any, dict[str, Any]]:
    """Rows of the log whose kernels are those of today."""
    if path is None or not path.exists():
        return {}
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return {row[key]: row for row in rows if row["kernels"] == digest(row["shape"].partition(",")[0])}


def campaign(draws: int, path: pathlib.Path | None) -> bool:
    """Draws that the log does not have; whether all of it is green."""
    rows = known(path, "draw")
    for number in range(draws):
        if number in rows:
            continue
        case = drawn(number)
        row = rows[number] = {"draw": number, "kernels": digest(case[2].op)} | held(*case)
        told = f"{number}: {row['card']} {row['dtype']} {row['shape']}"
        print(f"{told}: {row.get('red', 'green')}, {row['cpu']} s", flush=True)
        write(path, [rows[n] for n in sorted(rows)])
    return not any("red" in row for row in rows.values())


def before_and_after(path: pathlib.Path | None) -> bool:
    """Cures that the log does not have; whether all of it is green now."""
    rows = known(path, "case")
    for name, capability, kind, shape, fault in cures():
        case = f"{name}, {kind}, sm_{capability}"
        if case not in rows:
            row = {"case": case, "kernels": digest(shape.op)} | held(capability, kind, shape)
            once = held(capability, kind, shape, fault)
            row |= {"once": once.get("errors", once.get("red"))}
            rows[case] = row
            worst = max(row["once"]) if isinstance(row["once"], list) else row["once"]
            print(f"{case}: once {worst}, now {max(row['errors'])}, allowed 2 x {max(row['reference'])}", flush=True)
            write(path, [*rows.values()])
    return not any("red" in row for row in rows.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fixed cases; prints JSON")
    parser.add_argument("--planted", action="store_true", help="planted faults, barriers left out; prints JSON")
    parser.add_argument("--cures", action="store_true", help="what was wrong once, with the fault and without")
    parser.add_argument("--draws", type=int, default=0)
    parser.add_argument("--json", type=pathlib.Path, help="the log, which grows")
    options = parser.parse_args()
    if options.quick or options.planted:
        print(json.dumps(quick() if options.quick else found_out()))
        return 0
    if options.cures:
        return 0 if before_and_after(options.json) else 1
    return 0 if campaign(options.draws, options.json) else 1


if __name__ == "__main__":
    sys.exit(main())
