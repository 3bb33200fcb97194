"""Multi-head attention over any list of heads: causality, positions, masks, dropout, the tail of a block, errors.

Its equation is in test_equation.py, what it shows in test_codes.py.
"""

import functools
import re

import pytest
import torch
import zoo
from refusals import refused
from torch.testing import assert_close
from zoo import make_layer as make

import polyhead as ph
from polyhead import config
from polyhead.layers.call import drawn_keep
from polyhead.ops.latent_code import dense

F64 = torch.float64
M = 48
MANY = [
    ph.Softmax(2),
    ph.Linear(2, normalise="rms_heads", act="relu"),
    ph.Hyla(2, dim=4, value_dim=6),
    ph.Hyla(2, normalise="softmax"),
]
POSITIONS = {name: zoo.POSITIONS[name] for name in zoo.IN_LAYERS} | {"both": ph.RelativeBias(8, bidirectional=True)}


def tokens(t, b=2):
    return torch.randn(b, t, M, dtype=F64)


@pytest.mark.parametrize(("mixture", "positions"), zoo.turns([*zoo.EVERY], zoo.IN_LAYERS))
def test_the_future_is_invisible(mixture, positions):
    layer = make(zoo.EVERY[mixture], causal=True, positions=POSITIONS[positions])
    x = tokens(7).requires_grad_()
    y = layer(x)
    (gradient,) = torch.autograd.grad(y[:, 3].sum(), x)
    assert gradient[:, :4].abs().sum(-1).gt(0).all()
    assert gradient[:, 4:].eq(0).all()
    assert_close(layer(x[:, :4]), y[:, :4], atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("mixture", zoo.EVERY)
def test_without_causal_the_future_is_visible(mixture):
    layer, x = make(zoo.EVERY[mixture]), tokens(5, b=8).requires_grad_()  # a maximum over keys has few gradients
    (gradient,) = torch.autograd.grad(layer(x)[:, 0].sum(), x)
    assert gradient.abs().sum((0, 2)).gt(0).all()


@pytest.mark.parametrize("mixture", zoo.EVERY)
def test_the_tail_of_a_block_is_the_end_of_the_whole(mixture):
    x = tokens(7)
    for causal, window in ((False, None), (True, 3)):
        layer = make(zoo.EVERY[mixture], causal=causal, window=window, positions=ph.Rotary())
        block = ph.TransformerBlock(layer, ph.MlpLayer(M, dtype=F64), dtype=F64)
        assert_close(block(x, tail=2), block(x)[:, -2:])


# ------------------------------------------------------------------------------------------------- positions and masks
def test_positions_by_hand_equal_positions_by_default():
    where, x = torch.arange(7)[None], tokens(7)
    for positions in POSITIONS.values():
        layer = make(MANY, positions=positions, causal=True)
        assert_close(layer(x, positions=where), layer(x))
    rotary, t5 = (make(MANY, positions=positions) for positions in (ph.Rotary(), ph.RelativeBias()))
    assert_close(rotary(x, positions=where + 3), rotary(x))  # only distances count
    for layer in (rotary, t5):
        assert not torch.allclose(layer(x, positions=where * 2), layer(x))


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize(("t", "window"), [(3, None), (3, 3), (7, None), (9, None)])
def test_the_last_query_of_causal_attention_is_the_last_key_of_its_context(positions, t, window):
    """Queries before the first key see no key."""
    layer, x = make(MANY, causal=True, positions=POSITIONS[positions], window=window, bias=False), tokens(9)
    context = x[:, -7:]
    y = layer(x[:, -t:], context)
    assert_close(y[:, -7:], layer(context)[:, -t:])
    assert not y[:, :-7].any()


def test_biases_of_both_forms_add_up():
    x, layer, plain = tokens(5), make(MANY, positions=ph.RelativeBias()), make(MANY)
    plain.load_state_dict({k: v for k, v in layer.state_dict().items() if "relative" not in k})
    table, by_offset = layer.relative(5, 5, offset=0), torch.randn(layer.total_heads, 9, dtype=F64)
    assert_close(layer(x), plain(x, bias=table))
    for bias in (by_offset, dense(by_offset, 5, 5)[None]):
        assert_close(layer(x, bias=bias), plain(x, bias=table + by_offset))


# -------------------------------------------------------------------------------------------------------------- dropout
@pytest.mark.parametrize("mixture", zoo.MIXTURES)
def test_a_keep_of_0_removes_heads(mixture):
    """Also in training, in place of a draw; then their columns of the output map are not read."""
    layer, x = make(zoo.MIXTURES[mixture], dropout=0.5).train(), tokens(5)
    keep = torch.ones(1, layer.total_heads, 5, 5, dtype=F64)
    assert_close(layer(x, keep=keep), layer.eval()(x))
    keep[:, 2:] = 0
    without = layer.train()(x, keep=keep)
    with torch.no_grad():
        layer.out.weight[:, 2 * layer.sizes[0].value_dim :] = 0
    assert_close(without, layer.eval()(x))


@pytest.mark.parametrize("shared", [False, True])
def test_dropout_is_drawn_anew_in_training(shared):
    layer, x = make(MANY, dropout=0.2, dropout_shared=shared), tokens(60)
    assert_close(layer(x), layer(x), atol=0, rtol=0)
    layer.train()
    draws = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        draws.append(layer(x))
    assert torch.equal(draws[0], draws[1])
    assert not torch.allclose(draws[0], draws[2])
    torch.manual_seed(0)
    keep = layer.draw_keep(2, 60, 60, dtype=F64)
    assert_close(layer(x, keep=keep), draws[0])
    assert keep.shape == ((1, 1, 60, 60) if shared else (2, 8, 60, 60))
    assert set(keep.unique().tolist()) == {0.0, 1 / (1 - 0.2)}
    assert keep.eq(0).double().mean().item() == pytest.approx(0.2, abs=0.034 if shared else 0.0084)  # 5 deviations


def test_a_small_rate_is_kept_by_every_default_dtype():
    torch.set_default_dtype(torch.bfloat16)
    try:
        keep = drawn_keep((400, 100), 0.001)
    finally:
        torch.set_default_dtype(torch.float32)
    assert keep.dtype == torch.bfloat16
    assert 20 < keep.eq(0).sum() < 60


# --------------------------------------------------------------------------------------------------------------- errors
KEEP = "keep must be (b|1 h|1 t s), here (2, 4, 5, 5), but is "
ERRORS = {
    "wrong width": (lambda a, x: a(x[..., :3]), "m = 48 but x (b t m) = (2, 5, 3)"),
    "context of another batch": (lambda a, x: a(x, x[:1]), "b = 2 in x but 1 in context (b s m) = (1, 5, 48)"),
    "float mask": (
        lambda a, x: a(x, mask=torch.ones(5, 5)),
        "mask must be boolean, True where attention is allowed, but is torch.float32",
    ),
    "mask of the wrong size": (
        lambda a, x: a(x, mask=torch.ones(4, 5).bool()),
        "mask must broadcast to (b h t s) = (2, 4, 5, 5)",
    ),
    "keep without its queries": (lambda a, x: a(x, keep=torch.ones(1, 4, 1, 1, dtype=F64)), f"{KEEP}(1, 4, 1, 1)"),
    "keep of other heads": (lambda a, x: a(x, keep=torch.ones(2, 3, 5, 5, dtype=F64)), f"{KEEP}(2, 3, 5, 5)"),
    "keep without its batch": (lambda a, x: a(x, keep=torch.ones(4, 5, 5, dtype=F64)), f"{KEEP}(4, 5, 5)"),
    "context longer than the rotary table": (lambda a, x: a(x, tokens(17)), "17 positions but max_length is 16"),
    "more queries than the rotary table has": (lambda a, x: a(tokens(17), x), "17 positions but max_length is 16"),
    "bias of the wrong size": (lambda a, x: a(x, bias=torch.ones(4, 8, dtype=F64)), "(h t+s-1) = (4, 9) but is (4, 8)"),
    "dropout of everything": (lambda a, x: make([ph.Hyla(2)], dropout=1.0), "dropout must be in [0, 1) but is 1.0"),
    "positions of an input": (
        lambda a, x: make([ph.Hyla(2)], positions=ph.Learned()),
        "positions must be Rotary(), RelativeBias() or Alibi() but is Learned()",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_mistakes_are_one_line(name):
    call, text = ERRORS[name]
    refused(
        lambda: call(make([ph.Hyla(4)], positions=ph.Rotary()), tokens(5)), f"^MultiHeadAttention: .*{re.escape(text)}"
    )


def test_heads_that_are_none_are_refused():
    refused(lambda: make([ph.Softmax(3)], 10), r"Softmax: 3 heads do not divide the model width 10: give dim=")
    refused(lambda: make([ph.Hyla(2, impl="bloked")]), "did you mean 'blocked'")
    strange = ([], r"is \[\]"), (["softmax"], "holds 'softmax'"), ([ph.Softmax], "holds <class"), (3, "is 3")
    for heads, came in strange:
        call = functools.partial(config.head_list, "layer", heads)
        refused(call, f"layer: heads must be mechanisms .*but {came}")
