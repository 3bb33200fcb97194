"""Our layers equal those of the package `dual-attention` 0.0.7 in float64: outputs and all gradients, over a grid.

Its modules are read by `compat.dual_attention`, whose tests compare whole models and sources of symbols.  Its two
relational cross-attentions lack an import, which the tests give them.
"""

import itertools

import pytest
import torch

pytest.importorskip("dual_attention", reason="the package dual-attention is not installed (extra `test`)")
from dual_attention import model_utils, relational_attention
from dual_attention.attention_utils import precompute_freqs_cis
from dual_attention.dual_attention import DualAttention
from torch.testing import assert_close

from polyhead.compat.dual_attention.load import attention_groups, load_attention
from polyhead.compat.dual_attention.tensors import of_attention

F64 = torch.float64
NEAR = {"atol": 1e-5, "rtol": 1e-5}
T, D = 6, 16
ACTS = ("identity", "relu", "tanh", "gelu", "sigmoid", "silu")
CROSS = ("RelationalCrossAttention", "DisentangledRelationalCrossAttention")
RELATIONAL = ("RelationalAttention", *CROSS)


def act_of(cls, act):
    return {"activation" if cls == CROSS[0] else "rel_activation": act}


def grid():
    """The class of a module, its arguments, and how it is called."""
    heads = {"d_model": D, "n_heads": 4, "dropout": 0.0}
    choices = itertools.product((1, 2, 8, 16), (False, True), (None, 2, 1), (False, True))
    for i, (relations, symmetric, kv, causal) in enumerate(choices):
        cfg = {**heads, "n_relations": relations, "symmetric_rels": symmetric, "n_kv_heads": kv}
        cfg |= {"rel_activation": ACTS[i % 6], "add_bias_kv": i % 4 == 0, "add_bias_out": i % 4 == 0}
        yield RELATIONAL[0], cfg, {"rope": i % 3 == 0, "causal": causal}
    for cls, (i, act), causal in itertools.product(CROSS, enumerate(ACTS), (False, True)):
        yield cls, {**heads, **act_of(cls, act), "n_kv_heads": 1 if i % 2 else None}, {"rope": causal, "causal": causal}
    for cls in RELATIONAL:
        yield cls, {**heads, **act_of(cls, "softmax")}, {}
        yield cls, heads, {"masked": True}
        relative = {**heads, "n_kv_heads": 1, "use_relative_positional_symbols": True}
        for distance, causal in itertools.product((2, T, 2 * T), (False, True)):  # clipped, and longer than x
            yield cls, relative, {"distance": distance, "causal": causal}
    for kind, sa in itertools.product(("relational_attention", "rca", "disrca"), range(5)):
        cfg = {"d_model": D, "n_heads_sa": sa, "n_heads_ra": 4 - sa, "dropout": 0.0, "ra_type": kind}
        if kind == "relational_attention" and sa == 2:
            cfg |= {"sa_kwargs": {"n_kv_heads": 1}, "ra_kwargs": {"n_kv_heads": 1, "n_relations": 8}}
        yield "DualAttention", cfg, {"rope": True, "causal": True}
        if kind != "rca" and sa == 2:
            yield "DualAttention", {**cfg, "share_attn_params": True}, {}


def build(cls, cfg):
    kinds = {name: getattr(relational_attention, name) for name in RELATIONAL} | {"DualAttention": DualAttention}
    module = kinds[cls](**cfg).to(F64).eval()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return module


def symbols_of(distance):
    """Ours and theirs: by key; or a table by offset, of which the package takes a symbol for each pair."""
    if distance is None:
        symbols = torch.randn(2, T, D, dtype=F64)
        return symbols, symbols.clone()
    table = torch.randn(2 * distance + 1, D, dtype=F64)
    offset = (torch.arange(T) - torch.arange(T)[:, None]).clamp(-distance, distance)
    return table, table[offset + distance]


@pytest.mark.parametrize(("cls", "cfg", "how"), list(grid())[::4])
def test_outputs_and_gradients_are_those_of_the_package(monkeypatch, cls, cfg, how):
    monkeypatch.setattr(relational_attention, "model_utils", model_utils, raising=False)  # the missing import
    module, causal, rope = build(cls, cfg), how.get("causal", False), how.get("rope", False)
    layer = load_attention(module.state_dict(), cfg, cls=cls, causal=causal, rotary=rope)
    x = torch.randn(2, T, D, dtype=F64)
    mine, its = ([x.clone().requires_grad_(), s.requires_grad_()] for s in symbols_of(how.get("distance")))
    angles = precompute_freqs_cis(layer.sizes[0].dim, T) if rope else ()
    angles = dict(zip(("freqs_cos", "freqs_sin"), angles, strict=False))
    mask = (torch.rand(T, T) > 0.4) | torch.eye(T).bool() if "masked" in how else None
    y = layer(mine[0], symbols=mine[1], mask=mask)
    wanted, *_ = module(*its, attn_mask=mask, is_causal=causal, **angles)
    assert_close(y, wanted, **NEAR)
    cotangent = torch.randn_like(y)
    for each in (y, wanted):
        (each * cotangent).sum().backward()
    for ours, theirs in zip(mine, its, strict=True):
        if ours.shape == theirs.shape:
            assert_close(ours.grad, theirs.grad, **NEAR)
    ours, theirs = dict(layer.named_parameters()), dict(module.named_parameters(remove_duplicate=False))
    places = list(of_attention(layer, attention_groups(cls, cfg, causal=causal)))
    assert {id(theirs[key]) for place in places for key in place.keys} == {id(p) for p in module.parameters()}
    for place in places:
        gradient = ours[place.names[0]].grad[place.index]
        for key in place.keys:
            assert_close(gradient, theirs[key].grad, **NEAR, msg=lambda text, key=key: f"{key}: {text}")
