"""Models with wrapped linear maps, embeddings or ends compute the same as with merged weights."""

import copy

import pytest
import torch
from adapters import adapted
from torch import nn
from torch.testing import assert_close
from zoo import fresh

import polyhead as ph

HEADS = [ph.Softmax(2), ph.Hyla(1), ph.Relational(1, symbols=ph.SymbolicAttention(5))]
WORDS, DECODER = ph.Tokens(20), {"dim": 24, "layers": 2, "heads": HEADS, "causal": True}
ENCODER = ph.TransformerConfig(WORDS, ph.Values(1), dim=24, layers=1, heads=HEADS)
MODELS = {
    "free": ph.TransformerConfig(WORDS, ph.Logits(20), **DECODER),
    "tied": ph.TransformerConfig(WORDS, ph.Logits(20, tied=True, scaled=True), **DECODER),
    "crossed": ph.TransformerConfig(WORDS, ph.Logits(20), **DECODER, encoder=ENCODER),
    "classes": ph.TransformerConfig(WORDS, ph.Classes(3), dim=24, layers=1, heads=HEADS),
    "images": ph.TransformerConfig(
        ph.Patches((3, 8, 8), (4, 4), class_token=True), ph.Classes(3, pool="class"), dim=24, layers=1, heads=HEADS
    ),
}
DRAW = torch.Generator().manual_seed(0)
IDS, IMAGES = torch.randint(20, (2, 7), generator=DRAW), torch.randn(2, 3, 8, 8, generator=DRAW, dtype=torch.float64)
REAL = torch.arange(7)[None] < torch.tensor([[7], [4]])


def model(name):
    made = fresh(MODELS[name])
    for parameter in made.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.3)
    return made


def given(name):
    if name == "images":
        return {"inputs": IMAGES}
    return {"inputs": IDS, "mask": REAL, **({"source": IDS.flip(1)} if name == "crossed" else {})}


def loss(made, name):
    """By lazy logits where there are any, which must equal the ordinary ones."""
    y = made(**given(name))
    if name in ("classes", "images"):
        return nn.functional.cross_entropy(y[:, 0], torch.tensor([0, 2]))
    cost = nn.functional.cross_entropy(y.transpose(1, 2), IDS, reduction="none")
    lazy = made(**given(name), lazy=True)
    if isinstance(lazy, torch.Tensor):
        assert_close(lazy, y, rtol=1e-12, atol=1e-12)
    else:
        assert_close(lazy.cross_entropy(IDS), cost, rtol=1e-9, atol=1e-9)
        assert torch.equal(lazy.argmax(), y.argmax(-1))
        cost = made(**given(name), lazy=True).cross_entropy(IDS)
    return cost.mean()


@pytest.mark.parametrize("name", MODELS)
def test_lora_everywhere_equals_its_merged_weights(name):
    plain = model(name)
    targets = [key for key, part in plain.named_modules() if isinstance(part, (nn.Linear, nn.Embedding))]
    wrapped = adapted(copy.deepcopy(plain), target_modules=targets)
    loss(wrapped, name).backward()
    adapters = {key: p for key, p in wrapped.named_parameters() if "lora_" in key}
    assert len(adapters) == 2 * len(targets)
    assert [key for key, p in adapters.items() if p.grad is None or p.grad.abs().max() == 0] == []
    y = wrapped(**given(name))
    assert (y - plain(**given(name))).abs().max() > 1e-2
    assert_close(wrapped.merge_and_unload()(**given(name)), y, rtol=1e-6, atol=1e-6)


def test_a_table_that_is_trained_anew_stays_tied():
    wrapped, want = model("tied"), model("tied")
    wrapped = adapted(wrapped, fill=False, target_modules=["qkv"], modules_to_save=["inputs.table"]).base_model.model
    table = wrapped.inputs.table.modules_to_save["default"].weight
    with torch.no_grad():
        table.mul_(1.5)
        want.inputs.table.weight.mul_(1.5)
    loss(wrapped, "tied").backward()
    loss(want, "tied").backward()
    assert_close(wrapped(**given("tied")), want(**given("tied")))
    assert_close(table.grad, want.inputs.table.weight.grad)
    again = copy.deepcopy(wrapped)
    with torch.no_grad():
        again.inputs.table.modules_to_save["default"].weight.mul_(2)
        assert (again(**given("tied")) - wrapped(**given("tied"))).abs().max() > 1e-2
        want.inputs.table.weight.mul_(2)
    assert_close(again(**given("tied")), want(**given("tied")))


@pytest.mark.parametrize("name", ["free", "tied"])
@pytest.mark.parametrize("how", ["hook", "assigned"])
def test_lazy_logits_are_those_of_outputs_that_were_changed(name, how):
    made = model(name)
    before, ends = made(IDS), made.outputs
    if how == "hook":
        ends.register_forward_hook(lambda ends, given, y: 3 * y)
    else:
        ends.forward = lambda x, plain=ends.forward: 3 * plain(x)
    assert_close(made(IDS), 3 * before)
    loss(made, name)


def test_symbols_come_from_the_blocks_that_a_model_has_now():
    """All parts are those of another model: what it computes, with its parameters."""
    heads = [ph.Relational(2, symbols=ph.SymbolicAttention(5, shared=way)) for way in (False, True)]
    settings = ph.TransformerConfig(WORDS, ph.Logits(20), dim=24, layers=2, heads=heads, causal=True)
    made, other = ph.Transformer(settings), ph.Transformer(settings)
    for name, part in other.named_children():
        setattr(made, name, copy.deepcopy(part))
    assert_close(made(IDS), other(IDS))
    for model in (made, other):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
    assert_close(made(IDS), other(IDS))
    assert_close(made.double()(IDS), other.double()(IDS))
