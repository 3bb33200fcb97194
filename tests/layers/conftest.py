"""Layers of the package `dual-attention` and their parameters, as ours: what the tests of parity share."""

import math
from dataclasses import dataclass

import pytest
import torch

from polyhead.config import Abstractor, Disentangled, Relational, Rotary, Softmax
from polyhead.layers.attention import MultiHeadAttention

ACTS = {"gelu": "gelu_tanh"}
"""Activations that have another name there."""


@dataclass
class Twin:
    """Our layer, and where each array of the package's state dict lies in it: (name, parameter, rows, columns)."""

    layer: MultiHeadAttention
    places: list
    width: int  # of the package's output: the first features of ours

    def load(self, weights):
        with torch.no_grad():
            for name, parameter, where in self.places:
                parameter[where] = weights[name]
        return self

    def gradients(self):
        return {name: parameter.grad[where] for name, parameter, where in self.places}


def group(kind, options, heads, total, width):
    """Our mechanism for a relational module of the package."""
    d = width // total
    its = {"dim": d, "value_dim": d, "kv_heads": options.get("n_kv_heads")}
    act = options.get("rel_activation", options.get("activation", "softmax" if kind == "rca" else "identity"))
    act = ACTS.get(act, act)
    if kind == "rca":
        return Abstractor(heads, act=act, **its)
    if kind == "disrca":
        return Disentangled(heads, relation_act=act, **its)
    relations = {"relations": options.get("n_relations"), "relation_dim": options.get("rel_proj_dim")}
    return Relational(heads, relation_act=act, symmetric=options.get("symmetric_rels", False), **relations, **its)


def places_of(layer, i, prefix, bias):
    """Rows of the joint projections that are group i, under the package's names."""
    module, sizes = layer.groups[i], layer.sizes
    first = [sum(layer.widths[:part]) + sum(s.widths[part] for s in sizes[:i]) for part in range(3)]
    rows = [slice(a, a + wide) for a, wide in zip(first, sizes[i].widths, strict=True)]
    plain = module.kind in ("softmax", "abstractor")
    q, k, v = ("wq", "wk", "wv") if plain else ("wq_attn", "wk_attn", "wv")
    found = []
    if "q" in sizes[i].takes:
        found += [
            (f"{prefix}{q}.weight", layer.qkv.weight, rows[0]),
            (f"{prefix}{k}.weight", layer.qkv.weight, rows[1]),
        ]
        found += [(f"{prefix}{k}.bias", layer.qkv.bias, rows[1])] if bias else []
    value = layer.qkv if module.kind == "softmax" else module.value
    where = rows[2] if module.kind == "softmax" else slice(None)
    found += [(f"{prefix}{v}.weight", value.weight, where)] + (
        [(f"{prefix}{v}.bias", value.bias, where)] if bias else []
    )
    if module.kind in ("relational", "disentangled"):
        found.append((f"{prefix}wq_rel.weight", module.q_rel.weight, slice(None)))
        if module.k_rel is not None:
            found.append((f"{prefix}wk_rel.weight", module.k_rel.weight, slice(None)))
    if module.kind == "relational":
        found.append((f"{prefix}wr", module.relation_weight, slice(None)))
    start = sum(s.heads * s.value_dim for s in sizes[:i])
    square = slice(start, start + sizes[i].heads * sizes[i].value_dim)
    found.append((f"{prefix}wo.weight", layer.out.weight, (square, square)))
    return found + ([(f"{prefix}wo.bias", layer.out.bias, square)] if bias else [])


def twin(cls, cfg, *, rope=False, dtype=torch.float32):
    """Our layer for a module of the package with these settings, at zero but for what `load` fills."""
    width, call = cfg["d_model"], cfg.get("call", {})
    kinds = {"RelationalAttention": "ra", "RelationalCrossAttention": "rca"}
    kinds |= {"DisentangledRelationalCrossAttention": "disrca"}
    if cls == "DualAttention":
        sa, ra = cfg["n_heads_sa"], cfg["n_heads_ra"]
        kind = {"relational_attention": "ra"}.get(cfg.get("ra_type", "relational_attention"), cfg.get("ra_type"))
        kv, d = cfg.get("sa_kwargs", {}).get("n_kv_heads"), width // (sa + ra)
        groups = [(Softmax(sa, dim=d, value_dim=d, kv_heads=kv), "self_attention.")] if sa else []
        if ra:
            mechanism = group(kind, cfg.get("ra_kwargs", {}), ra, sa + ra, width)
            if cfg.get("share_attn_params"):
                mechanism = type(mechanism)(**{**vars(mechanism), "share": True})
            groups.append((mechanism, "relational_attention."))
    else:
        heads = cfg["n_heads"]
        groups = [(group(kinds[cls], cfg, heads, cfg.get("total_n_heads") or heads, width), "")]
    bias = cfg.get("add_bias_kv", False)
    layer = MultiHeadAttention(
        width,
        [mechanism for mechanism, _ in groups],
        causal=call.get("is_causal", False),
        positions=Rotary() if rope else None,
        bias=bias,
        own_symbols=False,
        dtype=dtype,
    )
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
    places = [place for i, (_, prefix) in enumerate(groups) for place in places_of(layer, i, prefix, bias)]
    return Twin(layer, places, sum(s.heads * s.value_dim for s in layer.sizes))


@pytest.fixture
def package_twin():
    return twin


def by_pair(table, t):
    """The package's symbols (t t dim) of a table (2 distance + 1, dim), or the table of such symbols."""
    distance = math.floor(len(table) / 2)
    index = (torch.arange(t) - torch.arange(t)[:, None]).clamp(-distance, distance) + distance
    return table[index]


@pytest.fixture
def symbols_by_pair():
    return by_pair
