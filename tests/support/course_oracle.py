"""The course's model in NumPy and float64, from the handout: loops over heads and positions, no code of ours."""

import math

import numpy as np
import torch
from scipy.special import expit, softmax


def draw(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def state_dict(vocab, layers, dim, hidden):
    """The course's tensors, random: gains too, so that a forgotten one shows."""
    shapes = {"token_embeddings.weight": (vocab, dim)}
    for i in range(layers):
        for name in ("q", "k", "v", "output"):
            shapes[f"layers.{i}.attn.{name}_proj.weight"] = (dim, dim)
        shapes[f"layers.{i}.ln1.weight"] = shapes[f"layers.{i}.ln2.weight"] = (dim,)
        shapes[f"layers.{i}.ffn.w1.weight"] = shapes[f"layers.{i}.ffn.w3.weight"] = (hidden, dim)
        shapes[f"layers.{i}.ffn.w2.weight"] = (dim, hidden)
    shapes["ln_final.weight"] = (dim,)
    shapes["lm_head.weight"] = (vocab, dim)
    state = {}
    for i, (key, shape) in enumerate(shapes.items()):
        scale = 1.0 if "token" in key else shape[-1] ** -0.5
        state[key] = draw(i, *shape) * scale + ("ln" in key)
    return state


def f64(x):
    return x.double().numpy()


def silu(x):
    return x * expit(x)


def rms(x, gain, eps=1e-5):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * gain


def turn(x, positions, theta):
    """x (..., t, d): interleaved pairs are complex numbers, position from 0."""
    angles = np.outer(positions, theta ** (-np.arange(0, x.shape[-1], 2) / x.shape[-1]))
    turned = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angles)
    return np.stack((turned.real, turned.imag), -1).reshape(x.shape)


def attend(q, k, v, mask):
    scores = q @ np.swapaxes(k, -1, -2) / math.sqrt(q.shape[-1])
    return softmax(np.where(mask, scores, -np.inf), -1) @ v


def mha(x, w_q, w_k, w_v, w_o, heads, positions=None, theta=None):
    """Head after head: head i owns rows i * d to (i + 1) * d."""
    width, outputs = x.shape[-1] // heads, []
    causal = np.arange(x.shape[-2])[:, None] >= np.arange(x.shape[-2])
    for i in range(heads):
        rows = slice(i * width, (i + 1) * width)
        q, k, v = x @ w_q[rows].T, x @ w_k[rows].T, x @ w_v[rows].T
        if positions is not None:
            q, k = turn(q, positions, theta), turn(k, positions, theta)
        outputs.append(attend(q, k, v, causal))
    return np.concatenate(outputs, -1) @ w_o.T


def swiglu(x, w1, w2, w3):
    return (silu(x @ w1.T) * (x @ w3.T)) @ w2.T


def block(x, weights, heads, theta):
    w = {key: f64(value) for key, value in weights.items()}
    projections = [w[f"attn.{name}_proj.weight"] for name in ("q", "k", "v", "output")]
    x = x + mha(rms(x, w["ln1.weight"]), *projections, heads, range(x.shape[-2]), theta)
    return x + swiglu(rms(x, w["ln2.weight"]), w["ffn.w1.weight"], w["ffn.w2.weight"], w["ffn.w3.weight"])


def of_layer(weights, i):
    """The weights of block i, by their names in the block."""
    prefix = f"layers.{i}."
    return {key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)}


def lm(tokens, weights, layers, heads, theta):
    x = f64(weights["token_embeddings.weight"])[tokens.numpy()]
    for i in range(layers):
        x = block(x, of_layer(weights, i), heads, theta)
    return rms(x, f64(weights["ln_final.weight"])) @ f64(weights["lm_head.weight"]).T
