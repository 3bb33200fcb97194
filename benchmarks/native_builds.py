"""Native code in builds that this machine would not choose, over fixed cases, against the reference in float64.

    python benchmarks/native_builds.py                    # all: sanitizers (gcc), vectors of 1, 4 and 16 numbers
    python benchmarks/native_builds.py --only scalar

`sanitized` runs with the sanitizers of addresses and of undefined behaviour, which end the process at the first
fault.  Vectors wider than the machine's are made of its own by the compiler: that shows what AVX-512 code computes,
not its speed.
"""

import argparse
import os
import subprocess
import sys

BUILDS = {
    "sanitized": "-O1 -g -march=native -fsanitize=address,undefined -fno-sanitize-recover=undefined",
    "scalar": "-O1 -DPOLYHEAD_WIDTH=1",
    "quads": "-O1 -DPOLYHEAD_WIDTH=4",
    "wide": "-O1 -march=native -DPOLYHEAD_WIDTH=16",
}
SIZES = ((1, 1, 1, 1, 1, 1), (5, 7, 4, 2, 3, 5), (33, 18, 8, 8, 7, 9), (20, 40, 16, 16, 4, 6), (37, 37, 3, 3, 2, 2))
"""t s h g d e."""
BOUND = 1e-4
"""Relative error of an output or a gradient as a whole, at most."""


def cases() -> None:
    """Every size with every normaliser, and options in turn."""
    import torch

    from polyhead import ops
    from polyhead.ops.native import library
    from polyhead.spec import ACTS, NORMALISE

    torch.manual_seed(0)
    if (reason := library.missing("hyla")) is not None:
        raise SystemExit(f"native_builds: hyla {reason}")
    worst, count = 0.0, 0
    for n, (t, s, h, g, d, e) in enumerate(SIZES):
        for i, normalise in enumerate(NORMALISE):
            biases = (None, torch.randn(h, t + s - 1), torch.randn(2, h, t, s), torch.randn(1, h, t, s))
            bias = biases[(n + i) % 4]
            q, k, v = torch.randn(2, t, h, d), torch.randn(2, s, g, d), torch.randn(2, s, g, e)
            options = {"normalise": normalise, "act": ACTS[(n + 2 * i) % len(ACTS)], "causal": (n + i) % 2 == 0}
            options |= {"window": 5} if i % 3 == 0 else {"mask": torch.rand(2, h if i % 2 else 1, t, s) < 0.8}
            options |= {"keep": (torch.rand(1, h, t, s) < 0.8) / 0.8} if i == 1 else {}
            came = []
            for impl, dtype in (("native", torch.float32), ("reference", torch.float64)):
                leaves = [x.to(dtype).requires_grad_() for x in (q, k, v, *(() if bias is None else (bias,)))]
                out = ops.hyla(*leaves[:3], bias=leaves[3] if bias is not None else None, impl=impl, **options)
                came.append([out, *torch.autograd.grad((out * out.detach().cos()).sum(), leaves)])
            for x, y in zip(*came, strict=True):
                worst, count = max(worst, ((x - y).norm() / (y.norm() + 1e-6)).item()), count + 1
                assert worst < BOUND, (t, s, h, g, d, e, options)
    print(f"{count} tensors, largest relative error {worst:.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=BUILDS, action="append")
    parser.add_argument("--cases", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cases:
        cases()
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
        subprocess.run([sys.executable, __file__, "--cases"], env=env, check=True)


if __name__ == "__main__":
    main()
