"""Run the kernels' PTX on a CPU (tests/support/ptx), for cards that are not here: errors, faults and races.

    python benchmarks/emulate.py --quick                                        a few fixed cases, and planted faults
    python benchmarks/emulate.py --draws 300 --json docs/results/kernels/emulated.json      random ones, hours

A case is a call of an op on sm_80 or sm_90 in bf16, fp16, fp32 or tf32, with its gradients, held to the reference in
float64: twice the reference's own error in that dtype is allowed.  Red is also an address outside of all tensors, a
barrier that not all threads reach, and a race in shared memory.  The log grows by a line a case, and goes on after it.
"""

import argparse
import json
import os
import pathlib
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # kernels that run in Python are not compiled
sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests" / "support"))

import torch
import triton
from ptx.launches import emulated
from ptx.program import Fault

from card.case import DTYPES, Setting, Shape, parity
from polyhead.ops.dispatch import resolve

CPU = Setting(torch.device("cpu"), False, 1)
CAUSAL, RELU, IDENTITY = ("causal", True), ("relation_act", "relu"), ("act", "identity")
TINY = Shape("hyla", b=1, t=17, s=17, h=2, g=2, d=16, r=2, options=(CAUSAL,))
RELATIONAL = replace(TINY, op="relational", options=(CAUSAL, RELU))
QUICK = {
    "hyla, strided mask": (90, "bf16", replace(TINY, b=2, t=3, mask=True, options=(IDENTITY,))),
    "relational, one relation": (80, "bf16", replace(RELATIONAL, r=1)),
    "linear": (80, "fp16", replace(TINY, op="linear")),
}
"""Name -> capability, dtype, shape."""


def held(capability: int, kind: str, shape: Shape) -> dict[str, Any]:
    """What came of a case: errors, races, what is red."""
    start = time.process_time()
    row: dict[str, Any] = {"card": f"sm_{capability}", "dtype": kind, "shape": text(shape)}
    with emulated(capability) as card:
        try:
            row |= parity(shape, kind, CPU, calls=1)
        except Fault as fault:
            row["red"] = str(fault)
        if card.races:
            row["red"] = f"races: {[*card.races]}"
    for name in ("inputs", "first", "second"):
        row.pop(name, None)
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
    h = dice.choice((1, 2, 3, 4, 8))
    g = dice.choice([n for n in range(1, h + 1) if h % n == 0])
    t, s, d = dice.choice((1, 5, 17, 20, 33)), dice.choice((1, 7, 17, 33, 40)), dice.choice((3, 8, 16, 20, 32))
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


def planted() -> Iterator[tuple[str, bool]]:
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


def campaign(options: argparse.Namespace) -> bool:
    """Draws after those that the log has; whether all of it is green."""
    path = options.json
    head: dict[str, Any] = {"triton": triton.__version__, "torch": torch.__version__, "rows": []}
    log = json.loads(path.read_text(encoding="utf-8")) if path and path.exists() else head
    for number in range(len(log["rows"]), options.draws):
        row = {"draw": number} | held(*drawn(number))
        log["rows"].append(row)
        print(
            f"{number}: {row['card']} {row['dtype']} {row['shape']}: {row.get('red', 'green')}, {row['cpu']} s",
            flush=True,
        )
        if path:
            lines = ",\n  ".join(map(json.dumps, log["rows"]))
            text_ = json.dumps({name: x for name, x in log.items() if name != "rows"})
            path.write_text(f'{text_[:-1]}, "rows": [\n  {lines}\n]}}\n', encoding="utf-8")
    return not any("red" in row for row in log["rows"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fixed cases and planted faults; prints JSON")
    parser.add_argument("--draws", type=int, default=0)
    parser.add_argument("--json", type=pathlib.Path, help="the log, which grows")
    options = parser.parse_args()
    if options.quick:
        rows = {name: held(*case) for name, case in QUICK.items()}
        print(json.dumps({"rows": rows, "planted": [*planted()]}))
        return 0
    return 0 if campaign(options) else 1


if __name__ == "__main__":
    sys.exit(main())
