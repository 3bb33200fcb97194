"""Every op beside an independent oracle, drawn as users call it: output and gradients at random sizes, dtypes, layouts.

    python benchmarks/parity_campaign.py [--kind ops] [--cases 20000] [--seed 0] [--json FILE]
    python benchmarks/parity_campaign.py --kind ops --seed 0 --case 123          # one case again, with its words
    python benchmarks/parity_campaign.py --impl native --cases 4000              # ops by one impl; or softmax:native

    ops       every op and impl of PyTorch beside tests/support/oracle.py (drawn by tests/support/agreement/cases.py)
    jax       every op and impl of JAX beside the same oracle, in 64 bits
    cache     models of random mixtures: decoding in pieces with a cache beside the full pass
    models    the same models: impl "auto" beside "reference", a batch beside its samples, packed beside separate
    steps     decoding steps beside the oracle's whole pass, cross entropies in tiles
    learned   ops of JAX with a scale that learns
    across    models with encoders: impls, batches and caches as above

Errors and bounds are those of measure.py and ops.py in tests/support/agreement: 1e-9 relative in float64; in other
dtypes twice the reference's own error; where the equation is ill-conditioned what rounding.py measures.  Each
failure is printed as the line that repeats it, and the exit code is then 1.  With --json the state is saved every few
seconds, and the same command goes on where it stopped; failures that it holds are tried again first.
"""

import argparse
import datetime
import json
import os
import pathlib
import pkgutil
import platform
import sys
import time
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests" / "support"))

import torch
from agreement.measure import Outcome
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

COUNTS = {"ops": 20_000, "jax": 500, "cache": 1_000, "models": 1_000, "learned": 40, "across": 110, "steps": 850}
"""Kinds and their cases."""

CHECKS = {
    **{kind: f"agreement.{kind}:check_number" for kind in ("ops", "jax", "steps")},
    **{kind: f"agreement.models:check_{kind}" for kind in ("models", "cache", "across")},
    "learned": "agreement.jax:check_learned",
}
"""Kind -> what gives the outcome of a case, in tests/support."""

SAVED = 10.0  # seconds between two savings
State = dict[str, Any]


def repeat(kind: str, seed: int, number: int, only: str = "", *, small: bool = False) -> str:
    which = f"--impl {only}" if only else f"--kind {kind}"
    return f"python benchmarks/parity_campaign.py {which} --seed {seed} --case {number}{' --small' * small}"


def fresh(seed: int) -> State:
    counts = {"cases": 0, "right": 0, "refused": 0, "overflow": 0}
    return {"seed": seed, **counts, "failures": [], "seconds": 0.0, "worst": {}, "conditioned": []}


def count(state: State, again: str, number: int, outcome: Outcome) -> None:
    """Add a case: how many of its group there were, and the one that came nearest to each bound."""
    state["cases"] += 1
    if outcome.failed:
        line = {
            "case": number,
            "repeat": again,
            "words": outcome.words,
            "detail": outcome.detail,
        }
        state["failures"].append(line)
        return
    state[outcome.what] += 1
    state["overflow"] += "overflow" in outcome.notes
    if "conditioned" in outcome.notes:
        errors = {name: [float(f"{x:.3g}") for x in pair] for name, pair in outcome.errors.items()}
        state["conditioned"].append({"case": number, "group": outcome.group, "errors and bounds": errors})
    for name, (error, bound) in outcome.errors.items():
        what = "output" if name == "output" else "gradient" if name.startswith("d") else name
        best = state["worst"].setdefault(f"{outcome.group} {what}", {"cases": 0, "error": -1.0, "of bound": -1.0})
        best["cases"] += 1
        best["error"] = max(best["error"], error)
        if (part := error / bound) > best["of bound"]:
            best |= {"of bound": part, "case": number}


def table(kind: str, state: State) -> Table:
    shown = Table("group", "quantities", "worst error", "of its bound", "case", title=f"{kind}: {state['cases']} cases")
    for name, best in sorted(state["worst"].items()):
        shown.add_row(name, str(best["cases"]), f"{best['error']:.1e}", f"{best['of bound']:.2g}", str(best["case"]))
    return shown


def read(path: str | None) -> State:
    if path is None or not os.path.exists(path):
        return {"kinds": {}}
    return json.loads(pathlib.Path(path).read_text(encoding="utf-8"))


def _machine() -> str:
    about = pathlib.Path("/proc/cpuinfo")
    named = [
        line.partition(":")[2].strip()
        for line in about.read_text(encoding="utf-8").splitlines()
        if line.startswith("model name")
    ]
    cores = f"{os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}"
    return ", ".join([*named[:1], platform.machine(), cores])


def write(path: str | None, found: State) -> None:
    if path is None:
        return
    about = {
        "date": datetime.date.today().isoformat(),
        "command": "python benchmarks/parity_campaign.py",
        "environment": {"python": platform.python_version(), "torch": torch.__version__, "machine": _machine()},
    }
    pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
    part = pathlib.Path(f"{path}.part")
    part.write_text(json.dumps({**about, "kinds": found["kinds"]}, indent=1) + "\n", encoding="utf-8")
    os.replace(part, path)


def go(
    kind: str, cases: int, seed: int, found: State, path: str | None, console: Console, *, how: dict[str, Any]
) -> State:
    """Cases up to number `cases`, from where the state stands; `how` says more of ops."""
    check, only = pkgutil.resolve_name(CHECKS[kind]), how.get("only", "")
    state = found["kinds"].setdefault(f"{kind} {only}".strip(), fresh(seed))
    if state["seed"] != seed:
        raise SystemExit(f"parity_campaign: the cases in {path} are of seed {state['seed']}, not {seed}")
    failed = [line["case"] for line in state["failures"]]
    saved = time.monotonic()
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task(kind, total=cases, completed=state["cases"] - len(failed))
        for number in [*failed, *range(state["cases"], cases)]:
            begun = time.process_time()
            outcome = check(seed, number, **how)
            state["seconds"] = round(state["seconds"] + time.process_time() - begun, 3)
            if number in failed:  # only now: a campaign that is killed before it has tried a failure again keeps it
                state["cases"] -= 1
                state["failures"] = [line for line in state["failures"] if line["case"] != number]
            again = repeat(kind, seed, number, only, small=how.get("small", False))
            count(state, again, number, outcome)
            if outcome.failed:
                console.print(f"{again}    # {outcome.detail}", soft_wrap=True, highlight=False)
            progress.update(bar, advance=1)
            if time.monotonic() - saved > SAVED:
                write(path, found)
                saved = time.monotonic()
    write(path, found)
    return state


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=COUNTS, action="append", help="of cases; all unless named")
    parser.add_argument("--cases", type=int, help="of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="this one alone, with its words")
    parser.add_argument("--impl", default="", help="ops by this impl alone, or OP:IMPL")
    parser.add_argument("--small", action="store_true", help="ops as `make test` draws them")
    parser.add_argument("--json", help="where results are saved, and gone on with")
    args = parser.parse_args()
    torch.set_num_threads(1)
    console, kinds = Console(), ["ops"] if args.impl else args.kind or list(COUNTS)
    how: dict[str, State] = {"ops": {"small": args.small, "only": args.impl}}
    if args.case is not None:
        outcome = pkgutil.resolve_name(CHECKS[kinds[0]])(args.seed, args.case, **how.get(kinds[0], {}))
        console.print(outcome, soft_wrap=True)
        return int(outcome.failed)
    found, failures = read(args.json), 0
    for kind in kinds:
        state = go(kind, args.cases or COUNTS[kind], args.seed, found, args.json, console, how=how.get(kind, {}))
        console.print(table(kind, state))
        failures += len(state["failures"])
        figures = ", ".join(f"{state[what]} {what}" for what in ("right", "refused"))
        console.print(f"{kind}: {figures}, {len(state['failures'])} failures, {state['seconds']:.0f} s of CPU")
        beyond = (
            f"{len(state['conditioned'])} ill-conditioned, {state['overflow']} with numbers too large for the dtype"
        )
        console.print(f"{kind}: {beyond}")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
