"""The drop-in equals nn.MultiheadAttention with the same weights; with other heads it equals our own layer."""

import copy
import inspect
import itertools
import warnings

import pytest
import torch
import torch_masks
from torch import nn
from torch.testing import assert_close
from torch_mixed import MIXED, own_layer

import polyhead as ph
from polyhead.compat import torch_mha
from polyhead.compat.torch_mha import MultiheadAttention, drop_in, replace

F64 = torch.float64
B, T, S, DIM, HEADS = 2, 4, 5, 12, 4
KINDS = {"self": {}, "cross": {}, "widths": {"kdim": 7, "vdim": 10}, "no biases": {"bias": False}}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(1)


@pytest.fixture
def ran(monkeypatch):
    """How often our forward was called: a hook would switch PyTorch's fast path off by itself."""
    count = []
    forward = MultiheadAttention.forward

    def counted(self, *args, **kwargs):
        count.append(self)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(MultiheadAttention, "forward", counted)
    return count


def pair(kind="self", **options):
    """PyTorch's and ours, with the same random weights."""
    options = {"dtype": F64, "batch_first": True, **KINDS[kind], **options}
    theirs, ours = nn.MultiheadAttention(DIM, HEADS, **options), MultiheadAttention(DIM, HEADS, **options)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.4)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def inputs(kind):
    if kind in ("self", "no biases"):
        return (torch.randn(B, S, DIM, dtype=F64, requires_grad=True),) * 3
    k, v = KINDS[kind].get("kdim", DIM), KINDS[kind].get("vdim", DIM)
    return tuple(torch.randn(B, n, m, dtype=F64, requires_grad=True) for n, m in ((T, DIM), (S, k), (S, v)))


def masks(name, t):
    return torch_masks.masks(name, B, t, S, HEADS)


@pytest.mark.parametrize("mask", torch_masks.MASKS)
@pytest.mark.parametrize(("kind", "batch_first"), list(itertools.product(KINDS, (True, False))))
def test_output_weights_and_gradients_are_theirs(kind, batch_first, mask):
    theirs, ours = pair(kind, batch_first=batch_first)
    qkv = inputs(kind)
    options = masks(mask, qkv[0].shape[1])
    given = qkv if batch_first else [x.transpose(0, 1) for x in qkv]
    for average in (True, False):
        y, weights = ours(*given, average_attn_weights=average, **options)
        wanted = theirs(*given, average_attn_weights=average, **options)
        assert_close((y, weights), wanted, rtol=1e-12, atol=1e-12)
    without, none = ours(*given, need_weights=False, **options)
    assert none is None
    assert_close(without, y, rtol=1e-12, atol=1e-12)
    cotangent = torch.randn_like(y)
    leaves = list(dict.fromkeys(qkv))
    grads = torch.autograd.grad(y, [*leaves, *ours.parameters()], cotangent)
    names = [name for name, _ in ours.named_parameters()]
    own = [theirs.get_parameter(name) for name in names]
    assert_close(grads, torch.autograd.grad(wanted[0], [*leaves, *own], cotangent), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_keys_and_signature(kind):
    made = []
    for build in (nn.MultiheadAttention, MultiheadAttention):
        torch.manual_seed(3)
        made.append(build(DIM, HEADS, **KINDS[kind]))
    theirs, ours = (module.state_dict() for module in made)
    assert list(theirs) == list(ours)
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
    assert inspect.signature(MultiheadAttention.forward) == inspect.signature(nn.MultiheadAttention.forward)
    wanted = list(inspect.signature(nn.MultiheadAttention).parameters.items())
    assert list(inspect.signature(MultiheadAttention).parameters.items())[: len(wanted)] == wanted


def test_arguments_by_position():
    """All of them: what comes after the sixth has its name by its place."""
    settings = (DIM, HEADS, 0.25, False, False, False, 7, 10, True, "cpu", F64)
    theirs, ours = nn.MultiheadAttention(*settings), MultiheadAttention(*settings)
    ours.load_state_dict(theirs.state_dict())
    theirs.eval(), ours.eval()
    assert ours.dropout == 0.25
    qkv, causal = [x[:, :T] for x in inputs("widths")], torch.ones(T, T, dtype=torch.bool).triu(1)
    for average in (True, False):
        given = (None, True, causal, average, True)
        assert_close(ours(*qkv, *given), theirs(*qkv, *given), rtol=1e-12, atol=1e-12)


def test_one_sequence_without_a_batch():
    theirs, ours = pair("cross", batch_first=False)
    query, key, value = (x[0] for x in inputs("cross"))
    padding, pairs = torch.tensor([False, False, True, False, True]), torch.rand(HEADS, T, S) > 0.5
    pairs[..., 0] = False
    options = {"key_padding_mask": padding, "attn_mask": pairs}
    for average in (True, False):
        got = ours(query, key, value, average_attn_weights=average, **options)
        assert_close(got, theirs(query, key, value, average_attn_weights=average, **options), rtol=1e-12, atol=1e-12)


def test_the_causal_hint_is_the_causal_mask():
    theirs, ours = pair()
    qkv, padding = inputs("self"), torch.zeros(B, S, dtype=torch.bool)
    padding[1, 3:] = True
    causal = nn.Transformer.generate_square_subsequent_mask(S, dtype=F64)
    for more in ({}, {"key_padding_mask": torch.zeros(B, S, dtype=F64).masked_fill(padding, -torch.inf)}):
        for weights in (True, False):
            given = {"attn_mask": causal, "is_causal": True, "need_weights": weights, **more}
            assert_close(ours(*qkv, **given), theirs(*qkv, **given), rtol=1e-12, atol=1e-12)
    narrow = [x[:, :T] for x in qkv[:1]] + [*qkv[1:]]
    given = {"attn_mask": causal[:T], "is_causal": True}
    assert_close(ours(*narrow, **given), theirs(*narrow, **given), rtol=1e-12, atol=1e-12)


def test_a_row_without_keys_is_0_and_has_no_gradient_of_nan():
    _, ours = pair()
    qkv, padding = inputs("self"), torch.zeros(B, S, dtype=torch.bool)
    padding[1] = True
    for mask in (padding, torch.zeros(B, S, dtype=F64).masked_fill(padding, -torch.inf)):
        y, weights = ours(*qkv, key_padding_mask=mask)
        assert_close(y[1], ours.out_proj.bias.expand(S, DIM))
        assert (weights[1] == 0).all()
        assert torch.autograd.grad(y.sum(), qkv[0])[0].isfinite().all()


def test_dropout_is_of_the_code_and_what_is_returned():
    _, ours = pair(dropout=0.25)
    x = inputs("self")
    ours.eval()
    _, code = ours(*x, average_attn_weights=False)
    ours.train()
    y, dropped = ours(*x, average_attn_weights=False)
    kept = dropped != 0
    assert 0 < (~kept).sum() < kept.numel() / 2
    assert_close(dropped[kept], code[kept] / 0.75, rtol=1e-12, atol=1e-12)
    v = torch.nn.functional.linear(x[2], *(part.chunk(3)[2] for part in (ours.in_proj_weight, ours.in_proj_bias)))
    read = torch.einsum("bhts,bshe->bthe", dropped, v.unflatten(-1, (HEADS, -1)))
    assert_close(y, ours.out_proj(read.flatten(2)), rtol=1e-12, atol=1e-12)


def test_dropout_of_everything_leaves_the_bias():
    theirs, ours = pair(dropout=1.0)
    x = torch.randn(B, S, DIM, dtype=F64)
    assert_close(ours(x, x, x), theirs(x, x, x))


@pytest.mark.parametrize("name", ["key_padding_mask", "attn_mask"])
def test_nan_in_a_mask_is_not_lost(name):
    theirs, ours = pair()
    x, shape = torch.randn(B, S, DIM, dtype=F64), (B, S) if name == "key_padding_mask" else (S, S)
    mask = torch.zeros(shape, dtype=F64)
    mask[1, 2] = torch.nan
    y, wanted = (module(x, x, x, **{name: mask})[0].isnan() for module in (ours, theirs))
    assert wanted.any()
    assert torch.equal(y, wanted)


def test_a_mask_of_large_numbers_is_not_taken_for_one_by_heads_without_a_softmax():
    """To which -1e9 is a score as any other: their code at the key that was to be hidden would be the largest."""
    x, padding = torch.randn(B, S, DIM, dtype=F64), torch.zeros(B, S, dtype=F64)
    padding[:, -1] = -1e9
    line = r"^MultiheadAttention: -inf or a Boolean mask hides pairs from HylaHeads but a mask with -1e\+09 came$"
    mixed = MultiheadAttention(DIM, HEADS, batch_first=True, heads=[ph.Softmax(2), ph.Hyla(2)], dtype=F64)
    with pytest.raises(ValueError, match=line):
        mixed(x, x, x, key_padding_mask=padding)
    for heads in (ph.Softmax(HEADS), ph.Hyla(HEADS, normalise="softmax")):
        soft = MultiheadAttention(DIM, HEADS, batch_first=True, heads=heads, dtype=F64)
        assert_close(soft(x, x, x, key_padding_mask=padding), soft(x, x, x, key_padding_mask=padding < 0))


def test_a_causal_hint_beside_a_mask_that_says_more():
    """PyTorch reads the mask if it returns weights."""
    theirs, ours = pair()
    x, slopes = torch.randn(B, S, DIM, dtype=F64), torch.randn(S, S, dtype=F64)
    mask = slopes.masked_fill(torch.ones(S, S, dtype=torch.bool).triu(1), -torch.inf)
    for weights in (True, False):
        given = {"attn_mask": mask, "is_causal": True, "need_weights": weights}
        assert_close(ours(x, x, x, **given), theirs(x, x, x, **given), rtol=1e-12, atol=1e-12)
    taps = torch_mha.capture(ours, x, x, x, attn_mask=mask, is_causal=True)
    assert_close(taps[0].groups[0].code(), ours(x, x, x, attn_mask=mask, average_attn_weights=False)[1])


def test_a_learned_bias_that_begins_at_0_is_learned():
    _, ours = pair()
    bias = torch.zeros(S, S, dtype=F64, requires_grad=True)
    y, _ = ours(*inputs("self"), attn_mask=bias)
    assert torch.autograd.grad(y.square().sum(), bias)[0].abs().min() > 0


# ------------------------------------------------------------------------------------------------ in PyTorch's layers
LIMITS = {
    "none": {},
    "padding": {"src_key_padding_mask": torch.tensor([[False] * 5, [False] * 3 + [True] * 2])},
    "pairs": {"src_mask": torch.ones(5, 5, dtype=torch.bool).triu(1)},
    "both": {
        "src_mask": torch.ones(5, 5, dtype=torch.bool).triu(2),
        "src_key_padding_mask": torch.tensor([[False] * 5, [False] + [True] * 2 + [False] * 2]),
    },
}


@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize("mask", LIMITS)
def test_an_encoder_layer_runs_our_forward(ran, mask, training):
    """Of PyTorch's own, for inference, no attention module is called: its fast path computes the layer as one."""
    theirs = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True).train(training)
    ours = copy.deepcopy(theirs)
    assert replace(ours) == 1
    x = torch.randn(2, 5, 16)
    with torch.no_grad():
        wanted = theirs(x, **LIMITS[mask])
        assert not ran
        assert_close(ours(x, **LIMITS[mask]), wanted, rtol=1e-6, atol=1e-6)
        assert ran == [ours.self_attn]
    y, want = ours(x, **LIMITS[mask]), theirs(x, **LIMITS[mask])
    grads = [torch.autograd.grad(out.sin().sum(), list(m.parameters())) for out, m in ((y, ours), (want, theirs))]
    assert_close(*grads, rtol=1e-5, atol=1e-6)


def test_an_encoder_with_padding_runs_our_forward_in_all_layers(ran):
    """There PyTorch nests the sequences, without their padding, for its fused layers."""
    theirs = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2).eval()
    ours = copy.deepcopy(theirs)
    assert replace(ours) == 2
    x, padding = torch.randn(2, 5, 16), LIMITS["padding"]["src_key_padding_mask"]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*nested tensors")  # said once in a process, here or before
        wanted = theirs(x, src_key_padding_mask=padding)
    with torch.no_grad():
        y = ours(x, src_key_padding_mask=padding)
    assert len(ran) == 2
    assert_close(y[~padding], wanted[~padding], rtol=1e-5, atol=1e-6)
    ours.use_nested_tensor = True  # as where layers are put in by hand
    with torch.no_grad(), pytest.raises(ValueError, match="a nested one came: set enable_nested_tensor=False"):
        ours(x, src_key_padding_mask=padding)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")  # PyTorch's own, of its own module
@pytest.mark.parametrize("batch_first", [True, False])
def test_a_decoder_has_both_kinds(ran, batch_first):
    theirs = nn.Transformer(12, 4, 1, 1, 16, batch_first=batch_first, dropout=0.0, dtype=F64)
    ours = copy.deepcopy(theirs)
    assert replace(ours) == 3
    source, target = torch.randn(B, S, 12, dtype=F64), torch.randn(B, T, 12, dtype=F64)
    given = (source, target) if batch_first else (source.transpose(0, 1), target.transpose(0, 1))
    causal = nn.Transformer.generate_square_subsequent_mask(T, dtype=F64)
    hidden = torch.zeros(B, S, dtype=F64)
    hidden[0, 2:] = -torch.inf
    how = {"tgt_mask": causal, "src_key_padding_mask": hidden, "memory_key_padding_mask": hidden}
    assert_close(ours(*given, **how), theirs(*given, **how), rtol=1e-10, atol=1e-10)
    assert len(ran) == 3


@pytest.mark.compile
def test_a_layer_compiles_as_one_graph():
    theirs = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    ours = copy.deepcopy(theirs)
    replace(ours, [ph.Softmax(2), ph.Hyla(2)])
    x, given = torch.randn(2, 5, 16), LIMITS["both"]
    compiled = torch.compile(ours, fullgraph=True, backend="eager")
    assert_close(compiled(x, **given), ours(x, **given), rtol=1e-5, atol=1e-6)
    assert (compiled(x, **given) - theirs(x, **given)).abs().max() > 1e-3


# ---------------------------------------------------------------------------------------------------------- other heads
@pytest.mark.parametrize("name", MIXED)
def test_other_heads_are_those_of_our_layer(name):
    heads = MIXED[name]
    ours = MultiheadAttention(DIM, HEADS, heads=heads, dtype=F64, batch_first=True)
    for parameter in ours.parameters():
        nn.init.normal_(parameter, std=0.5)
    layer = own_layer(ours, heads)
    x, context = torch.randn(B, T, DIM, dtype=F64), torch.randn(B, S, DIM, dtype=F64)
    padding = torch.zeros(B, T, dtype=torch.bool)
    padding[1, 3:] = True
    bias = torch.randn(B * HEADS, T, T, dtype=F64)
    if name != "neighbours":  # in our layer they see padding; here its mask is known
        y, code = layer(x, mask=~padding[:, None, None], bias=bias.unflatten(0, (B, HEADS)), return_code=True)
        got = ours(x, x, x, padding, True, bias, average_attn_weights=False)
        assert_close(got, (y, code), rtol=1e-10, atol=1e-10)
    y, code = layer(x, context, return_code=True)
    assert_close(ours(x, context, context, average_attn_weights=False), (y, code), rtol=1e-10, atol=1e-10)


def test_neighbours_are_no_padding():
    heads = MIXED["neighbours"]
    ours = MultiheadAttention(DIM, HEADS, heads=heads, dtype=F64, batch_first=True)
    nn.init.normal_(ours.in_proj_weight)
    x, padding = torch.randn(1, S, DIM, dtype=F64), torch.tensor([[False, False, False, True, True]])
    alone, _ = ours(*(x[:, :3],) * 3)
    assert_close(ours(x, x, x, padding)[0][:, :3], alone, rtol=1e-10, atol=1e-10)


def test_replace_keeps_the_parameters_themselves():
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, bias=False)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    model.layers[1].self_attn = model.layers[0].self_attn  # one module, in two places
    model.layers[0].self_attn.in_proj_weight.requires_grad_(False)
    before = dict(model.named_parameters())
    model.layers[0].eval()
    assert replace(model, [ph.Softmax(2), ph.Hyla(2)]) == 1
    assert model.layers[0].self_attn is model.layers[1].self_attn
    assert not model.layers[0].self_attn.training
    assert {name: id(p) for name, p in model.named_parameters()} == {name: id(p) for name, p in before.items()}
    assert isinstance(model.layers[0].self_attn, MultiheadAttention)


@pytest.mark.parametrize("heads", [ph.Hyla(4), [ph.Softmax(2), ph.Relational(2)]], ids=["hyla", "relational"])
def test_replace_under_a_default_device_of_meta(heads):
    with torch.device("meta"):
        model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 1)
        replace(model, heads)
    wanted = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 1)
    replace(wanted, heads)
    shapes = [{name: x.shape for name, x in made.state_dict().items()} for made in (model, wanted)]
    assert shapes[0] == shapes[1]
    assert all(x.is_meta for x in model.state_dict().values())


def test_relational_heads_take_the_rows_of_values_for_their_symbols():
    theirs, _ = pair()
    ours = drop_in(theirs, [ph.Softmax(2), ph.Relational(2)])
    assert torch.equal(ours.in_proj_weight, theirs.in_proj_weight[: 2 * DIM + 6])
    assert torch.equal(ours.groups[1].value.weight, theirs.in_proj_weight[2 * DIM + 6 :])
    assert torch.equal(ours.groups[1].value.bias, theirs.in_proj_bias[2 * DIM + 6 :])
    assert ours.out_proj.weight is theirs.out_proj.weight
    x = torch.randn(B, S, DIM, dtype=F64)
    own = own_layer(ours, [ph.Softmax(2), ph.Relational(2)])
    assert_close(ours(x, x, x)[0], own(x), rtol=1e-10, atol=1e-10)


class Own(nn.MultiheadAttention):
    """Computes something of its own."""


def call(heads=None, **options):
    given = {"query": torch.zeros(2, 5, 12), "key": torch.zeros(2, 5, 12), "value": torch.zeros(2, 5, 12)}
    MultiheadAttention(12, 4, batch_first=True, heads=heads)(**{**given, **options})


MISTAKES = [
    (lambda: MultiheadAttention(12, 4, heads=ph.Hyla()), "num_heads = 4 but heads have 8"),
    (lambda: MultiheadAttention(12, 4, add_bias_kv=True), "keys must be made of the inputs but add_bias_kv=True came"),
    (lambda: MultiheadAttention(12, 4, add_zero_attn=True), "made of the inputs but add_zero_attn=True came"),
    (lambda: MultiheadAttention(12, 4, kdim=7, heads=ph.Relational(4)), "relational heads need kdim and vdim = 12"),
    (lambda: MultiheadAttention(12, 5), "Softmax: 5 heads do not divide the model width 12"),
    (lambda: call(query=torch.zeros(2, 5, 11)), r"query must be (b t m) = (2, 5, 12) but is (2, 5, 11)"),
    (lambda: call(value=torch.zeros(2, 4, 12)), r"value must be (b t m) = (2, 5, 12) but is (2, 4, 12)"),
    (lambda: call(query=torch.zeros(12)), "must have 2 or 3 dimensions but one is (12,)"),
    (lambda: call(attn_mask=torch.zeros(5, 5).long()), "attn_mask must be boolean or floating but is torch.int64"),
    (lambda: call(attn_mask=torch.zeros(2, 5, 5)), "attn_mask must be one of ((5, 5), (8, 5, 5)) but is (2, 5, 5)"),
    (lambda: call(key_padding_mask=torch.zeros(5, 2)), "must be one of ((5,), (2, 5)) but is (5, 2)"),
    (lambda: call(is_causal=True), "is_causal says what attn_mask is, but attn_mask is None"),
    (lambda: replace(nn.Linear(2, 2)), "holds nn.MultiheadAttention was wanted but Linear holds none"),
    (lambda: replace(nn.Sequential(MultiheadAttention(12, 4)), ph.Hyla(4)), "holds none: 1 are replaced already"),
    (lambda: replace(nn.MultiheadAttention(12, 4)), "but MultiheadAttention is one itself: use drop_in"),
    (lambda: replace(nn.Sequential(Own(12, 4))), "was wanted but its subclass Own came"),
    (lambda: drop_in(nn.MultiheadAttention(12, 4, add_zero_attn=True)), "but add_zero_attn=True came"),
    (lambda: drop_in(nn.MultiheadAttention(12, 4), ph.Hyla(4, kv_heads=2)), "but 3, 3 and kv_heads 2 came"),
    (
        lambda: drop_in(nn.MultiheadAttention(12, 4), ph.Softmax(4, value_dim=5)),
        "dim, value_dim = 3 and keys",
    ),
]


@pytest.mark.parametrize(("make", "line"), MISTAKES, ids=[line[:30] for _, line in MISTAKES])
def test_mistakes_are_one_clear_line(make, line):
    with pytest.raises(ValueError, match=r"^(MultiheadAttention|replace|Softmax): ") as caught:
        make()
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_module_is_where_its_capture_is():
    assert torch_mha.MultiheadAttention is MultiheadAttention
    assert torch_mha.capture
