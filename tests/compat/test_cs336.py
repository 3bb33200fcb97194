"""Every model-part row of the course's test table, at its shapes and tolerances, against NumPy in float64.

The oracle is written from the handout: explicit loops over heads and positions, no code of ours.
"""

import importlib.util
import math
import pathlib

import numpy as np
import pytest
import torch

import polyhead as ph
from polyhead.compat import cs336

_spec = importlib.util.spec_from_file_location("cs336_adapters", pathlib.Path(__file__).with_name("adapters.py"))
adapters = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(adapters)

B, T, S, H, D, FF, V, L, CONTEXT, THETA = 4, 12, 16, 4, 64, 128, 10_000, 3, 16, 1e4


def draw(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def state_dict(vocab=V, layers=L, dim=D, ff=FF):
    """30 tensors, random: gains too, so that a forgotten one shows."""
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


def block(x, weights, prefix=""):
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


# -------------------------------------------------------------------------- the rows of the table
def test_linear(weights, x):
    w = weights["layers.0.ffn.w1.weight"]
    close(adapters.run_linear(D, FF, w, x), f64(x) @ f64(w).T, atol=1e-5)


def test_embedding(weights):
    w, ids = weights["token_embeddings.weight"], torch.randint(V, (B, T), generator=torch.Generator().manual_seed(6))
    close(adapters.run_embedding(V, D, w, ids), f64(w)[ids.numpy()], atol=0, rtol=0)


def test_swiglu(weights, x):
    ws = [weights[f"layers.0.ffn.w{n}.weight"] for n in "123"]
    close(adapters.run_swiglu(D, FF, *ws, x), swiglu(f64(x), *map(f64, ws)), atol=1e-5)


@pytest.mark.parametrize("lead", [(B,), (2, 2), (), (2, 1, 2)])
def test_scaled_dot_product_attention(lead):
    q, k, v = draw(1, *lead, T, D), draw(2, *lead, S, D), draw(3, *lead, S, D)
    mask = draw(5, *lead, T, S) > 0.5
    mask[..., 0] |= ~mask.any(-1)
    actual = adapters.run_scaled_dot_product_attention(Q=q, K=k, V=v, mask=mask)
    close(actual, attend(f64(q), f64(k), f64(v), mask.numpy()))
    inverted = attend(f64(q), f64(k), f64(v), (~mask | mask.all(-1, keepdim=True)).numpy())
    assert np.abs(actual.numpy() - inverted).max() > 0.1  # polarity matters: True looks


def attention_weights(weights):
    return [weights[f"layers.0.attn.{name}_proj.weight"] for name in ("q", "k", "v", "output")]


def test_multihead_self_attention_is_causal(weights, x):
    ws = attention_weights(weights)
    actual = adapters.run_multihead_self_attention(D, H, *ws, x)
    close(actual, mha(f64(x), *map(f64, ws), H))
    changed = x.clone()
    changed[:, 7:] += 1.0
    assert torch.equal(adapters.run_multihead_self_attention(D, H, *ws, changed)[:, :7], actual[:, :7])


@pytest.mark.parametrize("positions", [torch.arange(T)[None], torch.arange(T)[None] + 4, None])
def test_multihead_self_attention_with_rope(weights, x, positions):
    ws = attention_weights(weights)
    actual = adapters.run_multihead_self_attention_with_rope(D, H, CONTEXT, THETA, *ws, x, positions)
    where = range(T) if positions is None else positions[0].tolist()
    close(actual, mha(f64(x), *map(f64, ws), H, where, THETA))
    plain = adapters.run_multihead_self_attention(D, H, *ws, x)
    torch.testing.assert_close(actual[:, 0], plain[:, 0], atol=1e-6, rtol=1e-5)  # one key: no rotation shows
    assert (actual[:, 1] - plain[:, 1]).abs().max() > 1e-2


def test_attention_with_positions_of_each_sequence(weights, x):
    """Positions (b, t), in any order, and any number of batch dimensions."""
    ws = attention_weights(weights)
    module = adapters.attention(cs336.MultiHeadSelfAttention(D, H, CONTEXT, THETA), *ws)
    where = torch.stack([torch.randperm(CONTEXT, generator=torch.Generator().manual_seed(i))[:T] for i in range(B)])
    rows = [mha(f64(x[i]), *map(f64, ws), H, where[i].tolist(), THETA) for i in range(B)]
    close(module(x, where), np.stack(rows))
    close(module(x.view(2, 2, T, D), where.view(2, 2, T)), np.stack(rows).reshape(2, 2, T, D))
    close(module(x[0], where[0]), rows[0])


def test_transformer_block(weights, x):
    mine = {k.removeprefix("layers.0."): v for k, v in weights.items() if k.startswith("layers.0.")}
    close(adapters.run_transformer_block(D, H, FF, CONTEXT, THETA, mine, x), block(f64(x), mine))


@pytest.mark.parametrize("length", [12, 6, 16, 1])
def test_transformer_lm(weights, length):
    ids = torch.randint(V, (B, length), generator=torch.Generator().manual_seed(6))
    actual = adapters.run_transformer_lm(V, CONTEXT, D, L, H, FF, THETA, weights, ids)
    close(actual, lm(ids, weights), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("eps", [1e-5, 1e-6])
def test_rmsnorm(weights, x, eps):
    gain = weights["layers.1.ln1.weight"]
    for scale in (1.0, 1e-3):  # at 1e-3 eps shows
        close(adapters.run_rmsnorm(D, eps, gain, x * scale), rms(f64(x * scale), f64(gain), eps))
    for kind in (cs336.RMSNorm, ph.RMSNorm):
        assert kind(D).eps == 1e-5


@pytest.mark.parametrize("shape", [(B, T, D), (T, D), (2, 3, T, D)])
def test_rope(shape):
    x, positions = draw(4, *shape), torch.arange(T)
    expected = turn(f64(x), range(T), THETA)
    close(adapters.run_rope(D, THETA, T, x, positions), expected)
    if len(shape) > 2:
        close(adapters.run_rope(D, THETA, T, x, positions.expand(1, T)), expected)


def test_silu_matches_pytorch():
    x = draw(0, 2, 5)
    close(adapters.run_silu(x), torch.nn.functional.silu(x), atol=1e-6, rtol=1e-7)


def test_softmax_matches_pytorch():
    x = draw(0, 3, 5)
    for shift in (0, 100):
        close(
            adapters.run_softmax(x + shift, dim=-1), torch.softmax(x, dim=-1), atol=1e-6, rtol=1e-6 if shift else 1e-7
        )


def test_float64_is_exact(weights, x):
    """The same table in float64 within 1e-9: what is left in float32 is rounding."""
    wide = {k: v.double() for k, v in weights.items()}
    ids = torch.randint(V, (1, T), generator=torch.Generator().manual_seed(6))
    logits = adapters.run_transformer_lm(V, CONTEXT, D, L, H, FF, THETA, wide, ids)
    close(logits, lm(ids, weights), atol=1e-9, rtol=0)
    course = cs336.MultiHeadSelfAttention(D, H, CONTEXT, THETA, dtype=torch.float64)
    ws = attention_weights(wide)
    close(
        adapters.attention(course, *ws)(x.double()), mha(f64(x), *map(f64, ws), H, range(T), THETA), atol=1e-9, rtol=0
    )


# ------------------------------------------------------------------------------------- checkpoints
def small():
    return state_dict(vocab=50, layers=2, dim=16, ff=64)


def test_the_state_dict_has_the_thirty_keys_of_the_course(weights):
    assert len(weights) == 30
    model = cs336.TransformerLM(V, CONTEXT, D, L, H, FF, rope_theta=THETA)
    assert {k: v.shape for k, v in model.state_dict().items()} == {k: v.shape for k, v in weights.items()}


def test_load_infers_the_sizes_and_saves_the_same_bits():
    course = small()
    model = cs336.load(course, heads=4, theta=500.0, context=20)
    c = model.config
    assert (c.inputs, c.outputs, c.dim, c.layers) == (ph.Tokens(50), ph.Logits(50), 16, 2)
    assert (c.heads, c.feedforward, c.max_length) == ((ph.Softmax(4),), ph.Swiglu(64), 20)
    assert c.positions == ph.Rotary(theta=500.0)
    assert (c.norm, c.norm_eps, c.norm_order, c.causal) == ("rms", 1e-5, "pre", True)
    saved = cs336.save(model)
    assert list(saved) != []
    assert set(saved) == set(course)
    for key, value in course.items():
        assert torch.equal(saved[key], value), key
    assert saved["layers.0.attn.q_proj.weight"].untyped_storage().nbytes() == 16 * 16 * 4  # no view of q, k and v
    model.blocks[0].attention.qkv.weight.data.zero_()
    assert torch.equal(saved["layers.0.attn.q_proj.weight"], course["layers.0.attn.q_proj.weight"])


def test_load_strips_the_prefix_of_compiled_models():
    course = small()
    for name in (lambda k: f"_orig_mod.{k}", lambda k: k.replace("attn.", "attn._orig_mod.")):
        model = cs336.load({name(k): v for k, v in course.items()}, heads=4, theta=1e4, context=20)
        assert torch.equal(model.inputs.table.weight, course["token_embeddings.weight"])
        assert torch.equal(cs336.save(model)["layers.1.attn.v_proj.weight"], course["layers.1.attn.v_proj.weight"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_load_keeps_the_dtype_and_the_global_generator(dtype):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    model = cs336.load({k: v.to(dtype) for k, v in small().items()}, heads=4, theta=1e4, context=20)
    assert torch.equal(torch.get_rng_state(), before)
    assert {p.dtype for p in model.parameters()} == {dtype}
    logits = model(torch.arange(12).view(2, 6))
    assert logits.dtype == dtype
    assert logits.isfinite().all()


def test_load_mistakes_are_one_line():
    def loading(heads=4, **changes):
        course = {k.replace("/", "."): v for k, v in small().items()}
        for key, value in changes.items():
            course.pop(key.replace("__", "."), None)
            course |= {} if value is None else {key.replace("__", "."): value}
        return cs336.load(course, heads=heads, theta=1e4, context=8)

    with pytest.raises(ValueError, match=r"^cs336.load: missing layers.1.ffn.w2.weight, lm_head.weight$"):
        loading(layers__1__ffn__w2__weight=None, lm_head__weight=None)
    with pytest.raises(ValueError, match=r"^cs336.load: unknown layers.0.attn.q_proj.bias$"):
        loading(layers__0__attn__q_proj__bias=torch.zeros(16))
    with pytest.raises(ValueError, match=r"^cs336.load: missing lm_head.weight; unknown head.weight$"):
        loading(lm_head__weight=None, head__weight=torch.zeros(50, 16))
    with pytest.raises(ValueError, match=r"^cs336.load: layers.1.ffn.w2.weight must be \(16, 64\) but is \(64, 16\)$"):
        loading(layers__1__ffn__w2__weight=torch.zeros(64, 16))
    with pytest.raises(ValueError, match=r"^cs336.load: lm_head.weight must be \(50, 16\) but is \(51, 16\)$"):
        loading(lm_head__weight=torch.zeros(51, 16))
    with pytest.raises(
        ValueError, match=r"^cs336.load: tables must be \(c m\) and \(f m\) but are \(50,\) and \(64, 16\)$"
    ):
        loading(token_embeddings__weight=torch.zeros(50))
    with pytest.raises(ValueError, match=r"^cs336: the number of heads must divide the width 16 but is 5$"):
        loading(heads=5)
    with pytest.raises(ValueError, match=r"^cs336.load: missing layers.0.attn.k_proj.weight"):
        cs336.load({}, heads=4, theta=1e4, context=8)


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
    import dataclasses

    settings = dataclasses.replace(cs336.load(small(), heads=4, theta=1e4, context=8).config, **{field: value})
    with pytest.raises(ValueError, match=rf"^cs336.save: {field} must be .* but is "):
        cs336.save(ph.Transformer(settings))


def test_save_ignores_which_code_computes_the_heads():
    import dataclasses

    settings = cs336.load(small(), heads=4, theta=1e4, context=8).config
    per_layer = ((ph.Softmax(4, impl="reference"),), (ph.Softmax(4),))
    assert len(cs336.save(ph.Transformer(dataclasses.replace(settings, heads=per_layer)))) == 2 + 1 + 2 * 9


# -------------------------------------------------------------------------------------- the parts
def test_default_width_of_swiglu():
    assert cs336.SwiGLU(64).w1.weight.shape == (128, 64)
    assert cs336.SwiGLU(512).w1.weight.shape == (1344, 512)


def test_initialisation_of_the_handout():
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


def test_part_mistakes_are_one_line():
    with pytest.raises(ValueError, match=r"^MultiHeadSelfAttention: num_heads must divide d_model = 16 but is 3$"):
        cs336.MultiHeadSelfAttention(16, 3)
    with pytest.raises(ValueError, match=r"^MultiHeadSelfAttention: rotary positions need both max_seq_len and theta$"):
        cs336.MultiHeadSelfAttention(16, 2, max_seq_len=8)
    with pytest.raises(
        ValueError, match=r"^MultiHeadSelfAttention: token_positions came, so max_seq_len and theta are"
    ):
        cs336.MultiHeadSelfAttention(16, 2)(torch.zeros(1, 3, 16), torch.arange(3))
    with pytest.raises(ValueError, match=r"^TransformerLM: at most 8 tokens \(context_length\) but 9 came$"):
        cs336.TransformerLM(20, 8, 16, 1, 2, 64)(torch.zeros(1, 9, dtype=torch.long))


@pytest.mark.compile
def test_compiles_whole():
    model = cs336.load(state_dict(vocab=50, layers=1, dim=16, ff=64), heads=4, theta=1e4, context=20)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="eager")
    for t in (5, 9):
        ids = torch.arange(2 * t).view(2, t)
        torch.testing.assert_close(compiled(ids), model(ids), atol=1e-5, rtol=1e-5)
