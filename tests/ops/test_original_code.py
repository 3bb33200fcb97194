"""Relational ops against outputs and gradients of the authors' code (dual-attention 0.0.7), with its weights."""

import json
import pathlib

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from polyhead import ops
from polyhead.ops.dispatch import BACKENDS, resolve

FIXTURES = pathlib.Path(__file__).parents[1] / "fixtures"
RELATIONAL = (
    *("ra_default", "ra_causal", "ra_rope_causal", "ra_nrel2", "ra_nrel8_causal", "ra_sym", "ra_gqa2_bias"),
    *("ra_total8", "ra_relpos", "ra_act_relu", "ra_act_tanh_causal"),
)
INTERPRETED = ("ra_default", "ra_nrel8_causal", "ra_gqa2_bias")
"""Of the kernels, which take their time: the others in the campaign."""
FILES = [
    *(
        pytest.param("relational", name, impl, marks=[pytest.mark.campaign] * (name not in INTERPRETED))
        if impl == "triton"
        else ("relational", name, impl)
        for name in RELATIONAL
        for impl in BACKENDS["relational"]
    ),
    *(("disentangled", name, "auto") for name in ("disrca_default", "disrca_causal", "disrca_tanh")),
    *(("abstractor", name, "auto") for name in ("rca_softmax", "rca_tanh_causal")),
]


class Original:
    """One file: its inputs and weights as leaves, its outputs, its gradients."""

    def __init__(self, name):
        arrays = np.load(FIXTURES / f"dat_{name}.npz")
        self.config = json.loads(str(arrays["meta_json"]))["cfg"]
        wanted = {key: torch.tensor(arrays[key]) for key in arrays.files if key != "meta_json"}
        self.leaves = {
            key: wanted[key].requires_grad_()
            for key in wanted
            if key.startswith(("in::", "w::")) and f"g{key}" in wanted
        }
        self.wanted = wanted

    def map(self, name, x, heads):
        """A linear map of the original, in heads."""
        w, b = (self.leaves.get(f"w::{name}.{part}") for part in ("weight", "bias"))
        return torch.nn.functional.linear(x, w, b).unflatten(-1, (heads, -1))


@pytest.mark.parametrize(("op", "name", "impl"), FILES)
def test_outputs_and_gradients_are_those_of_the_original(op, name, impl):
    file = Original(name)
    config, x, symbols = file.config, file.leaves["in::x"], file.leaves["in::symbols"]
    act = config.get("rel_activation", "identity")
    if (impl == "sdpa" and act != "identity") or (impl == "sdpa" and name == "ra_relpos"):
        pytest.skip("refused")
    h, g, suffix = config["n_heads"], config.get("n_kv_heads", config["n_heads"]), "" if op == "abstractor" else "_attn"
    q, k = file.map(f"wq{suffix}", x, h), file.map(f"wk{suffix}", x, g)
    if "rope" in name:
        q, k = (ops.rope(z, torch.arange(7)[:, None]) for z in (q, k))
    tensors = [q, k]
    if op != "abstractor":
        r = h if op == "disentangled" else config.get("n_relations", h)
        symmetric = config.get("symmetric_rels", False)
        tensors += [file.map("wq_rel", x, r), file.map("wq_rel" if symmetric else "wk_rel", x, r)]
    tensors.append(file.map("wv", symbols, g))
    if op == "relational":
        tensors.append(file.leaves["w::wr"])
    acts = {"act": config.get("activation", "softmax")} if op == "abstractor" else {"relation_act": act}
    how = {"causal": config["call"].get("is_causal", False), **acts}
    out = by_row(resolve(op, impl), tensors, how) if name == "ra_relpos" else resolve(op, impl)(*tensors, **how)
    out = file.map("wo", out.flatten(2), 1).flatten(2)
    assert_close(out, file.wanted["out.0"], rtol=1e-5, atol=1e-5)
    grads = torch.autograd.grad(out, list(file.leaves.values()), file.wanted["G"])
    for key, grad in zip(file.leaves, grads, strict=True):
        assert_close(grad, file.wanted[f"g{key}"], rtol=1e-4, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}")


def by_row(run, tensors, how):
    """Symbols of each pair (t s g e) are those by offset of one query at a time."""
    q, k, q_rel, k_rel, pairs, weight = tensors
    rows = range(q.shape[1])
    return torch.cat([run(q[:, [i]], k, q_rel[:, [i]], k_rel, pairs[i], weight, **how) for i in rows], 1)
