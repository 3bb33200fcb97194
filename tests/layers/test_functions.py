"""A group with a user's own function: its code is the function's code, or it has no code."""

import pytest
import torch
from refusals import refused
from torch.nn import functional as F
from torch.testing import assert_close

import polyhead as ph
from polyhead.analysis import codes, value_network
from polyhead.layers.cache import LayerCache
from polyhead.layers.heads import functions
from polyhead.layers.heads.groups import SoftmaxHeads
from polyhead.pages.explore import writer as explore

F64 = torch.float64


def cosine_code(q, k, **options):
    q, k = (F.normalize(x, dim=-1) for x in (q, k))
    return ph.ops.latent_code(q, k, normalise="softmax", **{**options, "scale": 5.0})


def cosine_attention(q, k, v, *, keep=None, normalise=None, act=None, **options):
    code = cosine_code(q, k, **options)
    return torch.einsum("bhts,bshe->bthe", code if keep is None else code * keep, v)


def without_keep(q, k, v, *, mask, causal, **options):
    return cosine_attention(q, k, v, mask=mask, causal=causal)


def squares(q, k, v, **options):
    return cosine_attention(q, k, v.square(), **options)


def layer(heads, **options):
    torch.manual_seed(0)
    return ph.MultiHeadAttention(24, heads, dtype=F64, max_length=12, **options)


def inputs(b=2, t=6):
    return torch.randn(b, t, 24, dtype=F64, generator=torch.Generator().manual_seed(1))


def tapped(attention, x, **arguments):
    taps = []
    y = attention(x, taps=taps, **arguments)
    return y, taps[0]


# -------------------------------------------------------------------------------------------------- given with its code
@pytest.mark.parametrize("limits", [{"causal": True, "positions": ph.Rotary()}, {"window": 2, "qk_norm": True}])
def test_its_code_makes_its_output(limits):
    attention, x = layer([ph.Softmax(2), ph.Linear(4, dim=6, value_dim=8)], **limits), inputs()
    attention.groups[1].use(cosine_attention, code=cosine_code)
    y, taps = tapped(attention, x)
    group = taps.groups[1]
    code = attention(x, return_code=True)[1][:, 2:]
    assert_close(torch.einsum("bhts,bshe->bthe", code, group.v), group.output, rtol=0, atol=1e-12)
    assert_close(group.code(), code, rtol=0, atol=0)
    assert_close(codes(taps, [0, 5, -1], [0, 3, 4], group=1), code[:, :, [0, 5, 5], [0, 3, 4]].transpose(1, 2))
    networks = [value_network(taps, 3, j, sample=1, group=g)(x[1, j]) for j in range(6) for g in range(2)]
    assert_close(sum(networks), y[1, 3])


def test_the_function_and_its_code_are_given_the_same():
    """A function that ignores windows has a code at all pairs, although the mask in the taps hides some."""

    def far(q, k, *, window, **options):
        return cosine_code(q, k, **options)

    attention, x = layer(ph.Softmax(4), window=2), inputs(b=1)
    attention.groups[0].use(lambda q, k, v, *, window, **options: cosine_attention(q, k, v, **options), code=far)
    for arguments in ({}, {"cu_seqlens": torch.tensor([0, 4, 6], dtype=torch.int32)}):
        code = attention(x, return_code=True, **arguments)[1]
        group = tapped(attention, x, **arguments)[1].groups[0]
        assert_close(group.code(), code)
        assert_close(torch.einsum("bhts,bshe->bthe", code, group.v), group.output)
        assert code[0, :, 0, 3].ne(0).all()
    attention.groups[0].use(cosine_attention, code=lambda q, k, **options: cosine_code(q, k, **options)[:, :, 1:])
    message = r"^SoftmaxHeads: <lambda> must return \(b h t s\) = \(1, 4, 6, 6\) but gave \(1, 4, 5, 6\)$"
    refused(lambda: attention(x, return_code=True), message)


# ------------------------------------------------------------------------------------------------------- without a code
class WithOwnForward(SoftmaxHeads):
    def forward(self, call):
        return cosine_attention(call.q, call.k, call.v, mask=call.masks.mask, causal=call.masks.causal, keep=call.keep)


@pytest.mark.parametrize("assignment", ["assigned", "used", "assigned later", "a forward"])
def test_an_unknown_code_is_refused_everywhere(assignment):
    attention, x = layer(ph.Softmax(4)), inputs(b=1)
    group = attention.groups[0]
    if assignment == "assigned":
        group.attend = cosine_attention
    elif assignment == "used":
        group.use(squares)
    elif assignment == "assigned later":
        group.use(cosine_attention, cosine_code)
        group.attend = without_keep
    else:
        attention.groups[0] = WithOwnForward(ph.Softmax(4), group.sizes)
    y, taps = tapped(attention, x)
    assert not torch.allclose(y, layer(ph.Softmax(4))(x))
    for call in (
        lambda: attention(x, return_code=True),
        lambda: taps.groups[0].code(),
        lambda: codes(taps, -1, 0),
        lambda: value_network(taps, -1, 0),
        lambda: explore.write([taps], list("abcdef"), "nowhere.html"),
    ):
        refused(call, r": the code of \w+ is not known: give it with the function")
    assert taps.groups[0].kind == taps.groups[0].normalise == "own"


# -------------------------------------------------------------------------------------------------- caches and dropout
@pytest.mark.parametrize("code", [None, cosine_code])
def test_linear_heads_with_a_function_keep_every_token(code):
    """A sum of earlier tokens would be that of the op: none is kept, and a kept one is refused."""
    attention, x = layer(ph.Linear(4), causal=True), inputs()
    attention.groups[0].use(cosine_attention, code=code)
    cache = LayerCache()
    steps = [attention(x[:, i : i + 2], cache=cache) for i in range(0, 6, 2)]
    assert_close(torch.cat(steps, 1), attention(x))
    with pytest.raises(ValueError, match=r"^LinearHeads: step needs heads .* but attend is not the op's"):
        attention.groups[0].step(*torch.randn(3, 2, 1, 4, 6, dtype=F64), None)
    attention, cache = layer(ph.Linear(4), causal=True), LayerCache()
    attention(x[:, :3], cache=cache)
    attention.groups[0].attend = cosine_attention
    refused(lambda: attention(x[:, 3:], cache=cache), "but attend is not the op's")


@pytest.mark.parametrize("kind", [ph.Hyla, ph.Relational])
def test_a_swallowed_keep_is_noticed(kind):
    attention, x = layer(kind(4, dim=6), dropout=0.5, causal=True), inputs()
    (group,) = attention.groups
    attend = group.attend
    group.use(lambda *tensors, keep, **options: attend(*tensors, **options, keep=None))
    message = rf"^{type(group).__name__}: <lambda> must multiply its code by keep, but its output is not 0"
    attention(x[:0])  # an empty batch shows nothing
    refused(lambda: attention(x), message)
    attention.eval()(x)
    refused(lambda: attention(x, keep=torch.ones(1, 1, 6, 6, dtype=F64)), message)
    group.use(lambda *tensors, **options: attend(*tensors, **options))
    attention.train()
    torch.manual_seed(3)
    first = attention(x)
    torch.manual_seed(3)  # the check of the function, in the first call, takes nothing from torch's generator
    assert_close(attention(x), first)


@pytest.mark.compile
def test_compiled_it_must_have_been_seen_to_heed_keep():
    torch._dynamo.reset()
    attention, x = layer(ph.Softmax(4), dropout=0.5), inputs()
    attention.groups[0].use(cosine_attention, code=cosine_code)
    compiled = torch.compile(attention, fullgraph=True, backend="eager")
    message = r"call the layer once before torch\.compile, which checks that cosine_attention applies keep"
    with pytest.raises(torch._dynamo.exc.Unsupported, match=message):
        compiled(x)
    attention(x)
    assert compiled(x).shape == x.shape
    assert functions.has_user_function(attention.groups[0])
