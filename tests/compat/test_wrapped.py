"""Heads and projections that somebody wraps: PEFT, torch.compile, FSDP, parametrisations: used, or an error."""

import copy
import functools
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.testing import assert_close

import polyhead as ph
from polyhead.compat import huggingface as hf

SMALL = {"vocab_size": 50, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
HEADS = {
    "hyla": ph.Hyla(4, value_depth=2),
    "relational": [ph.Softmax(2), ph.Relational(2)],
    "sources": [ph.Disentangled(2, symbols=ph.RelativeSymbols(3)), ph.Abstractor(2, symbols=ph.SymbolicAttention(5))],
}
IDS = torch.randint(1, 50, (2, 7), generator=torch.Generator().manual_seed(0))


@functools.cache
def llama(name):
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SMALL, num_key_value_heads=2, max_position_embeddings=32, pad_token_id=0)
    return hf.swap_heads(transformers.LlamaForCausalLM(config).eval(), [1], HEADS[name])


def made(name):
    return copy.deepcopy(llama(name))


def adapted(model, fill=True, **options):
    """By PEFT; the second matrix of LoRA, which begins as 0, filled."""
    import peft

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what it saves
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, **options))
    torch.manual_seed(1)
    for key, parameter in model.named_parameters():
        if "lora_B" in key and fill:
            nn.init.normal_(parameter, std=0.5)
    return model


def through_eager(module):
    """`torch.compile` in all but the code it makes: what it wraps a module in."""
    return torch.compile(module, backend="eager")


@pytest.mark.parametrize("name", HEADS)
def test_modules_to_save_are_used_and_trained(name):
    model = made(name)
    want = model(IDS).logits
    wrapped = adapted(model, fill=False, target_modules=["q_proj", "v_proj"], modules_to_save=["polyhead"])
    new = [p for key, p in wrapped.named_parameters() if "polyhead" in key and p.requires_grad]
    assert len(new) == len(list(llama(name).model.layers[1].self_attn.polyhead.parameters()))
    assert_close(wrapped(IDS).logits, want, rtol=1e-6, atol=1e-6)
    wrapped(IDS, labels=IDS).loss.backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in new)
    with torch.no_grad():
        new[0].mul_(3)
    assert (wrapped(IDS).logits - want).abs().max() > 1e-4
    assert "ModulesToSaveWrapper" in hf.verify(wrapped).layers[1].heads


def test_lora_on_all_linear_layers_is_what_it_is_when_merged():
    wrapped = adapted(made("sources"), target_modules="all-linear")
    logits = wrapped(IDS, labels=IDS)
    logits.loss.backward()
    relations = [p for key, p in wrapped.named_parameters() if "polyhead" in key and "lora" in key]
    assert len(relations) >= 8
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in relations)
    assert (logits.logits - llama("sources")(IDS).logits).abs().max() > 1e-2
    assert_close(wrapped.merge_and_unload()(IDS).logits, logits.logits, rtol=1e-5, atol=1e-5)


@pytest.mark.compile
@pytest.mark.parametrize("name", HEADS)
def test_compiled_heads_are_used(name):
    model = made(name)
    heads = model.model.layers[1].self_attn.polyhead
    model.model.layers[1].self_attn.polyhead = through_eager(heads)
    for parameter in heads.parameters():  # of the compiled ones, too
        nn.init.normal_(parameter, std=0.5)
    want = made(name)
    want.load_state_dict({key.replace("_orig_mod.", ""): value for key, value in model.state_dict().items()})
    assert (want(IDS).logits - llama(name)(IDS).logits).abs().max() > 1e-3
    assert_close(model(IDS).logits, want(IDS).logits, rtol=1e-5, atol=1e-5)
    how = {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(model.generate(IDS, **how), want.generate(IDS, **how))


@pytest.fixture
def one_process(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # that returns views, which nobody writes to
def test_sharded_heads_are_used(one_process):
    from torch.distributed.fsdp import fully_shard

    model, want = made("sources"), llama("sources")
    heads = fully_shard(model.model.layers[1].self_attn.polyhead, mesh=one_process)
    logits = model(IDS).logits
    assert_close(logits, want(IDS).logits, rtol=1e-6, atol=1e-6)
    logits.sum().backward()
    assert all(p.grad is not None for p in heads.parameters())


class Normal(nn.Module):
    def forward(self, weight):
        return 2 * weight


@pytest.mark.parametrize("name", HEADS)
def test_parametrised_heads_are_used(name):
    model, want = made(name), made(name)
    for linear in [m for m in model.model.layers[1].self_attn.polyhead.modules() if isinstance(m, nn.Linear)]:
        parametrizations.weight_norm(linear)
    for group in model.model.layers[1].self_attn.polyhead.groups:
        for parameter in ("relation_weight", "value_weight"):
            if getattr(group, parameter, None) is not None:
                nn.utils.parametrize.register_parametrization(group, parameter, Normal())
                twice = want.model.layers[1].self_attn.polyhead.groups[0 if name == "hyla" else 1]
                with torch.no_grad():
                    getattr(twice, parameter).mul_(2)
    assert_close(model(IDS).logits, want(IDS).logits, rtol=1e-5, atol=1e-5)


def test_heads_that_are_promised_and_not_there_are_an_error():
    model = made("hyla")
    attention = model.model.layers[1].self_attn
    heads, attention.polyhead = attention.polyhead, nn.Identity()
    wanted = "polyhead: layer 1 (LlamaAttention) must have the heads that its configuration holds but has "
    for came in ("a Identity without any", "none"):
        with pytest.raises(ValueError, match=r"^polyhead: layer 1") as caught:
            model(IDS)
        assert str(caught.value) == wanted + came
        if came != "none":
            del attention.polyhead
    attention.polyhead = heads
    model.model.layers[0].self_attn.polyhead = heads
    with pytest.raises(ValueError, match=r"^polyhead: layer 0 \(LlamaAttention\) must have none of its own"):
        model(IDS)


def test_a_layer_that_is_not_called_is_noticed():
    """By `verify` always, and by the first forward pass."""
    line = "^polyhead: layer 1 of PolyheadLlamaForCausalLM must call the heads that its configuration holds$"
    for look in (lambda model: model(IDS), hf.verify):
        model = made("hyla")
        model.model.layers[1].self_attn = Other(model.model.layers[1].self_attn)
        with pytest.raises(ValueError, match=line):
            look(model)


class Other(nn.Module):
    """What somebody puts in place of a layer's attention."""

    def __init__(self, old):
        super().__init__()
        self.o_proj = old.o_proj

    def forward(self, hidden_states, **_):
        return self.o_proj(hidden_states), None


LAYER = [ph.Softmax(1), ph.Linear(1), ph.Hyla(2)]


@pytest.mark.parametrize("how", ["lora", pytest.param("compiled", marks=pytest.mark.compile), "normed", "hooked"])
def test_a_wrapped_projection_of_our_own_layer_is_called(how):
    """In self- and cross-attention, and in what taps say of it."""
    torch.manual_seed(0)
    layer = ph.MultiHeadAttention(24, LAYER, bias=True).eval()
    want, (x, context) = copy.deepcopy(layer), (torch.randn(2, n, 24) for n in (5, 7))
    if how == "lora":
        layer = adapted(layer, target_modules=["qkv", "out"], lora_bias=True).base_model.model
        for name in ("qkv", "out"):
            mine, own = getattr(layer, name), getattr(want, name)
            own.weight.data += mine.get_delta_weight("default")
            own.bias.data += 4 * mine.lora_B["default"].bias.data  # alpha over rank
    elif how == "compiled":
        layer.qkv, layer.out = (through_eager(m) for m in (layer.qkv, layer.out))
    elif how == "normed":
        for linear in (layer.qkv, layer.out):
            parametrizations.weight_norm(linear)
    else:
        layer.qkv.register_forward_hook(lambda module, args, y: 2 * y)
        for parameter in want.qkv.parameters():
            parameter.data *= 2
    for given in ((x,), (x, context)):
        assert_close(layer(*given), want(*given), rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        mine, own = ([], [])
        layer(x, context, taps=mine)
        want(x, context, taps=own)
    if how != "hooked":  # of a hook, taps cannot tell
        assert_close(mine[0].b_out, own[0].b_out, rtol=1e-5, atol=1e-5)
        for a, b in zip(mine[0].groups, own[0].groups, strict=True):
            assert_close((a.w_value, a.b_value, a.w_out), (b.w_value, b.b_value, b.w_out), rtol=1e-5, atol=1e-5)
