"""The course's model, whole and in parts, at the shapes and tolerances of its tests, against NumPy in float64.

The oracle is written from the handout: explicit loops over heads and positions, no code of ours.
"""

import dataclasses
import math

import numpy as np
import pytest
import torch
from refusals import refusing

import polyhead as ph
from polyhead.compat import cs336

B, T, S, H, D, FF, V, L, CONTEXT, THETA = 4, 12, 16, 4, 64, 128, 10_000, 3, 16, 1e4


def draw(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def state_dict(vocab=V, layers=L, dim=D, ff=FF):
    """The course's tensors, random: gains too, so that a forgotten one shows."""
    shapes = {"token_embeddings.weight": (vocab, dim)}
    for i in range(layers):
        shapes |= {f"layers.{i}.attn.{x}_proj.weight": (dim, dim) for x in ("q", "k", "v", "output")}
        shapes |= {f"layers.{i}.ln{n}.weight": (dim,) for n in "12"}
        shapes |= {f"layers.{i}.ffn.w1.weight": (ff, dim), f"layers.{i}.ffn.w3.weight": (ff, dim)}
        shapes |= {f"layers.{i}.ffn.w2.weight": (dim, ff)}
    shapes |= {"ln_final.weight": (dim,), "lm_head.weight": (vocab, dim)}
    sizes = {k: 1.0 if "token" in k else s[-1] ** -0.5 for k, s in shapes.items()}
    return {k: draw(i, *s) * sizes[k] + ("ln" in k) for i, (k, s) in enumerate(shapes.items())}


# -------------------------------------------------------------------------------------------------------------- oracle
def f64(x):
    return x.double().numpy()


def rms(x, gain, eps=1e-5):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * gain


def turn(x, positions, theta):
    """x (..., t, d): interleaved pairs, position from 0."""
    out = np.empty_like(x)
    for t, position in enumerate(positions):
        for j in range(x.shape[-1] // 2):
            angle = position * theta ** (-2 * j / x.shape[-1])
            a, b = x[..., t, 2 * j], x[..., t, 2 * j + 1]
            out[..., t, 2 * j] = a * math.cos(angle) - b * math.sin(angle)
            out[..., t, 2 * j + 1] = a * math.sin(angle) + b * math.cos(angle)
    return out


def attend(q, k, v, mask):
    scores = q @ np.swapaxes(k, -1, -2) / math.sqrt(q.shape[-1])
    parts = np.where(mask, np.exp(scores - np.where(mask, scores, -np.inf).max(-1, keepdims=True)), 0)
    return parts / parts.sum(-1, keepdims=True) @ v


def mha(x, wq, wk, wv, wo, heads, positions=None, theta=None):
    """Head after head: head i owns rows i * d to (i + 1) * d."""
    d, outs = x.shape[-1] // heads, []
    causal = np.arange(x.shape[-2])[:, None] >= np.arange(x.shape[-2])
    for i in range(heads):
        q, k, v = (x @ w[i * d : (i + 1) * d].T for w in (wq, wk, wv))
        if positions is not None:
            q, k = turn(q, positions, theta), turn(k, positions, theta)
        outs.append(attend(q, k, v, causal))
    return np.concatenate(outs, -1) @ wo.T


def swiglu(x, w1, w2, w3):
    gate = x @ w1.T
    return (gate / (1 + np.exp(-gate)) * (x @ w3.T)) @ w2.T


def block(x, weights, prefix):
    w = {k.removeprefix(prefix): f64(v) for k, v in weights.items() if k.startswith(prefix)}
    projections = [w[f"attn.{name}_proj.weight"] for name in ("q", "k", "v", "output")]
    x = x + mha(rms(x, w["ln1.weight"]), *projections, H, range(x.shape[-2]), THETA)
    return x + swiglu(rms(x, w["ln2.weight"]), *(w[f"ffn.w{n}.weight"] for n in "123"))


def lm(tokens, weights, layers=L):
    x = f64(weights["token_embeddings.weight"])[tokens.numpy()]
    for i in range(layers):
        x = block(x, weights, f"layers.{i}.")
    return rms(x, f64(weights["ln_final.weight"])) @ f64(weights["lm_head.weight"]).T


def close(actual, expected, atol=1e-6, rtol=1e-4):
    np.testing.assert_allclose(actual.detach().numpy(), expected, atol=atol, rtol=rtol)


@pytest.fixture(scope="module")
def weights():
    return state_dict()


@pytest.fixture
def x():
    return draw(4, B, T, D)


def fill(module, weights):
    """Strictly: every key of the course is there and no other."""
    module = module.to(next(iter(weights.values())).dtype)
    module.load_state_dict(weights)
    return module


# ------------------------------------------------------------------------------------------ the model and its parts
@pytest.mark.parametrize("length", [12, 6, 16, 1])
def test_transformer_lm(weights, length):
    """In float64 within 1e-9: only rounding is left in float32."""
    ids = torch.randint(V, (B, length), generator=torch.Generator().manual_seed(6))
    wanted = lm(ids, weights)
    for dtype, near in ((torch.float32, {"atol": 1e-4}), (torch.float64, {"atol": 1e-9, "rtol": 0})):
        given = {key: value.to(dtype) for key, value in weights.items()}
        close(fill(cs336.TransformerLM(V, CONTEXT, D, L, H, FF, THETA), given)(ids), wanted, **near)
        close(cs336.load(given, heads=H, theta=THETA, context=CONTEXT)(ids), wanted, **near)


def test_attention(weights, x):
    """Without rotary positions; with positions of each sequence in any order, and any number of batch dimensions."""
    names = [f"{name}_proj.weight" for name in ("q", "k", "v", "output")]
    state = {name: weights[f"layers.0.attn.{name}"] for name in names}
    ws = [f64(w) for w in state.values()]
    plain = fill(cs336.MultiHeadSelfAttention(D, H), state)
    close(plain(x), mha(f64(x), *ws, H))
    rotary = fill(cs336.MultiHeadSelfAttention(D, H, CONTEXT, THETA), state)
    where = torch.stack([torch.randperm(CONTEXT, generator=torch.Generator().manual_seed(i))[:T] for i in range(B)])
    rows = [mha(f64(x[i]), *ws, H, where[i].tolist(), THETA) for i in range(B)]
    close(rotary(x, where), np.stack(rows))
    close(rotary(x.view(2, 2, T, D), where.view(2, 2, T)), np.stack(rows).reshape(2, 2, T, D))
    close(rotary(x[0], where[0]), rows[0])


def test_eps_of_rmsnorm(x):
    x = x * 1e-3  # where eps shows
    close(cs336.RMSNorm(D, 1e-6)(x), rms(f64(x), 1.0, 1e-6))


def test_theta_and_positions():
    """The seventh argument is theta; a block gives token positions to its attention."""
    torch.manual_seed(0)
    models = [cs336.TransformerLM(11, 8, 8, 1, 2, 16, *last) for last in ((50.0,), ())]
    models += [cs336.TransformerLM(11, 8, 8, 1, 2, 16, rope_theta=50.0)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    given, usual, named = (model(torch.arange(8)[None]) for model in models)
    assert torch.equal(given, named)
    assert not torch.allclose(given, usual)
    block, x, where = models[0].layers[0], torch.randn(1, 4, 8), torch.tensor([0, 2, 3, 7])
    y = x + block.attn(block.ln1(x), where)
    torch.testing.assert_close(block(x, where), y + block.ffn(block.ln2(y)))


def test_functions_of_the_ops():
    for name in ("softmax", "silu", "scaled_dot_product_attention"):
        assert getattr(cs336, name) is getattr(ph.ops, name)


# ------------------------------------------------------------------------------------- checkpoints
def small():
    return state_dict(vocab=50, layers=2, dim=16, ff=64)


COMPILED = {"no": str, "whole": "_orig_mod.{}".format, "in part": lambda key: key.replace("attn.", "attn._orig_mod.")}


@pytest.mark.parametrize("compiled", COMPILED)
def test_load_infers_the_sizes_and_saves_the_same_bits(compiled):
    """Without the prefix of compiled models, and without a random draw."""
    course, draws = small(), torch.get_rng_state()
    given = {COMPILED[compiled](key): value for key, value in course.items()}
    model = cs336.load(given, heads=4, theta=500.0, context=20)
    assert torch.equal(torch.get_rng_state(), draws)
    assert (model.config.positions, model.config.max_length) == (ph.Rotary(theta=500.0), 20)
    saved = cs336.save(model)
    assert set(saved) == set(course)
    for key, value in course.items():
        assert torch.equal(saved[key], value), key
    assert saved["layers.0.attn.q_proj.weight"].untyped_storage().nbytes() == 16 * 16 * 4  # no view of q, k and v
    model.blocks[0].attention.qkv.weight.data.zero_()
    assert torch.equal(saved["layers.0.attn.q_proj.weight"], course["layers.0.attn.q_proj.weight"])


def loading(changed=None, heads=4, drop=()):
    """Load the course's state dict with some tensors changed and some dropped."""
    course = {key: value for key, value in small().items() if key not in drop}
    return cs336.load(course | (changed or {}), heads=heads, theta=1e4, context=8)


MISTAKES = {
    "cs336.load: missing layers.1.ffn.w2.weight, lm_head.weight; unknown head.weight": lambda: loading(
        {"head.weight": torch.zeros(50, 16)}, drop=("layers.1.ffn.w2.weight", "lm_head.weight")
    ),
    "cs336.load: lm_head.weight must be (50, 16) but is (51, 16)": lambda: loading(
        {"lm_head.weight": torch.zeros(51, 16)}
    ),
    "cs336.load: tables must be (c m) and (f m) but are (50,) and (64, 16)": lambda: loading(
        {"token_embeddings.weight": torch.zeros(50)}
    ),
    "cs336: the number of heads must divide the width 16 but is 5": lambda: loading(heads=5),
    "cs336.load: missing layers.0.attn.k_proj.weight": lambda: cs336.load({}, heads=4, theta=1e4, context=8),
    "num_heads must divide d_model = 16 but is 3": lambda: cs336.MultiHeadSelfAttention(16, 3),
    "positions need both max_seq_len and theta": lambda: cs336.MultiHeadSelfAttention(16, 2, max_seq_len=8),
    "MultiHeadSelfAttention: token_positions came, so max_seq_len and theta are needed": lambda: (
        cs336.MultiHeadSelfAttention(16, 2)(torch.zeros(1, 3, 16), torch.arange(3))
    ),
    "TransformerLM: at most 8 tokens (context_length) but 9 came": lambda: cs336.TransformerLM(20, 8, 16, 1, 2, 64)(
        torch.zeros(1, 9, dtype=torch.long)
    ),
}


@pytest.mark.parametrize("line", MISTAKES)
def test_mistakes_are_one_line(line):
    with refusing(line):
        MISTAKES[line]()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("norm", "layer"),
        ("norm_eps", 1e-6),
        ("causal", False),
        ("bias", True),
        ("heads", (ph.Softmax(2), ph.Hyla(2))),
        ("heads", (ph.Softmax(4, kv_heads=2),)),
        ("feedforward", ph.Mlp()),
        ("positions", None),
        ("positions", ph.Rotary(layout="half")),
        ("inputs", ph.Vectors(3)),
        ("outputs", ph.Logits(50, tied=True)),
    ],
)
def test_save_refuses_other_architectures(field, value):
    settings = dataclasses.replace(loading().config, **{field: value})
    with pytest.raises(ValueError, match=rf"^cs336.save: {field} must be .* but is "):
        cs336.save(ph.Transformer(settings))


def test_save_ignores_which_code_computes_the_heads():
    settings = loading().config
    per_layer = ((ph.Softmax(4, impl="reference"),), (ph.Softmax(4),))
    assert len(cs336.save(ph.Transformer(dataclasses.replace(settings, heads=per_layer)))) == 2 + 1 + 2 * 9


# -------------------------------------------------------------------------------------- the parts
def test_sizes_and_initialisation_of_the_handout():
    assert cs336.SwiGLU(512).w1.weight.shape == (1344, 512)
    torch.manual_seed(0)
    linear, embedding = cs336.Linear(300, 500), cs336.Embedding(400, 300)
    std = (2 / 800) ** 0.5
    assert abs(linear.weight.std().item() / std - 0.9866) < 0.01  # a normal cut at three deviations
    assert linear.weight.abs().max() <= 3 * std
    assert abs(embedding.weight.std().item() - 0.9866) < 0.01
    assert embedding.weight.abs().max() <= 3
    assert torch.equal(cs336.RMSNorm(7).weight, torch.ones(7))


def test_one_table_for_all_layers_and_none_in_the_state_dict():
    model = cs336.TransformerLM(20, 8, 16, 3, 2, 64, 1e4, device="meta", dtype=torch.bfloat16)
    assert len({id(layer.attn.rope) for layer in model.layers}) == 1
    assert not [key for key in model.state_dict() if "rope" in key]
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
