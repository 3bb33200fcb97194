"""Softmax attention: every head mixes values with weights that sum to one over the keys.

    out_ih = sum_j a_hij v_jh,      a_hij = softmax_j(cap(q_ih . k_jh / sqrt(d)) + bias_hij)

Vaswani et al. 2017, "Attention is all you need", eq. 1.  Without `softcap`, cap(x) is x; with it, softcap tanh(x /
softcap) (Gemma team 2024, "Gemma 2", section 2).  With `sinks`, the softmax runs over one more key, of score sinks_h
and value 0 (OpenAI 2025, "gpt-oss model card", section 2.2).
"""

import torch
from torch import Tensor

from polyhead.ops.call import AttentionCall
from polyhead.ops.latent_code import code, drop, share


def unsupported_extras(call: AttentionCall) -> str | None:
    """Why an implementation without soft cap and sinks does not take a call, or None."""
    if call.softcap is not None:
        return "takes no softcap"
    return None if call.sinks is None else "takes no sinks"


def reference(call: AttentionCall) -> Tensor:
    """The equation, literally."""
    return torch.einsum("b h t s, b s h e -> b t h e", drop(code(call), call.keep), share(call.v, call.q.shape[2]))
