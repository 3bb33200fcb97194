"""Compiled code treats packed rows and padding as eager code does, whatever the numbers of the mask."""

import pytest
import torch
from tiny_transformers import ours, tokens

import polyhead as ph

pytestmark = pytest.mark.compile
IDS = tokens(1, 5)
PACKED = torch.tensor([[0, 1, 2, 0, 1]])
ONES = torch.ones(1, 5, dtype=torch.long)
HEADS = [ph.Softmax(1), ph.Hyla(1), ph.Linear(1), ph.Relational(1, symbols=ph.RelationalSymbols())]
HEADS += [ph.Relational(1, symbols=ph.PositionSymbols())]


def compiled(model):
    torch._dynamo.reset()
    return torch.compile(model, backend="eager", fullgraph=True)


@torch.no_grad()
def test_packed_sequences_beside_a_mask_of_ones_do_not_see_each_other():
    model = ours(heads=HEADS, dim=20, layers=1).double()
    expected = torch.cat((model(IDS[:, :3]).logits, model(IDS[:, 3:]).logits), 1)
    run = compiled(model)
    for mask in (None, ONES, ONES.bool()):
        torch.testing.assert_close(model(IDS, position_ids=PACKED, attention_mask=mask).logits, expected)
        torch.testing.assert_close(run(IDS, position_ids=PACKED, attention_mask=mask).logits, expected)


@torch.no_grad()
def test_one_compiled_model_reads_other_numbers_in_every_call():
    model = ours(layers=1).double()
    run = compiled(model)
    padded, padded_positions = torch.tensor([[0, 0, 1, 1, 1]]), torch.tensor([[0, 0, 0, 1, 2]])
    for mask, positions in (
        (ONES, PACKED),
        (padded, padded_positions),
        (ONES, torch.tensor([[3, 4, 5, 6, 7]])),
        (ONES, torch.tensor([[0, 0, 1, 0, 0]])),
        (ONES, torch.arange(5)[None]),
    ):
        expected = model(IDS, attention_mask=mask, position_ids=positions).logits
        logits = run(IDS, attention_mask=mask, position_ids=positions).logits
        torch.testing.assert_close(logits[mask.bool()], expected[mask.bool()])


REFUSED = {
    "zeros at the end": ({"attention_mask": torch.tensor([[1, 1, 1, 1, 0]])}, "must come without padding"),
    "numbers of samples": ({"attention_mask": torch.tensor([[1, 1, 1, 2, 2]])}, "must be 1 at tokens and 0 at padding"),
    "not from 0": ({"position_ids": PACKED + 1}, "must count from 0 in each of the sequences"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_eager_code_refuses_compiled_code_refuses(name):
    options, line = REFUSED[name]
    model, options = ours(layers=1), {"position_ids": PACKED, **options}
    with pytest.raises(ValueError, match=line):
        model(IDS, **options)
    with pytest.raises(RuntimeError, match=rf"^PolyheadForCausalLM: .*{line}.*$"):
        compiled(model)(IDS, **options)


@torch.no_grad()
def test_logits_of_the_last_tokens_of_packed_sequences():
    model = ours(layers=1).double()
    for run in (model, compiled(model)):
        last = run(IDS, position_ids=PACKED, attention_mask=ONES, logits_to_keep=1).logits
        torch.testing.assert_close(last, model(IDS[:, 3:]).logits[:, -1:])
