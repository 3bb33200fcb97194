"""Our layers against arrays computed with the package `dual-attention` 0.0.7: outputs, code, relations, gradients.

Its relational cross-attentions were run with the import that they lack; relations through a softmax, which look into
the future there, are no part of it.
"""

import json

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from polyhead.layers.symbols import PositionSymbols, RelationalSymbols, RelativeSymbols, SymbolicAttention

NEAR = {"atol": 1e-5, "rtol": 1e-5}
HEADS = [
    *("ra_default", "ra_causal", "ra_nrel2", "ra_nrel8_causal", "ra_sym", "ra_act_relu", "ra_act_tanh_causal"),
    *("ra_gqa2_bias", "ra_total8", "ra_rope_causal", "ra_relpos"),
    *("disrca_default", "disrca_causal", "disrca_tanh", "rca_softmax", "rca_tanh_causal"),
    *("dual_2_2_causal", "dual_3_1", "dual_share"),
]


def load(fixtures, name):
    """The arrays of a fixture by kind ("in", "w", "gin", "gw", "out.0", ...), and what it was made with."""
    arrays = np.load(fixtures / f"dat_{name}.npz")
    found = {"out": {}}
    for key in arrays.files:
        if key == "meta_json":
            continue
        kind, _, rest = key.partition("::")
        if key.startswith("out."):
            kind, rest = "out", key.removeprefix("out.")
        array = torch.from_numpy(arrays[key])
        if rest:
            found.setdefault(kind, {})[rest] = array
        else:
            found[kind] = array
    return found, json.loads(str(arrays["meta_json"]))


@pytest.mark.parametrize("name", HEADS)
def test_heads_are_those_of_the_package(fixtures, package_twin, name):
    arrays, meta = load(fixtures, name)
    x, symbols = (arrays["in"][key].requires_grad_() for key in ("x", "symbols"))
    twin = package_twin(meta["cls"], meta["cfg"], rope="freqs_cos" in arrays["in"]).load(arrays["w"])
    taps = []
    if meta["cfg"].get("use_relative_positional_symbols"):  # any symbol for any pair: one query at a time
        rows = [twin.layer(x[:, i : i + 1], x, symbols=symbols[i : i + 1], taps=taps) for i in range(x.shape[1])]
        y = torch.cat(rows, 1)
        looks = ("code", "relations")
        code, relations = (torch.cat([getattr(t.groups[0], what)() for t in taps], 2) for what in looks)
    else:
        y = twin.layer(x, symbols=symbols, taps=taps)
        last = taps[0].groups[-1]
        code, relations = last.code(), None if last.q_rel is None else last.relations()
    y = y[..., : twin.width]
    assert_close(y, arrays["out"]["0"], **NEAR)
    dual = meta["cls"] == "DualAttention"
    assert_close(code, arrays["out"]["2.0" if dual else "1"], **NEAR)
    if relations is not None:
        wanted = arrays["out"]["2.1" if dual else "2"]
        assert_close(relations if meta["cls"].startswith("Disentangled") else relations.movedim(1, -1), wanted, **NEAR)
    (y * arrays["G"]).sum().backward()
    gradients = {**twin.gradients(), "x": x.grad, "symbols": symbols.grad}
    for key, wanted in {**arrays["gw"], **arrays["gin"]}.items():
        assert_close(gradients.pop(key), wanted, **NEAR, msg=lambda text, key=key: f"{key}: {text}")
    assert not gradients


def sources(meta):
    """Our source of symbols, and its parameters under the package's names."""
    cls, cfg = meta["cls"], meta["cfg"]
    if cls == "SymbolicAttention":
        ours = SymbolicAttention(cfg["d_model"], count=cfg["n_symbols"], heads=cfg["n_heads"])
        return ours, symbolic(ours, "")
    if cls == "PositionalSymbolRetriever":
        ours = PositionSymbols(cfg["symbol_dim"], cfg["max_length"])
        return ours, {"symbol_library.weight": ours.table}
    if cls == "PositionRelativeSymbolRetriever":
        ours = RelativeSymbols(cfg["symbol_dim"], 20, cfg["max_rel_pos"])
        return ours, {"rel_pos_enc.rel_pos_embeddings": ours.table}
    ours = RelationalSymbols(
        cfg["d_model"],
        count=cfg["n_symbols"],
        heads=cfg["symbolic_attn_n_heads"],
        neighbours=cfg["nbhd_delta"],
        relations=cfg["rel_n_heads"],
    )
    maps = {"q_proj": ours.q, "k_proj": ours.k, "model_dim_proj": ours.map}
    named = {f"{old}.{what}": getattr(new, what) for old, new in maps.items() for what in ("weight", "bias")}
    return ours, named | symbolic(ours.symbolic, "symbolic_attention.")


def symbolic(ours, prefix):
    named = {"template_features": ours.templates, "symbol_library": ours.library}
    named |= {"q_proj.weight": ours.query.weight, "q_proj.bias": ours.query.bias}
    return {prefix + name: parameter for name, parameter in named.items()}


@pytest.mark.parametrize("name", ["sym_attn", "sym_positional", "sym_posrel_max3", "relsymattn_causal"])
def test_symbols_are_those_of_the_package(fixtures, symbols_by_pair, name):
    arrays, meta = load(fixtures, name)
    source, named = sources(meta)
    with torch.no_grad():
        for key, parameter in named.items():
            parameter.copy_(arrays["w"][key])
    x = arrays["in"]["x"].requires_grad_()
    made = source(x)
    made = symbols_by_pair(made, x.shape[1]) if made.ndim == 2 else made.expand_as(arrays["out"]["0"])
    assert_close(made, arrays["out"]["0"], **NEAR)
    (made * arrays["G"]).sum().backward()
    for key, wanted in arrays["gw"].items():
        assert_close(named[key].grad, wanted, **NEAR, msg=lambda text, key=key: f"{key}: {text}")
    for key, wanted in arrays.get("gin", {}).items():
        assert_close(x.grad, wanted, **NEAR, msg=lambda text, key=key: f"{key}: {text}")
