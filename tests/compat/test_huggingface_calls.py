"""Names of ours on architectures that compute attention themselves: refused; what is counted; the table in the docs."""

import copy
import importlib.util
import json
import pathlib
import tomllib

import pytest
import torch
from torch import nn

import polyhead as ph
from polyhead.compat import huggingface as hf

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("architectures", ROOT / "benchmarks" / "architectures.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.transformers.logging.set_verbosity_error()
    hf.register()
    return module


@pytest.fixture(scope="module")
def found():
    return json.loads((ROOT / "benchmarks" / "architectures.json").read_text())


def test_the_page_is_what_the_script_found(script, found):
    assert script.page(found) == script.PAGE.read_text()
    works = [kind for kind, row in found["rows"].items() if "refused" not in row]
    assert len(works) >= 25
    assert all(found["rows"][kind]["causal"] in ("yes", "-", "looks both ways") for kind in works)
    version = ".".join(found["transformers"].split(".")[:2])
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert f"transformers>={version}" in extras["hf"]


@pytest.mark.parametrize("kind", ["qwen3", "bloom", "t5", "mamba"])
def test_the_table_is_what_the_script_finds(script, found, kind):
    assert script.try_one(kind) == found["rows"][kind]


@pytest.mark.parametrize("kind", ["bloom", "codegen", "xglm", "deberta-v2", "xlnet", "longformer"])
def test_no_way_in_for_those_that_compute_attention_themselves(script, kind):
    """As it is made, by `set_attn_implementation`, and by hand, where our masks would be added to scores of theirs."""
    model, name = script.build(kind, None), "polyhead_linear"
    line = rf"^polyhead: {type(model).__name__} must call its attention through transformers' AttentionInterface for "
    line += f"'{name}' but computes it itself$"
    with pytest.raises(ValueError, match=line):
        script.build(kind, name)
    with pytest.raises(ValueError, match=line):
        model.set_attn_implementation(name)
    given = script.inputs(kind)
    before = model(**given).logits
    model.config._attn_implementation = name
    if kind in ("bloom", "codegen", "xglm"):
        with pytest.raises(ValueError, match=r"^polyhead: "):
            model(**given)
    else:  # no mask of ours comes in
        assert torch.equal(model(**given).logits, before)


def test_what_only_says_that_it_goes_through_is_refused_at_the_first_pass(script):
    """One layer of a Llama that computes attention itself, wherever it lies; again at the second pass."""
    model = script.build("llama", "polyhead_hyla")
    model.model.layers[1].self_attn.__class__ = type("SilentAttention", (Silent,), {})
    line = (
        "polyhead: LlamaForCausalLM must call its attention through transformers' AttentionInterface for "
        "'polyhead_hyla' but model.layers.1.self_attn (SilentAttention) computes it itself"
    )
    ids = {"input_ids": torch.arange(4)[None]}
    for look in (lambda: model(**ids), lambda: hf.verify(model), lambda: copy.deepcopy(model)(**ids)):
        with pytest.raises(ValueError, match=r"^polyhead: LlamaForCausalLM must call") as caught:
            look()
        assert str(caught.value) == line


class Silent(nn.Module):
    def forward(self, hidden_states, **_):
        return hidden_states, None


def test_the_first_pass_leaves_no_hooks(script):
    """Nor does one that ends in an error of the model's own, which is told as it is."""
    model = script.build("llama", "polyhead_softmax")
    hooks = (model._forward_hooks, model._forward_pre_hooks, model._forward_hooks_always_called)
    with pytest.raises(IndexError):
        model(input_ids=torch.tensor([[999]]))
    assert all(len(each) == 1 for each in hooks)
    other = copy.deepcopy(model)
    for each in (model, other):
        each(**script.inputs("llama"))
        assert not each._forward_hooks
        assert not each._forward_pre_hooks
        assert not each._forward_hooks_always_called
    assert all(not module._forward_hooks for module in model.model.layers.modules())


def test_verify_counts_calls(script):
    model = hf.swap_heads(script.build("llama"), [1], [ph.Softmax(2), ph.Hyla(2)])
    assert [(x.name, x.calls, x.heads, x.ours) for x in hf.verify(model).layers] == [
        ("model.layers.0.self_attn", 1, "sdpa", False),
        ("model.layers.1.self_attn", 1, "Softmax(2), Hyla(2)", True),
    ]
    shared = script.build("albert", "polyhead_hyla")  # one layer that is called twice
    assert [(x.calls, x.heads, x.ours) for x in hf.verify(shared).layers] == [(2, "polyhead_hyla", True)]
    plain = hf.verify(script.build("bert"))
    assert [(x.calls, x.heads, x.ours) for x in plain.layers] == [(1, "its own", False)] * 2
    assert repr(plain).splitlines()[0] == "BertForMaskedLM: 0 of 2 attention layers are ours"
    own = ph.Transformer(ph.TransformerConfig(ph.Tokens(9), ph.Logits(9), dim=8, layers=2, heads=ph.Hyla(2)))
    assert [(x.heads, x.ours) for x in hf.verify(own, inputs=torch.ones(1, 3, dtype=torch.long)).layers] == [
        ("HylaHeads", True)
    ] * 2
    with pytest.raises(ValueError, match=r"^verify: Transformer must be given inputs by name"):
        hf.verify(own)
