"""Relational attention against the authors' package `dual-attention` and the reference, on one CPU thread.

    pip install dual-attention && python benchmarks/speed/relational.py --json relational.json
    python benchmarks/speed/relational.py --growth     # memory of tiles at t 8192 and 16384 as well: minutes

Whole layers, causal, forward and backward to the input and all parameters, with the same weights; the reference is our
layer with its other impls switched off.  Time is process CPU time, the minimum of interleaved repeats; memory is what
autograd keeps for the backward pass, parameters aside, and for growth the peak of a fresh process.
Nothing is timed unless all layers agree.  The package is no dependency of this one; it may lie anywhere on the path.
"""

import argparse
import json
import platform
import time
import unittest.mock
from collections.abc import Callable
from dataclasses import dataclass

import torch
from hyla import apart, high_water
from torch import Tensor, nn

import polyhead as ph
from polyhead.ops import dispatch
from polyhead.train import fast_products

Layer = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """One row of the table: `target` is how many times faster, `kept` which part of the memory, at most."""

    name: str
    b: int
    relations: int
    relative: bool
    target: float
    kept: float = 0.25
    dim: int = 256
    t: int = 1024


CASES = (
    Case("t 2048", 1, 8, False, 2.0, dim=512, t=2048),
    Case("R 8", 4, 8, False, 2.2),
    Case("R 32", 4, 32, False, 3.0),
    Case("relative, b 4", 4, 8, True, 5.0),
    Case("relative, b 1", 1, 8, True, 20.0),
)


def theirs(case: Case, options: argparse.Namespace, t: int) -> nn.ModuleDict:
    """The package's layer, with its table of symbols where there is one."""
    try:
        from dual_attention.relational_attention import RelationalAttention
        from dual_attention.symbol_retrieval import PositionRelativeSymbolRetriever
    except ImportError as error:
        raise SystemExit(f"relational: wants the package dual-attention (pip install it): {error}") from None
    relative = {"use_relative_positional_symbols": case.relative}
    layer = RelationalAttention(case.dim, options.heads, n_relations=case.relations, **relative)
    nn.init.normal_(layer.wr, std=0.3)
    return nn.ModuleDict({"layer": layer, "symbols": PositionRelativeSymbolRetriever(case.dim, t)})


def ours(case: Case, options: argparse.Namespace, package: nn.ModuleDict, t: int) -> ph.MultiHeadAttention:
    """The same layer here, with the same weights."""
    heads = ph.Relational(options.heads, relations=case.relations, symbols=ph.RelativeSymbols(distance=t))
    layer = ph.MultiHeadAttention(case.dim, heads, causal=True, max_length=t, own_symbols=case.relative)
    w = package["layer"].state_dict()
    state = {
        "qkv.weight": torch.cat((w["wq_attn.weight"], w["wk_attn.weight"])),
        "out.weight": w["wo.weight"],
        "groups.0.q_rel.weight": w["wq_rel.weight"],
        "groups.0.k_rel.weight": w["wk_rel.weight"],
        "groups.0.value.weight": w["wv.weight"],
        "groups.0.relation_weight": w["wr"],
    }
    if case.relative:
        state |= dict(zip(layer.symbols.state_dict(prefix="symbols."), package["symbols"].parameters(), strict=True))
    layer.load_state_dict(state)
    return layer


def sides(case: Case, options: argparse.Namespace, t: int) -> tuple[dict[str, Layer], dict[str, nn.Module], Tensor]:
    """Both layers as functions of x, as modules, and x."""
    torch.manual_seed(0)
    package = theirs(case, options, t)
    layer = ours(case, options, package, t)
    x = torch.randn(case.b, t, case.dim, requires_grad=True)
    symbols = torch.randn(case.b, t, case.dim)

    def run_package(x: Tensor) -> Tensor:
        given = package["symbols"](x) if case.relative else symbols
        return package["layer"](x, given, is_causal=True)[0]

    def run_ours(x: Tensor) -> Tensor:
        return layer(x) if case.relative else layer(x, symbols=symbols)

    def run_reference(x: Tensor) -> Tensor:
        with unittest.mock.patch.dict(dispatch.BACKENDS, relational=("reference",)):
            return run_ours(x)

    runs = {"package": run_package, "reference": run_reference, "ours": run_ours}
    return runs, {"package": package, "reference": layer, "ours": layer}, x


def both(run: Layer, x: Tensor) -> list[Tensor]:
    """Forward and backward; the output and the gradient of x."""
    x.grad = None
    out = run(x)
    out.square().sum().backward()
    assert x.grad is not None
    return [out.detach(), x.grad]


def check(case: Case, options: argparse.Namespace) -> None:
    """Refuse to time what is wrong."""
    for t in (1, 50, 200):
        runs, _, x = sides(case, options, t)
        wanted = both(runs["package"], x)
        for side in ("reference", "ours"):
            for came, want in zip(both(runs[side], x), wanted, strict=True):
                torch.testing.assert_close(came, want, rtol=1e-3, atol=1e-4)


def kept(run: Layer, module: nn.Module, x: Tensor) -> float:
    """MiB that wait for the backward pass, parameters and x aside."""
    apart = {p.untyped_storage().data_ptr() for p in (*module.parameters(), x)}
    found: dict[int, int] = {}

    def pack(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        if storage.data_ptr() not in apart:
            found[storage.data_ptr()] = storage.nbytes()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        out = run(x)
    del out
    return sum(found.values()) / 2**20


def measure(case: Case, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Seconds and MiB of both sides, and their ratios; the sides take turns."""
    runs, modules, x = sides(case, options, options.t or case.t)
    memory = {side: kept(run, modules[side], x) for side, run in runs.items()}
    seconds: dict[str, list[float]] = {side: [] for side in runs}
    for repeat in range(options.repeats + 1):
        for side, run in runs.items():
            start = time.process_time()
            both(run, x)
            if repeat:  # the first round warms up
                seconds[side].append(time.process_time() - start)
    fastest = {side: min(s) for side, s in seconds.items()}
    faster = {side: fastest[side] / fastest["ours"] for side in ("package", "reference")}
    part = {side: memory["ours"] / memory[side] for side in ("package", "reference")}
    return {"seconds": fastest, "kept": memory, "faster": faster, "part": part}


def peak(t: int) -> float:
    """Growth of the peak resident size in forward and backward of our layer, in MiB, in a process of its own."""
    torch.set_num_threads(1)
    layer = ph.MultiHeadAttention(512, ph.Relational(8, relations=8), causal=True, max_length=t)
    both(lambda x: layer(x, symbols=x), torch.randn(1, 256, 512, requires_grad=True))
    x = torch.randn(1, t, 512, requires_grad=True)
    before = high_water()
    both(lambda x: layer(x, symbols=x), x)
    return (high_water() - before) / 1024


def growth() -> dict[str, float]:
    """MiB at two lengths."""
    found = {str(t): apart(peak, t) for t in (8192, 16384)}
    return {**found, "ratio": found["16384"] / found["8192"]}


def figures(row: dict[str, dict[str, float]]) -> tuple[list[float], list[float]]:
    """Milliseconds, and MiB kept."""
    return [s * 1e3 for s in row["seconds"].values()], list(row["kept"].values())


def main() -> None:
    """Print the table, write the JSON, and fail if a target is missed at the size the targets are for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("heads", 8), ("t", 0), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--case", default="", help="only rows whose name contains this")
    parser.add_argument("--growth", action="store_true", help="memory of tiles at t 8192 and 16384, too")
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"relational attention, causal, {options.heads} heads, float32; package, reference, ours")
    print(f"{'':16}{'ms':>20}{'faster':>16}{'target':>8}{'kept MiB':>20}{'part':>13}{'target':>8}")
    rows, missed = {}, []
    for case in (case for case in CASES if options.case in case.name):
        check(case, options)
        row = rows[case.name] = measure(case, options)
        times, sizes = (" / ".join(f"{x:.0f}" for x in column) for column in figures(row))
        faster, part = (" / ".join(f"{x:.2f}" for x in row[name].values()) for name in ("faster", "part"))
        print(
            f"{case.name:16}{times:>20}{faster:>16}{case.target:8.1f}{sizes:>20}{part:>13}{case.kept:8.2f}", flush=True
        )
        if (
            row["faster"]["package"] < case.target
            or row["faster"]["reference"] < 2
            or max(row["part"].values()) > case.kept
        ):
            missed.append(case.name)
    if options.growth:
        row = rows["growth"] = growth()
        print(f"ours, t 8192 {row['8192']:.1f} MiB, t 16384 {row['16384']:.1f} MiB: {row['ratio']:.2f}x, target 2.2x")
        missed += ["growth"] if row["ratio"] > 2.2 else []
    if options.json:
        where = {"torch": torch.__version__, "platform": platform.platform(), "threads": 1}
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"options": vars(options), "rows": rows, "environment": where}, file, indent=2)
    if not options.t and missed:
        raise SystemExit(f"targets are missed: {', '.join(missed)}")


if __name__ == "__main__":
    with fast_products():
        main()
