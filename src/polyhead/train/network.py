"""The networks of a training loop.  `Single`: one run on one or several devices.

All randomness is a pure function of (seed, name, step): initial parameters use stream(seed, "init"), batch i the task's
own stream, and dropout in step i stream(seed, "dropout", i).  So a checkpoint needs no generator state.

With several processes, each draws the same batch and takes its own rows.  Each has its own dropout stream.
"""

import operator
from collections import deque
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from polyhead import config as configs
from polyhead.config import Run, stream
from polyhead.models.build import build
from polyhead.models.transformer import Transformer
from polyhead.train import optimiser, parallel
from polyhead.train.device import seed
from polyhead.train.evaluation import answers, evaluate, mean, metrics, parts
from polyhead.train.throughput import Throughput
from polyhead.train.world import World

State = tuple[nn.Module, torch.optim.Optimizer, torch.amp.GradScaler | None]
"""The model, the optimiser and the loss scale of one run."""

RECENT = 1024
"""How many recent losses are kept, to find the first that is not finite."""


@runtime_checkable
class Networks(Protocol):
    """n networks of one architecture that are trained together; tensors (n) hold one number per network."""

    parameters: int
    """The parameter count of one network."""
    seen: deque[list[Tensor]]
    """Losses (n) of the steps since they were last read."""

    def step(self, number: int, *, wanted: bool = False) -> dict[str, Tensor]:
        """Update number `number` (from 0); if `wanted`, returns loss, grad_norm and metrics (n)."""

    def evaluate(self, split: str) -> list[dict[str, float]]:
        """The scores of each network on `split`."""

    def finite(self) -> list[bool]:
        """For each network, whether all parameters are finite."""

    def recent(self, i: int) -> list[Tensor]:
        """`seen` of network `i`, summed over the processes."""

    def alone(self, i: int, step: int) -> State:
        """Network `i` and its optimiser after `step` updates; the tensors are shared with training, not copied."""

    def loaded(self, i: int, state: State) -> None:
        """Continue from `state`, which `alone` returned and a checkpoint was loaded into."""

    def select(self, which: list[int]) -> None:
        """Keep only the networks `which`."""

    def rates(self, steps_per_second: float) -> dict[str, float]:
        """Rates for a row in addition to steps per second."""

    def environment(self) -> dict[str, Any]:
        """The environment that results record."""


def initial(config: Run) -> nn.Module:
    """The network of a run before its first step, on the CPU."""
    torch.manual_seed(stream(config.seed, "init"))
    return build(config.model)


class Single:
    """The network of one run: `model`, with a data-parallel or sharded wrapper if several processes train it."""

    def __init__(self, config: Run, device: torch.device, world: World | None = None) -> None:
        self.config, self.device, self.train = config, device, config.train
        self.world = world or World.alone(device)
        rank = self.world.rank
        self.dropout = f"dropout/{rank}" if rank else "dropout"  # the name of the dropout stream
        self.model = parallel.placed(initial(config), self.world, config.parallel)
        self.optimiser = optimiser.build(self.model, self.train)
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.train.precision == "fp16")
        self.parameters = sum(p.numel() for p in self.model.parameters())
        self.sharded = parallel.is_sharded(self.world, config.parallel)
        self.seen: deque[list[Tensor]] = deque(maxlen=RECENT)
        if config.compile:
            self.model.compile()
        self.call = parallel.called(self.model, self.world, config.parallel)
        self.throughput = Throughput(config, self.model, device, self.world.size)
        self.model.train()

    def step(self, number: int, *, wanted: bool = False) -> dict[str, Tensor]:
        """One update of AdamW.  Unless `wanted`, it never synchronises with the device."""
        train, config = self.train, self.config
        rate = optimiser.learning_rate(number, train)
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        batch = config.task.batch("train", train.batch_size, seed=config.seed, step=number, device=self.device)
        seed(self.device, stream(config.seed, self.dropout, number))
        self.optimiser.zero_grad(set_to_none=True)
        own = batch if self.world.size == 1 else batch.map(operator.itemgetter(self.world.rows(train.batch_size)))
        pieces = parts(own, train.accumulate)
        done = []
        for piece in pieces:
            with parallel.exchanging(self.call, piece is pieces[-1]):
                done.append(self._backward(piece, batch, wanted))
        loss = torch.stack([loss for loss, _ in done]).sum() if len(done) > 1 else done[0][0]
        self.scaler.unscale_(self.optimiser)
        clipped = None if train.clip is None else parallel.norm_of_gradients(self.model, train.clip)
        self.scaler.step(self.optimiser)
        self.scaler.update()
        self.seen.append([loss[None]])
        if not wanted:
            return {}
        norm = parallel.norm_of_gradients(self.model, None) if clipped is None else clipped
        scores = {name: mean(torch.cat([seen[name] for _, seen in done])) for name in done[0][1]}
        totals = self.world.totals([loss, *scores.values()])
        found = dict(zip(("loss", *scores), totals, strict=True))
        return {name: (value / self.world.size)[None] for name, value in found.items()} | {"grad_norm": norm[None]}

    def _backward(self, piece: configs.Batch, batch: configs.Batch, score: bool) -> tuple[Tensor, dict[str, Tensor]]:
        """Add the gradients of a micro-batch; returns its share of the loss and, if `score`, metrics per sequence."""
        task = self.config.task
        outputs = answers(self.call, task, piece, self.train.precision)
        loss = task.loss(outputs, piece)
        if isinstance(self.model, Transformer):
            loss = loss + self.model.auxiliary_loss()
        if piece is not batch:  # the mean over all scored positions of the batch; gradients of processes are averaged
            loss = loss * (piece.scored.sum() * self.world.size / batch.scored.sum().clamp(min=1))
        early = score and self.sharded  # sharded: before resharding; otherwise after the backward pass, to save memory
        scores = self._metrics(outputs, piece) if early else {}
        self.scaler.scale(loss).backward()
        return loss.detach(), self._metrics(outputs, piece) if score and not early else scores

    @torch.no_grad()
    def _metrics(self, outputs: Any, piece: configs.Batch) -> dict[str, Tensor]:
        """The metrics under the parameters that gave the loss: lazy outputs read the parameters again."""
        return metrics(self.config.task, outputs, piece)

    def evaluate(self, split: str) -> list[dict[str, float]]:
        train = self.train
        scores = evaluate(
            self.model,
            self.config.task,
            split,
            batches=train.eval_batches,
            batch_size=train.batch_size,
            seed=self.config.seed,
            device=self.device,
            precision=train.precision,
            accumulate=train.accumulate,
            world=self.world,
        )
        parallel.let_go(self.model)
        return [scores]

    def finite(self) -> list[bool]:
        fine = [parallel.own_part(p).detach().isfinite().all() for p in self.model.parameters()]
        return [not self.world.sum((~torch.stack(fine)).sum().cpu())]

    def recent(self, i: int) -> list[Tensor]:
        return self.world.totals([loss[0] for (loss,) in self.seen])

    def alone(self, i: int, step: int) -> State:
        return self.model, self.optimiser, self.scaler

    def loaded(self, i: int, state: State) -> None:
        pass

    def select(self, which: list[int]) -> None:
        pass

    def rates(self, steps_per_second: float) -> dict[str, float]:
        return self.throughput.row(steps_per_second)

    def environment(self) -> dict[str, Any]:
        return {} if self.world.size == 1 else {"devices": self.world.size}
