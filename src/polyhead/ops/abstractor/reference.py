"""Relational cross-attention of the Abstractor: attention whose values are symbols.

    out_ih = sum_j act(s_ij)_h symbols_jh,      s_hij = q_ih . k_jh / sqrt(d) + bias_hij

With the softmax as `act`, the inner products select a symbol; with a pointwise activation they are the relations.
Altabaa, Webb, Cohen and Lafferty 2024, "Abstractors and relational cross-attention".
"""

from torch import Tensor

from polyhead.ops.call import AttentionCall
from polyhead.ops.latent_code import drop, products, relate, retrieve, with_bias


def code(call: AttentionCall) -> Tensor:
    """act(s) of all pairs (b h t s); 0 for masked pairs."""
    scores, visible = with_bias(products(call), call.bias, call.visible())
    a = relate(scores, call.act, visible).to(call.q.dtype)
    return a if visible is None else a.masked_fill(~visible, 0)


def reference(call: AttentionCall) -> Tensor:
    """The equation, literally."""
    return retrieve(drop(code(call), call.keep), call.symbols)
