"""A user's own mechanism: named, saved, tested against the promises, trained; broken promises are found."""

import functools
import json
import sys
from dataclasses import dataclass

import pytest
import torch
from refusals import refused
from scripts import ROOT

import polyhead as ph
from polyhead import extensions
from polyhead.cli import main
from polyhead.layers.heads.own import OwnHeads
from polyhead.train import optimiser


@pytest.fixture
def cosine(monkeypatch):
    """The heads of the example, imported as somebody's own."""
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "extension" / "src"))
    monkeypatch.setattr(extensions, "_ADDED", {sort: {} for sort in extensions.GROUPS})
    import parity_heads.recipes

    yield parity_heads.heads.Cosine
    for name in [name for name in sys.modules if name.startswith("parity_heads")]:
        del sys.modules[name]


def test_these_keep_every_promise(cosine):
    neighbours = ph.RelationalSymbols()
    for mechanism in (cosine(4, kv_heads=2), ph.Hyla(2), ph.Relational(2), ph.Relational(2, symbols=neighbours)):
        ph.testing.check(mechanism)


@dataclass(frozen=True)
class Broken(ph.Mechanism):
    """Breaks one promise."""

    fault: str = ""

    def code(self, module, q, k, **limits):
        if self.fault == "causality":
            limits["causal"] = False
        elif self.fault == "masks":
            limits["mask"] = None
        elif self.fault == "packing":
            limits["cu_seqlens"] = None
        code = ph.ops.latent_code(q, k, normalise="softmax", **limits)
        return code * q.mean() if self.fault == "parity" else code

    def attend(self, module, q, k, v, *, keep, **limits):
        code = self.code(module, q, k, **limits)
        if keep is not None and self.fault != "dropout":
            code = code * keep
        if self.fault == "gradients":
            code = code.detach()
        return torch.einsum("bhts,bshe->bthe", code, v)

    def __eq__(self, other):
        return self.fault != "file" and vars(self) == vars(other)

    __hash__ = None


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ("parity", AssertionError, "Broken: a sequence depends on others of its batch: it differs by"),
        ("causality", AssertionError, "Broken: a token sees its future"),
        ("masks", AssertionError, "Broken: a hidden key is read"),
        ("packing", AssertionError, "Broken: packed sequences see each other"),
        ("dropout", ValueError, r"OwnHeads: \w+ must multiply its code by keep"),
        ("gradients", AssertionError, "Broken: the gradients are not those of the function"),
        ("file", AssertionError, r"Broken: a file gives Broken\("),
    ],
)
def test_a_broken_promise_is_noticed(fault, error, message, monkeypatch):
    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or type(sys)(__name__))
    monkeypatch.setattr(sys.modules[__name__], "Broken", Broken, raising=False)
    with pytest.raises(error, match=message):
        ph.testing.check(Broken(2, fault=fault), fault)


def test_an_unknown_promise_is_one_line():
    line = r"^testing\.check: unknown promise 'causal'; did you mean 'causality'\?"
    refused(lambda: ph.testing.check(ph.Softmax(2), "causal"), line)


def test_its_parameters_have_their_own_initial_values_and_no_decay(cosine, monkeypatch):
    task = ph.tasks.FuzzyLogic(length=6)
    config = ph.TransformerConfig(*task.ends, dim=16, heads=(cosine(2, sharpness=3.0), ph.Softmax(2)), init="cs336")
    model = ph.Transformer(config)
    group = model.blocks[0].attention.groups[0]
    assert isinstance(group, OwnHeads)
    torch.testing.assert_close(group.log_sharpness.exp(), torch.full((2,), 3.0))
    group.log_sharpness.data.zero_()
    model.reset_parameters()
    torch.testing.assert_close(group.log_sharpness.exp(), torch.full((2,), 3.0))
    kinds = optimiser.parameter_kinds(model)
    assert kinds["blocks.0.attention.groups.0.log_sharpness"] == "norms"
    refused(lambda: ph.MultiHeadAttention(16, cosine(2, impl="flash")), "Cosine: impl must be auto or reference but is")
    for name, value in (("forward", torch.ones(2)), ("strength", 1.0)):
        monkeypatch.setattr(cosine, "parameters", lambda *sizes, result={name: value}: result)
        call = functools.partial(ph.MultiHeadAttention, 16, cosine(2))
        refused(call, f"^Cosine: parameter '{name}' must be a tensor under a name that is free$")


def test_gradients_of_single_sequences_need_no_call_before(cosine):
    layer, x = ph.MultiHeadAttention(16, cosine(2), dropout=0.5).train(), torch.randn(3, 4, 16)
    gradient = torch.func.grad(lambda x: layer(x[None]).sum())
    assert torch.vmap(gradient, randomness="different")(x).shape == x.shape


def test_heads_in_a_word_are_trained_saved_and_found_again(cosine, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    ph.register(cosine)
    command = "train parity-hyla --model.heads cosine:2,hyla:2 --model.layers 1 --folder run --threads 1"
    command += " --train.steps 2 --train.warmup 0 --train.batch-size 2 --train.eval-batches 1"
    assert main(["list", "mechanisms", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[-1]["mechanism"] == "Cosine"
    ph.register(sys.modules["parity_heads.recipes"].parity_hyla)
    assert main(command.split()) == 0
    written = json.loads((tmp_path / "run" / "config.json").read_text())["model"]["heads"]
    assert [group["kind"] for group in written] == ["parity_heads.heads:Cosine", "Hyla"]
    before = ph.load("run")[1].blocks[0].attention.groups[0].log_sharpness
    for name in [name for name in sys.modules if name.startswith("parity_heads")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ValueError, match=r"import parity_heads\.task first"):
        ph.load("run")
    monkeypatch.setenv("POLYHEAD_IMPORT", "parity_heads.recipes")
    torch.testing.assert_close(ph.load("run")[1].blocks[0].attention.groups[0].log_sharpness, before)
