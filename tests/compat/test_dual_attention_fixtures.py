"""Arrays computed with the package `dual-attention` 0.0.7, which need not be here: models, blocks and modules that hold
them as ours give its outputs and every gradient to 1e-5."""

import json

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from polyhead.compat import dual_attention
from polyhead.compat.dual_attention.arguments import block
from polyhead.compat.dual_attention.load import CLASSES, _groups
from polyhead.compat.dual_attention.models import plan
from polyhead.compat.dual_attention.tensors import of_attention, of_block, of_model

NEAR = {"atol": 1e-5, "rtol": 1e-5}


def wide(array):
    """In float64, so that what is left is the rounding of the fixture."""
    tensor = torch.from_numpy(array)
    return tensor.double() if tensor.is_floating_point() else tensor


def read(fixtures, name):
    """What it was made with, and the arrays by kind: "in", "w", "gin", "gw" by name; "out.0", "G"."""
    arrays = np.load(fixtures / f"dat_{name}.npz")
    found = {"in": {}, "w": {}, "gin": {}, "gw": {}}
    for key in arrays.files:
        kind, _, rest = key.partition("::")
        if rest:
            found[kind][rest] = wide(arrays[key])
        elif key != "meta_json":
            found[kind] = wide(arrays[key])
    meta = json.loads(str(arrays["meta_json"]))
    return meta["cls"], meta["cfg"], found


def check(arrays, module, places, y, inputs=None):
    """Outputs, gradients of the inputs and of every tensor of the package that trains."""
    assert_close(y, arrays["out.0"], **NEAR)
    (y * arrays["G"]).sum().backward()
    for name, wanted in arrays["gin"].items():
        assert_close(inputs[name].grad, wanted, **NEAR, msg=lambda text, name=name: f"{name}: {text}")
    mine, left = dict(module.named_parameters(remove_duplicate=False)), set(arrays["gw"])
    for place in places:
        for key in left & set(place.keys):
            gradient = mine[place.names[0]].grad[place.where] * place.factor
            wanted = arrays["gw"][key].reshape(gradient.shape)
            near = {**NEAR, "atol": 1e-5 * max(1.0, float(wanted.abs().max()))}  # theirs are sums in float32
            assert_close(gradient, wanted, **near, msg=lambda text, key=key: f"{key}: {text}")
            left.remove(key)
    assert not left


def model_outputs(model, arrays):
    given = arrays["in"]
    if "y" in given:
        return model(given["y"], source=given["x"])
    y = model(given["x"])
    return y[:, 0] if y.shape[1] == 1 else y


@pytest.mark.parametrize("name", ["lm_rope_symattn", "vit_dat_cls", "seq2seq_dat"])
def test_models(fixtures, name):
    _, config, arrays = read(fixtures, name)
    if "x" in arrays["gin"]:
        arrays["in"]["x"].requires_grad_()
    model = dual_attention.load(arrays["w"], config)
    check(arrays, model, list(of_model(model, plan(config))), model_outputs(model, arrays), arrays["in"])


@pytest.mark.parametrize("name", ["lm_rope_symattn", "vit_dat_cls", "seq2seq_dat"])
def test_what_is_written_back_is_what_was_read(fixtures, name):
    _, config, arrays = read(fixtures, name)
    state, arguments = dual_attention.save(dual_attention.load(arrays["w"], config))
    copies = {key for key in arrays["w"] if ".target_embedder.weights." in key}
    tied = {"layers.token_embedder.weight", "layers.final_out.weight"} if name.startswith("lm") else set()
    assert state.keys() | copies | tied == arrays["w"].keys() | tied
    for key in state.keys() & arrays["w"].keys():
        if not key.endswith(".pe"):  # which are computed anew
            assert torch.equal(state[key], arrays["w"][key]), key
    again = dual_attention.load(state, arguments)
    assert torch.equal(model_outputs(again, arrays), model_outputs(dual_attention.load(arrays["w"], config), arrays))


@pytest.mark.parametrize("name", ["encblock_prenorm_gelu", "decblock_postnorm_relu_causal"])
def test_blocks(fixtures, name):
    _, config, arrays = read(fixtures, name)
    made = dual_attention.load_block(arrays["w"], config)
    given = {key: value.requires_grad_() for key, value in arrays["in"].items()}
    y = made(given["x"], given.get("context"), symbols=given["symbols"])
    decoder = "n_heads_cross" in config
    own = {key: value for key, value in config.items() if key not in ("d_model", "call")}
    places = of_block(made, block(own, config["d_model"], dual=True, decoder=decoder))
    check(arrays, made, list(places), y, given)


MODULES = [
    *("attn_gqa2_bias_causal", "ra_default", "ra_causal", "ra_nrel2", "ra_nrel8_causal", "ra_sym", "ra_act_relu"),
    *("ra_act_tanh_causal", "ra_gqa2_bias", "ra_total8", "ra_rope_causal"),
    *("disrca_default", "disrca_causal", "disrca_tanh", "rca_softmax", "rca_tanh_causal"),
    *("dual_2_2_causal", "dual_3_1", "dual_share"),
]


@pytest.mark.parametrize("name", MODULES)
def test_modules(fixtures, name):
    cls, config, arrays = read(fixtures, name)
    call = config.pop("call", {})
    causal, rotary = call.get("is_causal", False), "freqs_cos" in arrays["in"]
    config = {key: value for key, value in config.items() if key != "n_kv_heads" or value}
    layer = dual_attention.load_attention(arrays["w"], config, cls=cls, causal=causal, rotary=rotary)
    given = {key: value.requires_grad_() for key, value in arrays["in"].items() if key in ("x", "symbols", "query")}
    x = given.get("x", given.get("query"))
    y = layer(x, symbols=given.get("symbols"))
    assert not y[..., arrays["out.0"].shape[-1] :].any()
    groups = _groups(CLASSES[cls], config, causal)
    if cls == "Attention":  # its three inputs were three tensors
        arrays["gin"] = {}
        assert all(torch.equal(arrays["in"][name], x) for name in ("key", "value"))
    check(arrays, layer, list(of_attention(layer, groups)), y[..., : arrays["out.0"].shape[-1]], given)
