"""Many networks of one architecture, each a row of one matrix, and AdamW on all rows.

    rows (n p)     row i: the parameters of network i, those with weight decay first
    loss_i         the loss of row i on its own batch, with its own draw of dropout, as `Single` computes it
    m = b1 m + (1 - b1) g     v = b2 v + (1 - b2) g^2     g = gradient of loss_i, clipped to its own norm
    row = row (1 - lr wd) - lr m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)       lr, wd, b1, b2, eps, clip of row i

Loshchilov and Hutter 2019, algorithm 2.  One vmapped pass takes `at_once` rows; a single row uses the model's ordinary
kernels instead.
"""

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from polyhead.config import (
    Batch,
    Mechanism,
    Run,
    SymbolHeads,
    SymbolicAttention,
    Task,
    Train,
    TransformerConfig,
    stream,
)
from polyhead.config.components import FEEDFORWARDS
from polyhead.layers.attention import MultiHeadAttention
from polyhead.layers.feedforward import MixtureOfExperts
from polyhead.models.transformer import Transformer
from polyhead.train import optimiser
from polyhead.train.evaluation import enough, evaluate, mean, metrics, predict, summary
from polyhead.train.network import RECENT, State

WINDOW = 256
"""Learning rates of this many steps are copied to the device together, so that steps do not wait for copies."""


def unsupported_reason(config: Run) -> str | None:
    """Why a run cannot be a row of a stack, or None.

    Residual dropout cannot be drawn from outside.  A user's feed-forward layers may have dropout, buffers and frozen
    parameters.  fp16 skips steps of some networks only.  Frozen symbols differ between networks but are no parameters.
    Batches are not accumulated.
    """
    model = config.model
    if not isinstance(model, TransformerConfig):
        return f"a {type(model).__name__} is no transformer"
    if model.encoder is not None:
        return "it is an encoder-decoder"
    if model.residual_dropout > 0:
        return "residual_dropout cannot be drawn for it"
    if not isinstance(model.feedforward, FEEDFORWARDS):
        return "its feed-forward layers are not of this package"
    if config.train.precision == "fp16":
        return "fp16 skips steps"
    if config.train.accumulate > 1:
        return "it accumulates gradients"
    sources = [g.symbols for i in range(model.layers) for g in model.layer_heads(i) if isinstance(g, SymbolHeads)]
    frozen = any(isinstance(source, SymbolicAttention) and not source.trainable for source in sources)
    return "its symbols are frozen" if frozen else None


class Stack:
    """The networks of `runs`, which differ in seed and in the settings of AdamW: parameters, moments, one step.

    Raises ValueError for a run that cannot be stacked, see `unsupported_reason`.  Parameters are drawn from torch's
    default generator, which the caller restores.
    """

    def __init__(self, runs: Sequence[Run], device: torch.device, at_once: int) -> None:
        self.runs, self.device, self.at_once = list(runs), device, at_once
        first = self.runs[0]
        if (reason := unsupported_reason(first)) is not None:
            raise ValueError(f"population: {first.name} must be trained alone: {reason}")
        self.task, self.train = first.task, first.train
        self.single = at_once == 1 and not first.compile
        settings = first.transformer if self.single else _reference(first.transformer)
        self.model = Transformer(settings).to(device).eval()  # in eval mode, only an explicit `keep` drops anything
        self.experts = [layer for layer in self.model.modules() if isinstance(layer, MixtureOfExperts)]
        decayed = optimiser.is_decayed(self.model, self.train.decay)
        trained = [item for item in self.model.named_parameters() if item[1].requires_grad]
        named = sorted(trained, key=lambda item: not decayed[item[0]])
        self.names, self.tensors = [name for name, _ in named], [parameter for _, parameter in named]
        self.sizes = [parameter.numel() for parameter in self.tensors]
        self.parameters = sum(self.sizes)
        self.decayed = sum(size for name, size in zip(self.names, self.sizes, strict=True) if decayed[name])
        drawn = {run.seed: self._drawn(run) for run in self.runs}
        self.rows = torch.stack([drawn[run.seed] for run in self.runs])
        self.exp_avg, self.exp_avg_sq, self.gradient = (torch.zeros_like(self.rows) for _ in range(3))
        self.generator = torch.Generator(device)
        self.seen: deque[list[Tensor]] = deque(maxlen=RECENT)
        self.losses: Callable[..., tuple[Tensor, Tensor]] = vmap(self._member)
        self.adamw: Callable[..., None] = adamw_
        if first.compile:
            # Launching kernels takes most of the time of a pass, so a GPU replays it as one graph.
            self.losses = torch.compile(self.losses, mode="reduce-overhead" if device.type == "cuda" else None)
            self.adamw = torch.compile(self.adamw)
        self._plan()

    def _drawn(self, run: Run) -> Tensor:
        torch.manual_seed(stream(run.seed, "init"))
        values = dict(Transformer(run.transformer).named_parameters())
        return torch.cat([values[name].detach().flatten() for name in self.names]).to(self.device)

    def _plan(self) -> None:
        """Compute everything that depends on the selection of networks."""
        self.sources: dict[Task, list[int]] = {}  # the seeds of each task: held-out splits may differ
        for run in self.runs:
            if run.seed not in (seeds := self.sources.setdefault(run.task, [])):
                seeds.append(run.seed)
        order = [(task, seed) for task, seeds in self.sources.items() for seed in seeds]
        self.which = [order.index((run.task, run.seed)) for run in self.runs]
        self.index = torch.tensor(self.which, device=self.device)
        trains = [run.train for run in self.runs]
        clips = [float("inf") if train.clip is None else train.clip for train in trains]
        self.clip = self._column(clips) if min(clips) < float("inf") else None
        self.constants = tuple(
            self._column(values)
            for values in ([t.betas[0] for t in trains], [t.betas[1] for t in trains], [t.eps for t in trains])
        )
        self.table, self.table_start = self.rows.new_empty(0), 0

    def _column(self, values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=self.rows.dtype, device=self.device)[:, None]

    def select(self, which: list[int]) -> None:
        """Keep only the networks `which`."""
        index = torch.tensor(which, device=self.device)
        self.rows, self.exp_avg, self.exp_avg_sq = (x[index] for x in (self.rows, self.exp_avg, self.exp_avg_sq))
        self.gradient = torch.zeros_like(self.rows)
        self.seen.clear()
        self.runs = [self.runs[i] for i in which]
        self._plan()

    # ------------------------------------------------------------------------------------------------------ one network
    def views(self, row: Tensor) -> dict[str, Tensor]:
        """The parameters in `row` (p), by name."""
        parts = zip(self.names, row.split(self.sizes), self.tensors, strict=True)
        return {name: part.view(like.shape) for name, part, like in parts}

    def show(self, i: int) -> Transformer:
        """The model with the parameters of network `i`, as views of its row."""
        for parameter, view in zip(self.tensors, self.views(self.rows[i]).values(), strict=True):
            parameter.data = view
        return self.model

    def alone(self, i: int, step: int) -> State:
        """Model and optimiser of network `i` as in `Single`, after `step` updates; views of its rows."""
        model = self.show(i)
        adamw = optimiser.build(model, self.runs[i].train)
        for parameter, state in self.moments(i).items():
            adamw.state[parameter] = {**state, "step": torch.tensor(float(step), dtype=torch.float32)}
        return model, adamw, None

    def loaded(self, i: int, state: State) -> None:
        """Copy the moments that were loaded into `state`; parameters were loaded into the rows directly."""
        for parameter, moments in self.moments(i).items():
            for name, value in moments.items():
                value.copy_(state[1].state[parameter][name])

    def finite(self) -> list[bool]:
        return self.rows.isfinite().all(dim=1).tolist()

    def recent(self, i: int) -> list[Tensor]:
        return [torch.cat(parts)[i] for parts in self.seen]

    def rates(self, steps_per_second: float) -> dict[str, float]:
        return {}

    def environment(self) -> dict[str, Any]:
        return {"population": len(self.runs)}

    def moments(self, i: int) -> dict[nn.Parameter, dict[str, Tensor]]:
        """The moments of network `i` by parameter, named as in torch.optim.AdamW; views of its rows."""
        first, second = self.views(self.exp_avg[i]).values(), self.views(self.exp_avg_sq[i]).values()
        parts = zip(self.tensors, first, second, strict=True)
        return {parameter: {"exp_avg": a, "exp_avg_sq": b} for parameter, a, b in parts}

    def _loss(self, model: Callable[..., Tensor], batch: Batch, keep: Sequence[Tensor] | None) -> tuple[Tensor, Tensor]:
        outputs = predict(model, self.task, batch, self.train.precision, keep)
        loss = self.task.loss(outputs, batch) + self.model.auxiliary_loss()
        for layer in self.experts:
            layer.balance_loss = None  # it would outlive the vmapped pass
        return loss, outputs

    def _call(self, row: Tensor) -> Callable[..., Tensor]:
        parameters = self.views(row)

        def call(
            inputs: Tensor, *, mask: Tensor | None, tail: int | None = None, keep: Sequence[Tensor | None] | None = None
        ) -> Tensor:
            options = {"mask": mask, "tail": tail, "keep": keep}
            return functional_call(self.model, parameters, (inputs,), options)

        return call

    def _member(self, row: Tensor, tensors: dict[str, Any], keep: list[Tensor]) -> tuple[Tensor, Tensor]:
        return self._loss(self._call(row), _batch(tensors), keep or None)

    def _outputs(self, row: Tensor, tensors: dict[str, Any]) -> Tensor:
        return predict(self._call(row), self.task, _batch(tensors), self.train.precision)

    # --------------------------------------------------------------------------------------------------------- one step
    def step(self, number: int, *, wanted: bool = False) -> dict[str, Tensor]:
        """Update number `number` (from 0) of every network; if `wanted`, loss, norm and metrics (n) before it."""
        batch = self._draw("train", number)
        scalars = self._scalars(number)
        seen: list[dict[str, Tensor]] = []
        self.seen.append([])
        start = 0
        while start < len(self.runs):
            rows = slice(start, min(start + self.at_once, len(self.runs)))
            try:
                losses, outputs = self._backward(rows, batch, number)
            except torch.OutOfMemoryError:
                if self.at_once == 1:
                    raise
                self.at_once = (rows.stop - start + 1) // 2
                continue
            losses = losses.clone()  # a replayed graph overwrites its outputs
            self.seen[-1].append(losses)
            norms = torch.linalg.vector_norm(self.gradient[rows], dim=1, keepdim=True)
            if wanted:
                seen.append({"loss": losses, "grad_norm": norms[:, 0], **self._metrics(rows, outputs, batch)})
            if self.clip is not None:
                self.gradient[rows] *= (self.clip[rows] / (norms + 1e-6)).clamp(max=1.0)
            moments = self.exp_avg[rows], self.exp_avg_sq[rows]
            constants = tuple(x[rows] for x in self.constants)
            self.adamw(self.rows[rows], self.gradient[rows], moments, scalars[:, rows], constants, self.decayed)
            start = rows.stop
        return {name: torch.cat([part[name] for part in seen]) for name in seen[0]} if wanted else {}

    def _backward(self, rows: slice, batch: Batch, number: int) -> tuple[Tensor, Tensor]:
        """Losses (n) and outputs (n b t c) of `rows`; writes their gradients into `self.gradient`."""
        if self.single:
            i = rows.start
            keep = self._keep(self.runs[i].seed, batch, number)
            loss, outputs = self._loss(self.show(i), _at(batch, self.which[i]), keep or None)
            grads = torch.autograd.grad(loss, self.tensors, allow_unused=True, materialize_grads=True)
            torch.cat([grad.reshape(-1) for grad in grads], out=self.gradient[i])
            return loss.detach()[None], outputs.detach()[None]
        drawn = {seed: self._keep(seed, batch, number) for seed in dict.fromkeys(run.seed for run in self.runs[rows])}
        layers = zip(*(drawn[run.seed] for run in self.runs[rows]), strict=True)
        leaf = self.rows[rows].detach().requires_grad_()
        if self.device.type == "cuda":
            torch.compiler.cudagraph_mark_step_begin()
        losses, outputs = self.losses(leaf, _tensors(self._own(batch, rows)), [torch.stack(layer) for layer in layers])
        self.gradient[rows] = torch.autograd.grad(losses.sum(), leaf)[0]
        return losses.detach(), outputs.detach()

    def _draw(self, split: str, number: int) -> Batch:
        """Batch `number` of `split` for all seeds, stacked."""
        size = self.train.batch_size
        parts = [
            task.batches(split, size, seeds=seeds, step=number, device=self.device)
            for task, seeds in self.sources.items()
        ]
        return parts[0] if len(parts) == 1 else Batch.cat(parts)

    def _own(self, batch: Batch, rows: slice) -> Batch:
        """The batch of each network in `rows`, from a draw with one batch per seed."""
        if self.which == list(range(len(self.runs))):
            return _at(batch, rows)
        return _at(batch, self.index[rows])

    def _keep(self, seed: int, batch: Batch, number: int) -> list[Tensor]:
        """The dropout masks of each layer in step `number` of a run with `seed`, as in the trainer; [] without any."""
        if self.model.config.dropout == 0.0:
            return []
        b, s = batch.inputs.shape[1], self.model.length(batch.inputs[0])
        self.generator.manual_seed(stream(seed, "dropout", number))
        layers = [cast(MultiHeadAttention, block.attention) for block in self.model.blocks]
        tails = [s] * (len(layers) - 1) + [self.task.tail or s]
        return [
            layer.draw_keep(b, t, s, device=self.device, dtype=self.rows.dtype, generator=self.generator)
            for layer, t in zip(layers, tails, strict=True)
        ]

    def _metrics(self, rows: slice, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        with torch.no_grad():
            members = [metrics(self.task, outputs[j], _at(batch, i)) for j, i in enumerate(self.which[rows])]
            return {name: torch.stack([mean(values[name]) for values in members]) for name in members[0]}

    def _scalars(self, number: int) -> Tensor:
        """(3 n 1): lr / (1 - b1^t), 1 / sqrt(1 - b2^t) and 1 - lr wd of update `number`."""
        if not self.table_start <= number < self.table_start + len(self.table):
            steps = range(number, min(number + WINDOW, self.train.steps))
            kinds = list(dict.fromkeys(run.train for run in self.runs))
            table = torch.tensor([[_rates(train, step) for train in kinds] for step in steps], dtype=self.rows.dtype)
            own = table[:, [kinds.index(run.train) for run in self.runs]]
            self.table, self.table_start = own.transpose(1, 2)[..., None].contiguous().to(self.device), number
        return self.table[number - self.table_start]

    # --------------------------------------------------------------------------------------------------------- scoring
    def evaluate(self, split: str) -> list[dict[str, float]]:
        """The scores of every network, as from `evaluation.evaluate`."""
        train, count = self.train, self.train.eval_batches
        if self.single:
            return [
                evaluate(
                    self.show(i), run.task, split, batches=count, batch_size=train.batch_size, seed=run.seed,
                    device=self.device, precision=train.precision,
                )
                for i, run in enumerate(self.runs)
            ]  # fmt: skip
        losses: list[list[Tensor]] = [[] for _ in self.runs]
        values: list[dict[str, list[Tensor]]] = [{} for _ in self.runs]
        scored: list[list[Tensor]] = [[] for _ in self.runs]
        amounts: list[list[Tensor | None]] = [[] for _ in self.runs]
        sequences = 0
        with torch.no_grad():
            for number in range(enough(self.task, split, count, train.batch_size)):
                batch = self._draw(split, number)
                sequences += len(_at(batch, self.which[0]).inputs)
                for rows in self._chunks():
                    outputs = vmap(self._outputs)(self.rows[rows], _tensors(self._own(batch, rows)))
                    for j, i in enumerate(range(rows.start, rows.stop)):
                        own = _at(batch, self.which[i])
                        losses[i].append(self.task.loss(outputs[j], own))
                        scored[i].append(own.scored.sum())
                        amounts[i].append(self.task.amounts(own))
                        for name, value in metrics(self.task, outputs[j], own).items():
                            values[i].setdefault(name, []).append(value)
        parts = zip(losses, values, scored, amounts, strict=True)
        found = [summary(loss, value, count, sequences, own) for loss, value, count, own in parts]
        return [scores | self.task.derived(scores) for scores in found]

    def _chunks(self) -> Iterator[slice]:
        for start in range(0, len(self.runs), self.at_once):
            yield slice(start, min(start + self.at_once, len(self.runs)))


def adamw_(
    rows: Tensor,
    gradient: Tensor,
    moments: tuple[Tensor, Tensor],
    scalars: Tensor,
    constants: tuple[Tensor, Tensor, Tensor],
    decayed: int,
) -> None:
    """One update of `rows` (n p) and their moments (n p), in place; the first `decayed` columns decay.

    scalars (3 n 1), see `Stack._scalars`; constants: b1, b2 and eps (n 1).
    """
    (exp_avg, exp_avg_sq), (size, root, shrink), (beta1, beta2, eps) = moments, scalars, constants
    exp_avg.lerp_(gradient, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(gradient, gradient * (1 - beta2))
    rows[:, :decayed].mul_(shrink)
    rows.addcdiv_(exp_avg * -size, exp_avg_sq.sqrt().mul_(root).add_(eps))


def _rates(train: Train, step: int) -> tuple[float, float, float]:
    rate, (beta1, beta2) = optimiser.learning_rate(step, train), train.betas
    return rate / (1 - beta1 ** (step + 1)), (1 - beta2 ** (step + 1)) ** -0.5, 1 - rate * train.weight_decay


def _at(batch: Batch, which: int | slice | Tensor) -> Batch:
    """The batch or batches at `which` of a stack."""
    return batch.map(lambda array: array[which])


def _tensors(batch: Batch) -> dict[str, Any]:
    """The tensors of a batch that are not None; vmap does not accept None."""
    fields = {"inputs": batch.inputs, "targets": batch.targets, "scored": batch.scored, "latents": batch.latents}
    return fields if batch.mask is None else {**fields, "mask": batch.mask}


def _batch(tensors: dict[str, Any]) -> Batch:
    mask, latents = tensors.get("mask"), tensors["latents"]
    return Batch(tensors["inputs"], tensors["targets"], mask, tensors["scored"], latents)


def _reference(settings: TransformerConfig) -> TransformerConfig:
    """The same network with every op's reference: vmap would loop over rows in other backends."""
    layers = [settings.layer_heads(i) for i in range(settings.layers)]
    heads = [tuple(_plain(group) for group in layer) for layer in layers]
    return dataclasses.replace(settings, heads=tuple(heads))


def _plain(group: Mechanism) -> Mechanism:
    return dataclasses.replace(group, impl="reference")
