"""Estimate memory, time per step, days and the largest batch of a run on hardware that you do not have.

    memory   parameters + gradients + 2 moments (AdamW) + buffers + the batch + activations and temporary tensors
    sharded  parameters, gradients and moments / devices, and gathered parameters: the rest of the model and two blocks
    step     sum over kernels of max(operations / peak, bytes / bandwidth) / share, on a GPU at least the launch time;
             + exposed communication + AdamW + drawing the batch
    data     all-reduce of the gradients: 2 (n - 1) / n of their bytes over the link, overlapped with the backward pass
    sharded  all-gather of all parameters in each forward pass and of the blocks' parameters in each backward pass, and
             one reduce-scatter of the gradients: (n - 1) / n of their bytes each, overlapped with the same pass

Kernels, operations, bytes and peak memory are counted op by op (`count.py`); nothing is allocated.
Ring collectives: Patarasuk and Yuan 2009.  The roofline: Williams et al. 2009.  Sharding: Rajbhandari et al. 2020
(ZeRO), here PyTorch's FSDP2 as `train/parallel.py` uses it.  `Plan.assumptions` lists the assumptions.
"""

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from polyhead.config import Batch, Run, TransformerConfig, check_run
from polyhead.models.build import build
from polyhead.scale.plan.cards import MACHINE, Card, card as card_of, quickest
from polyhead.scale.plan.count import Kernels, StepCounts, count, loss_of, size_of
from polyhead.spec.shapes import check_number
from polyhead.train import products
from polyhead.train.checks import check
from polyhead.train.device import process
from polyhead.train.evaluation import enough

SHARE = 0.5
"""The share of peak and bandwidth that a kernel reaches, if it was not measured."""

LAUNCH = 10e-6
"""Seconds per kernel launch from Python."""

RESERVED, FRAGMENTS = 1.5e9, 0.05
"""Bytes of a GPU used by CUDA, its libraries and NCCL; the share of the rest lost to fragmentation."""

LARGEST_BATCH, DRAWN = 1 << 16, 4096
"""The most sequences in a micro-batch that the search tries, and the most sequences drawn for timing."""


@dataclass(frozen=True)
class Plan:
    """The plan of one run on `devices` devices.  Memory is in bytes, time in seconds, per device and step."""

    name: str
    devices: int
    card: str
    parallel: str
    batch_size: int
    sequences: int
    """The micro-batch of one device: batch_size / devices / accumulate."""
    accumulate: int
    steps: int
    parameters: int
    memory: dict[str, float]
    """Memory by kind; `total` is the peak, which need not be their sum."""
    usable: float | None
    """None if unknown."""
    largest: int | None
    """The largest micro-batch that fits, a power of two; None if none fits, or without a limit."""
    seconds: dict[str, float]
    """Time of a step by kind; `exchange` is all communication, `exposed` the part that is not hidden."""
    operations: int
    share: float
    share_of_peak: float
    sequences_per_second: float
    tokens_per_second: float
    hours: float
    """The time of all steps and evaluations."""
    smallest_change: str | None
    """A change that makes it fit; None if it already fits, or if none was found."""
    assumptions: tuple[tuple[str, str], ...]

    @property
    def fits(self) -> bool:
        """Whether the peak of memory is usable; True if that is unknown."""
        return self.usable is None or self.memory["total"] <= self.usable

    @property
    def verdict(self) -> str:
        """Whether it fits, as one line."""
        total = self.memory["total"] / 1e9
        if self.usable is None:
            return f"needs {total:.2f} GB of each device"
        if self.fits:
            most = "" if self.largest is None else f"; up to {self.largest:,} sequences at a time would"
            return f"fits: {total:.2f} GB of {self.usable / 1e9:.1f} usable on each {self.card}{most}"
        change = self.smallest_change or "none was found"
        return (
            f"does not fit: needs {total:.1f} GB of {self.usable / 1e9:.1f} usable; smallest change that fits: {change}"
        )

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON values."""
        given = dataclasses.asdict(self)
        return given | {"fits": self.fits, "verdict": self.verdict, "assumptions": dict(self.assumptions)}


def plan(
    run: Run,
    *,
    devices: int = 1,
    card: str | Card = "this",
    share: float | None = None,
    link: float | None = None,
    search: bool = True,
) -> Plan:
    """Estimate the memory and time of `run` on `devices` cards, data parallel or sharded by `run.parallel`.

    `card`: a name of `cards.CARDS`, or "this": the local GPU or processor, on which one step is measured.
    `share`: the share of the peak that kernels reach, from a step measured elsewhere.  `link`: bytes per second that a
    device sends.  `search`: also find the largest batch, and a change that makes the run fit.  Raises ValueError for an
    unknown card, a wrong number of devices, and a batch that the devices cannot divide.
    """
    check_run("plan", run)
    check_number("plan", "devices", devices, 1)
    if share is not None and not 0 < share <= 1:
        raise ValueError(f"plan: share must be above 0 and at most 1 but is {share}")
    if link is not None and not link > 0:
        raise ValueError(f"plan: link must be above 0 but is {link:g}")
    here = replace(run, device="cuda" if torch.cuda.is_available() else "cpu")
    check(here)
    with process(here) as device, products.using(products.of_run(here, device)):
        place = _PlannedRun(run, devices, card if isinstance(card, Card) else card_of(card), link)
        have = place.counted(place.sequences)
        share, said = _share(place, have, share)
    seconds, memory = place.seconds(have, share), place.memory(have)
    step, each, usable = seconds["step"], run.train.batch_size, place.usable
    full = usable is not None and memory["total"] > usable
    operations = have.operations * run.train.accumulate
    return Plan(
        name=run.name, devices=devices, card=place.card.name, parallel=run.parallel, batch_size=each,
        sequences=place.sequences, accumulate=run.train.accumulate, steps=run.train.steps,
        parameters=sum(p.numel() for p in place.model.parameters()),
        memory=memory, usable=usable, largest=place.largest() if search else None,
        seconds=seconds, operations=operations, share=share, share_of_peak=operations / step / place.peak,
        sequences_per_second=each / step, tokens_per_second=each * (have.tokens / have.sequences) / step,
        hours=(run.train.steps * step + place.evaluating(have, share)) / 3600,
        smallest_change=_change(place) if full and search else None,
        assumptions=(said, *place.assumptions()),
    )  # fmt: skip


class _PlannedRun:
    """A run on its devices, with quantities that are counted once."""

    def __init__(self, run: Run, devices: int, card: Card, link: float | None = None) -> None:
        self.run, self.devices, self.card, self.link = run, devices, card, link
        pieces = devices * run.train.accumulate
        if run.train.batch_size % pieces:
            near = max(1, round(run.train.batch_size / pieces)) * pieces
            raise ValueError(
                f"plan: batch_size must be a multiple of {devices} devices x accumulate {run.train.accumulate} but is "
                f"{run.train.batch_size}; the nearest is {near}"
            )
        self.sequences = run.train.batch_size // pieces
        self.sharded = run.parallel == "sharded" and devices > 1
        self.sample = run.task.batch("train", 2, seed=run.seed, step=0)
        with torch.device("meta"):
            self.model = build(run.model, device="meta")
        self.known: dict[int, StepCounts] = {}

    def in_pieces(self, count: int) -> "_PlannedRun":
        """The same with batches in `count` pieces."""
        run = replace(self.run, train=replace(self.run.train, accumulate=count))
        return _PlannedRun(run, self.devices, self.card, self.link)

    def checkpointed(self) -> "_PlannedRun":
        run = replace(self.run, model=replace(self.run.transformer, checkpoint=True))
        return _PlannedRun(run, self.devices, self.card, self.link)

    def sharded_over(self, devices: int) -> "_PlannedRun":
        """The same, sharded over `devices` devices, with batches in one piece."""
        run = replace(self.run, parallel="sharded", train=replace(self.run.train, accumulate=1))
        return _PlannedRun(run, devices, self.card, self.link)

    def counted(self, sequences: int) -> StepCounts:
        if sequences not in self.known:
            self.known[sequences] = count(self.run, sequences, self.sample, card=not self.card.is_cpu)
        return self.known[sequences]

    # ------------------------------------------------------------------------------------------------------- memory
    @property
    def usable(self) -> float | None:
        if self.card.is_cpu:
            return self.card.memory if math.isfinite(self.card.memory) else None
        return (self.card.memory - RESERVED) * (1 - FRAGMENTS)

    def memory(self, have: StepCounts) -> dict[str, float]:
        trained = [p for p in self.model.parameters() if p.requires_grad]
        gradients = float(size_of(trained))
        moments = 2 * gradients + 4 * len(trained)  # plus the update count of each parameter
        inputs = have.inputs / have.sequences * self.run.train.batch_size  # each process draws the whole batch
        found = {"parameters": float(have.parameters), "gradients": gradients, "moments": moments}
        held = have.buffers + inputs
        found |= {"activations": float(have.kept), "batch and buffers": held}
        if not self.sharded:
            most = have.most - have.inputs - have.buffers  # gradients are allocated while activations are freed
            total = max(float(most), have.parameters + gradients) + moments + held
            return {**found, "total": total}
        root, unit = self.units
        for name in ("parameters", "gradients", "moments"):
            found[name] = self._part() * (2 if name == "moments" else 1)
        # Gathered parameters and their gradients; accumulation holds all gradients until the last micro-batch.
        found["gathered"] = 2 * (root + 2 * unit) if self.run.train.accumulate == 1 else root + 2 * unit + gradients
        own = found["parameters"] + found["gradients"] + found["moments"]
        return {**found, "total": own + found["gathered"] + have.beside + held}

    def _part(self) -> float:
        """Bytes of the largest part of the parameters, on the first device: each parameter is divided by rows."""
        divided = [p for p in self.model.parameters() if p.ndim and p.numel()]
        return float(sum(-(-len(p) // self.devices) * p[0].numel() * p.element_size() for p in divided))

    @property
    def units(self) -> tuple[float, float]:
        """Bytes that stay gathered during a step, and bytes of the largest FSDP unit."""
        from polyhead.train.parallel import units

        sizes = [float(size_of(unit.parameters())) for unit in units(self.model)]
        return size_of(self.model.parameters()) - sum(sizes), max(sizes, default=0.0)

    def fits(self) -> bool:
        usable = self.usable
        if usable is None or self.standing() > usable:
            return usable is None
        return self.memory(self.counted(self.sequences))["total"] <= usable

    def standing(self) -> float:
        """Bytes that are always allocated; they depend only on the parameters."""
        return 4.0 * (self._part() if self.sharded else size_of(self.model.parameters()))

    def largest(self) -> int | None:
        """The largest micro-batch that fits, a power of two: extrapolated linearly, then counted."""
        usable = self.usable
        if usable is None:
            return None

        def needs(n: int) -> float:
            return self.memory(self.counted(n))["total"]

        slope = max((needs(4) - needs(2)) / 2, 1.0)
        guess = int(min(max((usable - needs(2)) / slope + 2, 1), LARGEST_BATCH))
        at = 1 << (guess.bit_length() - 1)
        while at > 1 and needs(at) > usable:
            at //= 2
        while at < LARGEST_BATCH and needs(2 * at) <= usable:
            at *= 2
        return at if needs(at) <= usable else None

    # --------------------------------------------------------------------------------------------------------- time
    @property
    def peak(self) -> float:
        return self.card.fp32 if self.run.train.precision == "fp32" else self.card.narrow

    def working(self, kernels: Kernels, share: float) -> float:
        """Seconds of a pass.  The time to launch kernels is a lower bound on a GPU, and is added on a processor."""
        launch = sum(kind[3] for kind in kernels) * LAUNCH
        busy = sum(self.card.seconds(*kind[:3]) * kind[3] for kind in kernels)
        return (busy + launch) / share if self.card.is_cpu else max(busy / share, launch)

    def seconds(self, have: StepCounts, share: float) -> dict[str, float]:
        pieces = self.run.train.accumulate
        forward, backward = (self.working(kernels, share) for kernels in (have.forward, have.backward))
        each = self._part() if self.sharded else float(have.parameters)
        passes = 7 + 3 * (self.run.train.clip is not None)  # reads parameter, gradient, two moments; writes three
        found = {"forward": pieces * forward, "backward": pieces * backward}
        found["AdamW"] = self.card.seconds(0, round(passes * each), False) / share
        found["draw"] = quickest(self.draw, 3) * max(1.0, self.run.train.batch_size / DRAWN)
        reached = (self.link or self.card.between(self.devices)) * self.devices / max(1, self.devices - 1)
        whole = have.parameters / reached if self.devices > 1 else 0.0
        if self.sharded:
            again = whole - self.units[0] / reached  # parameters outside blocks are still gathered
            scattered = max(0.0, whole - max(0.0, backward - again))
            exchange = pieces * (whole + again) + whole
            exposed = pieces * (max(0.0, whole - forward) + max(0.0, again - backward)) + scattered
        else:
            exchange = 2 * whole
            exposed = max(0.0, exchange - backward)
        found |= {"exchange": exchange, "exposed": exposed}
        return {**found, "step": sum(found.values()) - exchange}

    def draw(self) -> Batch:
        return self.run.task.batch("train", min(self.run.train.batch_size, DRAWN), seed=self.run.seed, step=0)

    def evaluating(self, have: StepCounts, share: float) -> float:
        """Seconds of all evaluations, which the devices share."""
        train = self.run.train
        times = -(-train.steps // train.eval_every)
        each = self.working(have.forward, share) * train.batch_size / self.sequences / self.devices
        return (
            times * each * sum(enough(self.run.task, s, train.eval_batches, train.batch_size) for s in train.evaluate)
        )

    def assumptions(self) -> Iterable[tuple[str, str]]:
        """The assumptions about card and run, with their sources."""
        here = self.card
        narrow = f"{here.narrow / 1e12:.3g} bf16, {here.fp32 / 1e12:.3g} fp32 Tera-operations a second"
        yield here.full, f"{narrow}, {here.bandwidth / 1e9:,.0f} GB/s ({here.source})"
        if not here.is_cpu:
            yield (
                "memory",
                f"{RESERVED / 1e9} GB for CUDA and NCCL, {FRAGMENTS:.0%} of the rest lost to fragments (assumed)",
            )
            yield "launches", f"{LAUNCH * 1e6:.0f} microseconds each (assumed; without --compile)"
        if self.devices > 1:
            source = "given" if self.link else f"of one direction, {here.source}"
            speed = (self.link or here.between(self.devices)) / 1e9
            yield "link", f"{speed:,.4g} GB/s a device, {MACHINE} devices to a machine ({source}); no latency"
            yield "overlap", "communication is hidden behind the pass it belongs to (DDP, FSDP2)"
        yield "drawing a batch", "as measured here, not overlapped"


# ---------------------------------------------------------------------------------------------------- one measured step
def _share(place: _PlannedRun, have: StepCounts, given: float | None) -> tuple[float, tuple[str, str]]:
    """The share of the peak that kernels reach, and the assumption about it."""
    if given is not None:
        return given, ("share of the peak", f"{given:.2f} (given)")
    local = place.card.is_cpu or (torch.cuda.is_available() and place.card.full == torch.cuda.get_device_name())
    most = place.largest() if local else None
    if not local or (most is None and place.usable is not None):  # a step that does not fit would end this process
        said = "assumed: whole steps reach 0.44 to 0.52, Narayanan et al. 2021; large products alone 0.8, Bekman 2025"
        return SHARE, ("share of the peak", f"{SHARE} of peak and bandwidth, kernel by kernel ({said})")
    few = min(have.sequences, most or have.sequences)
    seconds = measured(place.run, few)
    here = place.counted(few)
    share = (place.working(here.forward, 1.0) + place.working(here.backward, 1.0)) / seconds
    return share, ("share of the peak", f"{share:.2f}: a step of {few} sequences took {seconds:.3g} s here")


def measured(run: Run, sequences: int, times: int = 3) -> float:
    """Seconds of a forward and backward pass of `sequences` sequences on this machine, the fastest of a few."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build(run.model).to(device).train()
    batch = run.task.batch("train", sequences, seed=run.seed, step=0, device=device)
    return quickest(lambda: step(model, run, batch), times)


def step(model: nn.Module, run: Run, batch: Batch, *, clear: bool = True) -> None:
    """One forward and backward pass as in the trainer, without an update."""
    if clear:
        model.zero_grad(set_to_none=True)
    loss_of(model, run, batch).backward()


# ------------------------------------------------------------------------------------------------------- what would fit
def _change(place: _PlannedRun) -> str | None:
    """The smallest change to make the run fit: accumulation, checkpointing, sharding or more devices, in this order."""
    train, devices = place.run.train, place.devices
    again = isinstance(place.run.model, TransformerConfig) and not place.run.model.checkpoint
    if (pieces := _pieces(place)) is not None:
        return f"--train.accumulate {pieces}"
    if again:
        deep = place.checkpointed()
        if deep.fits():
            return "--model.checkpoint"
        if (pieces := _pieces(deep)) is not None:
            return f"--model.checkpoint --train.accumulate {pieces}"
    for n in (devices, *(1 << i for i in range(1, 11) if 1 << i > devices)):
        if n == 1 or train.batch_size % n or (place.sharded and n == devices):
            continue
        words = "--parallel sharded" + (f" --devices {n}" if n > devices else "")
        words += " --train.accumulate 1" if train.accumulate > 1 else ""
        wide = place.sharded_over(n)
        if wide.fits():
            return words
        if again and wide.checkpointed().fits():
            return f"{words} --model.checkpoint"
    return None


def _pieces(place: _PlannedRun) -> int | None:
    """The fewest micro-batches that fit: extrapolated linearly from one and two sequences, then counted."""
    train, usable = place.run.train, place.usable or 0.0
    rows = train.batch_size // place.devices
    many = [n for n in range(train.accumulate + 1, rows + 1) if rows % n == 0]
    if not many or place.standing() > usable:
        return None
    cut = place.in_pieces(many[0])
    one, two = (cut.memory(cut.counted(n))["total"] for n in (1, 2))
    near = [n for n in many if one + (two - one) * (rows // n - 1) <= 1.02 * usable]
    return next((n for n in near if place.in_pieces(n).fits()), None)
