"""The course's model as modules and as our model, at the shapes and tolerances of its tests, against NumPy."""

import dataclasses

import numpy as np
import pytest
import torch
from course_oracle import draw, f64, lm, mha, state_dict
from refusals import refusing

import polyhead as ph
from polyhead.compat import cs336
from polyhead.ops import textbook

B, T, S, H, D, FF, V, L, CONTEXT, THETA = 4, 12, 16, 4, 64, 128, 10_000, 3, 16, 1e4


def close(actual, expected, atol=1e-6, rtol=1e-4):
    np.testing.assert_allclose(actual.detach().numpy(), expected, atol=atol, rtol=rtol)


@pytest.fixture(scope="module")
def weights():
    return state_dict(V, L, D, FF)


@pytest.fixture
def x():
    return draw(4, B, T, D)


def fill(module, weights):
    """Strictly: every key of the course is there and no other."""
    module = module.to(next(iter(weights.values())).dtype)
    module.load_state_dict(weights)
    return module


# ------------------------------------------------------------------------------------------ the model and its parts
@pytest.mark.parametrize("length", [16, 1])
def test_the_language_model_gives_what_numpy_gives(weights, length):
    """In float64 within 1e-9: only rounding is left in float32."""
    ids = torch.randint(V, (B, length), generator=torch.Generator().manual_seed(6))
    expected = lm(ids, weights, L, H, THETA)
    for dtype, tolerance in ((torch.float32, {"atol": 1e-4}), (torch.float64, {"atol": 1e-9, "rtol": 0})):
        state = {key: value.to(dtype) for key, value in weights.items()}
        close(fill(cs336.TransformerLM(V, CONTEXT, D, L, H, FF, THETA), state)(ids), expected, **tolerance)
        close(cs336.load(state, heads=H, theta=THETA, context=CONTEXT)(ids), expected, **tolerance)


def test_attention_gives_what_numpy_gives(weights, x):
    """With positions of each sequence in any order, and any number of batch dimensions."""
    names = [f"{name}_proj.weight" for name in ("q", "k", "v", "output")]
    state = {name: weights[f"layers.0.attn.{name}"] for name in names}
    rotary = fill(cs336.MultiHeadSelfAttention(D, H, CONTEXT, THETA), state)
    generator = torch.Generator().manual_seed(0)
    positions = torch.stack([torch.randperm(CONTEXT, generator=generator)[:T] for _ in range(B)])
    rows = [mha(f64(x[i]), *map(f64, state.values()), H, positions[i].tolist(), THETA) for i in range(B)]
    close(rotary(x, positions), np.stack(rows))
    close(rotary(x.view(2, 2, T, D), positions.view(2, 2, T)), np.stack(rows).reshape(2, 2, T, D))
    close(rotary(x[0], positions[0]), rows[0])
    assert rotary(x[:, :0]).shape == (B, 0, D)


def test_the_seventh_argument_is_theta_and_a_block_passes_positions_on():
    """The seventh argument is theta; a block gives token positions to its attention."""
    models = [cs336.TransformerLM(11, 8, 8, 1, 2, 16, *last) for last in ((50.0,), ())]
    models += [cs336.TransformerLM(11, 8, 8, 1, 2, 16, rope_theta=50.0)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    with_theta, without_theta, by_name = (model(torch.arange(8)[None]) for model in models)
    assert torch.equal(with_theta, by_name)
    assert not torch.allclose(with_theta, without_theta)
    block, x, positions = models[0].layers[0], torch.randn(1, 4, 8), torch.tensor([0, 2, 3, 7])
    y = x + block.attn(block.ln1(x), positions)
    torch.testing.assert_close(block(x, positions), y + block.ffn(block.ln2(y)))
    assert not torch.allclose(block(x, positions), block(x))


# ------------------------------------------------------------------------------------- checkpoints
def small():
    return state_dict(vocab=50, layers=2, dim=16, hidden=64)


def test_load_infers_the_sizes_and_saves_the_same_bits():
    course = small()
    model = cs336.load(course, heads=4, theta=500.0, context=20)
    config = model.config
    assert (config.inputs, config.outputs, config.dim, config.layers) == (ph.Tokens(50), ph.Logits(50), 16, 2)
    assert (config.heads, config.feedforward, config.max_length) == ((ph.Softmax(4),), ph.Swiglu(64), 20)
    assert config.positions == ph.Rotary(theta=500.0)
    assert (config.norm, config.norm_eps, config.norm_order, config.causal) == ("rms", 1e-5, "pre", True)
    saved = cs336.save(model)
    assert set(saved) == set(course)
    for key, value in course.items():
        assert torch.equal(saved[key], value), key
    assert saved["layers.0.attn.q_proj.weight"].untyped_storage().nbytes() == 16 * 16 * 4  # no view of q, k and v
    model.blocks[0].attention.qkv.weight.data.zero_()
    assert torch.equal(saved["layers.0.attn.q_proj.weight"], course["layers.0.attn.q_proj.weight"])


def loading(drop=(), changes=None, heads=4):
    """Load the course's state dict with some tensors dropped or changed."""
    course = {key: value for key, value in small().items() if key not in drop}
    return cs336.load(course | (changes or {}), heads=heads, theta=1e4, context=8)


TABLE, DOWN, HEAD, X = "token_embeddings.weight", "layers.1.ffn.w2.weight", "lm_head.weight", torch.zeros(2, 3, 8)
MISTAKES = {
    f"cs336.load: missing {DOWN}, {HEAD}": lambda: loading((DOWN, HEAD)),
    f"cs336.load: missing {HEAD}; unknown head.weight": lambda: loading([HEAD], {"head.weight": torch.zeros(50, 16)}),
    f"cs336.load: {DOWN} must be (16, 64) but is (64, 16)": lambda: loading(changes={DOWN: torch.zeros(64, 16)}),
    "cs336: the number of heads must divide the width 16 but is None": lambda: loading(heads=None),
    "cs336.load: a state dict must come, got a list": lambda: cs336.load([], heads=2, theta=1e4, context=8),
    "must be a floating matrix, got torch.float32 torch.Size([50])": lambda: loading(changes={TABLE: torch.zeros(50)}),
    "must be a floating matrix, got torch.int64": lambda: loading(changes={TABLE: torch.ones(50, 16).long()}),
    f"cs336.load: {DOWN} must be floating but is": lambda: loading(changes={DOWN: torch.ones(16, 64).long()}),
    "transformer_lm: tokens must be of a": lambda: textbook.transformer_lm(torch.ones(3).byte(), {}, 1, 1),
    "num_heads must divide d_model = 16 but is 2.0": lambda: cs336.MultiHeadSelfAttention(16, 2.0),
    "token_positions need max_seq_len and theta": lambda: cs336.MultiHeadSelfAttention(8, 2)(X, torch.arange(3)),
    "MultiHeadSelfAttention: the width must be even but is 3": lambda: cs336.MultiHeadSelfAttention(6, 2, 8, 1e4),
    "MultiHeadSelfAttention: theta must be above 0 but is -1": lambda: cs336.MultiHeadSelfAttention(8, 2, 8, -1),
    "token_positions must be (..., 3) but are (2, 1)": lambda: attend(torch.zeros(2, 1, dtype=torch.long)),
    "positions of shape (2, 1, 3) do not broadcast to (2, 3)": lambda: attend(torch.arange(3).expand(2, 1, 3)),
    "positions must be of an integer dtype but are torch.float32": lambda: attend(torch.arange(3.0)),
    "positions must be below max_seq_len = 8 but reach 8": lambda: attend(torch.arange(6, 9)),
    "x must be (..., t, 4) but is (2, 3, 8)": lambda: cs336.RotaryPositionalEmbedding(1e4, 4, 9)(X, torch.arange(3)),
    "softmax: dim must be in [-2, 2) for x of shape (3, 5) but is 2": lambda: textbook.softmax(torch.zeros(3, 5), 2),
    "rotary: the width must be even but is 3": lambda: textbook.rotary(torch.zeros(1, 3), torch.arange(1)),
    "rms_norm: m = 1 in x but 8 in weight (m) = (8,)": lambda: cs336.RMSNorm(8)(torch.ones(2, 1)),
}


def attend(positions):
    """Attention with rotary positions over two sequences of three tokens."""
    return cs336.MultiHeadSelfAttention(8, 2, 8, 1e4)(X, positions)


@pytest.mark.parametrize("line", MISTAKES)
def test_mistakes_are_one_line(line):
    with refusing(line):
        MISTAKES[line]()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("norm", "layer"),
        ("causal", False),
        ("heads", (ph.Softmax(2), ph.Hyla(2))),
        ("feedforward", ph.Mlp()),
        ("positions", ph.Rotary(layout="half")),
        ("inputs", ph.Vectors(3)),
    ],
)
def test_save_refuses_other_architectures(field, value):
    settings = dataclasses.replace(loading().config, **{field: value})
    with pytest.raises(ValueError, match=rf"^cs336.save: {field} must be .* but is "):
        cs336.save(ph.Transformer(settings))


def test_save_refuses_a_users_function():
    model = loading()
    model.blocks[1].attention.groups[0].use(ph.ops.linear_attention)
    with refusing("cs336.save: SoftmaxHeads must compute the op of their kind but compute a user's function"):
        cs336.save(model)


def test_save_ignores_which_code_computes_the_heads_and_how_they_are_trained():
    settings = dataclasses.replace(loading().config, checkpoint=True, dropout=0.1)
    per_layer = ((ph.Softmax(4, impl="reference"),), (ph.Softmax(4),))
    model = ph.Transformer(dataclasses.replace(settings, heads=per_layer))
    model.blocks[1] = torch.compile(model.blocks[1])
    assert cs336.save(model).keys() == small().keys()


# -------------------------------------------------------------------------------------- the parts
def test_initialisation_of_the_handout():
    linear, embedding = cs336.Linear(300, 500), cs336.Embedding(400, 300)
    std = (2 / 800) ** 0.5
    assert abs(linear.weight.std().item() / std - 0.9866) < 0.01  # a normal cut at three deviations
    assert linear.weight.abs().max() <= 3 * std
    assert abs(embedding.weight.std().item() - 0.9866) < 0.01
    assert embedding.weight.abs().max() <= 3
    assert torch.equal(cs336.RMSNorm(7).weight, torch.ones(7))
    assert cs336.SwiGLU(512).w1.weight.shape == (1344, 512)
