"""HYLA, hypernetwork linear attention: the latent code of a pair of tokens makes a small value network for this pair.

    z_ij   = act(sum_h a_hij v_jh)                      the pair's hidden layer
    out_ih = sum_j a_hij z_ij                           its output layer; W_out_h follows in the layer
    z_ij   = act(sum_h a_hij W_h act(sum_h a_hij v_jh)) with a deep value network

with a_hij the rms over heads of the scores.  Schug et al. 2024, "Attention as a hypernetwork", eq. 6; eq. 10 (deep).
"""

import torch
from torch import Tensor

from polyhead.ops.call import AttentionCall
from polyhead.ops.latent_code import act, code, drop, share


def reference(call: AttentionCall) -> Tensor:
    """Equation 6 (or 10), literally."""
    phi = act(call.act)
    a = drop(code(call), call.keep)
    v = share(call.v, call.q.shape[2])
    # Contiguous: with mixed layouts the gradient of phi takes 40 times as long as this copy.
    z = phi(torch.einsum("b h t s, b s h e -> b t s e", a, v).contiguous())
    if call.value_weight is not None:
        # Two operands at a time: for three, PyTorch chooses an order by the sizes, which an export then has fixed.
        z_by_head = torch.einsum("h f e, b t s e -> b t s h f", call.value_weight, z)
        z = phi(torch.einsum("b h t s, b t s h f -> b t s f", a, z_by_head))
    return torch.einsum("b h t s, b t s e -> b t h e", a, z)
