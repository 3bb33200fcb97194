"""`polyhead plan RECIPE`: the verb, its tables and its JSON."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from polyhead.cli.output import emit
from polyhead.cli.text import table
from polyhead.cli.train import configured, first_word
from polyhead.spec.shapes import check_number

if TYPE_CHECKING:
    from polyhead.config import Run
    from polyhead.scale.plan.estimate import Plan as Found


def verb(arguments: list[str]) -> int:
    """Estimate memory, time per step, days and the largest batch of a recipe on hardware you do not have.

    RECIPE and its fields are as for train.  --devices N and --card NAME set the hardware (h100, h200, a100, a100-40,
    l4, rtx4090, or this: the local GPU or processor, on which one step is measured); --parallel is data or sharded.
    --hours H also gives the number of steps in that time.  --share S is the share of the peak that kernels reach, and
    --link GB the gigabytes per second that a device sends, if known.  --json prints everything.  Every run of a recipe
    is planned, and the most expensive is shown.

    >>> polyhead plan lm-hyla --devices 64 --card h100 --train.batch-size 512
    >>> polyhead plan fuzzy-hyla
    >>> polyhead plan mine.yaml --devices 8 --card a100 --parallel sharded --hours 24 --json
    """
    recipe, rest = first_word("plan", arguments)
    runs, asked = configured("plan", recipe, [rest], kind=planning())
    if asked.hours is not None:
        check_number("plan", "hours", asked.hours, 0, above=True)
    return answer(runs, asked)


def answer(runs: Sequence["Run"], asked: Any) -> int:
    """Plan the runs and print the result; the exit code."""
    from polyhead.scale.plan.estimate import plan

    link = None if asked.link is None else asked.link * 1e9
    planned = partial(plan, devices=asked.devices, card=asked.card, share=asked.share, link=link)
    groups = alike(runs)
    alone = len(groups) == 1
    plans = [planned(group[0], search=alone) for group in groups]
    dearest = max(range(len(plans)), key=lambda i: plans[i].hours)
    chosen = plans[0] if alone else planned(groups[dearest][0])
    found = [{**one.to_dict(), "runs": len(group)} for one, group in zip(plans, groups, strict=True)]

    def tell() -> None:
        if len(runs) > 1:
            several(plans, groups)
        show(chosen, asked.hours)

    emit(lambda: chosen.to_dict() if len(runs) == 1 else {"dearest": chosen.to_dict(), "plans": found}, tell)
    return 0


def planning() -> Any:
    """The options of `plan`: the fields of a Run, and these.  Made when used, so that other commands need no Run."""
    from polyhead.config import Run

    @dataclass(frozen=True)
    class Planning:
        run: Annotated[Run, tyro.conf.arg(name="")]
        devices: Annotated[int, tyro.conf.arg(help="how many")] = 1
        card: Annotated[str, tyro.conf.arg(help="h100, h200, a100, a100-40, l4, rtx4090 or this")] = "this"
        hours: Annotated[float | None, tyro.conf.arg(help="also print the number of steps in this time")] = None
        share: Annotated[float | None, tyro.conf.arg(help="share of the peak that kernels reach, if known")] = None
        link: Annotated[float | None, tyro.conf.arg(help="GB per second that one device sends")] = None

    return Planning


def alike(runs: Sequence["Run"]) -> list[list["Run"]]:
    """Groups of runs with equal cost: runs that differ only in seed, name and rates."""
    from polyhead.config import Decay, to_dict

    groups: dict[str, list[Run]] = {}
    for run in runs:
        train = replace(run.train, lr=0.0, weight_decay=0.0, decay=Decay(), warmup=0, final=0.0, betas=(0.0, 0.0))
        # Not by digest: checkpointing, and how often a run is evaluated, cost something and change no result.
        alone = replace(run, name="", folder=None, seed=0, train=train)
        groups.setdefault(json.dumps(to_dict(alone), sort_keys=True), []).append(run)
    return list(groups.values())


def several(plans: Sequence["Found"], groups: Sequence[Sequence["Run"]]) -> None:
    """A row for each group of runs, and the total."""
    rows = [
        {
            "first of": one.name,
            "runs": len(group),
            "GB": f"{one.memory['total'] / 1e9:.3g}",
            "fits": "yes" if one.fits else "no",
            "ms a step": f"{one.seconds['step'] * 1e3:.3g}",
            "time of each": duration(one.hours),
        }
        for one, group in zip(plans, groups, strict=True)
    ]
    table("Kinds of runs", rows)
    total = sum(one.hours * len(group) for one, group in zip(plans, groups, strict=True))
    print(f"all {sum(map(len, groups))} runs, one after another: {duration(total)}; the most expensive:\n")


def show(found: "Found", hours: float | None = None) -> None:
    """Print the tables of one run, the verdict and the assumptions."""
    where = f"{found.devices} x {found.card}" + (f", {found.parallel}" if found.devices > 1 else "")
    pieces = f" x {found.accumulate} pieces" if found.accumulate > 1 else ""
    sequences = f"{found.devices} x {found.sequences}{pieces} = {found.batch_size} sequences"
    print(f"{found.name} on {where}: {found.parameters:,} parameters, {sequences}")
    table("Memory of a device", [{"": name, "GB": f"{size / 1e9:,.4f}"} for name, size in found.memory.items()])
    seconds = found.seconds if found.devices > 1 else {k: v for k, v in found.seconds.items() if k[:2] != "ex"}
    table("Time of a step", [{"": name, "ms": f"{value * 1e3:,.3g}"} for name, value in seconds.items()])
    print(f"verdict: {found.verdict}")
    rate = f"{found.sequences_per_second:,.0f} sequences, {found.tokens_per_second:,.0f} tokens a second"
    print(f"speed: {rate}; {found.share_of_peak:.1%} of the peak")
    print(f"time: {duration(found.hours)} for {found.steps:,} steps and their evaluations")
    if hours is not None:
        steps = min(found.steps, int(found.steps * hours / found.hours))
        print(f"in {duration(hours)}: {steps:,} of {found.steps:,} steps")
    print("assumed:")
    for name, value in found.assumptions:
        print(f"  {name}: {value}")


def duration(hours: float) -> str:
    """A time as text, in minutes, hours or days.

    >>> duration(0.2), duration(5.25), duration(80.0)
    ('12.0 minutes', '5.2 hours', '3.3 days')
    """
    if hours < 1:
        return f"{hours * 60:.1f} minutes"
    return f"{hours:.1f} hours" if hours < 48 else f"{hours / 24:.1f} days"
