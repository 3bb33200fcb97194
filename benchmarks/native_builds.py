"""Native code in builds that this machine would not choose, over fixed cases, against the reference in float64.

    python benchmarks/native_builds.py                    # all: sanitizers (gcc), vectors of 1, 4 and 16 numbers
    python benchmarks/native_builds.py --only scalar

`sanitized` runs with the sanitizers of addresses and of undefined behaviour, which end the process at the first
fault.  Vectors wider than the machine's are made of its own by the compiler: that shows what AVX-512 code computes,
not its speed.
"""

import argparse
import itertools
import os
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

BUILDS = {
    "sanitized": "-O1 -g1 -march=native -fsanitize=address,undefined -fno-sanitize-recover=undefined",
    "scalar": "-O1 -DPOLYHEAD_WIDTH=1",
    "quads": "-O1 -DPOLYHEAD_WIDTH=4",
    "wide": "-O1 -march=native -DPOLYHEAD_WIDTH=16",
}
SIZES = ((1, 1, 1, 1, 1, 1), (5, 7, 4, 2, 3, 5), (33, 18, 8, 8, 7, 9), (20, 40, 16, 16, 4, 6), (37, 37, 3, 3, 2, 2))
SIZES += ((70, 90, 4, 2, 5, 17), (3, 90, 8, 4, 9, 16))
"""t s h g d e."""
BOUND = 1e-4
"""Relative error of an output or a gradient as a whole, at most ..."""

ROUNDINGS = 8
"""... and so many roundings of a gradient's part in the output, |dout| |out| / |x| (tests/support/agreement/ops.py).
A gradient that is 0 by cancellation has no relative error.  RMS over a single head is such a case: its code is the sign
of the score but for eps, and its derivative is made of 1 - a^2."""


def limits(n: int, i: int, h: int, t: int, s: int) -> "dict[str, object]":
    """Options of a call, in turn."""
    import torch

    found: dict[str, object] = {"causal": (n + i) % 2 == 0}
    found |= {"window": 5} if i % 3 == 0 else {"mask": torch.rand(2, h if i % 2 else 1, t, s) < 0.8}
    return found | ({"keep": (torch.rand(1, h, t, s) < 0.8) / 0.8} if i == 1 else {})


def hyla(n: int, i: int) -> "tuple[list[Tensor], dict[str, object]]":
    """Every size with every normaliser."""
    import torch

    from polyhead.spec import ACTS, NORMALISE

    t, s, h, g, d, e = SIZES[n]
    tensors = [torch.randn(2, t, h, d), torch.randn(2, s, g, d), torch.randn(2, s, g, e)]
    return tensors, {"normalise": NORMALISE[i], "act": ACTS[(n + 2 * i) % len(ACTS)], **limits(n, i, h, t, s)}


def relational(n: int, i: int) -> "tuple[list[Tensor], dict[str, object]]":
    """The same, with symbols by key and by offset."""
    import torch

    from polyhead.spec import RELATION_ACTS

    t, s, h, g, d, e = SIZES[n]
    symbols = torch.randn(t + s - 1, g, e) if i % 2 else torch.randn(2, s, g, e)
    tensors = [torch.randn(2, t, h, d), torch.randn(2, s, g, d), torch.randn(2, t, 5, 3), torch.randn(2, s, 5, 3)]
    acts = RELATION_ACTS[:-1]
    return [*tensors, symbols, torch.randn(h, e, 5)], {
        "relation_act": acts[(n + i) % len(acts)],
        **limits(n, i, h, t, s),
    }


def linear(n: int, i: int) -> "tuple[list[Tensor], dict[str, object]]":
    """The same with what has a state; packed where there are as many queries as keys."""
    import torch

    from polyhead.spec import ACTS

    tensors, options = hyla(n, i)[0], {"causal": i % 2 == 0, "act": ACTS[(n + 2 * i) % len(ACTS)]}
    t, s = SIZES[n][:2]
    if t != s or i < 2:
        return tensors, {**options, "mask": torch.rand(2, 1, 1, s) < 0.8}
    return [x[:1] for x in tensors], {**options, "cu_seqlens": torch.tensor([0, t // 3, t // 3, t - t // 4]).int()}


def softmax(n: int, i: int) -> "tuple[list[Tensor], dict[str, object]]":
    """The same, without options of its own."""
    t, s, h = SIZES[n][:3]
    return hyla(n, i)[0], limits(n, i, h, t, s)


def gelu() -> int:
    """Sizes around one vector and one job, aligned or not, on one thread and on two; the number of tensors."""
    import torch
    from torch.nn import functional as F

    from polyhead.ops.native.gelu import computed

    count = 0
    for n, width in itertools.product((1, 15, 16, 17, 1000, 2**14 - 1, 2**14, 3 * 2**14 + 5), (0, 1, 19, 64, 20_001)):
        torch.set_num_threads(1 + n % 2)
        rows = -(-n // width) if width else 1
        for offset in (0, 1, 5):
            x, dout = (torch.randn(offset + rows * (width or n))[offset:].view(rows, -1) * 4 for _ in range(2))
            bias = torch.randn(offset + width)[offset:] if width else None
            leaves = [a.double().requires_grad_() for a in (x, bias) if a is not None]
            out = F.gelu(sum(leaves, torch.zeros(())), approximate="tanh")
            truth = out, *torch.autograd.grad(out, leaves, dout.double())
            mine = computed(x, bias)[0], *computed(x, bias, dout, learns=width > 0)
            for own, exact in zip(mine, truth, strict=False):
                assert own is not None
                assert (own - exact).norm() <= 1e-6 * exact.norm() + 1e-6 * dout.norm(), (n, width, offset)
                count += 1
    return count


MAKERS = {"hyla": hyla, "relational": relational, "linear": linear, "softmax": softmax}


def bounds(truth: "list[Tensor]", leaves: "list[Tensor]") -> list[float]:
    """How far an output and its gradients may be from the truth."""
    import torch

    out, *grads = truth
    size = out.detach().cos().norm() * out.norm()  # |dout| |out|
    unit = ROUNDINGS * torch.finfo(torch.float32).eps
    parts = [out.norm() * 0, *(size / (x.norm() + 1e-30) for x in leaves)]
    return [(BOUND * y.norm() + unit * part).item() + 1e-30 for y, part in zip([out, *grads], parts, strict=True)]


def cases(names: "list[str]") -> None:
    """Output and gradients of every case, on one thread and on two."""
    import torch

    import polyhead.ops.native.gelu  # noqa: F401  # with its check
    from polyhead.ops.dispatch import resolve
    from polyhead.ops.native import library

    library.PATIENCE = 3600.0  # sanitized code of HYLA compiles for many minutes
    torch.manual_seed(0)
    beyond: list[str] = []
    for name in names:
        if (reason := library.missing(library.source(name))) is not None:
            raise SystemExit(f"native_builds: {name} {reason}")
        if name == "gelu":
            print(f"gelu: {gelu()} tensors", end="  ", flush=True)
            continue
        make = MAKERS[name]
        worst, count = 0.0, 0
        for n, i in itertools.product(range(len(SIZES)), range(5)):
            torch.set_num_threads(1 + (n + i) % 2)
            (t, s, h), (tensors, options) = SIZES[n][:3], make(n, i)
            biases = (None, torch.randn(h, t + s - 1), torch.randn(2, h, t, s), torch.randn(1, h, t, s))
            bias = None if name == "linear" else biases[(n + i) % 4]
            came = []
            for impl, dtype in zip(
                ("native", *2 * ("reference",)), (*2 * (torch.float32,), torch.float64), strict=True
            ):
                leaves = [x.to(dtype).requires_grad_() for x in (*tensors, *(() if bias is None else (bias,)))]
                own = leaves[len(tensors)] if bias is not None else None
                out = resolve(name, impl)(*leaves[: len(tensors)], bias=own, **options)
                came.append([out, *torch.autograd.grad((out * out.detach().cos()).sum(), leaves)])
            for x, plain, y, bound in zip(*came, bounds(came[-1], leaves), strict=True):
                part, its_own = ((a - y).norm().item() / bound for a in (x, plain))
                worst, count = max(worst, part), count + 1
                if not part < 1:
                    beyond.append(f"{name} {SIZES[n]} {options}: {part:.1f}, the reference itself {its_own:.1f}")
        print(f"{name}: {count} tensors, largest error {worst:.2f} of its bound", end="  ", flush=True)
    print()
    assert not beyond, "\n".join(["beyond its bound, by times:", *beyond])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=BUILDS, action="append")
    parser.add_argument("--ops", nargs="+", choices=[*MAKERS, "gelu"], default=[*MAKERS, "gelu"])
    parser.add_argument("--cases", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cases:
        cases(options.ops)
        return
    for name in options.only or BUILDS:
        env = {**os.environ, "POLYHEAD_NATIVE_FLAGS": BUILDS[name], "OMP_NUM_THREADS": "1"}
        if name == "sanitized":
            found = [
                subprocess.check_output(["g++", f"-print-file-name=lib{x}.so"], text=True, encoding="utf-8")
                for x in ("asan", "ubsan")
            ]
            env |= {"LD_PRELOAD": ":".join(x.strip() for x in found), "ASAN_OPTIONS": "detect_leaks=0"}
        print(name, end=": ", flush=True)
        subprocess.run([sys.executable, __file__, "--cases", "--ops", *options.ops], env=env, check=True)


if __name__ == "__main__":
    main()
