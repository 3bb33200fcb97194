"""Cosine heads: a mechanism of one's own, by name, with a parameter."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

import polyhead as ph


@dataclass(frozen=True)
class Cosine(ph.Mechanism):
    """Softmax of sharpness times the cosine of query and key; each head learns its sharpness.

    a_hij = softmax_j(c_h q_ih . k_jh / (|q_ih| |k_jh|)),    out_ih = sum_j a_hij v_jh
    """

    sharpness: float = 10.0

    def parameters(self, heads: int, dim: int, value_dim: int) -> dict[str, Tensor]:
        """What the group learns, by name, as it begins."""
        return {"log_sharpness": torch.full((heads,), self.sharpness).log()}

    def code(self, own: torch.nn.Module, q: Tensor, k: Tensor, **seen: object) -> Tensor:
        """The code (b h t s) of queries (b t h d) and keys (b s h d); `seen` are mask, causality, bias and so on."""
        q = F.normalize(q, dim=-1) * own.log_sharpness.exp().to(q.dtype)[:, None]
        return ph.ops.latent_code(q, F.normalize(k, dim=-1), normalise="softmax", **(seen | {"scale": 1.0}))
