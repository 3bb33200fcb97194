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


def build_model(name):
    model = fresh(MODELS[name])
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.3)
    return model


def arguments(name):
    if name == "images":
        return {"inputs": IMAGES}
    return {"inputs": IDS, "mask": REAL, **({"source": IDS.flip(1)} if name == "crossed" else {})}


def loss(model, name):
    """By lazy logits where there are any, which must equal the ordinary ones."""
    y = model(**arguments(name))
    if name in ("classes", "images"):
        return nn.functional.cross_entropy(y[:, 0], torch.tensor([0, 2]))
    losses = nn.functional.cross_entropy(y.transpose(1, 2), IDS, reduction="none")
    lazy = model(**arguments(name), lazy=True)
    if isinstance(lazy, torch.Tensor):
        assert_close(lazy, y, rtol=1e-12, atol=1e-12)
    else:
        assert_close(lazy.cross_entropy(IDS), losses, rtol=1e-9, atol=1e-9)
        assert torch.equal(lazy.argmax(), y.argmax(-1))
        losses = model(**arguments(name), lazy=True).cross_entropy(IDS)
    return losses.mean()


@pytest.mark.parametrize("name", MODELS)
def test_lora_everywhere_equals_its_merged_weights(name):
    plain = build_model(name)
    targets = [key for key, part in plain.named_modules() if isinstance(part, (nn.Linear, nn.Embedding))]
    wrapped = adapted(copy.deepcopy(plain), target_modules=targets)
    loss(wrapped, name).backward()
    adapters = {key: p for key, p in wrapped.named_parameters() if "lora_" in key}
    assert len(adapters) == 2 * len(targets)
    assert [key for key, p in adapters.items() if p.grad is None or p.grad.abs().max() == 0] == []
    y = wrapped(**arguments(name))
    assert (y - plain(**arguments(name))).abs().max() > 1e-2
    assert_close(wrapped.merge_and_unload()(**arguments(name)), y, rtol=1e-6, atol=1e-6)


def test_a_table_that_is_trained_anew_stays_tied():
    wrapped, reference = build_model("tied"), build_model("tied")
    wrapped = adapted(wrapped, fill=False, target_modules=["qkv"], modules_to_save=["inputs.table"]).base_model.model
    table = wrapped.inputs.table.modules_to_save["default"].weight
    with torch.no_grad():
        table.mul_(1.5)
        reference.inputs.table.weight.mul_(1.5)
    loss(wrapped, "tied").backward()
    loss(reference, "tied").backward()
    assert_close(wrapped(**arguments("tied")), reference(**arguments("tied")))
    assert_close(table.grad, reference.inputs.table.weight.grad)
    copied = copy.deepcopy(wrapped)
    with torch.no_grad():
        copied.inputs.table.modules_to_save["default"].weight.mul_(2)
        assert (copied(**arguments("tied")) - wrapped(**arguments("tied"))).abs().max() > 1e-2
        reference.inputs.table.weight.mul_(2)
    assert_close(copied(**arguments("tied")), reference(**arguments("tied")))


@pytest.mark.parametrize("name", ["free", "tied"])
@pytest.mark.parametrize("change", ["hook", "assigned"])
def test_lazy_logits_are_those_of_outputs_that_were_changed(name, change):
    model = build_model(name)
    before, outputs = model(IDS), model.outputs
    if change == "hook":
        outputs.register_forward_hook(lambda outputs, args, y: 3 * y)
    else:
        outputs.forward = lambda x, forward=outputs.forward: 3 * forward(x)
    assert_close(model(IDS), 3 * before)
    loss(model, name)


def test_symbols_come_from_the_blocks_that_a_model_has_now():
    """All parts are those of another model: what it computes, with its parameters."""
    heads = [ph.Relational(2, symbols=ph.SymbolicAttention(5, shared=shared)) for shared in (False, True)]
    settings = ph.TransformerConfig(WORDS, ph.Logits(20), dim=24, layers=2, heads=heads, causal=True)
    model, other = ph.Transformer(settings), ph.Transformer(settings)
    for name, part in other.named_children():
        setattr(model, name, copy.deepcopy(part))
    assert_close(model(IDS), other(IDS))
    for transformer in (model, other):
        with torch.no_grad():
            for parameter in transformer.parameters():
                parameter.mul_(1.1)
    assert_close(model(IDS), other(IDS))
    assert_close(model.double()(IDS), other.double()(IDS))
