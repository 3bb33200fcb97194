"""The course's adapter functions over `polyhead`, as a student would write them; used by `test_cs336.py`.

Module parts run twice: through the course's modules (`compat.cs336`) and through our own names.
"""

import polyhead as ph
from polyhead.compat import cs336


def run_linear(d_in, d_out, weights, in_features):
    return fill(cs336.Linear(d_in, d_out), weight=weights)(in_features)


def run_embedding(vocab_size, d_model, weights, token_ids):
    return fill(cs336.Embedding(vocab_size, d_model), weight=weights)(token_ids)


def run_swiglu(d_model, d_ff, w1_weight, w2_weight, w3_weight, in_features):
    weights = {"w1.weight": w1_weight, "w2.weight": w2_weight, "w3.weight": w3_weight}
    course = fill(cs336.SwiGLU(d_model, d_ff), **weights)(in_features)
    return both(course, fill(ph.SwigluLayer(d_model, d_ff), **weights)(in_features))


def run_scaled_dot_product_attention(Q, K, V, mask=None):
    return ph.ops.scaled_dot_product_attention(Q, K, V, mask)


def run_multihead_self_attention(
    d_model, num_heads, q_proj_weight, k_proj_weight, v_proj_weight, o_proj_weight, in_features
):
    weights = (q_proj_weight, k_proj_weight, v_proj_weight, o_proj_weight)
    course = attention(cs336.MultiHeadSelfAttention(d_model, num_heads), *weights)(in_features)
    ours = ph.MultiHeadAttention(d_model, [ph.Softmax(num_heads)], causal=True)
    return both(course, fused(ours, *weights)(in_features))


def run_multihead_self_attention_with_rope(
    d_model,
    num_heads,
    max_seq_len,
    theta,
    q_proj_weight,
    k_proj_weight,
    v_proj_weight,
    o_proj_weight,
    in_features,
    token_positions=None,
):
    weights = (q_proj_weight, k_proj_weight, v_proj_weight, o_proj_weight)
    course = attention(cs336.MultiHeadSelfAttention(d_model, num_heads, max_seq_len, theta), *weights)
    positions = ph.Rotary(theta=theta)
    ours = ph.MultiHeadAttention(
        d_model, [ph.Softmax(num_heads)], causal=True, positions=positions, max_length=max_seq_len
    )
    out = fused(ours, *weights)(in_features, positions=token_positions)
    return both(course(in_features, token_positions), out)


def run_rope(d_k, theta, max_seq_len, in_query_or_key, token_positions):
    course = cs336.RotaryPositionalEmbedding(theta, d_k, max_seq_len)(in_query_or_key, token_positions)
    return both(course, ph.ops.rope(in_query_or_key, token_positions, theta=theta))


def run_transformer_block(d_model, num_heads, d_ff, max_seq_len, theta, weights, in_features):
    return fill(cs336.TransformerBlock(d_model, num_heads, d_ff, max_seq_len, theta), **weights)(in_features)


def run_transformer_lm(
    vocab_size, context_length, d_model, num_layers, num_heads, d_ff, rope_theta, weights, in_indices
):
    sizes = (vocab_size, context_length, d_model, num_layers, num_heads, d_ff, rope_theta)
    course = fill(cs336.TransformerLM(*sizes), **weights)(in_indices)
    ours = cs336.load(weights, heads=num_heads, theta=rope_theta, context=context_length)
    return both(course, ours(in_indices))


def run_rmsnorm(d_model, eps, weights, in_features):
    course = fill(cs336.RMSNorm(d_model, eps), weight=weights)(in_features)
    return both(course, fill(ph.RMSNorm(d_model, eps), weight=weights)(in_features))


def run_silu(in_features):
    return ph.ops.silu(in_features)


def run_softmax(in_features, dim):
    return ph.ops.softmax(in_features, dim)


# ------------------------------------------------------------------------------------------------------------- helpers
def fill(module, **weights):
    """Strictly: every key of the course is there and no other."""
    first = next(iter(weights.values()))
    module = module.to(first.dtype)
    module.load_state_dict(weights)
    return module


def attention(module, q, k, v, o):
    weights = {"q_proj.weight": q, "k_proj.weight": k, "v_proj.weight": v, "output_proj.weight": o}
    return fill(module, **weights)


def fused(module, q, k, v, o):
    return fill(module, **{"qkv.weight": q.new_tensor([*q.tolist(), *k.tolist(), *v.tolist()]), "out.weight": o})


def both(course, ours):
    """Two implementations of one thing: equal up to rounding."""
    assert course.shape == ours.shape
    worst = (course - ours).abs().max().item()
    assert worst < 1e-12 if course.dtype == course.double().dtype else worst < 2e-5, worst
    return course
