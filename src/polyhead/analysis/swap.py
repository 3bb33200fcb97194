"""Does the latent code specify the operation?  The code of one sequence replaces that of another in a forward pass.

Two sequences have the same inputs and different rules.  In one layer the code of the last token, (h s) numbers, is
replaced by the code of the other sequence.  Values and weights do not change.  If the code specifies the operation, as
Schug et al. propose (2024, "Attention as a hypernetwork", section 2.3), the output then follows the rule of the other
sequence.  There are three controls: the code of a third sequence, the same code with permuted heads, and a zero code.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from polyhead.analysis.capture import capture, within
from polyhead.analysis.values import agree
from polyhead.config import Batch, Task, stream
from polyhead.layers.block import TransformerBlock
from polyhead.layers.heads.functions import coder, compiled, is_own
from polyhead.layers.heads.groups import HylaHeads, LinearHeads, SoftmaxHeads
from polyhead.layers.taps import GroupTaps, looking
from polyhead.models.transformer import Transformer
from polyhead.ops.call import AttentionCall
from polyhead.ops.hyla.op import hyla
from polyhead.ops.linear.op import linear_attention
from polyhead.spec.shapes import check_number, one_of
from polyhead.tasks.task import Score, check_split
from polyhead.train.evaluation import predict

CODES = ("own", "donor", "other", "permuted", "zero")
"""The code that the last token gets: its own, the donor's (of a sequence with another rule), a third sequence's, the
donor's with its heads in a random order, or zero."""

KINDS = ("softmax", "linear", "hyla")
"""Heads whose output is a function of code and values."""

Mixing = SoftmaxHeads | LinearHeads | HylaHeads
"""The groups of such heads."""

Codes = list[Tensor]
"""The code (b h s) of the last token, by group of heads."""

Name = TypeVar("Name", str, float)
"""The name of a code: one of `CODES`, or a share."""


def swap_codes(
    model: Transformer,
    task: Task,
    split: str = "compositional",
    *,
    pairs: int = 2000,
    layer: int = -1,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> list[dict[str, float | str]]:
    """The task's metric against the rule of the sequence itself and against the donor's, one row for each of `CODES`.

    Rows are {code, own, donor, own_se, donor_se, n}, all for the same `pairs` pairs of sequences, drawn by
    `task.contrasts` from a stream that neither training nor evaluation reads.  ValueError for a task without such
    pairs, and for heads whose output is not a function of code and values, as may be a user's function.

    >>> {row["code"]: row["donor"] for row in swap_codes(model, task)}
    """
    scores = _scores(
        "swap_codes", controls, model, task, split=split, pairs=pairs, layer=layer, seed=seed, device=device
    )
    return [{"code": code, **row} for code, row in scores.items()]


def mix_codes(
    model: Transformer,
    task: Task,
    split: str = "compositional",
    *,
    shares: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0),
    pairs: int = 2000,
    layer: int = -1,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> list[dict[str, float]]:
    """As `swap_codes`, with mixtures of both codes: a row for each share of the donor's, {share, own, donor, ...}.

    The pairs are those of `swap_codes`: a share of 0 is its "own", a share of 1 its "donor".

    >>> {row["share"]: row["donor"] for row in mix_codes(model, task)}
    """

    def mixed(mine: Codes, theirs: Codes, generator: torch.Generator) -> dict[float, Codes]:
        return {share: [torch.lerp(*both, share) for both in zip(mine, theirs, strict=True)] for share in shares}

    scores = _scores("mix_codes", mixed, model, task, split=split, pairs=pairs, layer=layer, seed=seed, device=device)
    return [{"share": share, **row} for share, row in scores.items()]


def _scores(
    who: str,
    codes: Callable[[Codes, Codes, torch.Generator], dict[Name, Codes]],
    model: Transformer,
    task: Task,
    *,
    split: str,
    pairs: int,
    layer: int,
    seed: int,
    device: torch.device | str,
) -> dict[Name, dict[str, float]]:
    """The scores with each of the codes that `codes` makes of those of both sequences."""
    check_split(task, split)
    check_number(who, "pairs", pairs, 2)
    layer = _layer(who, model, layer)
    found: dict[Name, tuple[list[Tensor], list[Tensor]]] = {}
    with looking(model):
        for step, count in enumerate(_batches(pairs)):
            generator = torch.Generator(device).manual_seed(stream(seed, f"{task.name}/{split}/swap", step))
            batches = task.contrasts(split, count, generator)
            mine, theirs = (codes_of(model, layer, batch) for batch in batches)
            if step == 0:
                _check_functions(who, model, layer, batches[0], mine)
            for name, code in codes(mine, theirs, generator).items():
                with replaced(model, layer, code):
                    outputs = predict(model, task, batches[0]).float()
                for parts, batch in zip(found.setdefault(name, ([], [])), batches, strict=True):
                    parts.append(task.metrics(outputs, batch)[task.metric].cpu())
    return {name: _row(torch.cat(own), torch.cat(donor)) for name, (own, donor) in found.items()}


def _batches(pairs: int) -> list[int]:
    """Sizes of batches: 500, and the rest.  No pair is alone, because it takes a third code from another pair."""
    sizes = [min(500, pairs - start) for start in range(0, pairs, 500)]
    return [*sizes[:-2], 499, 2] if sizes[-1] == 1 else sizes


def _check_functions(who: str, model: Transformer, layer: int, batch: Batch, mine: Codes) -> None:
    """Raise ValueError unless a user's functions compute what their kind of heads computes from code and values."""
    groups = _groups(model, layer)
    if not any(map(is_own, groups)):
        return
    seen = [group.output[:, -1] for group in _seen(model, layer, batch)]
    for codes, wanted in ((mine, seen), ([torch.zeros_like(x) for x in mine], [torch.zeros_like(x) for x in seen])):
        with replaced(model, layer, codes):
            found = [group.output[:, -1] for group in _seen(model, layer, batch)]
        for group, ours, theirs in zip(groups, found, wanted, strict=True):
            if not agree(ours, theirs):
                name, kind = type(group).__name__, group.kind
                raise ValueError(f"{who}: {name} must compute what {kind} heads compute from their code, but do not")


def codes_of(model: Transformer, layer: int, batch: Batch) -> Codes:
    """The codes of the last token of each sequence."""
    return [group.code()[:, :, -1].clone() for group in _seen(model, layer, batch)]


def _seen(model: Transformer, layer: int, batch: Batch) -> tuple[GroupTaps, ...]:
    """The taps of the self-attention of a layer.  In an encoder-decoder those of the encoder come first, and those of
    cross-attention after each layer's."""
    taps = capture(model, batch)
    return taps[layer if model.encoder is None else 2 * (layer - len(model.blocks))].groups


@contextlib.contextmanager
def replaced(model: Transformer, layer: int, rows: Codes) -> Iterator[None]:
    """A context in which the last token of `layer` has the codes `rows`, (b h s) for each group of heads."""
    groups = [cast(Mixing, compiled(group)) for group in _groups(model, layer)]
    before = [dict(vars(group)) for group in groups]
    try:
        for group, row in zip(groups, rows, strict=True):
            attend = _attend(group, row)
            # A function cannot take the place of a module.
            group._modules = {name: module for name, module in group._modules.items() if name != "attend"}
            group.use(attend)
        yield
    finally:
        for group, own in zip(groups, before, strict=True):
            vars(group).clear()
            vars(group).update(own)


def _attend(group: Mixing, row: Tensor) -> Callable[..., Tensor]:
    """The output of `group` with another code for the last query."""
    code = coder(group)

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        bias: Tensor | None = None,
        mask: Tensor | None = None,
        causal: bool = False,
        window: int | None = None,
        cu_seqlens: Tensor | None = None,
        scale: float | None = None,
        keep: Tensor | None = None,
        normalise: str = "identity",
        act: str = "identity",
        value_weight: Tensor | None = None,
    ) -> Tensor:
        a = code(AttentionCall(q, k, v, bias, mask, None, causal, window, cu_seqlens, scale=scale))
        a = torch.cat((a[:, :, :-1], row[:, :, None].to(a)), dim=2)
        # With queries of 0 and the code as bias, the scores are the code; nothing normalises them.
        if group.kind == "hyla":
            return hyla(0 * q, k, v, bias=a, keep=keep, normalise="identity", act=act, value_weight=value_weight)
        return linear_attention(0 * q, k, v, bias=a, keep=keep, act=act)

    return attend


def controls(mine: Codes, theirs: Codes, generator: torch.Generator) -> dict[str, Codes]:
    """For each of `CODES` the code of the last token."""
    others = [x.roll(1, 0) for x in theirs]  # the code of the previous pair, whose inputs differ
    permuted = [x[:, torch.randperm(x.shape[1], generator=generator, device=x.device)] for x in theirs]
    return {
        "own": mine,
        "donor": theirs,
        "other": others,
        "permuted": permuted,
        "zero": [torch.zeros_like(x) for x in mine],
    }


def _layer(who: str, model: Transformer, layer: int) -> int:
    layer = within(who, "layer", layer, len(model.blocks))
    for group in _groups(model, layer):
        one_of(who, "kind of heads", getattr(group, "kind", type(group).__name__), KINDS)
    return layer


def _groups(model: Transformer, layer: int) -> list[nn.Module]:
    """The groups of a layer, of any kind."""
    return list(cast(TransformerBlock, model.blocks[layer]).attention.groups)


def _row(own: Tensor, donor: Tensor) -> dict[str, float]:
    mine, theirs = Score.of(own.double()), Score.of(donor.double())
    errors = {"own_se": mine.standard_error, "donor_se": theirs.standard_error}
    return {"own": mine.mean, "donor": theirs.mean, **errors, "n": len(own)}
