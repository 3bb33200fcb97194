"""Every transform of torch over our Hugging Face models, swapped models and models by name.

Masks change between calls: each transform gives the numbers of eager code at real tokens, or an error of one line.
"""

import pytest
import torch
from tiny_transformers import hf, llama, ours, tokens
from torch.func import functional_call, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close

import polyhead as ph

pytestmark = pytest.mark.compile
IDS = tokens(2, 5)
MASKS = [[[1] * 5] * 2, [[0, 0, 1, 1, 1], [1] * 5], [[1, 1, 1, 0, 0], [1] * 5]]
MASKS = [torch.tensor(rows) for rows in MASKS]
SYMBOLS = [ph.Softmax(2), ph.Relational(2, symbols=ph.PositionSymbols())]


def by_name():
    model = llama()
    model.set_attn_implementation("polyhead_hyla")
    return model


MODELS = {
    "ours": lambda: ours(layers=1, heads=SYMBOLS).double(),
    "swapped": lambda: hf.swap_heads(llama(num_hidden_layers=1), None, SYMBOLS),
    "by name": by_name,
}


class Logits(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids, mask):
        return self.model(ids, attention_mask=mask, use_cache=False).logits


def compiled(model):
    torch._dynamo.reset()
    run = torch.compile(model, backend="eager", fullgraph=True)
    return lambda mask: run(IDS, mask)


def mapped(model):
    return lambda mask: vmap(lambda ids, row: model(ids[None], row[None])[0])(IDS, mask)


def forward_mode(model):
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    tangents = {name: torch.ones_like(p) for name, p in parameters.items()}
    return lambda mask: jvp(lambda p: functional_call(model, p, (IDS, mask)), (parameters,), (tangents,))[0]


def exported(model):
    program = torch.export.export(model, (IDS, MASKS[0]), strict=False).module()
    return lambda mask: program(IDS, mask)


def traced(model):
    """Of Boolean masks: torch.jit.trace drops checks of other numbers."""
    program = torch.jit.trace(model, (IDS, MASKS[0].bool()), check_trace=False)
    return lambda mask: program(IDS, mask.bool())


TRANSFORMS = {
    "compile": compiled,
    "vmap": mapped,
    "jvp": forward_mode,
    "make_fx": lambda model: make_fx(lambda mask: model(IDS, mask))(MASKS[0]),
    "export": exported,
    "trace": traced,
}


@pytest.mark.filterwarnings("ignore")  # of torch.jit, and of the library about what it traces
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_masks_that_change_between_calls(name, transform):
    model = Logits(MODELS[name]())
    run = TRANSFORMS[transform](model)
    for mask in MASKS:
        assert_close(run(mask)[mask.bool()], model(IDS, mask)[mask.bool()], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_symbolic_tracing_is_refused_by_torch(name):
    with pytest.raises(torch.fx.proxy.TraceError, match=r"^[^\n]+$"):
        torch.fx.symbolic_trace(Logits(MODELS[name]()))


def test_a_mask_of_other_numbers_is_refused_under_vmap():
    run = mapped(Logits(MODELS["ours"]()))
    with pytest.raises(ValueError, match=r"^PolyheadForCausalLM: attention_mask must be 1 at tokens and 0 at padding$"):
        run(MASKS[0] + MASKS[1])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("transform", ["make_fx", "export"])
def test_a_mask_of_other_numbers_is_refused_by_recorded_code(transform):
    run = TRANSFORMS[transform](Logits(MODELS["ours"]()))
    with pytest.raises(RuntimeError, match="attention_mask must be 1 at tokens and 0 at padding"):
        run(MASKS[0] + MASKS[1])


@pytest.mark.filterwarnings("ignore")
def test_a_trace_of_an_integer_mask_is_refused():
    line = "attention_mask must be 1 at tokens and 0 at padding, which torch.jit.trace cannot check: give Boolean masks"
    with pytest.raises(ValueError, match=line):
        torch.jit.trace(Logits(MODELS["ours"]()), (IDS, MASKS[0]), check_trace=False)
