"""Feed-forward layers, which a block applies to each token separately.

MLP(x)     = W_down act(W_up x)
SwiGLU(x)  = W2 (silu(W1 x) * W3 x)                                               (Shazeer 2020)
experts(x) = sum_{i in top k} p_i MLP_i(x),   p = softmax over the chosen k of W_gate x
"""

from typing import Unpack

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from polyhead import config
from polyhead.layers.device import Placement
from polyhead.ops.latent_code import act as activation, wide
from polyhead.ops.precision import autocast_dtype

__all__ = ["MixtureOfExperts", "MlpLayer", "SwigluLayer"]


def _check_width(kind: str, width: int, x: Tensor) -> None:
    if x.shape[-1] != width:
        raise ValueError(f"{kind}: m = {width} but x (... m) = {tuple(x.shape)}")


def swiglu_width(dim: int) -> int:
    """The hidden width of SwiGLU by default: the multiple of 64 that is nearest to 8/3 dim, at least 64.

    >>> swiglu_width(64), swiglu_width(512)
    (192, 1344)
    """
    return max(64, round(dim / 24) * 64)


class MlpLayer(nn.Module):
    """`W_down act(W_up x)`; `hidden` defaults to 4 dim."""

    def __init__(
        self, dim: int, hidden: int | None = None, act: str = "gelu", bias: bool = True, **placement: Unpack[Placement]
    ) -> None:
        super().__init__()
        self.dim, self.act, self._act = dim, act, activation(act)
        if hidden is None:
            hidden = 4 * dim
        self.up = nn.Linear(dim, hidden, bias=bias, **placement)
        self.down = nn.Linear(hidden, dim, bias=bias, **placement)

    def forward(self, x: Float[Tensor, "... m"]) -> Float[Tensor, "... m"]:
        _check_width("MlpLayer", self.dim, x)
        return self.down(self._act(self.up(x)))


class SwigluLayer(nn.Module):
    """`w2(silu(w1 x) * w3 x)`; `hidden` defaults to `swiglu_width(dim)`; `bias` is for all three maps."""

    def __init__(self, dim: int, hidden: int | None = None, bias: bool = False, **placement: Unpack[Placement]) -> None:
        super().__init__()
        self.dim = dim
        if hidden is None:
            hidden = swiglu_width(dim)
        self.w1 = nn.Linear(dim, hidden, bias=bias, **placement)
        self.w2 = nn.Linear(hidden, dim, bias=bias, **placement)
        self.w3 = nn.Linear(dim, hidden, bias=bias, **placement)

    def forward(self, x: Float[Tensor, "... m"]) -> Float[Tensor, "... m"]:
        _check_width("SwigluLayer", self.dim, x)
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class MixtureOfExperts(nn.Module):
    """Each token is sent to the `top_k` experts with the highest gate scores and weighted by the softmax over those
    scores; the gate has no noise.

    After a forward pass `balance_loss` is `experts * sum_i f_i P_i`: f_i is the fraction of choices of expert i, and
    P_i its mean probability under the softmax over all experts (Fedus et al. 2022, eq. 4).  All k choices count the
    same.  It is 1 for an even load.  Padding counts as tokens do; without tokens it is 0.

    All experts are computed for all tokens; those that were not chosen have weight 0.  So no shape depends on data.
    """

    balance_loss: Tensor | None
    up_bias: nn.Parameter | None
    down_bias: nn.Parameter | None

    def __init__(
        self,
        dim: int,
        experts: int = 4,
        top_k: int = 2,
        hidden: int | None = None,
        act: str = "gelu",
        bias: bool = True,
        **placement: Unpack[Placement],
    ) -> None:
        super().__init__()
        if not 1 <= top_k <= experts:
            raise ValueError(f"MixtureOfExperts: top_k must be 1 to {experts} (experts) but is {top_k}")
        self.dim, self.experts, self.top_k = dim, experts, top_k
        self.act, self._act = act, activation(act)
        if hidden is None:
            hidden = 4 * dim
        self.gate = nn.Linear(dim, experts, bias=False, **placement)
        self.up = nn.Parameter(torch.empty(experts, hidden, dim, **placement))
        self.down = nn.Parameter(torch.empty(experts, dim, hidden, **placement))
        for name, width in (("up_bias", hidden), ("down_bias", dim)):
            empty = nn.Parameter(torch.empty(experts, width, **placement)) if bias else None
            self.register_parameter(name, empty)
        self.balance_loss = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Matrices N(0, 1 / fan_in), biases 0."""
        for matrix in (self.gate.weight, self.up, self.down):
            nn.init.normal_(matrix, std=matrix.shape[-1] ** -0.5)
        for bias in (self.up_bias, self.down_bias):
            if bias is not None:
                nn.init.zeros_(bias)

    def forward(self, x: Float[Tensor, "... m"]) -> Float[Tensor, "... m"]:
        _check_width("MixtureOfExperts", self.dim, x)
        flat = x.reshape(-1, x.shape[-1])  # (n m): n tokens
        scores = self._scores(flat)  # (n x): x experts
        best, chosen = scores.topk(self.top_k, dim=-1)  # (n top_k) each
        self.balance_loss = self._balance(scores, chosen)
        # Gate weights (n x): a softmax over the chosen scores, and 0 for all other experts.
        weight = torch.zeros_like(scores).scatter(-1, chosen, best.softmax(-1)).to(self.up.dtype)
        hidden = torch.einsum("nm,xfm->xnf", flat, self.up)
        if self.up_bias is not None:
            hidden = hidden + self.up_bias[:, None]
        # W_down is linear, so the gate can weight the hidden layer; the sum over experts is then one product.
        hidden = self._act(hidden) * weight.T[..., None]  # (x n f)
        out = torch.einsum("xnf,xmf->nm", hidden, self.down)
        if self.down_bias is not None:
            out = out + weight @ self.down_bias
        return out.view(x.shape)

    def _balance(self, scores: Tensor, chosen: Tensor) -> Tensor:
        if scores.shape[0] == 0:  # the mean over no tokens is NaN
            return scores.sum()
        # f_i (x,) is counted and has no gradient: the gate learns through P_i (Fedus et al. 2022, eq. 4).
        share = torch.zeros_like(scores).scatter(-1, chosen, 1.0 / self.top_k).mean(0)
        return self.experts * (share * scores.softmax(-1).mean(0)).sum()

    def _scores(self, flat: Tensor) -> Tensor:
        """The gate's scores, in at least float32; under autocast, too, as rounded scores choose other experts (Fedus et
        al. 2022, section 2.4)."""
        if autocast_dtype(flat) is None:
            return wide(self.gate(flat))
        with torch.autocast(flat.device.type, enabled=False):
            return wide(self.gate(flat.to(self.up.dtype)))

    def __getstate__(self) -> dict[str, object]:
        """The state without `balance_loss`, whose graph can be neither copied nor pickled."""
        return {**self.__dict__, "balance_loss": None}


def build_feedforward(
    kind: config.FeedForward, dim: int, **placement: Unpack[Placement]
) -> MlpLayer | SwigluLayer | MixtureOfExperts:
    """The feed-forward layer of a configuration."""
    if isinstance(kind, config.Mlp):
        return MlpLayer(dim, kind.hidden, act=kind.act, bias=kind.bias, **placement)
    if isinstance(kind, config.Swiglu):
        return SwigluLayer(dim, kind.hidden, kind.bias, **placement)
    return MixtureOfExperts(dim, kind.experts, kind.top_k, kind.hidden, kind.act, kind.bias, **placement)
