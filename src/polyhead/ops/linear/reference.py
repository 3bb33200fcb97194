"""Linear attention: the scores are not normalised, so the sum over keys can be carried along as a state.

    out_ih = sum_j a_hij act(v_jh),      a_hij = q_ih . k_jh / sqrt(d) + bias_hij             parallel
    out_i  = S_i q_i / sqrt(d),          S_i = S_(i-1) + act(v_i) k_i^T                       recurrent (causal, t = s)

Schug et al. 2024, "Attention as a hypernetwork", eq. 3 without the softmax; `normalise="rms_heads"` and an `act`
other than identity are the ablations of its table A1.  Recurrent form (`linear_step`): Katharopoulos et
al. 2020, eq. 16 to 20 (no feature map here).
"""

import torch
from torch import Tensor

from polyhead.ops.call import AttentionCall
from polyhead.ops.latent_code import act as activation, code, drop, share


def reference(call: AttentionCall) -> Tensor:
    """The parallel equation, literally."""
    v = activation(call.act)(share(call.v, call.q.shape[2]))
    return torch.einsum("b h t s, b s h e -> b t h e", drop(code(call), call.keep), v)
