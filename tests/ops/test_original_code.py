"""The ops against outputs and gradients of the authors' code: HYLA's, and dual-attention 0.0.7 with its weights."""

import json
import pathlib

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from polyhead import ops
from polyhead.ops.registry import resolve

FIXTURES = pathlib.Path(__file__).parents[1] / "fixtures"
RELATIONAL = (
    *("ra_default", "ra_causal", "ra_rope_causal", "ra_nrel2", "ra_nrel8_causal", "ra_sym", "ra_gqa2_bias"),
    *("ra_total8", "ra_relpos", "ra_act_relu", "ra_act_tanh_causal"),
)
FILES = [
    *(("relational", name) for name in RELATIONAL),
    *(("disentangled", name) for name in ("disrca_default", "disrca_causal", "disrca_tanh")),
    *(("abstractor", name) for name in ("rca_softmax", "rca_tanh_causal")),
]


class Original:
    """One file: its inputs and weights as leaves, its outputs, its gradients."""

    def __init__(self, name):
        arrays = np.load(FIXTURES / f"dat_{name}.npz")
        self.config = json.loads(str(arrays["meta_json"]))["cfg"]
        tensors = {key: torch.tensor(arrays[key]) for key in arrays.files if key != "meta_json"}
        self.leaves = {
            key: tensors[key].requires_grad_()
            for key in tensors
            if key.startswith(("in::", "w::")) and f"g{key}" in tensors
        }
        self.tensors = tensors

    def map(self, name, x, heads):
        """A linear map of the original, in heads."""
        w, b = (self.leaves.get(f"w::{name}.{part}") for part in ("weight", "bias"))
        return torch.nn.functional.linear(x, w, b).unflatten(-1, (heads, -1))


@pytest.mark.parametrize(("op", "name"), FILES)
def test_outputs_and_gradients_are_those_of_the_original(op, name):
    file = Original(name)
    config, x, symbols = file.config, file.leaves["in::x"], file.leaves["in::symbols"]
    act = config.get("rel_activation", "identity")
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
    options = {"causal": config["call"].get("is_causal", False), **acts}
    out = by_row(resolve(op), tensors, options) if name == "ra_relpos" else resolve(op)(*tensors, **options)
    out = file.map("wo", out.flatten(2), 1).flatten(2)
    assert_close(out, file.tensors["out.0"], rtol=1e-5, atol=1e-5)
    grads = torch.autograd.grad(out, list(file.leaves.values()), file.tensors["G"])
    for key, grad in zip(file.leaves, grads, strict=True):
        assert_close(grad, file.tensors[f"g{key}"], rtol=1e-4, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}")


def by_row(run, tensors, options):
    """Symbols of each pair (t s g e) are those by offset of one query at a time."""
    q, k, q_rel, k_rel, pairs, weight = tensors
    rows = range(q.shape[1])
    return torch.cat([run(q[:, [i]], k, q_rel[:, [i]], k_rel, pairs[i], weight, **options) for i in rows], 1)


# ----------------------------------------------------------------------------------------------------------------- HYLA
HYLA = sorted(FIXTURES.glob("hyla_attn_small_*.npz"))
assert len(HYLA) == 19


def original_layer(file):
    """The layer of a fixture on our op: output, code, and its parameters as leaves."""
    data = np.load(file)
    meta = json.loads(str(data["meta"])) if "meta" in data else {}
    norms = {"softmax": "softmax", "rms_head": "rms_heads", "none": "identity"}
    leaves = {n[6:]: torch.tensor(data[n], requires_grad=True) for n in data if n.startswith("param/")}
    x = leaves["x"] = torch.tensor(data["x"], requires_grad=True)
    q, k, v = (
        torch.einsum("btm,mhd->bthd", x, leaves[f"{n}/kernel"]) + leaves[f"{n}/bias"] for n in ("query", "key", "value")
    )
    options = {
        "bias": torch.tensor(data["attention_bias"]),
        "mask": torch.tensor(data["mask"]) if "mask" in data else None,
        "normalise": norms[meta.get("attention_norm", "rms_head")],
    }
    code = ops.latent_code(q, k, **options)
    keep = torch.tensor(data["keep_mask"]).float() / 0.9 if "keep_mask" in data else None
    target, extra = meta.get("target_network", "mlp_relu"), {}
    if target == "default":
        op = {"softmax": ops.softmax_attention}.get(options["normalise"], ops.linear_attention)
        if op is ops.softmax_attention:
            del options["normalise"]
    else:
        op, extra = ops.hyla, {"act": {"mlp_relu": "relu", "mlp_linear": "identity"}[target]}
    if "value2_kernel" in data:
        extra["value_weight"] = torch.tensor(data["value2_kernel"]).mT  # stored [head, in, out]
    out = op(q, k, v, keep=keep, **options, **extra)
    return torch.einsum("bthe,hem->btm", out, leaves["out/kernel"]) + leaves["out/bias"], code, leaves, data


@pytest.mark.parametrize("file", HYLA, ids=lambda f: f.stem.removeprefix("hyla_attn_small_"))
def test_the_original_layer(file):
    out, code, leaves, data = original_layer(file)
    assert_close(out.detach(), torch.tensor(data["out"]), rtol=1e-5, atol=1e-5)
    if "attn_weights" in data:
        assert_close(code.detach(), torch.tensor(data["attn_weights"]), rtol=1e-5, atol=1e-5)
    else:
        dropped = code * torch.tensor(data["keep_mask"]).float() / 0.9
        assert_close(dropped.detach(), torch.tensor(data["attn_weights_after_dropout"]), rtol=1e-5, atol=1e-5)
    if "cotangent" not in data:
        return
    out.backward(torch.tensor(data["cotangent"]))
    for name, leaf in leaves.items():
        expected = torch.tensor(data["grad_x" if name == "x" else f"grad/{name}"])
        assert_close(leaf.grad, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().clamp(min=1).item())
