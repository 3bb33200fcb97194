"""transformers 5.24 calls the cache `cache`: our models generate the same with and without it, under both names."""

import pytest
import torch
from refusals import refusing
from tiny_transformers import CACHE, hf, llama, ours, padded, tokens

import polyhead as ph

GREEDY = {"max_new_tokens": 6, "do_sample": False}
SYMBOLS = [ph.Softmax(2), ph.Relational(2, symbols=ph.PositionSymbols())]
MODELS = {
    "ours": lambda: ours(max_length=64).double(),
    "swapped": lambda: hf.swap_heads(llama(), [1], [ph.Softmax(2), ph.Hyla(2)]),
    "swapped relational": lambda: hf.swap_heads(llama(), [1], SYMBOLS),
    "by name": lambda: llama(name="polyhead_hyla"),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("beams", [1, 3])
def test_generation_is_the_same_with_and_without_a_cache(name, beams):
    model, (ids, mask, _) = MODELS[name](), padded("left")
    options = {**GREEDY, "attention_mask": mask, "num_beams": beams}
    assert torch.equal(model.generate(ids, **options), model.generate(ids, use_cache=False, **options))


@pytest.mark.parametrize("name", MODELS)
def test_prompt_lookup_finds_the_greedy_tokens(name):
    model, ids = MODELS[name](), tokens(1, 4).repeat(1, 3)
    assert torch.equal(model.generate(ids, prompt_lookup_num_tokens=3, **GREEDY), model.generate(ids, **GREEDY))


@pytest.mark.parametrize("argument", ["cache", "past_key_values"])
def test_a_cache_is_taken_under_both_names(argument):
    model, ids = MODELS["ours"](), tokens(1, 6)
    with torch.no_grad():
        cache = model(ids[:, :5], use_cache=True)[CACHE]
        step = model(ids[:, 5:], **{argument: cache}).logits
        torch.testing.assert_close(step, model(ids).logits[:, 5:])


@pytest.mark.parametrize("name", ["PolyheadModel", "PolyheadForCausalLM"])
def test_no_argument_is_swallowed(name):
    model, ids = ours(name), tokens(1, 4)
    with refusing(f"{name}: it takes no argument kv_store"):
        model(ids, kv_store=torch.ones(1))
    model(ids, kv_store=None, output_router_logits=False)  # which mean nothing
    cache = hf.model.PolyheadCache(2)
    with refusing(f"{name}: cache and past_key_values are the same argument, got both"):
        model(ids, cache=cache, past_key_values=cache)
