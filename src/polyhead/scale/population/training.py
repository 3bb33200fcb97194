"""Runs of one architecture trained together in one process: all seeds and hyper-parameters of a figure at once.

`groups` says who goes together: runs that differ in name, seed, the `split_seed` of their task and what AdamW does
(learning rate, warm-up, decay, clipping) alone.  Each member writes the folder it would have written alone, so that
afterwards it is an ordinary run: it can be evaluated, resumed, or continued in another population.  Its losses are
those it has alone, to rounding: the batches, the initial parameters and the draws of dropout are the same functions of
its own seed.

Members at different steps (a population that was cut short and a run that was not in it), or with other matrix products
so far, are trained in populations of their own.  What fits into none is trained by `trainer.run`: a member without
company, and whatever `stacked.refusal` names.
"""

import contextlib
import ctypes
import dataclasses
import json
import math
import os
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from polyhead import config as configs
from polyhead.config import Run
from polyhead.scale.population.member import Member, recover
from polyhead.scale.population.stacked import Stack, refusal
from polyhead.scale.sweep.job import Failure
from polyhead.scale.sweep.jobs import MEMORY, prepare
from polyhead.train import optimiser, products
from polyhead.train.checks import check
from polyhead.train.device import process
from polyhead.train.progress import Progress
from polyhead.train.stop import Interrupted, Stop
from polyhead.train.store.bad_batch import first_bad
from polyhead.train.store.checkpoint import load_optimiser, load_weights, save_checkpoint
from polyhead.train.store.claims import claim
from polyhead.train.store.disk import UNSAVED, Patience
from polyhead.train.store.folder import CHECKPOINT, CONFIG, Result, environment, finished, write_result
from polyhead.train.store.saving import diverged
from polyhead.train.trainer import run

MOST = 256
"""Members of one population, at most: each holds two open files."""

Outcomes = dict[pathlib.Path, Result | Failure]

CACHED = 1 << 20
"""Activations between two layers that a CPU keeps at hand: so many networks go through one pass, if at least `FEW`.

Steps of 24 networks on one core, milliseconds a network, at 2^15 activations each: 4.0 one by one, 1.6 by 8, 1.2 by 24;
at 2^17: 7.4, 4.7, 4.6; at 2^19: 12.3, 10.0, 12.8 for width 32 and no gain for width 64.
"""

FEW = 4
"""Fewer in a pass are no faster than one by one."""


def train(
    runs: Sequence[Run],
    folder: str | pathlib.Path,
    *,
    progress: bool = True,
    again: bool = False,
    at_once: int | None = None,
) -> list[Result | Failure]:
    """Train every run in `folder`/NAME-DIGEST, groups of like runs together; results or failures in their order.

    What is finished is skipped, what was begun goes on.  `again`: forget what is there and start over.  `at_once`:
    networks in one pass (default: all on an accelerator, as many as its cache holds on a CPU).  A member whose loss
    ceases to be finite becomes a Failure and leaves the others alone.  On a CPU the process from then on keeps memory
    that it frees, which is faster.  Raises ValueError for a run that occurs twice, Interrupted after Ctrl-C or SIGTERM,
    when all have saved.
    """
    places = prepare("population", runs, folder, again=again)
    if at_once is not None and at_once < 1:
        raise ValueError(f"population: at_once must be at least 1 but is {at_once}")
    outcomes: Outcomes = {}
    members: list[Run] = []
    stop = Stop()
    for config, place in zip(runs, places, strict=True):
        if (result := finished(place, configs.digest(config))) is not None:
            outcomes[place] = result
        else:
            members.append(dataclasses.replace(config, folder=str(place)))
    try:
        with stop:
            for part in [part for group in groups(members) for part in _of_one_step(group, outcomes)]:
                _train(part, outcomes, stop, progress, at_once)
                if stop.asked:
                    raise Interrupted
    except Interrupted as stopped:
        said = str(stopped) if str(stopped).startswith(UNSAVED) else "stopped and saved"
        done = sum(isinstance(outcome, Result) for outcome in outcomes.values())
        text = f"{said}; {done} of {len(runs)} runs are done, the same command goes on"
        raise stop.interrupted(text) from None
    return [outcomes[place] for place in places]


def groups(runs: Sequence[Run]) -> list[list[Run]]:
    """`runs` in groups that can be trained together, each in the order of its first run."""
    found: dict[object, list[Run]] = {}
    for i, config in enumerate(runs):
        alone = refusal(config) is not None
        found.setdefault(i if alone else _kind(config), []).append(config)
    return [group[i : i + MOST] for group in found.values() for i in range(0, len(group), MOST)]


def _kind(config: Run) -> str:
    """All of a run that its population shares, as text."""
    some, own = configs.Train(), ("lr", "weight_decay", "warmup", "final", "early_floor", "clip", "betas", "eps")
    train = dataclasses.replace(config.train, **{name: getattr(some, name) for name in own})
    task: Any = config.task
    if hasattr(task, "split_seed"):  # what is held out is a matter of the data, which each member has its own of
        task = dataclasses.replace(task, split_seed=0)
    common = dataclasses.replace(config, name="", seed=0, folder=None, train=train, task=task)
    return json.dumps(configs.to_dict(common), sort_keys=True)


def _of_one_step(group: Sequence[Run], outcomes: Outcomes) -> list[list[Run]]:
    """The members of a group by the step they have reached and their products so far; one that another process trains
    is a failure."""
    parts: dict[tuple[int, bool | None], list[Run]] = {}
    for config in group:
        folder = pathlib.Path(str(config.folder))
        try:
            with claim(config, folder):
                found = recover(config, folder)
            at = (found[1]["step"], found[1].get("fast_products", False)) if found else (0, None)
            parts.setdefault(at, []).append(config)
        except ValueError as error:
            outcomes[folder] = Failure(config.name, folder, 2, str(error))
    return list(parts.values())


def _train(part: Sequence[Run], outcomes: Outcomes, stop: Stop, progress: bool, at_once: int | None) -> None:
    """Train runs that can be trained together; a lone one as it is always trained."""
    if len(part) > 1:
        _together(part, outcomes, stop, progress, at_once)
        return
    folder = pathlib.Path(str(part[0].folder))
    try:
        outcomes[folder] = run(part[0], progress=progress, resume=True)
    except (ValueError, OSError) as error:
        outcomes[folder] = _failure(part[0], folder, error)


def _failure(config: Run, folder: pathlib.Path, error: ValueError | OSError) -> Failure:
    """What the worker of a sweep says of such an end."""
    if isinstance(error, OSError):
        return Failure(config.name, folder, 1, error.strerror or str(error))
    return Failure(config.name, folder, 2, str(error))


def _together(part: Sequence[Run], outcomes: Outcomes, stop: Stop, progress: bool, at_once: int | None) -> None:
    patience = Patience(stop)
    with contextlib.ExitStack() as held:
        members = []
        for config in part:
            folder = pathlib.Path(str(config.folder))
            try:
                check(config)
                held.enter_context(claim(config, folder))
                config.task.keep(folder)
                members.append(Member(config, folder, patience))
                held.callback(members[-1].metrics.close)
            except (ValueError, OSError) as error:
                outcomes[folder] = _failure(config, folder, error)
        if not members:
            return
        with process(part[0]) as device:
            if device.type == "cpu":
                _keep_memory()
            loop = _Population(members, device, at_once or networks_at_once(part[0], device), progress)
            try:
                loop.fit(stop)
            except OSError as error:  # one that waiting does not mend
                loop.outcomes |= {m.folder: _failure(m.config, m.folder, error) for m in loop.members}
            finally:
                loop.progress.close()
                outcomes |= loop.outcomes


def networks_at_once(config: Run, device: torch.device) -> int:
    """Networks in one pass: all on an accelerator and in compiled code, on a CPU as many as its cache holds.

    A pass of tiny networks is mostly overhead, which they share; larger ones only push each other out of the cache.
    """
    if device.type != "cpu" or config.compile:
        return MOST
    model, length = config.transformer, config.task.length
    heads = max(sum(group.heads for group in model.layer_heads(i)) for i in range(model.layers))
    fit = CACHED // (config.train.batch_size * length * max(4 * model.dim, heads * length))
    return fit if fit >= FEW else 1


def _keep_memory() -> None:
    """Let the C library keep what is freed, as workers of a sweep do: else every step asks the system for it anew.

    12 to 18 % of the steps of the paper's and the demo's shape on one core.
    """
    if sys.platform == "linux" and not any(name in os.environ for name in MEMORY):
        with contextlib.suppress(AttributeError, OSError):  # no glibc
            mallopt = ctypes.CDLL(None).mallopt
            mallopt(-1, int(MEMORY["MALLOC_TRIM_THRESHOLD_"]))
            mallopt(-3, int(MEMORY["MALLOC_MMAP_THRESHOLD_"]))


class _Population:
    """The state of runs that are trained together: their stack, `step` updates done, who has ended and how."""

    def __init__(self, members: list[Member], device: torch.device, at_once: int, progress: bool) -> None:
        self.members, self.device = members, device
        first = members[0].config
        self.train, self.task, self.step = first.train, first.task, members[0].step
        self.products = products.of_run(first, device, members[0].fast)
        self.outcomes: Outcomes = {}
        self.stack = Stack([member.config for member in members], device, at_once)
        for i, member in enumerate(members):
            self._load(i, member)
        name = f"{first.name} and {len(members) - 1} more"
        self.progress = Progress(name, self.task.metric, start=self.step, steps=self.train.steps, enabled=progress)
        self.progress.line(f"{name}: from step {self.step}, {min(at_once, len(members))} in a pass")
        self.charged = self.ticked = time.perf_counter()
        self.counted = 0  # steps since `ticked`

    def fit(self, stop: Stop) -> None:
        with products.using(self.products):
            self._fit(stop)

    def _fit(self, stop: Stop) -> None:
        train, scored = self.train, False
        while self.step < train.steps and self.members:
            last = self.step + 1 == train.steps
            wanted = last or self.step == 0 or (self.step + 1) % train.log_every == 0
            values = self.stack.step(self.step, wanted=wanted)
            self.step += 1
            self.counted += 1
            self.progress.step()
            if wanted:
                self._log(values)
            if self.members and (scored := last or self.step % train.eval_every == 0):
                self._evaluate()
            if self.members and (last or stop.asked or self.step % train.save_every == 0):
                self._save()
            if stop.asked and not last:
                raise Interrupted("stopped and saved")
        if self.members and not scored:
            self._evaluate()
        for member in self.members:
            self._finish(member)
            self.progress.line(f"{member.config.name}: done ({member.folder})")
        self.members = []

    def _log(self, values: dict[str, torch.Tensor]) -> None:
        """A row of training for each member: the loss and metrics of its own batch."""
        self._charge()
        columns = {name: value.tolist() for name, value in values.items()}
        rate = self.counted / (time.perf_counter() - self.ticked)
        rows = [{name: column[i] for name, column in columns.items()} for i in range(len(self.members))]
        for member, row in zip(self.members, rows, strict=True):
            norm = row.pop("grad_norm")
            row |= {"lr": optimiser.learning_rate(self.step - 1, member.config.train)}
            row |= {"grad_norm": norm if math.isfinite(norm) else None, "steps_per_second": rate}
            if math.isfinite(row["loss"]):
                member.add({"kind": "train", "step": self.step, **row})
        self._drop({i: f"the loss of {{}} is {row['loss']}" for i, row in enumerate(rows) if not _finite(row["loss"])})
        self.progress.trained({"step": self.step, **_mean([row for row in rows if _finite(row["loss"])] or rows)})
        self._tick()

    def _evaluate(self) -> None:
        """A row for each member and split."""
        began = time.perf_counter()
        for split in self.train.evaluate:
            scores = self.stack.evaluate(split)
            self._charge()
            for member, own in zip(self.members, scores, strict=True):
                member.scores[split] = own
                member.add({"kind": "eval", "step": self.step, "split": split, **own})
            self.progress.evaluated({"split": split, **_mean(scores)})
        for member in self.members:
            member.rating.evaluated(self.step, member.scores)
        self.ticked += time.perf_counter() - began

    def _save(self) -> None:
        began = time.perf_counter()
        whole = self.stack.rows.isfinite().all(dim=1).tolist()
        self._drop({i: "parameters of {} are not finite" for i, fine in enumerate(whole) if not fine})
        self._charge()
        for i, member in enumerate(self.members):
            rows = member.metrics.sync()  # rows before the checkpoint that vouches for them
            model, adamw = self._alone(i, member)
            score, best = member.rating.at(self.step)
            metadata = {"digest": member.digest, "step": self.step, "seconds": member.seconds}
            metadata |= {"score": score, "scaler": {}, "rows": rows, "fast_products": self.products.fast}
            how: Any = {"keep": self.train.keep, "best": best, "patience": member.patience}
            save_checkpoint(member.folder, model, adamw, metadata, **how)
            member.rating.kept(self.step)
            member.saved = self.step
        self.ticked += time.perf_counter() - began

    def _alone(self, i: int, member: Member) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        """The model and the optimiser of a member as the trainer has them, on our memory."""
        model = self.stack.show(i)
        adamw = optimiser.build(model, member.config.train)
        for parameter, state in self.stack.moments(i).items():
            adamw.state[parameter] = {**state, "step": torch.tensor(float(self.step), dtype=torch.float32)}
        return model, adamw

    def _load(self, i: int, member: Member) -> None:
        if member.tensors is None:
            return
        path = member.folder / CHECKPOINT
        model, adamw = self._alone(i, member)
        load_weights(model, member.tensors, path)
        load_optimiser(model, adamw, member.tensors, path)
        for parameter, state in self.stack.moments(i).items():
            for name, value in state.items():
                value.copy_(adamw.state[parameter][name])
        member.tensors = None

    def _drop(self, lost: dict[int, str]) -> None:
        """Go on without the members `lost`, whose trouble is told with their name left open."""
        if not lost:
            self.stack.seen.clear()
            return
        for i, what in lost.items():
            config, folder = self.members[i].config, self.members[i].folder
            bad = first_bad([torch.cat(parts)[i] for parts in self.stack.seen])
            first = self.step if bad is None else self.step - len(self.stack.seen) + bad + 1
            told = what.format(config.name)
            error = diverged(told, config, folder, self.step, first, self.members[i].saved)
            self.outcomes[folder] = Failure(config.name, folder, 2, error)
            self.progress.line(f"{config.name}: failed: {error}")
        left = [i for i in range(len(self.members)) if i not in lost]
        self.members = [self.members[i] for i in left]
        if left:
            self.stack.select(left)

    def _finish(self, member: Member) -> None:
        result = Result(
            name=member.config.name,
            digest=member.digest,
            steps=self.step,
            seconds=member.seconds,
            parameters=sum(self.stack.sizes),
            scores=member.scores,
            command=f"python -m polyhead.train {member.folder / CONFIG}",
            environment={**environment(self.device), "population": len(self.members)},
            folder=member.folder,
        )
        member.metrics.finish(result)
        member.patience(lambda: write_result(result))
        self.outcomes[member.folder] = result

    def _charge(self) -> None:
        """Share the time since the last call among the members: their seconds add up to what the population took."""
        now = time.perf_counter()
        for member in self.members:
            member.seconds += (now - self.charged) / len(self.members)
        self.charged = now

    def _tick(self) -> None:
        self.ticked, self.counted = time.perf_counter(), 0


def _mean(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of numbers of all members, for the person who watches."""
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    shown = {name: column for name, column in columns.items() if all(isinstance(value, float) for value in column)}
    return {name: sum(column) / len(column) for name, column in shown.items()}  # the norm of a gradient may be None


def _finite(value: float) -> bool:
    return math.isfinite(value)
