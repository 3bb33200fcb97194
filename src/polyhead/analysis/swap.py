"""Does the latent code specify the operation?  The code of one sequence replaces that of another in a forward pass.

Two sequences have the same inputs and different rules.  In one layer the code of the last token, (h s) numbers, is
replaced by the code of the other sequence.  Values and weights do not change.  If the code specifies the operation, as
Schug et al. propose (2024, "Attention as a hypernetwork", section 2.1), the output then follows the rule of the other
sequence.  There are three controls: the code of a third sequence, the same code with permuted heads, and a zero code.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from polyhead.analysis.capture import capture, for_model, within
from polyhead.layers.block import TransformerBlock
from polyhead.layers.heads.functions import Code, coder, compiled, has_user_function
from polyhead.layers.heads.groups import HylaHeads, LinearHeads, SoftmaxHeads
from polyhead.layers.taps import GroupTaps, looking
from polyhead.models.transformer import Transformer
from polyhead.ops.call import AttentionCall
from polyhead.ops.hyla.op import hyla
from polyhead.ops.linear.op import linear_attention
from polyhead.spec.shapes import check_number, one_of
from polyhead.tasks.base import Batch, Task, check_split, stream
from polyhead.tasks.scores import Score
from polyhead.train.network import predict

# The code that the last token gets: that of its sequence, the donor's (of a sequence with another rule), a third
# sequence's, the donor's with its heads in a random order, or zero.
CODES = ("own", "donor", "other", "permuted", "zero")
# Heads whose output is a function of code and values.
KINDS = ("softmax", "linear", "hyla")
# The most pairs of a forward pass.
BATCH = 500

CodeGroup = SoftmaxHeads | LinearHeads | HylaHeads
# The code (b h s) of the last token, by group of heads.
Codes = list[Tensor]
# Codes of the recipient and of the donor -> the codes to try, by name (one of `CODES`) or share.
MakeCodes = Callable[[Codes, Codes, torch.Generator], dict[Any, Codes]]


def swap_codes(
    model: Transformer,
    task: Task,
    split: str = "compositional",
    *,
    pairs: int = 2000,
    layer: int = -1,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> list[dict[str, Any]]:
    """The task's metric against a sequence's own rule and the donor's: rows {code, own, donor, own_se, donor_se, n}.

    There is a row for each of `CODES`, all for the same `pairs` pairs of sequences.  `task.contrasts` draws the pairs
    from a stream that neither training nor evaluation reads.

    >>> {row["code"]: row["donor"] for row in swap_codes(model, task)}

    Raises:
        ValueError: For a task without such pairs, and for heads other than `KINDS`, a user's functions among them.
    """
    return _rows("code", controls, model, task, split, pairs=pairs, layer=layer, seed=seed, device=device)


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
) -> list[dict[str, Any]]:
    """As `swap_codes`, with mixtures of both codes: a row for each share of the donor's, {share, own, donor, ...}.

    The pairs are those of `swap_codes`: a share of 0 is its "own", a share of 1 its "donor".

    >>> {row["share"]: row["donor"] for row in mix_codes(model, task)}
    """

    def mixtures(recipient: Codes, donor: Codes, generator: torch.Generator) -> dict[float, Codes]:
        codes = {}
        for share in shares:
            check_number("mix_codes", "shares", share)
            codes[share] = list(map(partial(torch.lerp, weight=share), recipient, donor))
        return codes

    return _rows("share", mixtures, model, task, split, pairs=pairs, layer=layer, seed=seed, device=device)


def controls(recipient: Codes, donor: Codes, generator: torch.Generator) -> dict[str, Codes]:
    """The code of the last token for each of `CODES`; a single head has no other order."""
    permuted = []
    other = []
    for code in donor:
        num_heads = code.shape[1]
        # An order that leaves all heads in place would be the donor's code itself, so it is drawn again.
        order = identity = torch.arange(num_heads, device=generator.device)
        while num_heads > 1 and torch.equal(order, identity):
            order = torch.randperm(num_heads, generator=generator, device=generator.device)
        permuted.append(code[:, order.to(code.device)])
        other.append(code.roll(1, 0))  # that of the previous pair, whose inputs differ
    zero = list(map(torch.zeros_like, recipient))
    return {"own": recipient, "donor": donor, "other": other, "permuted": permuted, "zero": zero}


# -------------------------------------------------------------------------------------------------------------- scores
def _rows(
    column: str,
    make_codes: MakeCodes,
    model: Transformer,
    task: Task,
    split: str,
    *,
    pairs: int,
    layer: int,
    seed: int,
    device: torch.device | str,
) -> list[dict[str, Any]]:
    """The scores against both rules with each of the codes, whose name or share is in `column`."""
    function = "swap_codes" if column == "code" else "mix_codes"  # for errors
    check_split(task, split)
    check_number(function, "pairs", pairs, 2)
    layer = within(function, "layer", layer, len(model.blocks))
    for group in _groups(model, layer):
        one_of(function, "kind of heads", getattr(group, "kind", type(group).__name__), KINDS)
        if has_user_function(group):
            raise ValueError(f"{function}: heads must compute their own mechanism, not a user's function")

    scores: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    with looking(model):
        for step, size in enumerate(batch_sizes(pairs)):
            generator = torch.Generator(device).manual_seed(stream(seed, f"{task.name}/{split}/swap", step))
            recipients, donors = map(partial(for_model, model), task.contrasts(split, size, generator))
            recipient_codes = codes_of(model, layer, recipients)
            donor_codes = codes_of(model, layer, donors)
            for name, codes in make_codes(recipient_codes, donor_codes, generator).items():
                with replaced(model, layer, codes):
                    outputs = predict(model, task, recipients).float()
                against_own, against_donor = scores.setdefault(name, ([], []))
                against_own.append(task.metrics(outputs, recipients)[task.metric].cpu())
                against_donor.append(task.metrics(outputs, donors)[task.metric].cpu())
    rows = []
    for name, (against_own, against_donor) in scores.items():
        recipient = Score.of(torch.cat(against_own).double())
        donor = Score.of(torch.cat(against_donor).double())
        errors = {"own_se": recipient.standard_error, "donor_se": donor.standard_error}
        rows.append({column: name, "own": recipient.mean, "donor": donor.mean, **errors, "n": pairs})
    return rows


def batch_sizes(pairs: int) -> list[int]:
    """`BATCH`, and the rest.  No pair is alone in a batch, because it takes the third code from another pair."""
    sizes = [BATCH] * (pairs // BATCH)
    if pairs % BATCH:
        sizes.append(pairs % BATCH)
    if sizes[-1] == 1:
        sizes[-2:] = [BATCH - 1, 2]
    return sizes


# --------------------------------------------------------------------------------------------------------------- codes
def codes_of(model: Transformer, layer: int, batch: Batch) -> Codes:
    """The codes of the last token of each sequence."""
    return [taps.code()[:, :, -1].clone() for taps in _taps(model, layer, batch)]


def _taps(model: Transformer, layer: int, batch: Batch) -> tuple[GroupTaps, ...]:
    """The taps of the self-attention of a layer.

    In an encoder-decoder those of the encoder come first, and those of cross-attention after each layer's.
    """
    taps = capture(model, batch)
    if model.encoder is not None:
        layer = 2 * (layer - len(model.blocks))
    return taps[layer].groups


def _groups(model: Transformer, layer: int) -> list[nn.Module]:
    """The groups of a layer, of any kind."""
    return list(cast(TransformerBlock, model.blocks[layer]).attention.groups)


@contextlib.contextmanager
def replaced(model: Transformer, layer: int, codes: Codes) -> Iterator[None]:
    """A context in which the last token of `layer` has the given codes, (b h s) for each group of heads."""
    groups = list(map(compiled, _groups(model, layer)))
    forwards = [partial(_with_code, group, coder(group), code) for group, code in zip(groups, codes, strict=True)]
    try:
        for group, forward in zip(groups, forwards, strict=True):
            group.forward = forward
        yield
    finally:
        for group in groups:
            vars(group).pop("forward", None)


def _with_code(group: CodeGroup, code_function: Code, last_code: Tensor, call: AttentionCall) -> Tensor:
    """The output of `group` for a call, with another code for the last query."""
    code = code_function(call)
    code = torch.cat((code[:, :, :-1], last_code[:, :, None].to(code)), dim=2)
    # With queries of 0 and the code as bias, the scores are the code; nothing normalises them.
    same: dict[str, Any] = {"bias": code, "keep": call.keep, "act": group.act}
    if group.kind == "hyla":
        return hyla(0 * call.q, call.k, call.v, **same, normalise="identity", value_weight=group.value_weight)
    return linear_attention(0 * call.q, call.k, call.v, **same)
