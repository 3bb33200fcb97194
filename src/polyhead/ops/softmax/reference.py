"""Softmax attention: every head mixes values with weights that sum to one over the keys.

    out_ih = sum_j a_hij v_jh,      a_hij = softmax_j(q_ih . k_jh / sqrt(d) + bias_hij)

Vaswani et al. 2017, "Attention is all you need", eq. 1.
"""

from einops import einsum
from torch import Tensor

from polyhead.ops.call import AttentionCall
from polyhead.ops.latent_code import code, drop, share


def reference(call: AttentionCall) -> Tensor:
    """The equation, literally."""
    return einsum(drop(code(call), call.keep), share(call.v, call.q.shape[2]), "b h t s, b s h e -> b t h e")
