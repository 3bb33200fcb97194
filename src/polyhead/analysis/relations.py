"""Attention, relations and symbols of every layer, for one input.

    attention     the latent code of all pairs (h t s)
    relations     of relational and disentangled heads, act(q_rel . k_rel / sqrt(p)) of all pairs (r t s)
    assignments   of symbolic attention, the weight of each symbol for a token, by head (s h n)

They are recomputed from the taps of one forward pass, so no layer stores a t x s tensor.
"""

import inspect
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float
from torch import Tensor, nn

from polyhead.analysis.capture import as_array, capture, within
from polyhead.config import Patches, Tokens
from polyhead.layers.taps import GroupTaps, Taps
from polyhead.tasks.base import Batch, Task

Array = np.ndarray
Names = tuple[str, ...]


@dataclass(frozen=True)
class GroupLook:
    """One group of heads in one layer.  `relations` and `assignments` are None if the group has none."""

    kind: str  # "softmax", "relational", ...
    attention: Float[Array, "h t s"] = field(repr=False)
    relations: Float[Array, "r t s"] | None = field(repr=False)
    assignments: Float[Array, "s _ n"] | None = field(repr=False)


@dataclass(frozen=True)
class LayerLook:
    """One attention layer: queries `receivers` (t names) attend to keys `senders` (s names), group by group."""

    name: str  # "layer 1"; in an encoder-decoder "encoder 1", "decoder 1", "cross 1"
    receivers: Names = field(repr=False)
    senders: Names = field(repr=False)
    groups: tuple[GroupLook, ...]


def look(model: nn.Module, batch: Batch, *, sample: int = 0, task: Task | None = None) -> list[LayerLook]:
    """Attention, relations and symbol assignments of every layer for one sample of `batch`.

    An encoder-decoder gives the layers of its encoder, then self- and cross-attention of each decoder layer.  Padding
    is omitted: tokens that the batch masks and, in a causal model, tokens after the last scored one.

    >>> layers = look(model, batch, sample=1)
    >>> layers[0].name, layers[0].groups[0].kind, layers[0].groups[0].attention.shape, layers[0].senders[:3]
    ('layer 1', 'hyla', (8, 32, 32), ('1', '2', '3'))

    Args:
        task: Gives names to tokens, such as the characters of maths or the cards of SET.

    Raises:
        ValueError: For a model without attention, and for a sample that does not exist.
    """
    if "taps" not in inspect.signature(model.forward).parameters:
        raise ValueError(f"look: the model must have attention (taps=...), got a {type(model).__name__}")
    sample = within("look", "sample", sample, len(batch.inputs))
    batch = batch.map(lambda array: array[sample : sample + 1])
    return [_layer(model, batch, taps, i, task) for i, taps in enumerate(capture(model, batch))]


def _layer(model: nn.Module, batch: Batch, taps: Taps, number: int, task: Task | None) -> LayerLook:
    stack, _, index = taps.name.rpartition(" ")  # "encoder 0" in an encoder-decoder
    if index.isdigit():
        number = int(index)
    name = f"{stack or 'layer'} {number + 1}"
    queries, keys = taps.groups[0].q.shape[1], taps.groups[0].k.shape[1]
    rows, receivers = _tokens(model, batch, queries, task, source=stack == "encoder")
    columns, senders = _tokens(model, batch, keys, task, source=stack in ("encoder", "cross"))
    return LayerLook(name, receivers, senders, tuple(_group(group, rows, columns) for group in taps.groups))


def _tokens(model: nn.Module, batch: Batch, count: int, task: Task | None, *, source: bool) -> tuple[Array, Names]:
    """The indices and names of the tokens that are not padding, among the `count` tokens of the input or the source.

    Names are the task's, if it has some.  Otherwise integer tokens are their own names, and vectors and patches are
    numbered from 1.
    """
    settings = getattr(model, "config", None)
    tokens, mask = batch.inputs, batch.mask
    if source:
        settings, tokens, mask = getattr(settings, "encoder", None), batch.source, batch.source_mask
    is_real = np.ones(count, dtype=bool)
    if mask is not None and mask.shape[1] == count:
        is_real = as_array(mask)[0].astype(bool)
    if getattr(settings, "causal", False) and not source and batch.scored.shape[1] == count:
        scored = np.flatnonzero(as_array(batch.scored)[0])
        if len(scored):
            is_real[scored[-1] + 1 :] = False
    indices = np.flatnonzero(is_real)

    inputs = getattr(settings, "inputs", None)
    numbers = tuple(map(str, range(1, count + 1)))
    names = None
    if task is not None:
        names = task.token_names(batch, source=source)
    if names is None and isinstance(inputs, Tokens):
        names = tuple(map(str, as_array(tokens)[0].astype(int).tolist()))
    elif names is None and isinstance(inputs, Patches) and inputs.class_token:
        names = ("class", *numbers[:-1])
    if names is None or len(names) != count:
        names = numbers
    return indices, tuple(names[i] for i in indices)


def _group(group: GroupTaps, rows: Array, columns: Array) -> GroupLook:
    """The matrices of a group for the tokens `rows` and `columns`."""

    def pairs(matrices: Tensor) -> Array:
        return as_array(matrices.float())[0][:, rows][:, :, columns]

    relations = pairs(group.relations()) if group.relates else None
    assignments = None
    if group.assignments is not None:
        assignments = as_array(group.assignments.float())[0][columns]
    return GroupLook(group.kind, pairs(group.code()), relations, assignments)
