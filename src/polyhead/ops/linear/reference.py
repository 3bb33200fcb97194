"""Linear attention: the scores are not normalised, so the sum over keys can be carried along as a state.

    out_ih = sum_j a_hij act(v_jh),      a_hij = q_ih . k_jh / sqrt(d) + bias_hij             parallel
    out_i  = S_i q_i / sqrt(d),          S_i = S_(i-1) + act(v_i) k_i^T                       recurrent (causal, t = s)

Schug et al. 2024, "Attention as a hypernetwork", eq. 3 without the softmax; `normalise="rms_heads"` and an `act`
other than identity are the ablations of its table A1.  Recurrent form: Katharopoulos et al. 2020, eq. 16 to 20 (no
feature map here).
"""

import torch
from einops import einsum
from torch import Tensor

from polyhead.ops.call import AttentionCall, sequence_of
from polyhead.ops.latent_code import act as activation, code, drop, share, wide, zero_hidden_keys
from polyhead.ops.tiles import unsupported_by_states


def reference(call: AttentionCall) -> Tensor:
    """The parallel equation, literally."""
    v = activation(call.act)(share(call.v, call.q.shape[2]))
    return einsum(drop(code(call), call.keep), v, "b h t s, b s h e -> b t h e")


def recurrent(call: AttentionCall) -> Tensor:
    """The recurrent equation: keys enter the state one by one; each query reads the state of all its visible keys."""
    reason = unsupported_by_states(call)
    if reason is not None:
        raise ValueError(f"linear_attention: impl 'recurrent' {reason}; use impl='auto' or 'reference'")
    q, h, (t, s) = call.q, call.q.shape[2], call.lengths
    k = wide(share(zero_hidden_keys(call.mask, call.k), h))
    v = wide(activation(call.act)(share(call.v, h)))
    sequence = None if call.cu_seqlens is None else sequence_of(call.cu_seqlens, s)
    states = [einsum(k[:, :0], v[:, :0], "b s h d, b s h e -> b h d e")]  # zeros: the state without keys
    for j in range(s):
        state = states[-1]
        if sequence is not None and j > 0:
            state = torch.where(sequence[j] == sequence[j - 1], state, 0)
        states.append(state + einsum(k[:, j], v[:, j], "b h d, b h e -> b h d e"))

    # How many keys are in the state that each query reads.
    if call.causal:
        num_keys = torch.arange(1 + s - t, 1 + s, device=q.device).clamp(min=0)
    elif sequence is None:
        num_keys = torch.full((t,), s, device=q.device)
    else:
        num_keys = torch.searchsorted(sequence, sequence, right=True)  # those up to the end of its own sequence
    read = torch.stack(states, 1)[:, num_keys]
    return einsum(wide(q) * call.score_scale, read, "b t h d, b t h d e -> b t h e").to(q.dtype)
