"""A forward pass with another sequence's code equals a forward pass written by hand."""

import dataclasses
from unittest import mock

import pytest
import torch
from refusals import refusing
from torch.testing import assert_close

import polyhead as ph
from polyhead.analysis import capture, mix_codes, swap, swap_codes
from polyhead.analysis.swap import CODES, codes_of, controls, replaced
from polyhead.tasks import FuzzyLogic, Sraven
from polyhead.tasks.base import stream
from polyhead.tasks.fuzzy_logic.task import zadeh
from polyhead.train.network import predict

TASK = FuzzyLogic(variables=3, terms=2, length=8, held_out=0.5)
HEADS = [
    (ph.Softmax(3),),
    (ph.Linear(3, normalise="rms_heads", act="relu"),),
    (ph.Hyla(4, kv_heads=2),),
    (ph.Hyla(3, value_depth=2, act="gelu"),),
    (ph.Softmax(1), ph.Hyla(2)),
]


def model_of(*heads, layers=2):
    torch.manual_seed(0)
    options = {"positions": ph.RelativeBias(), "max_length": TASK.length, "bias": True}
    config = ph.TransformerConfig(*TASK.ends, dim=12, layers=layers, heads=heads, **options)
    return ph.Transformer(config).double().eval()


def pairs_of(n=5):
    own_batch, donor_batch = TASK.contrasts("compositional", n, torch.Generator().manual_seed(1))
    return [batch.map(lambda x: x.double() if x.is_floating_point() else x) for batch in (own_batch, donor_batch)]


def rows_of(model, layer, own_batch, donor_batch):
    own_codes, donor_codes = (codes_of(model, layer, batch) for batch in (own_batch, donor_batch))
    return controls(own_codes, donor_codes, torch.Generator().manual_seed(0))


def test_contrasts_share_inputs_and_have_different_functions():
    own_batch, donor_batch = pairs_of(200)
    assert torch.equal(own_batch.inputs[..., :-1], donor_batch.inputs[..., :-1])
    known = {tuple(row) for row in TASK.functions("compositional").tolist()}
    for batch in (own_batch, donor_batch):
        assert {tuple(row) for row in batch.latents["terms"].tolist()} == known  # all of the split, none other
        assert_close(batch.targets[..., 0], zadeh(batch.inputs[..., :-1], batch.latents["terms"]))
    assert (own_batch.latents["terms"] != donor_batch.latents["terms"]).any(dim=1).all()


@torch.no_grad()
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("layer", [0, 1])
def test_the_output_is_that_of_the_code_given(heads, layer):
    """Of the last token, in that layer: what the mechanism makes of the donor's code and of its own values."""
    model, (own_batch, donor_batch) = model_of(*heads), pairs_of()
    rows = rows_of(model, layer, own_batch, donor_batch)
    before = capture(model, own_batch)[layer].groups
    with replaced(model, layer, rows["donor"]):
        after = capture(model, own_batch)[layer].groups
    donor_groups = capture(model, donor_batch)[layer].groups
    for group, old, new, other in zip(heads, before, after, donor_groups, strict=True):
        assert_close(new.output[:, :-1], old.output[:, :-1])
        code, values = other.code()[:, :, -1], old.v.repeat_interleave(group.heads // old.v.shape[2], dim=2)
        if isinstance(group, ph.Hyla):
            hidden = torch.einsum("bhs,bshe->bse", code, values)
            act = getattr(torch.nn.functional, old.act)
            weight = old.value_weight
            if weight is not None:  # equation 10: another matrix a head, by the same code
                hidden = torch.einsum("bhs,bsf,hef->bse", code, act(hidden), weight)
            expected = torch.einsum("bhs,bse->bhe", code, act(hidden))
        else:
            values = torch.relu(values) if isinstance(group, ph.Linear) else values
            expected = torch.einsum("bhs,bshe->bhe", code, values)
        assert_close(new.output[:, -1], expected)


@torch.no_grad()
def test_in_an_encoder_decoder_a_layer_is_one_of_the_decoder():
    fields = {"dim": 12, "heads": ph.Hyla(4), "positions": ph.RelativeBias()}
    encoder = ph.TransformerConfig(*TASK.ends, **fields)
    model = ph.Transformer(ph.TransformerConfig(*TASK.ends, encoder=encoder, **fields)).double().eval()
    batch = dataclasses.replace(pairs_of()[0], source=torch.randn(5, TASK.length, 4).double())
    for layer in (0, 1):
        with replaced(model, layer, codes_of(model, layer, batch)):
            actual = predict(model, TASK, batch)
        assert_close(actual, predict(model, TASK, batch))


def test_controls_are_the_donors_code_of_another_pair_permuted_and_zeroed():
    model, (own_batch, donor_batch) = model_of(ph.Hyla(4)), pairs_of()
    rows = {code: row[0] for code, row in rows_of(model, 1, own_batch, donor_batch).items()}
    assert_close(rows["other"][1], rows["donor"][0])
    assert_close(rows["permuted"].sum(1), rows["donor"].sum(1))
    assert not torch.allclose(rows["permuted"], rows["donor"])
    assert not rows["zero"].any()


@torch.no_grad()
def test_scores_are_those_of_either_rule_with_each_code_and_each_mixture():
    model = model_of(ph.Hyla(3)).float()
    rows = {row["code"]: row for row in swap_codes(model, TASK, pairs=6, seed=2)}
    assert tuple(rows) == CODES
    (rows["mixed"],) = mix_codes(model, TASK, pairs=6, seed=2, shares=(0.25,))
    generator = torch.Generator().manual_seed(stream(2, "fuzzy_logic/compositional/swap", 0))
    own_batch, donor_batch = TASK.contrasts("compositional", 6, generator)
    (own_code,), (donor_code,) = (codes_of(model, 1, batch) for batch in (own_batch, donor_batch))
    for name, code in (("own", own_code), ("donor", donor_code), ("mixed", 0.75 * own_code + 0.25 * donor_code)):
        with replaced(model, 1, [code]):
            outputs = predict(model, TASK, own_batch)
        for rule, batch in (("own", own_batch), ("donor", donor_batch)):
            scores = TASK.metrics(outputs, batch)["r2"].double()
            assert rows[name][rule] == pytest.approx(scores.mean().item(), abs=1e-5)
            assert rows[name][f"{rule}_se"] == pytest.approx(scores.std().item() / 6**0.5, abs=1e-5)
        assert rows[name]["n"] == 6


def test_what_cannot_be_swapped_is_refused():
    symbols = ph.Relational(3, relations=2, symbols=ph.SymbolicAttention(4))
    for heads, task, options, message in (
        (ph.Hyla(3), TASK, {"pairs": 1}, "swap_codes: pairs must be at least 2 but is 1"),
        (ph.Hyla(3), TASK, {"layer": 2}, "swap_codes: layer must be an integer in [-2, 2) but is 2"),
        (symbols, TASK, {}, "swap_codes: unknown kind of heads 'relational'"),
        (ph.Softmax(3), Sraven(features=2, values=5), {}, "Sraven: has no sequences that differ in their rule alone"),
    ):
        with refusing(message):
            swap_codes(model_of(heads), task, **options)
    model = model_of(ph.Softmax(3))
    model.blocks[1].attention.groups[0].use(ph.ops.linear_attention, code=ph.ops.latent_code)
    with refusing("swap_codes: heads must compute their own mechanism, not a user's function"):
        swap_codes(model, TASK)


def test_no_pair_is_alone_in_a_batch(monkeypatch):
    """The third code of a pair that is alone was the donor's."""
    assert swap.batch_sizes(1300) == [500, 500, 300]
    assert swap.batch_sizes(1001) == [500, 499, 2]
    recorded = mock.Mock(side_effect=controls)
    monkeypatch.setattr(swap, "controls", recorded)
    assert {row["n"] for row in swap_codes(model_of(ph.Softmax(3)).float(), TASK, pairs=501)} == {501}
    assert [len(call.args[0][0]) for call in recorded.call_args_list] == [499, 2]
