"""The course's model, whole and in parts, with its names of tensors.

The oracle is our own layers, which have oracles of their own: the course's parts share the ops with them, no more.
"""

import dataclasses

import pytest
import torch
from refusals import refusing
from torch.testing import assert_close

import polyhead as ph
from polyhead.compat import cs336

B, T, H, D, FF, V, L, CONTEXT = 4, 12, 4, 16, 64, 50, 2, 20
F64 = torch.float64


def draw(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def state_dict():
    """The course's tensors, random: gains too, so that a forgotten one shows."""
    shapes = {"token_embeddings.weight": (V, D)}
    for i in range(L):
        shapes |= {f"layers.{i}.attn.{x}_proj.weight": (D, D) for x in ("q", "k", "v", "output")}
        shapes |= {f"layers.{i}.ln{n}.weight": (D,) for n in "12"}
        shapes |= {f"layers.{i}.ffn.w1.weight": (FF, D), f"layers.{i}.ffn.w3.weight": (FF, D)}
        shapes |= {f"layers.{i}.ffn.w2.weight": (D, FF)}
    shapes |= {"ln_final.weight": (D,), "lm_head.weight": (V, D)}
    sizes = {k: 1.0 if "token" in k else s[-1] ** -0.5 for k, s in shapes.items()}
    return {k: draw(i, *s) * sizes[k] + ("ln" in k) for i, (k, s) in enumerate(shapes.items())}


# ------------------------------------------------------------------------------------------ the model and its parts
@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize(
    ("theta", "place", "named"), [(500.0, [500.0], {}), (50.0, [], {"rope_theta": 50.0}), (1e4, [], {})]
)
def test_transformer_lm(theta, place, named, dtype):
    """All keys of the course are there, and no others.  The seventh argument may be theta."""
    state = {key: value.to(dtype) for key, value in state_dict().items()}
    model = cs336.TransformerLM(V, CONTEXT, D, L, H, FF, *place, **named, dtype=dtype)
    model.load_state_dict(state)
    loaded = cs336.load(state, heads=H, theta=theta, context=CONTEXT)
    for length in (CONTEXT, 1):
        ids = torch.randint(V, (B, length), generator=torch.Generator().manual_seed(6))
        assert_close(model(ids), loaded(ids))
        assert_close(model(ids[0]), loaded(ids)[0])


def test_attention():
    """Without rotary positions; with positions of each sequence in any order, and any number of batch dimensions."""
    x, order = draw(4, B, T, D), torch.stack([torch.randperm(CONTEXT)[:T] for _ in range(B)])
    names = [f"{name}_proj.weight" for name in ("q", "k", "v", "output")]
    state = {name: state_dict()[f"layers.0.attn.{name}"] for name in names}
    q, k, v, out = state.values()
    plain, rotary = cs336.MultiHeadSelfAttention(D, H), cs336.MultiHeadSelfAttention(D, H, CONTEXT, 50.0)
    for module, where, positions in ((plain, None, None), (rotary, order, ph.Rotary(theta=50.0))):
        module.load_state_dict(state)
        layer = ph.MultiHeadAttention(D, ph.Softmax(H), causal=True, positions=positions, max_length=CONTEXT)
        layer.load_state_dict({"qkv.weight": torch.cat((q, k, v)), "out.weight": out})
        wanted = layer(x, positions=where)
        assert_close(module(x, where), wanted)
    assert_close(rotary(x.view(2, 2, T, D), order.view(2, 2, T)), wanted.view(2, 2, T, D))
    assert_close(rotary(x[0], order[0]), wanted[0])


def test_eps_of_rmsnorm():
    x = draw(4, B, D) * 1e-3  # where eps shows
    assert_close(cs336.RMSNorm(D, 1e-6)(x), x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt())


def test_a_block_gives_token_positions_to_its_attention():
    block, x, where = cs336.TransformerBlock(8, 2, 16, 8, 1e4), draw(4, 1, 4, 8), torch.tensor([0, 2, 3, 7])
    y = x + block.attn(block.ln1(x), where)
    assert_close(block(x, where), y + block.ffn(block.ln2(y)))


def test_functions_of_the_ops():
    for name in ("softmax", "silu", "scaled_dot_product_attention"):
        assert getattr(cs336, name) is getattr(ph.ops, name)


# ------------------------------------------------------------------------------------- checkpoints
COMPILED = {"no": str, "whole": "_orig_mod.{}".format, "in part": lambda key: key.replace("attn.", "attn._orig_mod.")}


@pytest.mark.parametrize("compiled", COMPILED)
def test_load_infers_the_sizes_and_saves_the_same_bits(compiled):
    """Without the prefix of compiled models, and without a random draw."""
    course, draws = state_dict(), torch.get_rng_state()
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


def loading(changed=(), heads=4):
    """Load the course's state dict with some tensors changed, or dropped (None)."""
    course = {key: value for key, value in {**state_dict(), **dict(changed)}.items() if value is not None}
    return cs336.load(course, heads=heads, theta=1e4, context=8)


MISTAKES = {
    "cs336.load: missing lm_head.weight; unknown x": lambda: loading({"lm_head.weight": None, "x": torch.ones(1)}),
    "lm_head.weight must be (50, 16) but is (51, 16)": lambda: loading({"lm_head.weight": torch.zeros(51, 16)}),
    "(c m) and (f m) but are (50,) and (64, 16)": lambda: loading({"token_embeddings.weight": torch.zeros(50)}),
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


OTHERS = {"norm": "layer", "norm_eps": 1e-6, "causal": False, "bias": True, "feedforward": ph.Mlp()}
OTHERS |= {"positions": ph.Rotary(layout="half"), "inputs": ph.Vectors(3), "outputs": ph.Logits(50, tied=True)}
HEADS = [(ph.Softmax(2), ph.Hyla(2)), (ph.Softmax(4, kv_heads=2),)]


@pytest.mark.parametrize(
    ("field", "value"), [*OTHERS.items(), ("positions", None), *(("heads", heads) for heads in HEADS)]
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
