"""timm's attention with our heads: softmax heads compute the same, others what our own layer computes.

Every case runs on classes written with timm's names (support/timm_like.py) and, where timm is installed, on its own.
"""

import copy
import importlib
import inspect

import pytest
import timm_like
import torch
from refusals import refusing
from torch import nn
from torch.testing import assert_close
from torch_attention import rebuilt, scrambled

import polyhead as ph
from polyhead.compat import timm
from polyhead.compat.torch_mha import capture, drop_in, replace

F64 = torch.float64
B, T, DIM, HEADS = 2, 6, 16, 4
PLACES = {"Attention": "timm.layers", "AttentionRope": "timm.layers", "EvaAttention": "timm.models.eva"}


@pytest.fixture(scope="module", params=["written here", "timm"])
def library(request):
    """Maker of a module by the name of its class, with random parameters."""
    if request.param == "timm":
        try:
            importlib.import_module("timm")
        except (ImportError, RuntimeError) as error:  # RuntimeError: torchvision of another build than torch
            pytest.skip(f"timm: {error}")

    def make(name, **options):
        torch.manual_seed(0)
        home = timm_like if request.param != "timm" else importlib.import_module(PLACES[name])
        cls = getattr(home, name)
        known = inspect.signature(cls).parameters
        if request.param == "timm" and (strange := sorted(set(options) - set(known))):
            pytest.skip(f"this timm has no {strange[0]}")
        if "norm_layer" in known and request.param == "timm":
            options["norm_layer"] = nn.LayerNorm
        return scrambled(cls(DIM, HEADS, **options).to(F64)).eval()

    return make


ALL = {"qkv_bias": True, "qk_norm": True, "scale_norm": True, "gated": True}
CASES = {
    "plain": ("Attention", {}),
    "all": ("Attention", ALL),
    "narrow": ("Attention", {"attn_head_dim": 3, "dim_out": 5, "qkv_bias": True, "proj_bias": False}),
    "rotary": ("AttentionRope", {"num_prefix_tokens": 2}),
    "rotary, all": ("AttentionRope", {**ALL, "rotate_half": True}),
    "rotary, separate": ("AttentionRope", {"qkv_fused": False, "qkv_bias": True}),
    "rotary, shared keys": ("AttentionRope", {"qkv_fused": False, "num_kv_heads": 2, "qk_norm": True}),
    "eva": ("EvaAttention", {"qkv_bias": True, "scale_norm": False}),
    "eva, no bias": ("EvaAttention", {"qkv_bias": False, "scale_norm": True}),
    "eva, separate": ("EvaAttention", {"qkv_fused": False, "scale_norm": True}),
}
HALF = torch.ones(T, T, dtype=torch.bool).tril(2)
MASKS = {
    "none": {},
    "pairs": {"attn_mask": HALF},
    "keys": {"attn_mask": torch.tensor([[True] * T, [True] * 3 + [False] * 3])[:, None, None]},
    "added": {"attn_mask": torch.randn(B, HEADS, T, T, dtype=F64).masked_fill(~HALF, -torch.inf)},
    "causal": {"is_causal": True},
}


def given(name, options):
    """Inputs and, for a class with rotary positions, its table."""
    torch.manual_seed(1)
    x = torch.randn(B, T, DIM, dtype=F64, requires_grad=True)
    if name == "Attention":
        return x, {}
    dim, first = DIM // HEADS, options.get("num_prefix_tokens", 1)
    angles = torch.randn(T - first, dim // 2, dtype=F64)
    spread = torch.cat((angles, angles), -1) if options.get("rotate_half") else angles.repeat_interleave(2, -1)
    return x, {"rope": torch.cat((spread.sin(), spread.cos()), -1)}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("case", CASES)
def test_softmax_heads_compute_the_same(library, case, mask):
    name, options = CASES[case]
    theirs = library(name, **options)
    ours = drop_in(theirs)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert {n: id(p) for n, p in ours.named_parameters()} == {n: id(p) for n, p in theirs.named_parameters()}
    x, table = given(name, options)
    y, wanted = (module(x, **table, **MASKS[mask]) for module in (ours, theirs))
    assert_close(y, wanted, rtol=1e-12, atol=1e-12)
    leaves, seed = [x, *theirs.parameters()], torch.randn_like(y)
    found, right = (torch.autograd.grad(out, leaves, seed) for out in (y, wanted))
    assert_close(found, right, rtol=1e-9, atol=1e-9)


MIXED = {"tokens": [ph.Softmax(1), ph.Hyla(2), ph.Linear(1)], "relations": [ph.Softmax(2), ph.Relational(2)]}


@pytest.mark.parametrize("name", MIXED)
def test_other_heads_are_those_of_our_layer(library, name):
    theirs, x = library("Attention", qkv_bias=True), torch.randn(B, T, DIM, dtype=F64)
    ours = drop_in(theirs, MIXED[name])
    layer = ph.MultiHeadAttention(DIM, MIXED[name], bias=True, dtype=F64)
    state = {f"qkv.{kind}": getattr(ours.qkv, kind)[: len(layer.qkv.weight)] for kind in ("weight", "bias")}
    state |= {f"out.{kind}": getattr(ours.proj, kind) for kind in ("weight", "bias")}
    state |= {key: x for key, x in ours.state_dict().items() if key.startswith(("groups", "symbols"))}
    layer.load_state_dict(state)
    assert_close(ours(x, attn_mask=HALF), layer(x, mask=HALF), rtol=1e-12, atol=1e-12)
    if name == "relations":
        last = slice(2 * DIM + DIM // 2, None)
        assert torch.equal(ours.groups[1].value.weight, theirs.qkv.weight[last])
        assert torch.equal(ours.groups[1].value.bias, theirs.qkv.bias[last])


def test_relational_heads_take_the_rows_of_values_of_eva(library):
    theirs = library("EvaAttention", qkv_bias=True, scale_norm=False)
    value = drop_in(theirs, [ph.Softmax(2), ph.Relational(2)]).groups[1].value
    assert torch.equal(value.weight, theirs.qkv.weight[2 * DIM + DIM // 2 :])
    assert torch.equal(value.bias, theirs.v_bias[DIM // 2 :])


@pytest.mark.parametrize("part", ["attn_drop", "proj_drop"])
def test_dropout_in_training_only(library, part):
    """That what is dropped is the code is in torch_mha/test_drop_in.py."""
    theirs, x = library("Attention", **{part: 1.0}), torch.randn(B, T, DIM, dtype=F64)
    ours = drop_in(theirs)
    assert_close(ours(x), theirs(x))
    assert_close(ours.train()(x), theirs.train()(x))


def test_codes_of_a_swapped_model(library):
    model = nn.Sequential(library("Attention", qkv_bias=True), library("AttentionRope", gated=True))
    assert replace(model, [ph.Softmax(2), ph.Hyla(2)]) == 2
    x = torch.randn(B, T, DIM, dtype=F64)
    first, second = capture(model, x)
    assert (first.name, second.name) == ("0", "1")
    y = model[0](x)
    assert_close(rebuilt(first, 1, 2), y[1, 2], rtol=1e-9, atol=1e-9)
    assert torch.equal(second.x, y)
    assert second.groups[0].w_out is None  # a gate lies between the heads and the output


class Block(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(DIM), attention

    def forward(self, x):
        return x + self.attention(self.norm(x))


def test_a_large_batch_in_half_precision(library):
    """Under autocast our softmax heads are no further from float32 than twice what theirs are."""
    theirs = nn.Sequential(*(Block(library("Attention", qkv_bias=True, qk_norm=True)) for _ in range(2))).float()
    ours, other = copy.deepcopy(theirs), copy.deepcopy(theirs)
    assert (replace(ours), replace(other, ph.Hyla(HEADS))) == (2, 2)
    x = torch.randn(64, T, DIM)
    right = theirs(x)
    with torch.autocast("cpu", torch.bfloat16):
        errors = [(model(x).float() - right).abs().max() for model in (ours, theirs)]
        loss = other(x).square().mean()
    loss.backward()
    assert 0 < errors[0] <= 2 * errors[1]
    assert all(p.grad.isfinite().all() and p.grad.any() for p in other.parameters())


@pytest.mark.compile
def test_a_block_compiles_as_one_graph(library):
    model = nn.Sequential(Block(library("AttentionRope", qk_norm=True, qkv_bias=True))).double()
    replace(model, [ph.Softmax(2), ph.Hyla(2)])
    x = torch.randn(64, T, DIM, dtype=F64)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert_close(compiled(x), model(x), rtol=1e-9, atol=1e-9)


def module(name="Attention", **options):
    return getattr(timm_like, name)(12, HEADS, **options)


class Odd(timm_like.Attention):
    """Computes something of its own."""


def changed(**parts):
    made = module()
    for name, part in parts.items():
        setattr(made, name, part)
    return made


def hooked():
    made = module()
    made.register_full_backward_hook(lambda *_: None)
    return made


def called(heads=None, **options):
    drop_in(module(), heads)(torch.zeros(B, T, 12), **options)


def foreign(place, name):
    """A model of another library with an attention module, in a block whose name also contains Attn."""
    block, cls = (type(kind, (nn.Sequential,), {"__module__": place}) for kind in ("CrossAttnBlock", name))
    return nn.Sequential(block(cls()))


WINDOW = foreign("timm.models.swin_transformer", "WindowAttention")
TALKING = foreign("timm.models.cait", "TalkingHeadAttn")
ELSEWHERE = [foreign(f"{place}.some", "Attention") for place in ("x_transformers", "diffusers", "transformers")]
MISTAKES = {
    "replace: Attention has 4 heads but 8 came": lambda: drop_in(module(), ph.Hyla()),
    "keys of their own but 3, 3": lambda: drop_in(module(), [ph.Softmax(2), ph.Hyla(2, share=True)]),
    "of a known timm was wanted but one with temperature came": lambda: drop_in(changed(temperature=2.0)),
    "of a known timm was wanted but one with mix came": lambda: drop_in(changed(mix=nn.Linear(2, 2))),
    "replace: Attention as timm makes it was wanted but one with hooks": lambda: drop_in(hooked()),
    "Attention must have scale = head_dim ** -0.5 = 0.57735 but has 1": lambda: drop_in(
        changed(scale=1, fused_attn=False)
    ),
    "HylaHeads but a mask with -10000 came": lambda: called(ph.Hyla(4), attn_mask=torch.full((T, T), -1e4)),
    "AttentionRope or EvaAttention was wanted but": lambda: drop_in(Odd(12, 4)),
    "relational heads need values of the model's width 8": lambda: drop_in(module(attn_head_dim=2), ph.Relational(4)),
    "attn_mask or is_causal was wanted but both came": lambda: called(attn_mask=torch.ones(T, T), is_causal=True),
    "Attention: attn_mask must be boolean or floating but is": lambda: called(attn_mask=torch.ones(T, T).long()),
    "broadcast to (b h t s) = (2, 4, 6, 6) but is (6, 7)": lambda: called(attn_mask=torch.ones(T, T + 1)),
    "Attention: attn_mask must broadcast to (b": lambda: called(attn_mask=torch.ones(1, 1, 1, T, T)),
    "Attention is one itself: use drop_in": lambda: replace(module()),
    "Sequential holds none: 1 are replaced already": lambda: replace(nn.Sequential(drop_in(module()))),
    "timm.models.swin_transformer.WindowAttention: of timm, replace takes Attention, Att": lambda: replace(WINDOW),
    "holds timm.models.cait.TalkingHeadAttn: of timm": lambda: replace(TALKING),
    "Attention: its layers have options that ours lack: build the": lambda: replace(ELSEWHERE[0]),
    "Attention: set an attention processor, as examples/diffusers_processor": lambda: replace(ELSEWHERE[1]),
    "Attention: use polyhead.compat.huggingface.swap_heads": lambda: replace(ELSEWHERE[2]),
    "was wanted but Sequential holds none": lambda: replace(foreign("mine", "Attention")),
}


@pytest.mark.parametrize("line", MISTAKES)
def test_mistakes_are_one_clear_line(line):
    with refusing(line):
        MISTAKES[line]()


def test_a_model_with_attention_of_both_kinds():
    """One call replaces both; other modules of timm stay."""
    other = foreign("timm.layers.attention_pool", "AttentionPoolLatent")
    model = nn.ModuleDict({"a": module(), "b": nn.MultiheadAttention(12, HEADS), "c": other})
    model["d"] = model["a"]
    assert replace(model, ph.Hyla(HEADS)) == 2
    assert isinstance(model["a"], timm.Attention)
    assert model["d"] is model["a"]
    assert model["c"] is other
