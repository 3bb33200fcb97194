"""Relational attention: a head retrieves symbols, and the relations of the receiver to the senders it attends to.

    out_ih  = sum_j a_hij symbols_jh + W_h sum_j a_hij rel_ij,      a_hij = softmax_j(q_ih . k_jh / sqrt(d) + bias_hij)
    rel_ijr = act(q_rel_ir . k_rel_jr / sqrt(p))                    r relations, the same for all heads

The features of the senders are never retrieved; only their relations to the receiver are.  Altabaa and Lafferty 2024,
"Disentangling and integrating relational and sensory information in transformer architectures" (arXiv 2405.16727).
"""

from dataclasses import replace

import torch
from torch import Tensor

from polyhead.ops.call import AttentionCall, Masks
from polyhead.ops.latent_code import code, drop, relation_mask, relations, retrieve


def reference(call: AttentionCall) -> Tensor:
    """The equation, literally."""
    call = replace(call, masks=Masks(call.visible()))  # computed once, for the code and for the relations
    q_rel, k_rel = call.relation_qk
    a = drop(code(call), call.keep)
    rel = relations(q_rel, k_rel, relation_act=call.act, mask=relation_mask(call))
    related = torch.einsum("b h t s, b r t s -> b t h r", a, rel)
    return retrieve(a, call.symbols) + torch.einsum("h e r, b t h r -> b t h e", call.relation_map, related)
