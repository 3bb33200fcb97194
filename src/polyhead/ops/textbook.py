"""The course's functions, written out: no call of PyTorch's own softmax, SiLU, norms or attention.

    softmax(x)_i = exp(x_i - max x) / sum_j exp(x_j - max x)
    silu(x)      = x sigmoid(x)
    glu(x)       = sigmoid(W1 x) * W2 x
    swiglu(x)    = W2 (silu(W1 x) * W3 x)
    rms_norm(x)  = x / sqrt(mean(x^2) + eps) * weight
    rotary(x)    = each pair of components, turned by position * theta^(-2 j / d)
    attention    = softmax(q k^T / sqrt(d)) v

Weights are [out, in].  `softmax`, `silu`, `rms_norm`, `rotary` and attention compute in at least float32, whatever the
dtype of the inputs, and round once.  `glu` and `swiglu` round every product.  Stanford CS336, assignment 1;
docs/course.md shows this code part by part.
"""

from collections.abc import Mapping

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from polyhead.ops.latent_code import wide
from polyhead.ops.precision import casting
from polyhead.ops.rope import check_even, check_shape
from polyhead.spec.shapes import shaped


@shaped
def softmax(x: Float[Tensor, "..."], dim: int) -> Float[Tensor, "..."]:
    """`exp(x - max x)` divided by its sum along `dim`: no finite number overflows.

    A slice of -inf only gives NaN, as in PyTorch.  Attention knows its mask and gives 0 there.

    >>> softmax(torch.tensor([1e4, 1e4, -1e4]), 0)
    tensor([0.5000, 0.5000, 0.0000])

    Raises:
        ValueError: For a `dim` out of range.
    """
    rank = max(x.dim(), 1)
    if not -rank <= dim < rank:
        raise ValueError(f"softmax: dim must be in [{-rank}, {rank}) for x of shape {tuple(x.shape)} but is {dim}")
    if x.numel() == 0:
        return x.clone()
    # The largest number becomes 0, so no exponential exceeds 1.  It cancels: it is a constant for gradients.
    largest = wide(x).amax(dim, keepdim=True).detach()
    exponentials = torch.exp(wide(x) - largest)
    return (exponentials / exponentials.sum(dim, keepdim=True)).to(x.dtype)


@shaped
def silu(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """`x * sigmoid(x)`, also called swish (Hendrycks and Gimpel 2016).

    >>> silu(torch.tensor([-20.0, 0.0, 20.0]))
    tensor([-4.1223e-08,  0.0000e+00,  2.0000e+01])
    """
    return (wide(x) * torch.sigmoid(wide(x))).to(x.dtype)


def glu(x: Float[Tensor, "... m"], w1: Float[Tensor, "f m"], w2: Float[Tensor, "f m"]) -> Float[Tensor, "... f"]:
    """`sigmoid(W1 x) * W2 x` (Dauphin et al. 2017)."""
    return torch.sigmoid(x @ w1.T) * (x @ w2.T)


def swiglu(
    x: Float[Tensor, "... m"], w1: Float[Tensor, "f m"], w2: Float[Tensor, "m f"], w3: Float[Tensor, "f m"]
) -> Float[Tensor, "... m"]:
    """`W2 (silu(W1 x) * W3 x)` (Shazeer 2020)."""
    return (silu(x @ w1.T) * (x @ w3.T)) @ w2.T


@shaped
def rms_norm(x: Float[Tensor, "... m"], weight: Float[Tensor, " m"], eps: float = 1e-5) -> Float[Tensor, "... m"]:
    """`x / sqrt(mean(x^2) + eps) * weight` (Zhang and Sennrich 2019)."""
    # In float32: the square of 1e4 exceeds what float16 holds.
    mean_square = wide(x).square().mean(-1, keepdim=True)  # (... 1)
    return (wide(x) / torch.sqrt(mean_square + eps) * weight).to(x.dtype)


@shaped
def rotary(x: Float[Tensor, "... d"], positions: Int[Tensor, "..."], theta: float = 1e4) -> Float[Tensor, "... d"]:
    """Turn the pairs (2j, 2j + 1) of `x` by `position * theta^(-2 j / d)`; positions count from 0 (Su et al. 2021)."""
    dim = x.shape[-1]
    check_even("rotary", dim)
    check_shape("rotary", positions, tuple(x.shape[:-1]))
    # In float64, which Apple's GPUs do not have: at position 100,000 a float32 angle is off by 0.006.
    dtype = torch.float32 if x.device.type == "mps" else torch.float64
    exponents = torch.arange(0, dim, 2, dtype=dtype, device=x.device) / -dim  # (d/2)
    angles = positions[..., None] * theta**exponents  # (... d/2)
    cos = angles.cos().to(wide(x).dtype)
    sin = angles.sin().to(wide(x).dtype)
    first, second = wide(x)[..., 0::2], wide(x)[..., 1::2]  # (... d/2) each
    turned = torch.stack((first * cos - second * sin, first * sin + second * cos), dim=-1)  # (... d/2 2)
    return turned.flatten(-2).to(x.dtype)


@shaped
def scaled_dot_product_attention(
    q: Float[Tensor, "... t d"],
    k: Float[Tensor, "... s d"],
    v: Float[Tensor, "... s e"],
    mask: Bool[Tensor, "... #t #s"] | None = None,
) -> Float[Tensor, "... t e"]:
    """`softmax(q k^T / sqrt(d)) v`, where batch dimensions broadcast.

    A query without a visible key gets exactly 0, and its gradient is never NaN.

    >>> q, k, v = torch.zeros(1, 2), torch.zeros(3, 2), torch.tensor([[1.0], [2.0], [6.0]])
    >>> scaled_dot_product_attention(q, k, v, torch.tensor([[True, True, False]]))
    tensor([[1.5000]])

    Args:
        mask: True where query t may attend to key s.

    Raises:
        ValueError: For sizes, batch dimensions or dtypes that do not match, and for a mask that is not boolean.
    """
    with casting(q, k, v) as (q, k, v):
        check_batch(q, k, v, mask)
        return attention(q, k, v, mask)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """The equation, for tensors of one dtype."""
    if mask is None:
        scores = wide(q) @ wide(k).mT * q.shape[-1] ** -0.5
        return (softmax(scores, -1) @ wide(v)).to(v.dtype)

    # NaN in a key that no query sees would be multiplied by 0.
    mask = mask.expand(*mask.shape[:-2], q.shape[-2], k.shape[-2])
    is_seen = mask.any(-2)[..., None]
    k, v = torch.where(is_seen, k, 0), torch.where(is_seen, v, 0)
    scores = wide(q) @ wide(k).mT * q.shape[-1] ** -0.5

    # Hidden scores are -inf, but 0 in a row without keys: a softmax of -inf alone would be NaN.
    has_keys = mask.any(-1, keepdim=True)  # (... t 1)
    hidden = torch.where(has_keys, -torch.inf, 0.0).to(scores.dtype)
    weights = softmax(torch.where(mask, scores, hidden), -1) * mask
    return (weights @ wide(v)).to(v.dtype)


def split_heads(x: Float[Tensor, "... t m"], num_heads: int) -> Float[Tensor, "... h t d"]:
    """Cut vectors into heads, which become a batch dimension."""
    return x.unflatten(-1, (num_heads, -1)).transpose(-3, -2)


def causal_heads(
    q: Float[Tensor, "... t m"],
    k: Float[Tensor, "... t m"],
    v: Float[Tensor, "... t m"],
    num_heads: int,
    positions: Int[Tensor, "... t"] | None = None,
    theta: float = 1e4,
) -> Float[Tensor, "... t m"]:
    """Attention of each head to itself and to earlier tokens, side by side; rotary if `positions` are given."""
    q, k, v = split_heads(q, num_heads), split_heads(k, num_heads), split_heads(v, num_heads)  # (... h t d)
    if positions is not None:
        q = rotary(q, positions[..., None, :], theta)
        k = rotary(k, positions[..., None, :], theta)
    num_tokens = q.shape[-2]
    mask = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=q.device).tril()
    return scaled_dot_product_attention(q, k, v, mask).transpose(-3, -2).flatten(-2)


def self_attention(
    x: Float[Tensor, "... t m"],
    w_q: Float[Tensor, "m m"],
    w_k: Float[Tensor, "m m"],
    w_v: Float[Tensor, "m m"],
    w_o: Float[Tensor, "m m"],
    num_heads: int,
    positions: Int[Tensor, "... t"] | None = None,
    theta: float = 1e4,
) -> Float[Tensor, "... t m"]:
    """Causal multi-head self-attention; queries, keys and values of all heads are three products."""
    return causal_heads(x @ w_q.T, x @ w_k.T, x @ w_v.T, num_heads, positions, theta) @ w_o.T


def self_attention_one_product(
    x: Float[Tensor, "... t m"],
    w_qkv: Float[Tensor, "3*m m"],
    w_o: Float[Tensor, "m m"],
    num_heads: int,
    positions: Int[Tensor, "... t"] | None = None,
    theta: float = 1e4,
) -> Float[Tensor, "... t m"]:
    """The same with `w_qkv = torch.cat((w_q, w_k, w_v))`: one product."""
    q, k, v = (x @ w_qkv.T).chunk(3, dim=-1)
    return causal_heads(q, k, v, num_heads, positions, theta) @ w_o.T


def transformer_block(
    x: Float[Tensor, "... t m"],
    weights: Mapping[str, Tensor],
    num_heads: int,
    positions: Int[Tensor, "... t"] | None = None,
    theta: float = 1e4,
) -> Float[Tensor, "... t m"]:
    """A pre-norm block: `x + attention(norm(x))`, then `x + swiglu(norm(x))`; keys are the course's."""
    w_q, w_k, w_v, w_o = (weights[f"attn.{name}_proj.weight"] for name in ("q", "k", "v", "output"))
    x = x + self_attention(rms_norm(x, weights["ln1.weight"]), w_q, w_k, w_v, w_o, num_heads, positions, theta)
    w_1, w_2, w_3 = weights["ffn.w1.weight"], weights["ffn.w2.weight"], weights["ffn.w3.weight"]
    return x + swiglu(rms_norm(x, weights["ln2.weight"]), w_1, w_2, w_3)


@shaped
def transformer_lm(
    tokens: Int[Tensor, "... t"], weights: Mapping[str, Tensor], num_layers: int, num_heads: int, theta: float = 1e4
) -> Float[Tensor, "... t c"]:
    """The language model: embedding, blocks, a last norm, and the logits of the next token."""
    x = weights["token_embeddings.weight"][tokens]
    positions = torch.arange(tokens.shape[-1], device=tokens.device)
    for i in range(num_layers):
        prefix = f"layers.{i}."
        block = {key.removeprefix(prefix): weight for key, weight in weights.items() if key.startswith(prefix)}
        x = transformer_block(x, block, num_heads, positions, theta)
    return rms_norm(x, weights["ln_final.weight"]) @ weights["lm_head.weight"].T


def check_batch(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> None:
    """Raise ValueError unless dtypes are the same, batch dimensions broadcast, and queries have a width."""
    name = "scaled_dot_product_attention"
    if q.shape[-1] == 0:
        raise ValueError(f"{name}: q and k must have a width of 1 or more")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"{name}: q, k and v must share a dtype but are {q.dtype}, {k.dtype} and {v.dtype}")
    shapes = [tuple(x.shape[:-2]) for x in (q, k, v, mask) if x is not None]
    try:
        torch.broadcast_shapes(*shapes)
    except RuntimeError:
        raise ValueError(f"{name}: batch dimensions do not broadcast: {', '.join(map(str, shapes))}") from None
