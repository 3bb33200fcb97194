"""The adapters that the tests of Stanford's CS336, assignment 1, call for the model: from a linear map to the whole.

    cp examples/cs336_adapters.py path/to/assignment1/tests/polyhead_adapters.py
    echo "from .polyhead_adapters import *" >> path/to/assignment1/tests/adapters.py

The course's other nine adapters stay yours: tokenizer, loss, optimiser, batches and checkpoints.  Run the tests with
polyhead's Python, after `pip install pytest tiktoken psutil`: `uv run` has the course's torch 2.6.

Each adapter calls one function of `polyhead.ops.textbook`, whose code docs/course.md explains part by part.  Weights
are [out, in], and a mask is True where a query may attend.
"""

import torch
from torch import Tensor

from polyhead.ops import textbook


def run_linear(d_in: int, d_out: int, weights: Tensor, in_features: Tensor) -> Tensor:
    """A map without bias."""
    return in_features @ weights.T


def run_embedding(vocab_size: int, d_model: int, weights: Tensor, token_ids: Tensor) -> Tensor:
    """A row of the table for each token."""
    return weights[token_ids]


def run_silu(in_features: Tensor) -> Tensor:
    """x sigmoid(x)."""
    return textbook.silu(in_features)


def run_swiglu(
    d_model: int, d_ff: int, w1_weight: Tensor, w2_weight: Tensor, w3_weight: Tensor, in_features: Tensor
) -> Tensor:
    """W2 (silu(W1 x) * W3 x)."""
    return textbook.swiglu(in_features, w1_weight, w2_weight, w3_weight)


def run_rmsnorm(d_model: int, eps: float, weights: Tensor, in_features: Tensor) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weights."""
    return textbook.rms_norm(in_features, weights, eps)


def run_softmax(in_features: Tensor, dim: int) -> Tensor:
    """exp(x - max x), divided by its sum."""
    return textbook.softmax(in_features, dim)


def run_rope(d_k: int, theta: float, max_seq_len: int, in_query_or_key: Tensor, token_positions: Tensor) -> Tensor:
    """Pairs of components, turned by their positions."""
    return textbook.rotary(in_query_or_key, token_positions, theta)


def run_scaled_dot_product_attention(Q: Tensor, K: Tensor, V: Tensor, mask: Tensor | None = None) -> Tensor:
    """softmax(Q K' / sqrt(d)) V."""
    return textbook.scaled_dot_product_attention(Q, K, V, mask)


def run_multihead_self_attention(
    d_model: int,
    num_heads: int,
    q_proj_weight: Tensor,
    k_proj_weight: Tensor,
    v_proj_weight: Tensor,
    o_proj_weight: Tensor,
    in_features: Tensor,
) -> Tensor:
    """Causal, without positions."""
    weights = (q_proj_weight, k_proj_weight, v_proj_weight, o_proj_weight)
    return textbook.self_attention(in_features, *weights, num_heads)


def run_multihead_self_attention_with_rope(
    d_model: int,
    num_heads: int,
    max_seq_len: int,
    theta: float,
    q_proj_weight: Tensor,
    k_proj_weight: Tensor,
    v_proj_weight: Tensor,
    o_proj_weight: Tensor,
    in_features: Tensor,
    token_positions: Tensor | None = None,
) -> Tensor:
    """Causal, with rotary positions."""
    if token_positions is None:
        token_positions = torch.arange(in_features.shape[-2], device=in_features.device)
    weights = (q_proj_weight, k_proj_weight, v_proj_weight, o_proj_weight)
    return textbook.self_attention(in_features, *weights, num_heads, token_positions, theta)


def run_transformer_block(
    d_model: int,
    num_heads: int,
    d_ff: int,
    max_seq_len: int,
    theta: float,
    weights: dict[str, Tensor],
    in_features: Tensor,
) -> Tensor:
    """A pre-norm block."""
    positions = torch.arange(in_features.shape[-2], device=in_features.device)
    return textbook.transformer_block(in_features, weights, num_heads, positions, theta)


def run_transformer_lm(
    vocab_size: int,
    context_length: int,
    d_model: int,
    num_layers: int,
    num_heads: int,
    d_ff: int,
    rope_theta: float,
    weights: dict[str, Tensor],
    in_indices: Tensor,
) -> Tensor:
    """Logits of the next token."""
    return textbook.transformer_lm(in_indices, weights, num_layers, num_heads, rope_theta)
