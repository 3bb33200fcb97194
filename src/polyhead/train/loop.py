"""A plain training loop.  It can be killed at any moment; a resumed run gives the same result.

It trains one run, or many runs of one architecture together.  `Networks` hides the difference.
"""

import functools
import math
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from polyhead.config import Run
from polyhead.train import optimiser, products
from polyhead.train.member import Member
from polyhead.train.network import Networks, Single
from polyhead.train.progress import Progress
from polyhead.train.stop import StopSignals
from polyhead.train.store.disk import DiskRetry
from polyhead.train.store.folder import Result, environment
from polyhead.train.store.state import State, write_end
from polyhead.train.world import StopBroadcast, World

Row = dict[str, Any]
Callback = Callable[[Row], object]
"""Called with every row of metrics.jsonl when it is written."""


def _raised(member: Member, outcome: Result | ValueError | OSError) -> None:
    """What `ended` does for a single run: it raises the run's error."""
    if isinstance(outcome, Exception):
        raise outcome


def alone(
    config: Run,
    folder: pathlib.Path,
    device: torch.device,
    progress: bool = False,
    stop: StopSignals | None = None,
    world: World | None = None,
    *,
    callbacks: Sequence[Callback] = (),
) -> "Loop":
    """The loop of one run."""
    retry = DiskRetry(stop or StopSignals(), speaks=world is None or world.first)
    member, network = Member(config, folder, retry, world), Single(config, device, world)
    return Loop([member], network, device, progress=progress, callbacks=callbacks)


class Loop:
    """`members`, whose networks are `networks`, after `step` updates.

    `ended` is called with each member's result or error when it ends.  The others continue.
    """

    def __init__(
        self,
        members: Sequence[Member],
        networks: Networks,
        device: torch.device,
        *,
        progress: bool,
        callbacks: Sequence[Callback] = (),
        ended: Callable[[Member, Result | ValueError | OSError], None] = _raised,
    ) -> None:
        self.members, self.networks, self.device, self.ended = list(members), networks, device, ended
        self.callbacks = callbacks
        first = members[0].config
        self.train, self.world = first.train, members[0].world
        self.stopping = StopBroadcast(self.world)
        self.step = self._load()
        began = self.members[0].fast if self.members else None
        own = products.of_run(first, device, began, speaks=self.world.first)
        self.products = products.agreed(own, self.world)
        for member in self.members:
            member.fast = self.products.fast
        name = first.name if len(members) == 1 else f"{first.name} and {len(members) - 1} more"
        shown = progress and self.world.first
        self.progress = Progress(name, first.task.metric, start=self.step, steps=self.train.steps, enabled=shown)
        if self.members and self.step < self.train.steps:
            folder = self.members[0].folder
            self.progress.begin(folder if len(members) == 1 else folder.parent, networks.parameters)
        self.charged = self.ticked = time.perf_counter()
        self.counted = 0  # steps since `ticked`

    def _load(self) -> int:
        """Load every member's last checkpoint, all of the same step; a member with unreadable files ends."""
        lost: list[int] = []
        steps: set[int] = set()
        for i, member in enumerate(self.members):
            try:
                state = self.networks.alone(i, 0)
                if member.load(state):
                    self.networks.loaded(i, state)
                if steps and member.step not in steps:
                    raise ValueError(f"train: {member.config.name} is at step {member.step}, the others at {steps}")
                member.begin()
                steps.add(member.step)
            except (ValueError, OSError) as error:
                self.ended(member, error)
                lost.append(i)
        self._leave(lost)
        return steps.pop() if steps else 0

    def _leave(self, lost: Sequence[int]) -> None:
        """Continue without the members `lost`."""
        for i in lost:
            self.members[i].close()
        left = [i for i in range(len(self.members)) if i not in lost]
        self.members = [self.members[i] for i in left]
        if lost and left:
            self.networks.select(left)

    def fit(self, stop: StopSignals) -> list[Result]:
        """Train to the end; returns the results of the members that reach it.  Raises Interrupted after a signal."""
        train, scored = self.train, False
        with products.using(self.products):
            while self.step < train.steps and self.members:
                last = self.step + 1 == train.steps
                wanted = last or self.step == 0 or (self.step + 1) % train.log_every == 0
                values = self._update(wanted)
                self.progress.step()
                if wanted:
                    self._log(values)
                if scored := last or self.step % train.eval_every == 0:
                    self._evaluate()
                asked = self.stopping.exchange(stop.asked)
                if last or asked or self.step % train.save_every == 0:
                    self._save()
                if asked and not last:
                    stop.asked = asked
                    self.world.on_rank_zero(lambda: self._stop(stop))
            self.stopping.last()
            if not scored:
                self._evaluate()
            return [self._finish(i) for i in range(len(self.members))]

    def _stop(self, stop: StopSignals) -> int:
        devices = f" --devices {self.world.size}" if self.world.size > 1 else ""
        folders = " ".join(str(member.folder) for member in self.members)
        raise stop.interrupted(
            f"stopped and saved at step {self.step}; resume with: polyhead resume {folders}{devices}"
        )

    def _update(self, wanted: bool = False) -> dict[str, Tensor]:
        values = self.networks.step(self.step, wanted=wanted)
        torch.clear_autocast_cache()  # within another autocast, that of a step keeps the casts of weights
        self.step += 1
        self.counted += 1
        return values

    def _log(self, values: dict[str, Tensor]) -> None:
        """Write a training row for each member: loss and metrics of its own batch."""
        columns = {name: value.tolist() for name, value in values.items()}
        self._charge()
        rate = self.counted / (time.perf_counter() - self.ticked)
        rows, lost = [], {}
        for i, member in enumerate(self.members):
            row = {name: column[i] for name, column in columns.items()}
            norm = row.pop("grad_norm")
            row |= {"lr": optimiser.learning_rate(self.step - 1, member.config.train)}
            row |= {"grad_norm": norm if math.isfinite(norm) else None, "steps_per_second": rate}
            if math.isfinite(row["loss"]):
                rows.append(row | self.networks.rates(rate))
                self._add(member, {"kind": "train", "step": self.step, **rows[-1]})
            else:
                lost[i] = f"the loss of {member.config.name} is {row['loss']}"
        self._drop(lost)
        if rows:
            self.progress.trained({"step": self.step, **_mean(rows)})
        self.ticked, self.counted = time.perf_counter(), 0

    def _add(self, member: Member, row: Row) -> None:
        member.add(row)
        for tell in self.callbacks if self.world.first else ():
            tell(dict(row))

    def _evaluate(self) -> None:
        """Evaluate: write a row for each member and split."""
        began = time.perf_counter()
        for split in self.train.evaluate if self.members else ():
            scores = self.networks.evaluate(split)
            self._charge()
            for member, own in zip(self.members, scores, strict=True):
                member.scores[split] = own
                self._add(member, {"kind": "eval", "step": self.step, "split": split, **own})
            self.progress.evaluated({"split": split, **_mean(scores)})
        for member in self.members:
            member.rating.evaluated(self.step, member.scores)
        self.ticked += time.perf_counter() - began

    def _save(self) -> None:
        began = time.perf_counter()
        fine = self.networks.finite() if self.members else []
        names = [member.config.name for member in self.members]
        self._drop({i: f"parameters of {names[i]} are not finite" for i, each in enumerate(fine) if not each})
        self._charge()
        for i, member in enumerate(self.members):
            member.save(self.step, self.networks.alone(i, self.step))
        self.ticked += time.perf_counter() - began

    def _drop(self, lost: dict[int, str]) -> None:
        """End the diverged members `lost`, with their error texts."""
        for i, what in lost.items():
            losses = self.networks.recent(i)
            self.world.on_rank_zero(functools.partial(self._diverged, self.members[i], what, losses))
        self.networks.seen.clear()
        self._leave(list(lost))

    def _diverged(self, member: Member, what: str, losses: Sequence[Tensor]) -> int:
        error = member.trouble(what, self.step, losses, self.device)
        write_end(member.folder, State.FAILED, str(error))
        self.ended(member, error)
        return 0

    def _finish(self, i: int) -> Result:
        member, about = self.members[i], environment(self.device) | self.networks.environment()
        state = self.networks.alone(i, self.step)
        result = member.finish(state, parameters=self.networks.parameters, environment=about)
        self.ended(member, result)
        return result

    def _charge(self) -> None:
        """Divide the time since the last call among the members, so that their seconds add up to the loop's time."""
        now = time.perf_counter()
        for member in self.members:
            member.seconds += (now - self.charged) / len(self.members)
        self.charged = now

    def close(self) -> None:
        for member in self.members:
            member.close()
        self.progress.close()


def _mean(rows: Sequence[Row]) -> Row:
    """The mean over all members, for the progress display."""
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    shown = {name: column for name, column in columns.items() if all(isinstance(value, float) for value in column)}
    return {name: sum(column) / len(column) for name, column in shown.items()}  # the norm of a gradient may be None
