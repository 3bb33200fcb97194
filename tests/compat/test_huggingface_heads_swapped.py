"""Models whose configuration holds heads: swapped into a checkpoint, saved, loaded."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.testing import assert_close

import polyhead as ph
from polyhead.compat import huggingface as hf
from polyhead.compat.huggingface.attention import Heads, Place

F64 = torch.float64
SMALL = {
    "vocab_size": 50,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "attention_bias": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
MIXED = {
    "softmax": ph.Softmax(4),
    "cut": [ph.Softmax(1), ph.Softmax(3)],  # through heads that share their keys
    "hyla": [ph.Softmax(2), ph.Hyla(2)],
    "deep": [ph.Linear(1, normalise="rms_heads"), ph.Hyla(3, value_depth=2)],
    "positions": [ph.Relational(2), ph.Softmax(2)],
    "relative": [ph.Relational(2, symbols=ph.RelativeSymbols(3), relations=3, relation_dim=5), ph.Softmax(2)],
    "library": ph.Relational(4, symbols=ph.SymbolicAttention(5, trainable=False), symmetric=True),
    "two sources": [ph.Disentangled(2), ph.Abstractor(2, symbols=ph.SymbolicAttention(5))],
}
RELATIONAL = list(MIXED)[4:]


@pytest.fixture(scope="module")
def library():
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


@pytest.fixture
def make(library):
    def make(dtype=F64, **options):
        torch.manual_seed(0)
        model = library.LlamaForCausalLM(library.LlamaConfig(**{**SMALL, **options})).to(dtype)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.3)
        return model.eval()

    return make


def tokens(b=2, t=7):
    return torch.randint(1, 50, (b, t), generator=torch.Generator().manual_seed(1))


def swapped(model, name, layers=(1,)):
    """With the heads of that name, all that is new about them filled so that it matters."""
    hf.swap_heads(model, list(layers), MIXED[name])
    for layer in layers:
        for parameter in model.model.layers[layer].self_attn.polyhead.parameters():
            nn.init.normal_(parameter, std=0.5)
    return model


def test_without_positions_symbols_are_counted_from_the_first_token_that_came():
    """As in a cached step of a model whose attention is not told where its tokens stand."""
    torch.manual_seed(0)
    sources = [ph.Relational(1, symbols=ph.PositionSymbols()), ph.Relational(1, symbols=ph.SymbolicAttention(5))]
    heads, x = Heads(sources, Place(8, heads=2, kv_heads=2, dim=4), dtype=F64), torch.randn(2, 6, 8, dtype=F64)
    for parameter in heads.parameters():
        nn.init.normal_(parameter)
    for whole, part in zip(heads(x), heads(x[:, 4:], first=4), strict=True):
        assert_close(part["values"].expand(2, -1, -1, -1), whole["values"].expand(2, -1, -1, -1)[:, 4:])


@pytest.mark.parametrize("name", ["softmax", "cut"])
def test_softmax_for_softmax_leaves_the_logits(make, name):
    model, ids = make(), tokens()
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    with torch.no_grad():
        before = model(ids, attention_mask=mask).logits[mask.bool()]
        kept = {key: id(p) for key, p in model.named_parameters()}
        assert hf.swap_heads(model, None, MIXED[name]) is model
        assert_close(model(ids, attention_mask=mask).logits[mask.bool()], before, rtol=1e-9, atol=1e-9)
    assert {key: id(p) for key, p in model.named_parameters()} == kept


@pytest.mark.parametrize("name", [n for n in MIXED if n not in ("softmax", "cut", "deep")])
def test_a_swapped_layer_is_our_own_with_its_weights(library, make, name):
    """Our layer, with rotary positions of its own, has no part of transformers in it."""
    model, heads = swapped(make(), name), MIXED[name]
    attention, x = model.model.layers[1].self_attn, torch.randn(2, 7, 24, dtype=F64)
    groups = heads if isinstance(heads, list) else [heads]
    grouped = [ph.config.from_dict({**ph.config.to_dict(g), "kv_heads": g.heads // 2}) for g in groups]
    layer = ph.MultiHeadAttention(
        *(24, grouped), causal=True, bias=True, positions=ph.Rotary(layout="half"), max_length=32, dtype=F64
    )
    own = [torch.full((group.heads * 3,), not isinstance(group, ph.config.SymbolHeads)) for group in groups]
    values = torch.cat(own)  # which rows of v_proj are read
    q, k, v, o = (getattr(attention, f"{part}_proj") for part in "qkvo")
    state = attention.polyhead.state_dict()
    for what in ("weight", "bias"):
        rows = [getattr(q, what), getattr(k, what), getattr(v, what)[values]]
        state |= {f"qkv.{what}": torch.cat(rows), f"out.{what}": getattr(o, what)}
    layer.load_state_dict(state)
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[1, :3] = False
    places = torch.arange(7)[None]
    look = mask[:, None, None] & torch.ones(7, 7, dtype=torch.bool).tril()
    with torch.no_grad():
        y, _ = attention(x, position_embeddings=model.model.rotary_emb(x, places), attention_mask=look)
        assert_close(y, layer(x, mask=mask[:, None, None]), rtol=1e-5, atol=1e-5)  # angles are float32 there


@pytest.mark.parametrize("name", ["hyla", *RELATIONAL])
def test_caches_and_padding_change_nothing(library, make, name):
    model, ids = swapped(make(), name, (0, 1)), tokens(t=9)
    steps, how = [(0, 4), (4, 7), (7, 8), (8, 9)], {"max_new_tokens": 4, "do_sample": False}
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        for cache in (library.DynamicCache(), library.StaticCache(config=model.config, max_cache_len=12)):
            parts = [model(ids[:, a:b], past_key_values=cache, use_cache=True).logits for a, b in steps]
            assert_close(torch.cat(parts, 1), whole, rtol=1e-9, atol=1e-9)
        mask = torch.ones_like(ids)
        mask[1, :3] = 0
        places = (mask.cumsum(-1) - 1).clamp(min=0)
        padded = model(ids, attention_mask=mask, position_ids=places).logits[1:, 3:]
        assert_close(padded, model(ids[1:, 3:]).logits, rtol=1e-9, atol=1e-9)
    found = model.generate(ids, attention_mask=mask, **how)
    assert torch.equal(found[1:, 9:], model.generate(ids[1:, 3:], **how)[:, 6:])


def test_beams_keep_their_keys_of_relations(make):
    """A beam is another row of the cache from one step to the next."""
    model, how = swapped(make(), "relative", (0, 1)), {"max_new_tokens": 5, "do_sample": False, "num_beams": 3}
    assert torch.equal(*(model.generate(tokens(), use_cache=cache, **how) for cache in (True, False)))


def test_a_window_with_relative_symbols(library):
    """The cache of a window forgets, so that keys are fewer than tokens."""
    torch.manual_seed(0)
    config = library.MistralConfig(**{k: v for k, v in SMALL.items() if k != "attention_bias"}, sliding_window=3)
    model = swapped(library.MistralForCausalLM(config).to(F64).eval(), "relative", (0, 1))
    ids = tokens(t=9)
    for cache in (library.DynamicCache(config=config), library.StaticCache(config=config, max_cache_len=12)):
        with torch.no_grad():
            parts = [model(ids[:, a:b], past_key_values=cache).logits for a, b in [(0, 4), (4, 7), (7, 8), (8, 9)]]
            assert_close(torch.cat(parts, 1), model(ids, use_cache=False).logits, rtol=1e-9, atol=1e-9)


def test_what_is_new_begins_with_the_rows_of_the_values(make):
    attention = hf.swap_heads(make(), [1], MIXED["positions"]).model.layers[1].self_attn
    group = attention.polyhead.groups[0]
    assert torch.equal(group.value.weight, attention.v_proj.weight[:6])
    assert torch.equal(group.value.bias, attention.v_proj.bias[:6])
    assert group.q_rel.weight.dtype == group.relation_weight.dtype == F64
    table = attention.polyhead.symbols[0].table
    assert table.shape == (32, 24)
    assert 0.8 < table.std() < 1.2


@pytest.mark.parametrize("name", ["hyla", "positions"])
def test_fine_tuning_goes_on_and_what_is_saved_is_the_same_model(library, make, tmp_path, name):
    model, ids = make(torch.float32), tokens(4, 8)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.05)
    hf.swap_heads(model, [1], MIXED[name]).train()
    optimiser, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    begin = {key: p.detach().clone() for key, p in model.named_parameters() if "polyhead" in key}
    for _ in range(15):
        optimiser.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0]
    assert all(not torch.equal(model.get_parameter(key), before) for key, before in begin.items())
    model.eval().save_pretrained(tmp_path)
    again = library.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again).__name__ == type(model).__name__ == "PolyheadLlamaForCausalLM"
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)
    assert set(load_file(tmp_path / "model.safetensors")) >= set(begin)


def test_an_ordinary_checkpoint_into_other_heads(library, make, tmp_path):
    """As it is swapped: the weights it has, and for relational heads what a swap gives them."""
    model, ids = make(torch.float32), tokens()
    model.save_pretrained(tmp_path)
    config = library.AutoConfig.from_pretrained(tmp_path)
    hyla = library.AutoModelForCausalLM.from_pretrained(tmp_path, config=hf.with_heads(config, MIXED["hyla"]))
    held = hf.with_heads(config, [None, [ph.Relational(4)]])
    relational = library.AutoModelForCausalLM.from_pretrained(tmp_path, config=held).eval()
    attention = relational.model.layers[1].self_attn
    assert torch.equal(attention.polyhead.groups[0].value.weight, attention.v_proj.weight)
    assert attention.polyhead.groups[0].relation_weight.std() > 0
    assert 0.8 < attention.polyhead.symbols[0].table.std() < 1.2
    with torch.no_grad():
        assert relational(ids).logits.isfinite().all()
        got = hyla.eval()(ids).logits
        assert_close(got, hf.swap_heads(model, None, MIXED["hyla"])(ids).logits, rtol=1e-6, atol=1e-6)
    deep = hf.with_heads(config, ph.Hyla(4, value_depth=2))
    weight = library.AutoModelForCausalLM.from_pretrained(tmp_path, config=deep).model.layers[0].self_attn.polyhead
    assert 0.2 < weight.groups[0].value_weight.std() < 0.8


def test_no_other_implementation_for_a_model_that_holds_heads(library, make, tmp_path):
    model = hf.swap_heads(make(), [1], MIXED["hyla"])
    line = "^PolyheadLlamaConfig: layers have heads of their own, so attn_implementation cannot be 'sdpa'$"
    with pytest.raises(ValueError, match=line):
        model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match=line):
        library.AutoModelForCausalLM.from_config(model.config, attn_implementation="sdpa")
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=line):
        library.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")
    with pytest.raises(ValueError, match="must run softmax attention but its heads are polyhead_heads"):
        hf.capture(model, tokens())  # which would read all layers as softmax attention


def test_what_is_new_is_in_the_mode_of_its_layer_and_of_a_dtype_that_has_fractions(make):
    model = make(torch.bfloat16)
    model.model.layers[1].self_attn.train()
    projection = model.model.layers[0].self_attn.v_proj
    whole = torch.zeros_like(projection.weight, dtype=torch.int8)
    projection.weight = nn.Parameter(whole, requires_grad=False)  # as a quantised one
    hf.swap_heads(model, None, ph.Hyla(4, value_depth=2))
    for layer, train, dtype in ((0, False, torch.float32), (1, True, torch.bfloat16)):
        heads = model.model.layers[layer].self_attn.polyhead
        assert {module.training for module in heads.modules()} == {train}
        assert {parameter.dtype for parameter in heads.parameters()} == {dtype}


def test_swapped_again(make):
    model, ids = make(), tokens()
    hf.swap_heads(model, [0], MIXED["hyla"])
    hf.swap_heads(model, [-1], MIXED["positions"])
    hf.swap_heads(model, [1], MIXED["hyla"])
    both = hf.swap_heads(make(), None, MIXED["hyla"])
    with torch.no_grad():
        assert_close(model(ids).logits, both(ids).logits)
    assert model.config.to_dict() == both.config.to_dict()


def swap(model, heads, layers=None):
    return lambda make: hf.swap_heads(model(make), layers, heads)


def llama(make):
    return make()


def gpt(make):
    import transformers

    return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=24, n_layer=1, n_head=4, vocab_size=50))


MISTAKES = {
    "swap_heads: 4 heads were wanted but 8 came": swap(llama, ph.Hyla()),
    "swap_heads: dim of Hyla must be 6 but is 5": swap(llama, ph.Hyla(4, dim=5)),
    "swap_heads: kv_heads of Softmax must be 2 but is 4": swap(llama, ph.Softmax(4, kv_heads=4)),
    "swap_heads: Relational must be a multiple of 2 heads, which share keys": swap(
        llama, [ph.Softmax(3), ph.Relational(1)]
    ),
    "swap_heads: Hyla must read the model's own queries and keys, without share or hidden": swap(
        llama, [ph.Softmax(2), ph.Hyla(2, share=True)]
    ),
    "swap_heads: Relational must have symbols of single tokens but has RelationalSymbols": swap(
        llama, ph.Relational(4, symbols=ph.RelationalSymbols())
    ),
    "swap_heads: layers must be below 2 but are [2]": swap(llama, ph.Softmax(4), [2]),
    "swap_heads: a LlamaForCausalLM was wanted but a LlamaModel came": swap(lambda make: make().model, ph.Softmax(4)),
    "polyhead: GPT2LMHeadModel must have q_proj, k_proj, v_proj and o_proj in each of its layers": swap(
        gpt, ph.Softmax(4)
    ),
    "with_heads: 2 layers were wanted but heads of 3 came": lambda make: hf.with_heads(make().config, [None] * 3),
}


@pytest.mark.parametrize("line", MISTAKES)
def test_mistakes_are_one_clear_line(make, line):
    with pytest.raises(ValueError, match=r"^(swap_heads|with_heads|polyhead): ") as caught:
        MISTAKES[line](make)
    assert str(caught.value) == line
