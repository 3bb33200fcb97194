"""Our models in transformers: the backbone, and additional outputs."""

import pytest
import torch
from refusals import refusing
from tiny_transformers import COUNT, hf, ours, tokens, transformers
from torch.nn import functional as F
from torch.testing import assert_close

import polyhead as ph
from polyhead.analysis import capture, codes

MIXED = {"heads": (ph.Softmax(1), ph.Linear(1), ph.Hyla(2))}
DUAL = {"heads": (ph.Softmax(2), ph.Relational(2)), "positions": ph.Learned(), "norm_order": "post"}
SCALED = {"inputs": ph.Tokens(COUNT, scaled=True), "outputs": ph.Logits(COUNT, tied=True)}
WINDOW = {"heads": (ph.Hyla(4),), "window": 2, **SCALED}


def make(kind="PolyheadForCausalLM", **changes):
    return ours(kind, **{**MIXED, **changes})


ALL_OUTPUTS = {"output_hidden_states": True, "output_attentions": True}


@pytest.mark.parametrize("changes", [MIXED, DUAL, WINDOW], ids=["mixed", "dual", "window"])
@torch.no_grad()
def test_the_backbone_of_a_language_model(changes, tmp_path):
    model, ids = make(**changes), tokens(2, 6)
    model.save_pretrained(tmp_path)
    backbone, loading_info = transformers.AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert type(backbone) is hf.PolyheadModel
    assert not any(loading_info.values())
    out, plain = backbone(ids, **ALL_OUTPUTS), model(ids, logits_to_keep=2)
    assert_close(model.model.outputs(out.last_hidden_state[:, -2:]), plain.logits)
    assert backbone(ids, return_dict=False)[0].equal(out.last_hidden_state)
    assert [x.shape for x in out.hidden_states] == [(2, 6, 16)] * 3
    assert torch.equal(out.hidden_states[2], out.last_hidden_state)
    first, second, last = out.hidden_states
    if changes is not DUAL:  # whose blocks are given symbols
        assert_close(first, model.model.inputs(ids))
        assert_close(model.model.blocks[0](first), second)
        assert_close(model.model.norm(model.model.blocks[1](second)), last)
    taps = capture(model.model, ph.Batch(ids, ids, None, torch.ones(2, 6), {}))
    for layer, code in zip(taps, out.attentions, strict=True):
        assert code.shape == (2, 4, 6, 6)
        assert_close(code[:, :, 4, 3], codes(layer, 4, 3))
        assert (code.triu(1) == 0).all()
    assert_close(model(ids, logits_to_keep=2, **ALL_OUTPUTS).hidden_states[-1], out.last_hidden_state)
    assert_close(model(ids, logits_to_keep=2, **ALL_OUTPUTS).logits, plain.logits)


@pytest.mark.parametrize("options", [{}, {"tied": True, "scaled": True}], ids=["untied", "scaled"])
def test_trainers_that_make_the_logits_themselves(options):
    """As TRL does: from the backbone's result, the weight of the output embeddings, and `logit_scale`."""
    model, ids = make(outputs=ph.Logits(COUNT, **options)), tokens(2, 5)
    names = set(model.state_dict())
    with torch.no_grad():
        x = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        end = model.get_output_embeddings()
        assert_close(F.linear(x, end.weight, end.bias) * (model.config.logit_scale or 1.0), model(ids).logits)
    assert set(model.state_dict()) == names
    model.train().model.blocks[0].eval()
    assert model.base_model.training
    assert not model.model.blocks[0].training  # asking changes nothing


@torch.no_grad()
def test_generation_returns_the_codes_of_each_step():
    """Linear heads then keep each key, not a sum."""
    model, ids = make(), tokens(2, 4)
    generated = model.generate(ids, max_new_tokens=3, do_sample=False, return_dict_in_generate=True, **ALL_OUTPUTS)
    assert [step[0].shape for step in generated.attentions] == [(2, 4, 4, 4), (2, 4, 1, 5), (2, 4, 1, 6)]
    one_pass = model(generated.sequences[:, :-1], **ALL_OUTPUTS)
    assert_close(generated.attentions[2][1], one_pass.attentions[1][:, :, -1:])
    assert_close(generated.hidden_states[2][1], one_pass.hidden_states[1][:, -1:])


@torch.no_grad()
def test_embeddings_in_place_of_tokens():
    model, ids = make(**WINDOW), tokens(2, 5)
    rows = model.get_input_embeddings()(ids)
    assert_close(model(inputs_embeds=rows).logits, model(ids).logits)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    assert_close(model(None, mask, inputs_embeds=rows).logits, model(ids, mask).logits)
    options = {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(model.generate(inputs_embeds=rows, **options), model.generate(ids, **options)[:, 5:])
    other = rows.clone()
    other[:, 0] += 1  # no token's row
    assert not torch.allclose(model(inputs_embeds=other).logits, model(inputs_embeds=rows).logits)
    for wrong in ({}, {"input_ids": ids, "inputs_embeds": rows}):
        with refusing("give input_ids (b t) or inputs_embeds (b t m)"):
            model(**wrong)
