"""The inputs and outputs of every attention layer, and the latent code of chosen pairs.

There are no hooks: layers return q, k, v on request.  The code of a pair is recomputed from them by the function that
made the output.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import SupportsIndex

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from polyhead.layers.taps import OWN, GroupTaps, Taps, looking
from polyhead.ops.call import AttentionCall, Masks
from polyhead.tasks.base import Batch
from polyhead.train.network import sources

INTEGER = (int, np.integer)
LARGEST = 1e150  # the square of a larger code is not finite


def as_array(value: object) -> np.ndarray:
    """A NumPy array from a tensor on any device, or from anything that NumPy accepts.  bfloat16 becomes float32."""
    if isinstance(value, Tensor) and value.dtype == torch.bfloat16:
        value = value.float()
    if isinstance(value, Tensor):
        return value.detach().cpu().numpy()
    return np.asarray(value)


def finite(codes: object, function: str) -> np.ndarray:
    """Codes (b h) in double precision.  Raises a ValueError for another rank, none, and squares that are not finite."""
    x = as_array(codes).astype(np.float64)
    if x.ndim != 2 or not x.size:
        raise ValueError(f"{function}: codes must be (b h), at least one, but have shape {x.shape}")
    num_infinite = int((~(np.abs(x) < LARGEST)).any(1).sum())
    if num_infinite:
        raise ValueError(f"{function}: codes must be finite but {num_infinite} of {len(x)} are not")
    return x


def within(function: str, argument: str, index: SupportsIndex, size: int) -> int:
    """The index from 0; a negative one counts from the end.  Raises ValueError unless it is an integer in range."""
    try:
        return range(size)[index]
    except (IndexError, TypeError):
        raise ValueError(f"{function}: {argument} must be an integer in [{-size}, {size}) but is {index}") from None


def check_taps(function: str, taps: object) -> None:
    """Raise ValueError unless these are the taps of one layer: not a list of layers, nor the layer itself."""
    if not isinstance(taps, Taps):
        raise ValueError(f"{function}: taps must be those of one layer, such as taps[0], got a {type(taps).__name__}")


def capture(model: nn.Module, batch: Batch) -> list[Taps]:
    """One forward pass of `batch`, without dropout or gradients: the taps of every layer, first to last.

    Taps have q, k, v, bias, mask and output.  An encoder-decoder gives the layers of its encoder, then self- and
    cross-attention of each decoder layer, by name.  The modes (train or eval) of all modules are restored.  The batch
    takes the model's device and dtype.

    >>> taps = capture(model, task.batch("compositional", 64, seed=0, step=0))
    >>> codes(taps[-1], -1, -1)      # (b h): the last token attending to itself, last layer

    Raises:
        ValueError: For tensors in place of a batch: the taps of a layer come from its call, `layer(x, taps=taps)`.
    """
    if not isinstance(batch, Batch):
        raise ValueError(
            f"capture: batch must be a Batch, as task.batch(...) gives, got {type(batch).__name__}; "
            "a tensor goes into the model itself, model(x, taps=[])"
        )
    taps: list[Taps] = []
    with looking(model):
        batch = for_model(model, batch)
        model(batch.inputs, mask=batch.mask, taps=taps, **sources(batch))
    return taps


def for_model(model: nn.Module, batch: Batch) -> Batch:
    """The batch on the model's device, its inputs in the model's dtype if they are floats."""
    # A model without any counts as one on the CPU, of the default dtype.
    parameter = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    batch = batch.to(parameter.device)
    for name in ("inputs", "source"):
        array = getattr(batch, name)
        if array is not None and array.is_floating_point():
            batch = replace(batch, **{name: array.to(parameter.dtype)})
    return batch


def codes(
    taps: Taps,
    q_index: int | np.integer | Sequence[int],
    k_index: int | np.integer | Sequence[int],
    *,
    group: int | None = None,
) -> Float[Tensor, "b h"] | Float[Tensor, "b n h"]:
    """The latent code of chosen pairs: query `q_index` attending to key `k_index`, all heads.

    Two integers give (b h); two lists of equal length n give n pairs (b n h).  Negative indices count from the end.
    A pair costs one row of scores.  Heads with a user's own function cost all t x s scores, as it may use any of them.

    Args:
        group: The group whose heads are used; by default the heads of all groups are concatenated.

    Raises:
        ValueError: If the code is unknown, or the indices are not in range or do not make pairs.
    """
    check_taps("codes", taps)
    groups = taps.groups
    if group is not None:
        groups = (groups[within("codes", "group", group, len(groups))],)
    if isinstance(q_index, INTEGER) and isinstance(k_index, INTEGER):
        return codes(taps, [int(q_index)], [int(k_index)], group=group)[:, 0]
    if np.ndim(q_index) != 1 or np.shape(q_index) != np.shape(k_index):
        raise ValueError(
            f"codes: q_index and k_index must be two integers or two lists of one length, got {q_index!r}, {k_index!r}"
        )
    assert not isinstance(q_index, INTEGER)
    assert not isinstance(k_index, INTEGER)
    return torch.cat([_pairs(taps_of_group, q_index, k_index) for taps_of_group in groups], dim=-1)


def _pairs(taps: GroupTaps, queries: Sequence[int], keys: Sequence[int]) -> Float[Tensor, "b n h"]:
    t, s = taps.q.shape[1], taps.k.shape[1]
    queries = [within("codes", "q_index", i, t) for i in queries]
    keys = [within("codes", "k_index", j, s) for j in keys]
    if taps.kind == OWN:
        return taps.code()[:, :, queries, keys].transpose(1, 2)
    # Also causality is a mask: a query that is picked out would otherwise count as one of the last.
    bias, visible = taps.bias, taps.visible()
    if visible is not None:
        visible = visible.expand(*visible.shape[:-2], t, s)[..., queries, :]
    if bias is not None and bias.ndim == 2:  # by offset: key j of query i has column j - i + t - 1
        bias = bias[:, torch.arange(t - 1, s + t - 1) - torch.tensor(queries)[:, None]]
    elif bias is not None:
        bias = bias.expand(*bias.shape[:-2], t, s)[..., queries, :]
    call = AttentionCall(taps.q[:, queries], taps.k, taps.v, bias=bias, masks=Masks(visible), scale=taps.scale)
    return taps.coder(call)[:, :, range(len(queries)), keys].transpose(1, 2)
