"""The value network: the function that a layer applies for one query-key pair; the latent code sets its weights.

Schug et al. 2024, with a_h the code of the pair and x the key's input:

    softmax, linear (eq. 2-5):   (sum_h a_h W_out_h W_value_h) x                                     one matrix
    HYLA (eq. 6-7):              (sum_h a_h W_out_h) act((sum_h a_h W_value_h) x)                    two
    HYLA, deep (eq. 10):         (sum_h a_h W_out_h) act((sum_h a_h W'_h) act((sum_h a_h W_value_h) x))   three

    any other:                   as softmax, if the output is the sum of code times value

For linear attention with `act` on its values the two maps cannot be merged: [W_value_h stacked over heads], then `act`,
then [a_h W_out_h concatenated].  Heads with a shared value head use the same W_value.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from polyhead.analysis.capture import check_taps, codes, within
from polyhead.layers.taps import OWN, GroupTaps, Taps
from polyhead.ops.latent_code import act as activation, retrieve


class ValueNetwork(list[Tensor]):
    """The matrices [out, in] in order of application, with biases and activations.

    Calling the network applies it to inputs (..., m).  The sum over keys and groups is the layer's output, except for
    its output bias, which is added once per query.

    Args:
        biases: One vector [out] per matrix, or zero.  That of values is sum_h a_h b_h, through W_out if the maps merge.
        act: The function between matrices.
    """

    def __init__(self, matrices: Sequence[Tensor], biases: Sequence[Tensor], act: str) -> None:
        super().__init__(matrices)
        self.biases = list(biases)
        self.act = act

    def __call__(self, x: Float[Tensor, "... _"]) -> Float[Tensor, "... m"]:
        function = activation(self.act)
        for i, (matrix, bias) in enumerate(zip(self, self.biases, strict=True)):
            if i > 0:
                x = function(x)
            x = x @ matrix.mT + bias
        return x


def value_network(taps: Taps, q_index: int, k_index: int, *, sample: int = 0, group: int = 0) -> ValueNetwork:
    """The matrices that one layer applies to the input of key `k_index` for query `q_index`, in order of application.

    >>> layer = capture(model, batch)[0]
    >>> network = value_network(layer, -1, -1)
    >>> [tuple(matrix.shape) for matrix in network]        # HYLA, width 64, value width 8 per head
    [(8, 64), (64, 8)]
    >>> network(layer.context[0, -1])                      # this pair's share of the layer's output

    Args:
        sample: The index of the sequence in the batch.
        group: The group of heads: a layer with several groups has a value network for each, and adds their outputs.

    Raises:
        ValueError: If values are no linear map, or a user's function does not give the sum of code times value.
    """
    check_taps("value_network", taps)
    code = codes(taps, q_index, k_index, group=group)
    if code.ndim != 2:
        raise ValueError(f"value_network: q_index and k_index must be two integers, got {q_index!r}, {k_index!r}")
    sample = within("value_network", "sample", sample, len(code))
    heads = taps.groups[group]
    for role, weight in (("values", heads.w_value), ("output", heads.w_out)):
        if weight is None:
            layer = f"layer {taps.name}" if taps.name else "this layer"
            raise ValueError(
                f"value_network: the {role} of {layer} must be one linear map of known weights but are not"
            )
    if heads.kind not in ("softmax", "linear", "hyla") and not _sums_codes(heads):
        raise ValueError("value_network: the output of these heads must be the sum of code times value but is not")
    if heads.kind == "hyla":
        return _hyla(heads, code[sample])
    if heads.gate is not None and heads.w_out is not None:  # the gate of this query is part of the output map
        heads = replace(heads, w_out=heads.w_out * heads.gate[sample, q_index][:, None])
    return _sums(heads, code[sample])


def _sums_codes(heads: GroupTaps) -> bool:
    """Whether the output equals the sum of code times value up to rounding: in half precision 3 % of the largest."""
    summed = retrieve(heads.code(), heads.v)
    if heads.gate is not None:
        summed = summed * heads.gate
    tolerance = min(1e3 * torch.finfo(heads.output.dtype).eps, 0.03)
    return bool((summed - heads.output).abs().max() <= tolerance * heads.output.abs().max())


def _per_head(heads: GroupTaps) -> tuple[Float[Tensor, "h e _"], Float[Tensor, "h e"], Float[Tensor, "h m e"]]:
    """The value map, bias and output map of each query head."""
    assert heads.w_value is not None
    assert heads.w_out is not None
    h, g = heads.w_out.shape[0], heads.w_value.shape[0]
    bias = heads.w_value.new_zeros(heads.w_value.shape[:2]) if heads.b_value is None else heads.b_value
    return heads.w_value.repeat_interleave(h // g, dim=0), bias.repeat_interleave(h // g, dim=0), heads.w_out


def _sums(heads: GroupTaps, a: Float[Tensor, " h"]) -> ValueNetwork:
    """The value network of heads whose output is the sum of code `a` times value."""
    w_value, b_value, w_out = _per_head(heads)
    scaled = a[:, None, None].to(w_out.dtype) * w_out  # (h m e): a_h W_out_h
    if heads.kind in ("softmax", OWN) or heads.act == "identity":
        # Nothing stands between the two maps, so they are one matrix.
        matrix = torch.einsum("h m e, h e c -> m c", scaled, w_value)
        return ValueNetwork([matrix], [torch.einsum("h m e, h e -> m", scaled, b_value)], "identity")
    wide = scaled.transpose(0, 1).flatten(1)  # (m, h e)
    return ValueNetwork([w_value.flatten(0, 1), wide], [b_value.flatten(), wide.new_zeros(len(wide))], heads.act)


def _hyla(heads: GroupTaps, a: Float[Tensor, " h"]) -> ValueNetwork:
    """The value network of HYLA: each matrix is the sum of those of the heads, weighted by the code `a`."""
    w_value, b_value, w_out = _per_head(heads)
    a = a.to(w_out.dtype)
    matrices = [torch.einsum("h, h e m -> e m", a, w_value), torch.einsum("h, h m e -> m e", a, w_out)]
    if heads.value_weight is not None:
        matrices.insert(1, torch.einsum("h, h e c -> e c", a, heads.value_weight))
    biases = [a @ b_value]
    for matrix in matrices[1:]:
        biases.append(matrix.new_zeros(len(matrix)))
    return ValueNetwork(matrices, biases, heads.act)
