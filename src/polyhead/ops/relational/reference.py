"""Relational attention: a head retrieves symbols, and the relations of the receiver to the senders it attends to.

    out_ih  = sum_j a_hij symbols_jh + W_h sum_j a_hij rel_ij,      a_hij = softmax_j(q_ih . k_jh / sqrt(d) + bias_hij)
    rel_ijr = act(q_rel_ir . k_rel_jr / sqrt(p))                    r relations, the same for all heads

The features of the senders are never retrieved; only their relations to the receiver are.  Altabaa and Lafferty 2024,
"Disentangling and integrating relational and sensory information in transformer architectures" (arXiv 2405.16727).
"""

import torch
from torch import Tensor

from polyhead.ops.call import AttentionCall
from polyhead.ops.latent_code import retrieved_and_related


def reference(call: AttentionCall) -> Tensor:
    """The equation, literally."""
    retrieved, related = retrieved_and_related(call)
    return retrieved + torch.einsum("h e r, b t h r -> b t h e", call.relation_map, related)
