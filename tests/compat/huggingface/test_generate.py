"""`generate` of our models in transformers gives the tokens of our own decoding, with and without our cache."""

import functools
from dataclasses import replace

import pytest
import torch
import zoo
from refusals import refusing
from tiny_transformers import CACHE, hf
from torch.testing import assert_close

import polyhead as ph
from polyhead.compat.huggingface.cache import PolyheadCache
from polyhead.compat.huggingface.inputs import place_tokens


def dual(symbols):
    return ph.Softmax(2), ph.Relational(2, symbols=symbols)


COUNT = 40
ENDS = {"inputs": ph.Tokens(COUNT), "outputs": ph.Logits(COUNT)}
BASE = ph.TransformerConfig(**ENDS, dim=16, layers=2, causal=True, max_length=32, positions=ph.Rotary())
ONE = replace(BASE, layers=1)
ZOO = zoo.models(zoo.FEW, **ENDS, max_length=32)
MODELS = ZOO | {
    "softmax": replace(BASE, heads=ph.Softmax(2)),
    "window": replace(BASE, heads=ph.Softmax(2), window=3),
    "sums": replace(BASE, heads=(ph.Linear(2), ph.Softmax(2, kv_heads=1))),
    "dual": replace(ONE, heads=dual(ph.SymbolicAttention()), positions=ph.Learned()),
    "places": replace(ONE, heads=dual(ph.PositionSymbols())),
    "neighbours": replace(ONE, heads=dual(ph.RelationalSymbols())),
}
STEPS = 4


@functools.cache
def make(name):
    torch.manual_seed(1)  # whichever test asks first; beams then differ from the greedy choice
    return zoo.far(hf.PolyheadForCausalLM(hf.PolyheadConfig(MODELS[name])).double())


def tokens(*shape, seed=1):
    return torch.randint(1, COUNT, shape, generator=torch.Generator().manual_seed(seed))


def generate(model, ids, **options):
    return model.generate(ids, **{"max_new_tokens": STEPS, "do_sample": False, **options})


def ragged():
    """Rows of 7, 3 and 5 tokens, padded on the left with 0."""
    rows = [tokens(n, seed=n) for n in (7, 3, 5)]
    ids = torch.stack([torch.cat((torch.zeros(7 - len(row), dtype=torch.long), row)) for row in rows])
    return rows, ids, (ids != 0).long()


@pytest.mark.parametrize("name", ZOO)
def test_rows_of_several_lengths_get_the_tokens_of_our_own_decoding_of_each_alone(name):
    model = make(name)
    rows, ids, mask = ragged()
    expected = [ph.generate(model.model, row[None], steps=STEPS, temperature=0.0)[0] for row in rows]
    for use_cache in (True, False):
        assert generate(model, ids, attention_mask=mask, use_cache=use_cache)[:, 7:].tolist() == expected
    assert generate(model, ids[:1])[0, 7:].tolist() == expected[0]
    assert len({tuple(row) for row in expected}) == 3


@pytest.mark.parametrize("name", ["softmax", "sums", "places", "neighbours"])
def test_beam_search_puts_the_cache_in_order(name):
    model = make(name)
    _, ids, mask = ragged()
    options = {"attention_mask": mask, "num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.5}
    cached, plain = (generate(model, ids, use_cache=use_cache, **options) for use_cache in (True, False))
    assert torch.equal(cached, plain)
    assert not torch.equal(cached[::2], generate(model, ids, attention_mask=mask))  # beams find something else


def test_a_step_with_a_cache_reads_its_own_token_only():
    """With the cache only its own token; logits only of the last one."""
    model, lengths = make("softmax"), []
    hook = model.model.register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
    generate(model, tokens(2, 5))
    generate(model, tokens(2, 5), use_cache=False)
    hook.remove()
    assert lengths == [5, 1, 1, 1, 5, 6, 7, 8]
    assert model(tokens(2, 5), logits_to_keep=2).logits.shape == (2, 2, COUNT)
    chosen = model(tokens(2, 5), logits_to_keep=torch.tensor([0, 3])).logits
    assert_close(chosen, model(tokens(2, 5)).logits[:, [0, 3]])


def test_guessed_tokens_are_removed_from_the_cache():
    """Prompt lookup guesses some tokens and crops the cache where it was wrong; sums cannot be cropped."""
    ids = tokens(1, 4).repeat(1, 3)
    expected = ph.generate(make("dual").model, ids, steps=STEPS, temperature=0.0)
    assert generate(make("dual"), ids, prompt_lookup_num_tokens=3)[:, 12:].tolist() == expected
    for name in ("sums", "window"):
        # In the words of transformers or, before 5.24, in ours.
        with pytest.raises(ValueError, match=r"can be cropped|some heads keep a sum of earlier tokens, or"):
            generate(make(name), ids, prompt_lookup_num_tokens=3)


def test_a_cache_is_cropped_repeated_and_cut_to_rows():
    model, cache, sums = make("softmax"), PolyheadCache(2), PolyheadCache(2)
    cache.batch_repeat_interleave(2)  # nothing yet
    ids = tokens(2, 6)
    with torch.no_grad():
        model(ids, **{CACHE: cache})
        assert (len(cache), cache.get_seq_length(), cache.batch_size, cache.is_croppable) == (2, 6, 2, True)
        cache.crop(-2)
        cache.batch_repeat_interleave(2)
        rows = torch.tensor([0, 0, 1, 1])
        assert_close(model(ids[rows, 4:], **{CACHE: cache}).logits, model(ids[rows]).logits[:, 4:])
        cache.batch_select_indices(torch.tensor([3]))
        expected = model(torch.cat((ids[1:], ids[1:, :1]), 1)).logits[:, -1:]
        assert_close(model(ids[1:, :1], **{CACHE: cache}).logits, expected)
        cache.crop(-99)  # more than there are
        assert_close(model(ids[1:], **{CACHE: cache}).logits, model(ids[1:]).logits)
        make("sums")(ids[:1, :2], **{CACHE: sums})
    assert not sums.is_croppable  # although there are as many heads as tokens


@pytest.mark.parametrize("name", ["softmax", "neighbours"])
def test_a_cache_of_another_number_of_sequences(name):
    """Such as that of beams, which `generate` returns."""
    model, (_, ids, mask) = make(name), ragged()
    beams = generate(model, ids, attention_mask=mask, num_beams=2, return_dict_in_generate=True)
    longer = torch.cat((beams.sequences, ids[:, :1]), 1)
    with refusing("PolyheadForCausalLM: its cache holds 6 sequences (beams are several), got 3"):
        generate(model, longer, attention_mask=(longer != 0).long(), **{CACHE: beams[CACHE]})


def test_positions_are_counted_from_the_first_real_token():
    """Without position_ids, with padding on the left: positions are learned, so another count gives other logits."""
    model, alone = make("dual"), tokens(1, 4)
    padded = torch.cat((torch.zeros_like(alone), alone), 1)
    with torch.no_grad():
        logits = model(padded, attention_mask=(padded > 0).long()).logits
        assert_close(logits[:, 4:], model(alone).logits)


def test_several_sequences_in_one_row_do_not_see_each_other():
    """As from the library's collators without padding: positions restart in each sequence."""
    model, (first, second) = make("dual"), (tokens(1, 4), tokens(1, 3, seed=2))
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2]])
    with torch.no_grad():
        both = model(torch.cat((first, second), 1), position_ids=positions).logits
        assert_close(both, torch.cat((model(first).logits, model(second).logits), 1))
        with refusing("PolyheadForCausalLM: sequences one after the other come in one row"):
            model(tokens(2, 7), position_ids=positions.expand(2, -1))
        shifted = model(first, position_ids=torch.tensor([[2, 3, 4, 5]])).logits
        assert not torch.allclose(shifted, model(first).logits)
        ids, indices = torch.cat((first, second), 1), torch.arange(7)[None]
        for options, line in (
            ({"position_ids": torch.tensor([[0, 1, 5, 6, 0, 1, 2]])}, "must count from 0 in each of the sequences"),
            ({"position_ids": positions + 1}, "must count from 0 in each of the sequences"),
            ({"position_ids": positions, "attention_mask": (indices < 6).long()}, "must come without padding"),
            ({"position_ids": positions[0]}, "position_ids must be (b|1 t) = (1, 7) but is (7,)"),
            ({"position_ids": positions, "use_cache": True}, "one after the other must come without a cache"),
            ({"cu_seq_lens_q": torch.tensor([0, 4, 7])}, "it takes no argument cu_seq_lens_q"),
            ({"attention_mask": 1 + (indices > 3)}, "attention_mask must be 1 at tokens and 0 at padding"),
        ):
            with refusing(line):
                model(ids, **options)
        short = torch.tensor([[0, 0, 1, 0, 0]])  # some of one token
        assert place_tokens("", short, None, short, None)[2].tolist() == [0, 1, 3, 4, 5]


def test_a_mask_that_contradicts_the_cache_is_refused():
    """Keys in the cache keep the mask that they came with."""
    model, (_, ids, mask) = make("softmax"), ragged()
    with torch.no_grad():
        for first_mask, second_mask in ((torch.ones_like(mask), mask), (mask, torch.ones_like(mask))):
            cache, positions = PolyheadCache(2), (first_mask.cumsum(1) - 1).clamp(min=0)
            options = {CACHE: cache, "use_cache": True}
            model(ids[:, :5], attention_mask=first_mask[:, :5], position_ids=positions[:, :5], **options)
            with refusing("PolyheadForCausalLM: attention_mask must be as before at the tokens in the cache"):
                model(ids[:, 5:], attention_mask=second_mask, position_ids=positions[:, 5:], **options)
            y = model(ids[:, 5:], attention_mask=first_mask, position_ids=positions[:, 5:], **options).logits
            assert_close(y, model(ids, attention_mask=first_mask, position_ids=positions).logits[:, 5:])
