"""Relational attention against the authors' package `dual-attention`, on one CPU thread: time and memory.

    pip install dual-attention && python benchmarks/bench_relational.py --json relational.json

Whole layers, causal, forward and backward to the input and all parameters, with the same weights.  Time is process
CPU time, the minimum of interleaved repeats; memory is what autograd keeps for the backward pass, parameters aside.
Nothing is timed unless both layers agree.  The package is no dependency of this one; it may lie anywhere on the path.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import polyhead as ph

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


CASES = (
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
        raise SystemExit(f"bench_relational: wants the package dual-attention (pip install it): {error}") from None
    relative = {"use_relative_positional_symbols": case.relative}
    layer = RelationalAttention(options.dim, options.heads, n_relations=case.relations, **relative)
    nn.init.normal_(layer.wr, std=0.3)
    return nn.ModuleDict({"layer": layer, "symbols": PositionRelativeSymbolRetriever(options.dim, t)})


def ours(case: Case, options: argparse.Namespace, package: nn.ModuleDict, t: int) -> ph.MultiHeadAttention:
    """The same layer here, with the same weights."""
    heads = ph.Relational(options.heads, relations=case.relations, symbols=ph.RelativeSymbols(distance=t))
    layer = ph.MultiHeadAttention(options.dim, heads, causal=True, max_length=t, own_symbols=case.relative)
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
    x = torch.randn(case.b, t, options.dim, requires_grad=True)
    symbols = torch.randn(case.b, t, options.dim)

    def run_package(x: Tensor) -> Tensor:
        given = package["symbols"](x) if case.relative else symbols
        return package["layer"](x, given, is_causal=True)[0]

    def run_ours(x: Tensor) -> Tensor:
        return layer(x) if case.relative else layer(x, symbols=symbols)

    return {"package": run_package, "ours": run_ours}, {"package": package, "ours": layer}, x


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
        for came, want in zip(both(runs["ours"], x), wanted, strict=True):
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
    runs, modules, x = sides(case, options, options.t)
    memory = {side: kept(run, modules[side], x) for side, run in runs.items()}
    seconds: dict[str, list[float]] = {side: [] for side in runs}
    for repeat in range(options.repeats + 1):
        for side, run in runs.items():
            start = time.process_time()
            both(run, x)
            if repeat:  # the first round warms up
                seconds[side].append(time.process_time() - start)
    fastest = {side: min(s) for side, s in seconds.items()}
    return {
        "seconds": {**fastest, "ratio": fastest["package"] / fastest["ours"]},
        "kept": {**memory, "ratio": memory["ours"] / memory["package"]},
    }


def main() -> None:
    """Print the table, write the JSON, and fail if a target is missed at the size the targets are for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("dim", 256), ("heads", 8), ("t", 1024), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--case", default="", help="only rows whose name contains this")
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"relational attention, causal, width {options.dim}, {options.heads} heads, t {options.t}, float32")
    print(f"{'':16}{'package':>12}{'ours':>12}{'faster':>9}{'target':>9}{'kept':>20}{'part':>7}{'target':>8}")
    rows, missed = {}, []
    for case in (case for case in CASES if options.case in case.name):
        check(case, options)
        row = rows[case.name] = measure(case, options)
        seconds, memory = row["seconds"], row["kept"]
        times = f"{seconds['package'] * 1e3:>9.0f} ms{seconds['ours'] * 1e3:>9.0f} ms"
        sizes = f"{memory['package']:>9.0f} /{memory['ours']:>5.0f} MiB"
        print(
            f"{case.name:16}{times}{seconds['ratio']:8.1f}x{case.target:8.1f}x"
            f"{sizes}{memory['ratio']:7.2f}{case.kept:8.2f}",
            flush=True,
        )
        if seconds["ratio"] < case.target or memory["ratio"] > case.kept:
            missed.append(case.name)
    if options.json:
        where = {"torch": torch.__version__, "platform": platform.platform(), "threads": 1}
        with open(options.json, "w") as file:
            json.dump({"options": vars(options), "rows": rows, "environment": where}, file, indent=2)
    if options.t >= 1024 and missed:
        raise SystemExit(f"targets are missed: {', '.join(missed)}")


if __name__ == "__main__":
    main()
