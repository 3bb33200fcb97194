"""Wrapped heads and projections (PEFT, torch.compile, FSDP, parametrisations) are used, or give an error."""

import copy
import functools

import pytest
import torch
from adapters import adapted
from refusals import refusing
from tiny_transformers import GREEDY, drawn, llama as plain, tokens
from torch import nn
from torch.nn.utils import parametrizations
from torch.testing import assert_close

import polyhead as ph
from polyhead.compat import huggingface as hf, torch_mha

HEADS = {
    "hyla": ph.Hyla(4, value_depth=2),
    "relational": [ph.Softmax(2), ph.Relational(2)],
    "sources": [ph.Disentangled(2, symbols=ph.RelativeSymbols(3)), ph.Abstractor(2, symbols=ph.SymbolicAttention(5))],
}
IDS = tokens()


@functools.cache
def llama(name):
    return hf.swap_heads(plain(torch.float32, std=None), [1], HEADS[name])


def make(name):
    """A model that has not been called yet: its first pass is watched."""
    return copy.deepcopy(llama(name))


@pytest.mark.parametrize("name", ["hyla", "sources"])
def test_modules_to_save_are_used_and_trained(name):
    model = make(name)
    expected = model(IDS).logits
    wrapped = adapted(model, fill=False, target_modules=["q_proj", "v_proj"], modules_to_save=["polyhead"])
    new = [p for key, p in wrapped.named_parameters() if "polyhead" in key and p.requires_grad]
    assert len(new) == len(list(llama(name).model.layers[1].self_attn.polyhead.parameters()))
    assert_close(wrapped(IDS).logits, expected, rtol=1e-6, atol=1e-6)
    wrapped(IDS, labels=IDS).loss.backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in new)
    with torch.no_grad():
        new[0].mul_(3)
    assert (wrapped(IDS).logits - expected).abs().max() > 1e-4
    assert list(hf.verify(wrapped).values())[1] != "polyhead_softmax"


def test_heads_are_swapped_before_adapters():
    model = adapted(plain(torch.float32, std=None), target_modules=["q_proj", "v_proj"])
    with refusing("swap_heads: the model must be a LlamaForCausalLM, got PeftModel"):
        hf.swap_heads(model, [1], [ph.Softmax(2), ph.Hyla(2)])


def test_offloaded_weights():
    """accelerate keeps them off the device between calls."""
    accelerate = pytest.importorskip("accelerate")
    model = plain(torch.float32, std=None)
    expected = hf.capture(model, IDS)[1].groups[0].q
    accelerate.cpu_offload(model, execution_device="cpu")
    assert_close(hf.capture(model, IDS)[1].groups[0].q, expected)


def test_heads_that_torch_compile_wraps_are_used(eager):
    model = make("relational")
    heads = model.model.layers[1].self_attn.polyhead
    model.model.layers[1].self_attn.polyhead = eager(heads)
    drawn(heads, std=0.5)  # the compiled ones have the same parameters
    expected = make("relational")
    expected.load_state_dict({key.replace("_orig_mod.", ""): value for key, value in model.state_dict().items()})
    assert (expected(IDS).logits - make("relational")(IDS).logits).abs().max() > 1e-3
    assert_close(model(IDS).logits, expected(IDS).logits, rtol=1e-5, atol=1e-5)
    assert torch.equal(model.generate(IDS, **GREEDY), expected.generate(IDS, **GREEDY))
    assert list(hf.verify(model).values())[1] != "polyhead_softmax"


@pytest.fixture
def one_process(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # that returns views, which nobody writes to
def test_sharded_heads_are_used(one_process):
    from torch.distributed.fsdp import fully_shard

    model, expected = make("sources"), make("sources")
    heads = fully_shard(model.model.layers[1].self_attn.polyhead, mesh=one_process)
    logits = model(IDS).logits
    assert_close(logits, expected(IDS).logits, rtol=1e-6, atol=1e-6)
    logits.sum().backward()
    assert all(p.grad is not None for p in heads.parameters())


class Twice(nn.Module):
    def forward(self, weight):
        return 2 * weight


def test_parametrised_heads_are_used():
    """Maps of heads, which are modules, are in tests/models/test_wrapped_models.py."""
    model, expected = make("relational"), make("relational")
    nn.utils.parametrize.register_parametrization(
        model.model.layers[1].self_attn.polyhead.groups[1], "relation_weight", Twice()
    )
    expected.model.layers[1].self_attn.polyhead.groups[1].relation_weight.data.mul_(2)
    assert_close(model(IDS).logits, expected(IDS).logits, rtol=1e-5, atol=1e-5)


def test_heads_that_disagree_with_the_configuration_are_an_error():
    model = make("hyla")
    layers = model.model.layers
    heads, layers[1].self_attn.polyhead = layers[1].self_attn.polyhead, nn.Identity()
    with refusing("polyhead: layer 1 must have the heads of its configuration, [{"):
        model(IDS)
    layers[1].self_attn.polyhead = layers[0].self_attn.polyhead = heads
    with refusing("polyhead: layer 0 must have the heads of its configuration, None"):
        model(IDS)


def test_verify_notices_a_layer_that_is_not_called():
    model = make("hyla")
    model.model.layers[1].self_attn = Other()
    with refusing("polyhead: layer 1 of PolyheadLlamaForCausalLM must call the heads of its configuration"):
        hf.verify(model)


class Other(nn.Module):
    """A module in place of a layer's attention."""

    def forward(self, hidden_states, **_):
        return hidden_states, None


def test_an_adapted_projection_of_a_polyhead_layer_is_called():
    """In self- and cross-attention, and in what taps say of it."""
    layer = ph.MultiHeadAttention(24, [ph.Softmax(1), ph.Linear(1), ph.Hyla(2)], bias=True).eval()
    expected, x, context = copy.deepcopy(layer), torch.randn(2, 5, 24), torch.randn(2, 7, 24)
    layer = adapted(layer, target_modules=["qkv", "out"], lora_bias=True).base_model.model
    for name in ("qkv", "out"):
        adapter, linear = getattr(layer, name), getattr(expected, name)
        linear.weight.data += adapter.get_delta_weight("default")
        linear.bias.data += 4 * adapter.lora_B["default"].bias.data  # alpha over rank
    taps, expected_taps = [], []
    with torch.no_grad():
        assert_close(layer(x), expected(x), rtol=1e-5, atol=1e-5)
        assert_close(layer(x, context, taps=taps), expected(x, context, taps=expected_taps), rtol=1e-5, atol=1e-5)
    assert_close(taps[0].b_out, expected_taps[0].b_out, rtol=1e-5, atol=1e-5)
    for group, expected_group in zip(taps[0].groups, expected_taps[0].groups, strict=True):
        for name in ("w_value", "b_value", "w_out"):
            assert_close(getattr(group, name), getattr(expected_group, name), rtol=1e-5, atol=1e-5)


NOT_PLAIN = {
    "hook": lambda module: module.register_forward_hook(lambda *_: None),
    "forward of its own": lambda module: setattr(module, "forward", functools.partial(module.forward)),
    "normed output": lambda module: parametrizations.weight_norm(module.out_proj),
    "normed": lambda module: parametrizations.weight_norm(module, "in_proj_weight"),
    "lora on all": "self_attn",
}


@pytest.mark.parametrize("wrapping", NOT_PLAIN)
def test_attention_of_pytorch_that_is_wrapped_is_not_replaced(wrapping):
    model, wrap = nn.TransformerEncoder(nn.TransformerEncoderLayer(24, 4, batch_first=True), 1), NOT_PLAIN[wrapping]
    if isinstance(wrap, str):
        adapted(model, target_modules=[wrap])
    else:
        wrap(model.layers[0].self_attn)
    with refusing("replace: nn.MultiheadAttention"):
        torch_mha.replace(model, ph.Hyla(4))
    assert not any(isinstance(module, torch_mha.MultiheadAttention) for module in model.modules())
