"""PyTorch's layers with our heads, decoded step by step: what one pass over the whole sequence computes."""

import copy
from itertools import accumulate
from unittest import mock

import pytest
import torch
from refusals import refusing
from torch import nn
from torch.testing import assert_close
from torch_attention import DIM, F64, HEADS, MIXED, B, S, causal, scrambled

import polyhead as ph
from polyhead.compat.torch_mha import MultiheadAttention, cached, capture, replace
from polyhead.layers.cache import Cache

T = 6
STEPS = (3, 1, 2)
"""New tokens of each call: a prompt, then one, then several."""
PLAIN = {name: heads for name, heads in MIXED.items() if name not in ("grouped", "share")}
PLAIN["softmax"], PLAIN["neighbours"] = None, ph.Relational(4, symbols=ph.RelationalSymbols(causal=True))


def decoder(heads, batch_first=True, layers=2):
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(DIM, HEADS, 16, batch_first=batch_first, dtype=F64)
    model = nn.TransformerDecoder(layer, layers)
    assert replace(model, heads) == 2 * layers
    return scrambled(model).eval()


def states():
    """Tokens of a decoder, and those of its encoder."""
    return torch.randn(B, T, DIM, dtype=F64), torch.randn(B, S, DIM, dtype=F64)


def stepwise(call, x, dim=1, steps=STEPS):
    """The outputs of all steps; `call` gets the tokens of one, and the index of the first."""
    firsts = accumulate((0, *steps[:-1]))
    return torch.cat([call(x.narrow(dim, first, t), first) for first, t in zip(firsts, steps, strict=True)], dim)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("name", PLAIN)
def test_a_decoder_decodes_as_in_one_pass(name, batch_first):
    model = decoder(PLAIN[name], batch_first)
    x, memory = states()
    x, memory = (x, memory) if batch_first else (x.transpose(0, 1), memory.transpose(0, 1))
    hidden = torch.tensor([[False] * S, [False] * 3 + [True] * 2])
    wanted = model(x, memory, tgt_mask=causal(T), memory_key_padding_mask=hidden)
    with cached(model) as cache:
        y = stepwise(lambda new, _: model(new, memory, memory_key_padding_mask=hidden), x, int(batch_first))
        assert cache.length == T
    assert_close(y, wanted, rtol=1e-9, atol=1e-9)
    assert_close(model(x, memory, tgt_mask=causal(T), memory_key_padding_mask=hidden), wanted)  # no cache is left


def test_keys_of_a_context_are_computed_once():
    model, project = decoder([ph.Softmax(2), ph.Hyla(2)]), MultiheadAttention._project
    x, memory = states()
    wanted = model(x, memory, tgt_mask=causal(T))[:, 3:4]
    with cached(model):
        model(x[:, :3], memory)
        with mock.patch.object(MultiheadAttention, "_project", autospec=True, side_effect=project) as called:
            assert_close(model(x[:, 3:4], memory.clone()), wanted, rtol=1e-9, atol=1e-9)
        assert [call.kwargs["senders"] for call in called.call_args_list] == [True, False] * 2  # self, cross
        with refusing("MultiheadAttention: 5 keys as in its cache were wanted but 4 came"):
            model(x[:, 4:5], memory[:, :4])


@pytest.mark.parametrize(
    "heads", [None, MIXED["mixture"], PLAIN["neighbours"]], ids=["softmax", "mixture", "neighbours"]
)
def test_causal_encoder_layers_decode_with_padding_on_the_left(heads):
    """A decoder without cross-attention is often made of encoder layers; beams go on in another order."""
    layer = nn.TransformerEncoderLayer(DIM, HEADS, 16, batch_first=True, dtype=F64)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    replace(model, heads)
    scrambled(model).eval()
    x, padding = torch.randn(B, T, DIM, dtype=F64), torch.zeros(B, T, dtype=torch.bool)
    padding[1, :2] = True
    order = torch.tensor([1, 0, 1])
    wanted = model(x[order], mask=causal(T), src_key_padding_mask=padding[order])[:, -1:]
    with cached(model) as cache:
        model(x[:, :3], mask=causal(3), src_key_padding_mask=padding[:, :3], is_causal=True)
        model(x[:, 3:5], mask=causal(5, 3), src_key_padding_mask=padding[:, :5])
    cache.reorder(order)
    with cached(model, cache) as same, torch.no_grad():
        assert same is cache
        y = model(x[order, -1:], src_key_padding_mask=padding[order])
    assert_close(y, wanted, rtol=1e-9, atol=1e-9)


def inside(model, call):
    with cached(model):
        call(model)


def whole():
    model = nn.Transformer(8, 2, 1, 1, 8, batch_first=True)
    replace(model)
    return model


MISTAKES = {
    "TransformerDecoderLayer holds nn.MultiheadAttention": lambda: inside(nn.TransformerDecoderLayer(8, 2), id),
    "cached: a model of replaced attention was wanted but Linear holds none": lambda: inside(nn.Linear(2, 2), id),
    "a decoder was wanted but Transformer has an encoder: take its decoder": lambda: inside(whole(), id),
    "TransformerDecoder has a cache already": lambda: inside(decoder(None), lambda model: inside(model, id)),
    "cache of 4 attention modules was wanted but one of 2 came": lambda: cached(decoder(None), Cache(2)).__enter__(),
    "layers.0.self_attn must have no cache": lambda: inside(decoder(None), lambda model: capture(model, *states())),
}


@pytest.mark.parametrize("line", MISTAKES)
def test_mistakes_are_one_clear_line(line):
    with refusing(line):
        MISTAKES[line]()


# ---------------------------------------------------------------------------------------------- which attention it is
def attention(heads=None):
    torch.manual_seed(0)
    module = nn.ModuleDict({"one": nn.MultiheadAttention(DIM, HEADS, batch_first=True, dtype=F64)})
    replace(module, heads)
    return scrambled(module).eval()


WAYS = {
    "one tensor": lambda x: (x, x, x),
    "views": lambda x: (x[:, :], x[:, :], x[:, :]),
    "copies": lambda x: (x, x.clone(), x.clone()),
    "a copied value": lambda x: (x, x, x.clone()),
}


@pytest.mark.parametrize("steps", [STEPS, (1, 1, 1, 1, 1, 1)])
@pytest.mark.parametrize("way", WAYS)
def test_views_and_copies_of_one_tensor_are_self_attention(way, steps):
    model, x = attention([ph.Softmax(2), ph.Hyla(2)]), torch.randn(B, T, DIM, dtype=F64)
    wanted = model["one"](x, x, x, attn_mask=causal(T), need_weights=False)[0]
    with cached(model) as cache:
        y = stepwise(lambda new, _: model["one"](*WAYS[way](new), need_weights=False)[0], x, steps=steps)
        assert cache.length == T
    assert_close(y, wanted, rtol=1e-9, atol=1e-9)


NOISE = 1 + torch.arange(DIM, dtype=F64)
CALLS = {
    "self": lambda x: (x, x),
    "cross": lambda x: (x, x * NOISE),
    "other values": lambda x: (x, NOISE.expand_as(x), x),
}
CONFUSED = {
    "keys as in its first call were wanted but others came": ("cross", "cross"),
    "values as in its first call were wanted but others came": ("other values", "other values"),
    "self-attention is in its cache but cross-attention came": ("self", "cross"),
    "cross-attention is in its cache but self-attention came": ("cross", "self"),
}


@pytest.mark.parametrize("line", CONFUSED)
def test_attention_that_changes_its_kind_or_its_keys_is_refused(line):
    model, x = attention(), torch.randn(B, 2, DIM, dtype=F64)
    with refusing(f"MultiheadAttention: {line}"), cached(model):
        for name, token in zip(CONFUSED[line], x.split(1, dim=1), strict=True):
            query, *context = CALLS[name](token)
            model["one"](query, context[0], context[-1])


def test_a_context_may_be_computed_in_each_call():
    model, (x, memory), order = decoder(None), states(), torch.tensor([1, 0])
    wanted = model(x, memory, tgt_mask=causal(T))[order]
    with cached(model) as cache:
        model(x[:, :3], memory)
        model(x[:, 3:4], memory * (1 + 1e-12))
        cache.reorder(order)
        y = model(x[order, 4:], memory[order])
    assert_close(y, wanted[:, 4:], rtol=1e-9, atol=1e-9)


def test_a_module_that_one_call_asks_twice_is_refused():
    layer = nn.TransformerEncoderLayer(DIM, HEADS, 16, batch_first=True, dtype=F64)
    model, x = nn.Sequential(layer, layer), torch.randn(B, 3, DIM, dtype=F64)
    replace(model)
    with refusing("must call it once in each pass but called it twice"), cached(model.eval()) as cache:
        model(x)
    assert cache.length == 0
    with cached(layer) as cache:  # as before, although there was an error
        layer(x)
    assert cache.length == 3


def test_the_cache_of_another_model_is_refused():
    x, memory = states()
    with cached(decoder(None)) as cache, torch.no_grad():
        pass
    one, two = decoder(None), decoder(None)
    with cached(one, cache):
        one(x[:, :3], memory)
    line = "MultiheadAttention: a cache of its own was wanted but that of another layer came"
    with cached(two, cache), refusing(line):
        two(x[:, 3:], memory)
    assert cache.length == 3


# ------------------------------------------------------------------------------------------------------- whole calls
@pytest.mark.parametrize("place", ["layers.1.linear1", "layers.1.multihead_attn.out_proj", "layers.0.self_attn"])
def test_a_call_that_was_interrupted_adds_nothing(place):
    model = decoder(PLAIN["neighbours"])
    x, memory = states()
    wanted = model(x, memory, tgt_mask=causal(T))

    def stop(*_):
        raise KeyboardInterrupt

    def step(new, first):
        hook = model.get_submodule(place).register_forward_hook(stop)
        with pytest.raises(KeyboardInterrupt):
            model(new, memory)
        hook.remove()
        assert (cache.length, cache[0].crossed, cache[1].crossed) == (first, 0, first)
        return model(new, memory)

    with cached(model) as cache:
        y = stepwise(step, x)
    assert_close(y, wanted, rtol=1e-9, atol=1e-9)


def test_the_models_own_forward_comes_back():
    model, plain = decoder(None), decoder(None)
    x, memory = torch.randn(B, 2, DIM, dtype=F64), torch.randn(B, S, DIM, dtype=F64)
    before = model.forward
    model.forward = lambda *given: 2 * before(*given)  # as accelerate sets one
    mine = model.forward
    with cached(model), torch.no_grad():
        y = model(x, memory)
        again = copy.deepcopy(model)
        assert again.forward.args[0][0] is again.layers[0].self_attn.memory is not model.layers[0].self_attn.memory
    assert model.forward is mine
    with cached(plain):
        assert_close(y, 2 * plain(x, memory))
    assert "forward" not in vars(plain)
