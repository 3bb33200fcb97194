"""Masks that change between calls, under every transform of PyTorch, through every door: no example is kept.

Doors are our layer, the drop-in, timm's attention, and models of transformers: ours, swapped, by name.
"""

import pytest
import timm_like
import torch
from tiny_transformers import hf, llama, ours, tokens
from torch import nn
from torch.func import functional_call, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close

import polyhead as ph
from polyhead.compat.torch_mha import drop_in

pytestmark = [pytest.mark.compile, pytest.mark.filterwarnings("ignore")]  # of torch.jit and vmap
F64 = torch.float64
MIXED = [ph.Softmax(2), ph.Hyla(2)]
SYMBOLS = [ph.Softmax(2), ph.Relational(2, symbols=ph.PositionSymbols())]
IDS = tokens(2, 5)
X = torch.randn(2, 5, 12, dtype=F64, generator=torch.Generator().manual_seed(0))
MASKS = [[[1] * 5] * 2, [[0, 0, 1, 1, 1], [1] * 5], [[1, 1, 1, 0, 0], [1] * 5]]
MASKS = [torch.tensor(rows) for rows in MASKS]


class Door(nn.Module):
    """Attention as a function of its input and of a mask (b s) that is 1 at tokens."""

    def __init__(self, attention, call):
        super().__init__()
        self.attention, self.call = attention.eval(), call

    def forward(self, x, mask):
        return self.call(self.attention, x, mask)


def by_layer(layer, x, mask):
    return layer(x, mask=mask.bool()[:, None, None])


def by_drop_in(module, x, mask):
    return module(x, x, x, key_padding_mask=~mask.bool(), need_weights=False)[0]


def by_drop_in_with_added_masks(module, x, mask):
    hidden = torch.zeros_like(mask, dtype=F64).masked_fill(~mask.bool(), -torch.inf)
    return module(x, x, x, key_padding_mask=hidden, need_weights=False)[0]


def by_timm(model, x, mask):
    return model(x, attn_mask=mask.bool()[:, None, None])


def by_transformers(model, ids, mask):
    return model(ids, attention_mask=mask, use_cache=False).logits


def dropped_in():
    return drop_in(nn.MultiheadAttention(12, 4, batch_first=True, dtype=F64), MIXED)


def of_timm():
    attention = timm_like.Attention(12, 4).to(F64)
    timm_like.snippet()["swap"](attention)
    return attention


DOORS = {
    "layer": (lambda: ph.MultiHeadAttention(12, MIXED, dtype=F64), by_layer),
    "drop-in": (dropped_in, by_drop_in),
    "drop-in, added": (dropped_in, by_drop_in_with_added_masks),
    "timm": (of_timm, by_timm),
    "ours": (lambda: ours(layers=1, heads=SYMBOLS).double(), by_transformers),
    "swapped": (lambda: hf.swap_heads(llama(num_hidden_layers=1), None, SYMBOLS), by_transformers),
    "by name": (lambda: llama(name="polyhead_hyla"), by_transformers),
}


def through(name):
    """A door, and what it reads."""
    torch.manual_seed(0)
    make, call = DOORS[name]
    return Door(make(), call), IDS if call is by_transformers else X


def compiled(model, x):
    torch._dynamo.reset()
    run = torch.compile(model, backend="eager", fullgraph=True)
    return lambda mask: run(x, mask)


def mapped(model, x):
    return lambda mask: vmap(lambda row, mask_row: model(row[None], mask_row[None])[0])(x, mask)


def forward_mode(model, x):
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    tangents = {name: torch.ones_like(p) for name, p in parameters.items()}
    return lambda mask: jvp(lambda p: functional_call(model, p, (x, mask)), (parameters,), (tangents,))[0]


def exported(model, x):
    program = torch.export.export(model, (x, MASKS[0]), strict=False).module()
    return lambda mask: program(x, mask)


def traced(model, x):
    """Of Boolean masks: torch.jit.trace drops checks of other numbers."""
    program = torch.jit.trace(model, (x, MASKS[0].bool()), check_trace=False)
    return lambda mask: program(x, mask.bool())


TRANSFORMS = {
    "compile": compiled,
    "vmap": mapped,
    "jvp": forward_mode,
    "make_fx": lambda model, x: make_fx(lambda mask: model(x, mask))(MASKS[0]),
    "export": exported,
    "trace": traced,
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", DOORS)
@torch.no_grad()
def test_masks_that_change_between_calls(name, transform):
    model, x = through(name)
    run = TRANSFORMS[transform](model, x)
    for mask in MASKS:
        assert_close(run(mask)[mask.bool()], model(x, mask)[mask.bool()], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("transform", "error"), [("vmap", ValueError), ("make_fx", RuntimeError), ("export", RuntimeError)]
)
def test_a_mask_of_other_numbers_is_refused(transform, error):
    with pytest.raises(error, match=r"^PolyheadForCausalLM: attention_mask must be 1 at tokens and 0 at padding$"):
        TRANSFORMS[transform](*through("ours"))(MASKS[0] + MASKS[1])


def test_a_trace_of_an_integer_mask_is_refused():
    model, x = through("ours")
    line = "attention_mask must be 1 at tokens and 0 at padding, which torch.jit.trace cannot check: give Boolean masks"
    with pytest.raises(ValueError, match=line):
        torch.jit.trace(model, (x, MASKS[0]), check_trace=False)
