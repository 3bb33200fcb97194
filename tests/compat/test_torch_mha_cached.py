"""PyTorch's layers with our heads, decoded step by step: what one pass over the whole sequence computes."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch_mixed import MIXED

import polyhead as ph
from polyhead.compat.torch_mha import cached, capture, replace
from polyhead.layers.cache import Cache

F64 = torch.float64
B, T, S, DIM, HEADS = 2, 6, 5, 12, 4
STEPS = (3, 1, 2)
"""New tokens of each call: a prompt, then one, then several."""
PLAIN = {name: heads for name, heads in MIXED.items() if name not in ("grouped", "share")}
PLAIN["softmax"], PLAIN["neighbours"] = None, ph.Relational(4, symbols=ph.RelationalSymbols(causal=True))


def causal(t, first=0):
    return torch.ones(t, t, dtype=torch.bool).triu(1)[first:]


def scrambled(model):
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.4)
    return model.eval()


def decoder(heads, batch_first=True, layers=2):
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(DIM, HEADS, 16, batch_first=batch_first, dtype=F64)
    model = nn.TransformerDecoder(layer, layers)
    assert replace(model, heads) == 2 * layers
    return scrambled(model)


def stepwise(call, x, dim=1):
    """The outputs of all steps; `call` gets the tokens of one, and the index of the first."""
    ends = [sum(STEPS[: i + 1]) for i in range(len(STEPS))]
    parts = zip((0, *ends), ends, strict=False)
    return torch.cat([call(x.narrow(dim, first, last - first), first) for first, last in parts], dim)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("name", PLAIN)
def test_a_decoder_decodes_as_in_one_pass(name, batch_first):
    model = decoder(PLAIN[name], batch_first)
    x, memory = torch.randn(B, T, DIM, dtype=F64), torch.randn(B, S, DIM, dtype=F64)
    x, memory = (x, memory) if batch_first else (x.transpose(0, 1), memory.transpose(0, 1))
    hidden = torch.tensor([[False] * S, [False] * 3 + [True] * 2])
    wanted = model(x, memory, tgt_mask=causal(T), memory_key_padding_mask=hidden)
    with cached(model) as cache:
        y = stepwise(lambda new, _: model(new, memory, memory_key_padding_mask=hidden), x, int(batch_first))
        assert cache.length == T
    assert_close(y, wanted, rtol=1e-9, atol=1e-9)
    assert_close(model(x, memory, tgt_mask=causal(T), memory_key_padding_mask=hidden), wanted)  # no cache is left


def test_keys_of_a_context_are_computed_once():
    model = decoder([ph.Softmax(2), ph.Hyla(2)])
    x, memory = torch.randn(B, T, DIM, dtype=F64), torch.randn(B, S, DIM, dtype=F64)
    found = []
    for later in (memory, torch.zeros_like(memory)):
        with cached(model):
            model(x[:, :3], memory)
            found.append(model(x[:, 3:4], later))
            with pytest.raises(
                ValueError, match=r"^MultiheadAttention: 5 keys as in its cache were wanted but 4 came$"
            ):
                model(x[:, 4:5], memory[:, :4])
    assert torch.equal(*found)


@pytest.mark.parametrize(
    "heads", [None, MIXED["mixture"], PLAIN["neighbours"]], ids=["softmax", "mixture", "neighbours"]
)
def test_causal_encoder_layers_decode_with_padding_on_the_left(heads):
    """A decoder without cross-attention is often made of encoder layers; beams go on in another order."""
    layer = nn.TransformerEncoderLayer(DIM, HEADS, 16, batch_first=True, dtype=F64)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    replace(model, heads)
    scrambled(model)
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


MISTAKES = [
    (lambda: inside(nn.TransformerDecoderLayer(8, 2), id), "TransformerDecoderLayer holds nn.MultiheadAttention"),
    (lambda: inside(nn.Linear(2, 2), id), "a model of replaced attention was wanted but Linear holds none"),
    (lambda: inside(whole(), id), "a decoder was wanted but Transformer has an encoder: take its decoder"),
    (lambda: inside(decoder(None), lambda model: inside(model, id)), "TransformerDecoder has a cache already"),
    (lambda: cached(decoder(None), Cache(2)).__enter__(), "cache of 4 attention modules was wanted but one of 2 came"),
    (
        lambda: inside(decoder(None), lambda model: capture(model, *(torch.zeros(1, 3, DIM, dtype=F64),) * 2)),
        "layers.0.self_attn must have no cache: capture the whole sequence, outside of cached",
    ),
]


def whole():
    model = nn.Transformer(8, 2, 1, 1, 8, batch_first=True)
    replace(model)
    return model


@pytest.mark.parametrize(("make", "line"), MISTAKES, ids=[line[:40] for _, line in MISTAKES])
def test_mistakes_are_one_clear_line(make, line):
    with pytest.raises(ValueError, match=r"^(cached|capture): ") as caught:
        make()
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_after_an_error_the_model_is_as_before():
    model = decoder(None)
    with pytest.raises(ValueError, match="must be"), cached(model):
        model(torch.zeros(1, 3, DIM + 1, dtype=F64), torch.zeros(1, 3, DIM, dtype=F64))
    assert not any(getattr(module, "memory", None) for module in model.modules())
