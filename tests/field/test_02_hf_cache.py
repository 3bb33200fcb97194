"""Further turns of a conversation through `generate` and `forward`: a cache accepts padding that comes later."""

import pytest
import torch
from tiny_transformers import CACHE, GREEDY, ours, tokens
from torch.testing import assert_close

import polyhead as ph

IDS = tokens(2, 7)
MASK = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 1, 1, 1]])
POSITIONS = (MASK.cumsum(1) - 1).clamp(min=0)
HEADS = {
    "softmax": {"heads": ph.Softmax(4)},
    "mixture": {"heads": (ph.Softmax(2), ph.Hyla(2))},
    "sums": {"heads": ph.Linear(4)},
    "places": {"heads": (ph.Softmax(1), ph.Hyla(1), ph.Relational(2, symbols=ph.PositionSymbols()))},
    "neighbours": {"heads": (ph.Softmax(2), ph.Relational(2, symbols=ph.RelationalSymbols()))},
    "window": {"heads": ph.Hyla(4), "window": 3},
    "learned": {"heads": ph.Hyla(4), "positions": ph.Learned()},
    "alibi": {"heads": ph.Softmax(4), "positions": ph.Alibi()},
    "buckets": {"heads": ph.Softmax(4), "positions": ph.RelativeBias(8, 8)},
}


def model_of(name, layers=2):
    return ours(max_length=32, layers=layers, **HEADS[name]).double()


@pytest.mark.parametrize("name", HEADS)
def test_generation_continues_from_a_cache_with_padding_in_the_second_turn(name):
    model = model_of(name)
    first = model(IDS[:, :3], attention_mask=MASK[:, :3], use_cache=True)
    assert first[CACHE].get_seq_length() == 3
    generated = model.generate(IDS, attention_mask=MASK, **{CACHE: first[CACHE]}, **GREEDY)
    assert torch.equal(generated, model.generate(IDS, attention_mask=MASK, use_cache=False, **GREEDY))


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("position_kind", ["positions", "mask alone", "gaps"])
@torch.no_grad()
def test_turns_are_one_pass(name, position_kind):
    model = model_of(name)
    kinds = {"positions": POSITIONS, "gaps": POSITIONS + (torch.arange(7) > 3), "mask alone": None}
    position_ids = kinds[position_kind]
    expected = model(IDS, attention_mask=MASK, position_ids=position_ids).logits
    cache, turns = None, []
    for first, last in ((0, 3), (3, 5), (5, 6), (6, 7)):
        options = {"attention_mask": MASK[:, :last], "use_cache": True, CACHE: cache}
        if position_ids is not None:
            options["position_ids"] = position_ids[:, first:last]
        output = model(IDS[:, first:last], **options)
        cache = output[CACHE]
        turns.append(output.logits)
    assert_close(torch.cat(turns, 1)[MASK.bool()], expected[MASK.bool()])


@pytest.mark.compile
@torch.no_grad()
def test_an_eager_first_turn_and_compiled_steps():
    torch._dynamo.reset()
    model = model_of("places", layers=1)
    expected = model(IDS, attention_mask=MASK).logits
    run = torch.compile(model, backend="eager", fullgraph=True)
    cache = model(IDS[:, :3], attention_mask=MASK[:, :3], use_cache=True)[CACHE]
    for first, last in ((3, 5), (5, 6), (6, 7)):
        logits = run(IDS[:, first:last], attention_mask=MASK[:, :last], **{CACHE: cache}).logits
        real = MASK[:, first:last].bool()
        assert_close(logits[real], expected[:, first:last][real])
