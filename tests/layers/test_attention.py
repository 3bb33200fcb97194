"""Multi-head attention over any list of heads: contexts, biases, dropout, errors.

Its equation is in test_equation.py, what it shows in test_codes.py.  That no query sees the future is noticed in
test_cache.py, too.
"""

import itertools
import re

import pytest
import torch
import zoo
from refusals import refused, refusing
from torch.testing import assert_close
from zoo import make_layer as make, tokens

import polyhead as ph
from polyhead.layers.call import drawn_keep
from polyhead.ops.latent_code import dense

F64 = torch.float64
HEADS = [
    ph.Softmax(2),
    ph.Linear(2, normalise="rms_heads", act="relu"),
    ph.Hyla(2, dim=4, value_dim=6),
    ph.Hyla(2, normalise="softmax"),
]
POSITIONS = {name: zoo.POSITIONS[name] for name in zoo.IN_LAYERS} | {"both": ph.RelativeBias(8, bidirectional=True)}


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize(("t", "window"), [(3, None), (3, 3), (7, None), (9, None)])
def test_the_last_query_of_causal_attention_is_the_last_key_of_its_context(positions, t, window):
    """Queries before the first key see no key."""
    layer, x = make(HEADS, causal=True, positions=POSITIONS[positions], window=window, bias=False), tokens(9)
    context = x[:, -7:]
    y = layer(x[:, -t:], context)
    assert_close(y[:, -7:], layer(context)[:, -t:])
    assert not y[:, :-7].any()


def test_positions_with_gaps_are_those_of_a_longer_sequence():
    """Its other tokens are masked; a window counts positions."""
    indices, x, mask = torch.tensor([0, 2, 3, 7]), tokens(8), torch.zeros(8, dtype=torch.bool)
    mask[indices] = True
    for positions, window in itertools.product(POSITIONS.values(), (5, 200)):  # 200 is more than int8 has
        layer = make(HEADS, positions=positions, causal=True, window=window)
        places = indices[None].to(torch.int8)
        assert_close(layer(x[:, indices], positions=places), layer(x, mask=mask)[:, indices])


def test_biases_of_both_forms_add_up():
    x, layer, plain = tokens(5), make(HEADS, positions=ph.RelativeBias()), make(HEADS)
    plain.load_state_dict({k: v for k, v in layer.state_dict().items() if "relative" not in k})
    table, by_offset = layer.relative(5, 5, offset=0), torch.randn(layer.total_heads, 9, dtype=F64)
    assert_close(layer(x), plain(x, bias=table))
    for bias in (by_offset, dense(by_offset, 5, 5)[None]):
        assert_close(layer(x, bias=bias), plain(x, bias=table + by_offset))


@pytest.mark.parametrize("mixture", [*zoo.EVERY][::3])
def test_what_is_empty_stays_empty(mixture):
    for positions, causal in zoo.turns(zoo.IN_LAYERS, (False, True)):
        layer = make(zoo.EVERY[mixture], causal=causal, positions=zoo.POSITIONS[positions], window=2)
        for x in (tokens(0), tokens(3, b=0)):
            assert layer(x).shape == x.shape


@pytest.mark.parametrize("mixture", zoo.EVERY)
def test_what_leaves_the_meta_device_begins_anew(mixture):
    """Each module with parameters of its own has `reset_parameters`, as those of PyTorch have."""
    layer = make(zoo.EVERY[mixture], positions=ph.RelativeBias(), qk_norm=True).to("meta").to_empty(device="cpu")
    for value in layer.state_dict().values():
        value.fill_(torch.nan)

    def reset(module):
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()

    layer.apply(reset)  # from the inside out: relation weights depend on the maps around them
    assert all(value.isfinite().all() for value in layer.state_dict().values())


@pytest.mark.parametrize("value", [0.0, torch.nan])
def test_relation_weights_are_not_drawn_from_maps_without_values(value):
    layer = make(ph.Relational(2))
    for parameter in layer.parameters():
        parameter.data.fill_(value)
    with refusing("call reset_parameters of children first, as `layer.apply` does"):
        layer.groups[0].reset_parameters()


@pytest.mark.parametrize("shared", [False, True])
def test_dropout_is_drawn_anew_in_training(shared):
    layer, x = make(HEADS, dropout=0.2, dropout_shared=shared), tokens(60)
    assert_close(layer(x), layer(x), atol=0, rtol=0)
    layer.train()
    draws = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        draws.append(layer(x))
    assert torch.equal(draws[0], draws[1])
    assert not torch.allclose(draws[0], draws[2])
    torch.manual_seed(0)
    keep = drawn_keep((1, 1, 60, 60) if shared else (2, 8, 60, 60), 0.2, device=x.device, dtype=F64)
    assert_close(layer(x, keep=keep), draws[0])
    assert set(keep.unique().tolist()) == {0.0, 1 / (1 - 0.2)}
    assert keep.eq(0).double().mean().item() == pytest.approx(0.2, abs=0.034 if shared else 0.0084)  # 5 deviations


@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "pure"])
def test_dropout_keeps_the_mean_in_bfloat16(monkeypatch, autocast):
    """1 / (1 - 0.1), rounded to bfloat16, would make all outputs smaller by 0.16 %."""
    layer, x = ph.MultiHeadAttention(32, ph.Softmax(2), dropout=0.1), torch.randn(4, 64, 32).bfloat16()
    layer.out = torch.nn.Identity()
    layer = layer if autocast else layer.bfloat16()
    monkeypatch.setattr(torch, "rand", lambda *shape, **options: torch.ones(*shape))  # nothing is dropped
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        in_training, in_evaluation = layer(x).double(), layer.eval()(x).double()
    assert abs((in_training * in_evaluation).sum() / in_evaluation.square().sum() * 0.9 - 1) < 5e-4


# --------------------------------------------------------------------------------------------------------------- errors
KEEP = "keep must be (b|1 h|1 t s), here (2, 4, 5, 5), but is "
ERRORS = {
    "wrong width": (lambda a, x: a(x[..., :3]), "m = 48 but x (b t m) = (2, 5, 3)"),
    "unread symbols": (lambda a, x: a(x, symbols=x), "its heads read no symbols, so symbols must be None"),
    "wrong dtype": (lambda a, x: a(x, x.float()), "must be torch.float64, as its weights, but is torch.float32"),
    "context of another batch": (lambda a, x: a(x, x[:1]), "b = 2 in x but 1 in context (b s m) = (1, 5, 48)"),
    "floats": (lambda a, x: a(x, mask=torch.ones(5, 5)), "boolean, True where attention is allowed, but is torch.f"),
    "mask of the wrong size": (lambda a, x: a(x, mask=torch.ones(4, 5).bool()), "to (b h t s) = (2, 4, 5, 5)"),
    "keep without its queries": (lambda a, x: a(x, keep=torch.ones(1, 4, 1, 1, dtype=F64)), f"{KEEP}(1, 4, 1, 1)"),
    "keep of other heads": (lambda a, x: a(x, keep=torch.ones(2, 3, 5, 5, dtype=F64)), f"{KEEP}(2, 3, 5, 5)"),
    "context longer than the rotary table": (lambda a, x: a(x, tokens(17)), "17 positions but max_length is 16"),
    "longer context, positions": (lambda a, x: a(x, tokens(17), positions=torch.arange(5)[None]), "17 positions but"),
    "more queries than the rotary table has": (lambda a, x: a(tokens(17), x), "17 positions but max_length is 16"),
    "bias of the wrong size": (lambda a, x: a(x, bias=torch.ones(4, 8, dtype=F64)), "(h t+s-1) = (4, 9) but is (4, 8)"),
    "dropout of everything": (lambda a, x: make([ph.Hyla(2)], dropout=1.0), "dropout must be in [0, 1) but is 1.0"),
    "positions of an input": (lambda a, x: make([ph.Hyla(2)], positions=ph.Learned()), "or Alibi() but is Learned()"),
    "other tables": (lambda a, x: make(ph.Hyla(4, dim=6), positions=a.rotary), "{'6'} need rotary tables, got ['12']"),
    "no length": (lambda a, x: make(ph.Hyla(4), max_length=0), "max_length must be an integer of at least 1 but is 0"),
    "no heads": (lambda a, x: make([]), "heads must be mechanisms such as [Softmax(4), Hyla(4)] but is []"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_mistakes_are_one_line(name):
    call, message = ERRORS[name]
    layer = make([ph.Hyla(4)], positions=ph.Rotary())
    refused(lambda: call(layer, tokens(5)), f"^MultiHeadAttention: .*{re.escape(message)}")


def test_an_exported_layer_takes_a_context_of_any_length_and_is_saved(tmp_path):
    layer = ph.MultiHeadAttention(16, ph.Abstractor(2, hidden=8)).eval()
    t, s = torch.export.Dim("t"), torch.export.Dim("s", max=512)
    inputs, dims = (torch.randn(2, 5, 16), torch.randn(2, 9, 16)), ({1: t}, {1: s})
    torch.export.save(torch.export.export(layer, inputs, dynamic_shapes=dims), tmp_path / "layer.pt2")
    exported, x = torch.export.load(tmp_path / "layer.pt2").module(), torch.randn(2, 7, 16)
    assert_close(exported(x, x + 1), layer(x, x + 1))
