"""Models whose configuration holds heads: swapped into a checkpoint, saved, loaded."""

import pickle

import pytest
import torch
from refusals import refusing
from tiny_transformers import F64, GREEDY, SMALL, drawn, hf, llama, padded, positions, stepwise, tokens, transformers
from torch import nn
from torch.testing import assert_close

import polyhead as ph

MIXED = {
    "softmax": ph.Softmax(4),
    "cut": [ph.Softmax(1), ph.Softmax(3)],  # through heads that share their keys
    "hyla": [ph.Softmax(2), ph.Hyla(2)],
    "positions": [ph.Relational(2), ph.Softmax(2)],
    "relative": [ph.Relational(2, symbols=ph.RelativeSymbols(3), relations=3, relation_dim=5), ph.Softmax(2)],
    "library": ph.Relational(4, symbols=ph.SymbolicAttention(5, trainable=False), symmetric=True),
    "two sources": [ph.Disentangled(2), ph.Abstractor(2, symbols=ph.SymbolicAttention(5))],
}
RELATIONAL = list(MIXED)[3:]


def swapped(model, name, layers=(1,)):
    """With the heads of that name, whose new parameters are large enough to matter."""
    hf.swap_heads(model, list(layers), MIXED[name])
    for layer in layers:
        drawn(model.model.layers[layer].self_attn.polyhead, std=0.5)
    return model


@pytest.mark.parametrize("name", ["softmax", "cut"])
def test_softmax_for_softmax_leaves_the_logits(name):
    model, (ids, mask, _) = llama(), padded("left")
    with torch.no_grad():
        before = model(ids, attention_mask=mask).logits[mask.bool()]
        parameter_ids = {key: id(p) for key, p in model.named_parameters()}
        assert hf.swap_heads(model, None, MIXED[name]) is model
        assert_close(model(ids, attention_mask=mask).logits[mask.bool()], before, rtol=1e-9, atol=1e-9)
    assert {key: id(p) for key, p in model.named_parameters()} == parameter_ids


@pytest.mark.parametrize("name", ["hyla", *RELATIONAL])
def test_a_swapped_layer_is_our_own_with_its_weights(name):
    """Our layer, with rotary positions of its own, has no part of transformers in it."""
    model, heads = swapped(llama(), name), MIXED[name]
    attention, x = model.model.layers[1].self_attn, torch.randn(2, 7, 24, dtype=F64)
    groups = heads if isinstance(heads, list) else [heads]
    grouped = [ph.config.from_dict({**ph.config.to_dict(g), "kv_heads": g.heads // 2}) for g in groups]
    layer = ph.MultiHeadAttention(
        *(24, grouped), causal=True, bias=True, positions=ph.Rotary(layout="half"), max_length=32, dtype=F64
    )
    has_values = [torch.full((group.heads * 3,), not isinstance(group, ph.config.SymbolHeads)) for group in groups]
    value_rows = torch.cat(has_values)  # which rows of v_proj are read
    q, k, v, o = (getattr(attention, f"{part}_proj") for part in "qkvo")
    state = attention.polyhead.state_dict()
    for suffix in ("weight", "bias"):
        rows = [getattr(q, suffix), getattr(k, suffix), getattr(v, suffix)[value_rows]]
        state |= {f"qkv.{suffix}": torch.cat(rows), f"out.{suffix}": getattr(o, suffix)}
    layer.load_state_dict(state)
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[1, :3] = False
    position_ids = torch.arange(7)[None]
    visible = mask[:, None, None] & torch.ones(7, 7, dtype=torch.bool).tril()
    with torch.no_grad():
        y, _ = attention(x, position_embeddings=model.model.rotary_emb(x, position_ids), attention_mask=visible)
        assert_close(y, layer(x, mask=mask[:, None, None]), rtol=1e-5, atol=1e-5)  # angles are float32 there


@pytest.mark.parametrize(
    ("name", "options"),
    [*((name, {}) for name in ("hyla", *RELATIONAL)), ("relative", {"kind": "mistral", "sliding_window": 3})],
)
def test_caches_and_padding_change_nothing(name, options):
    """The cache of a window forgets, so that keys are fewer than tokens."""
    model, ids = swapped(llama(**options), name, (0, 1)), tokens(t=9)
    config = model.config
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        for cache in (
            transformers.DynamicCache(config=config),
            transformers.StaticCache(config=config, max_cache_len=12),
        ):
            assert_close(stepwise(model, ids, cache), expected, rtol=1e-9, atol=1e-9)
        ids, mask, real = padded("left")
        batch = model(ids, attention_mask=mask, position_ids=positions(mask)).logits[1:, real]
        assert_close(batch, model(ids[1:, real]).logits, rtol=1e-9, atol=1e-9)
    generated = model.generate(ids, attention_mask=mask, **GREEDY)
    assert torch.equal(generated[1:, 7:], model.generate(ids[1:, real], **GREEDY)[:, 4:])
    assert torch.equal(model.generate(ids, attention_mask=mask, cache_implementation="static", **GREEDY), generated)


def test_new_parameters_begin_with_the_rows_of_the_values():
    attention = hf.swap_heads(llama(), [1], MIXED["positions"]).model.layers[1].self_attn
    group = attention.polyhead.groups[0]
    assert torch.equal(group.value.weight, attention.v_proj.weight[:6])
    assert torch.equal(group.value.bias, attention.v_proj.bias[:6])
    assert group.q_rel.weight.dtype == group.relation_weight.dtype == F64
    assert attention.polyhead.symbols[0].table.shape == (32, 24)
    attention = hf.swap_heads(llama(), [1], (ph.Softmax(2), ph.Relational(2))).model.layers[1].self_attn
    assert torch.equal(attention.polyhead.groups[1].value.weight, attention.v_proj.weight[6:])  # of the last heads


def mixtral():
    sizes = SMALL | {"num_local_experts": 3, "num_experts_per_tok": 2}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes)).eval()


@pytest.mark.parametrize(("kind", "name"), [("Llama", "hyla"), ("Llama", "positions"), ("Mixtral", "softmax")])
def test_a_swapped_model_can_be_saved_and_loaded(tmp_path, kind, name):
    """Files of experts are converted by the type of the model.  That models can be trained is in test_wrapped.py."""
    model = swapped(llama(torch.float32), name) if kind == "Llama" else hf.swap_heads(mixtral(), [0], MIXED[name])
    assert all(p.requires_grad for p in model.parameters())
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded).__name__ == type(model).__name__ == f"Polyhead{kind}ForCausalLM"
    with torch.no_grad():
        assert torch.equal(loaded(tokens()).logits, model(tokens()).logits)
    assert pickle.loads(pickle.dumps(model.config)).polyhead_heads == model.config.polyhead_heads


def test_an_ordinary_checkpoint_into_other_heads(tmp_path):
    """Heads without parameters read it; others are swapped in afterwards, so that none is random without a word."""
    model, ids = llama(torch.float32), tokens()
    model.save_pretrained(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    hyla = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, config=hf.with_heads(config, MIXED["hyla"]))
    for heads in (ph.Relational(4), ph.Hyla(4, value_depth=2)):
        with refusing("PolyheadLlamaForCausalLM: the checkpoint must have model.layers.0.self_attn.polyhead."):
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path, config=hf.with_heads(config, heads))
    with torch.no_grad():
        logits = hyla.eval()(ids).logits
        assert_close(logits, hf.swap_heads(model, None, MIXED["hyla"])(ids).logits, rtol=1e-6, atol=1e-6)


def test_no_other_implementation_for_a_model_with_swapped_heads(tmp_path):
    model = hf.swap_heads(llama(), [1], MIXED["hyla"])
    line = "PolyheadLlamaConfig: layers have heads of their own, so attn_implementation cannot be 'sdpa'"
    model.save_pretrained(tmp_path)
    auto = transformers.AutoModelForCausalLM
    with refusing(line):
        model.set_attn_implementation("sdpa")
    with refusing(line):
        auto.from_config(model.config, attn_implementation="sdpa")
    with refusing(line):
        auto.from_pretrained(tmp_path, attn_implementation="sdpa")
    with refusing("LlamaForCausalLM must not read heads of layers"):
        transformers.LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    with refusing("must run softmax attention but its heads are polyhead_heads"):
        hf.capture(model, tokens())  # which would read all layers as softmax attention


def test_new_heads_have_the_mode_and_the_dtype_of_their_layer():
    model = llama(torch.bfloat16)
    model.model.layers[1].self_attn.train()
    hf.swap_heads(model, None, ph.Hyla(4, value_depth=2))
    for layer, train in ((0, False), (1, True)):
        heads = model.model.layers[layer].self_attn.polyhead
        assert {module.training for module in heads.modules()} == {train}
        assert {parameter.dtype for parameter in heads.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("kind", [torch.int8, torch.uint8, torch.float8_e4m3fn, "wrapped"])
def test_symbols_are_never_mapped_by_the_codes_of_a_quantised_layer(kind):
    """Nor by a random map, where the layer is wrapped; the model is then unchanged."""
    model, wrapped = llama(torch.float32), nn.Sequential()
    attention = model.model.layers[1].self_attn
    if kind == "wrapped":
        wrapped.weight, wrapped.bias = attention.v_proj.weight, attention.v_proj.bias
        attention.v_proj = wrapped
    else:
        attention.v_proj.weight = nn.Parameter(attention.v_proj.weight.detach().to(kind), requires_grad=False)
    refused = [MIXED["positions"]]
    if kind != "wrapped":
        refused.append(ph.Hyla(4, value_depth=2))  # its parameters had the dtype of the codes
    for heads in refused:
        with refusing("heads: v_proj must be a plain linear layer"):
            hf.swap_heads(model, None, heads)
    assert type(model) is transformers.LlamaForCausalLM
    assert not any(hasattr(layer.self_attn, "polyhead") for layer in model.model.layers)
    hf.swap_heads(model, None, MIXED["hyla"])


def test_heads_may_be_swapped_again():
    model, ids = llama(), tokens()
    hf.swap_heads(model, [0], MIXED["hyla"])
    hf.swap_heads(model, [-1], MIXED["positions"])
    hf.swap_heads(model, [1], MIXED["hyla"])
    both = hf.swap_heads(llama(), None, MIXED["hyla"])
    with torch.no_grad():
        assert_close(model(ids).logits, both(ids).logits)
    assert model.config.to_dict() == both.config.to_dict()


def test_none_keeps_the_heads_that_a_layer_of_a_configuration_has():
    first = hf.with_heads(llama().config, [MIXED["hyla"], None])
    assert hf.with_heads(first, [None, ph.Hyla(4)]).polyhead_heads[0] == first.polyhead_heads[0] is not None


def test_the_given_configuration_does_not_change():
    config = transformers.LlamaConfig(**SMALL)
    before = config.to_dict()
    model = hf.swap_heads(transformers.LlamaForCausalLM(config), [1], ph.Hyla(4))
    assert (type(config), config.to_dict()) == (transformers.LlamaConfig, before)
    configs = [module.config for module in model.modules() if hasattr(module, "config")]
    assert all(type(module_config).__name__ == "PolyheadLlamaConfig" for module_config in configs)
    assert transformers.LlamaForCausalLM(config)(tokens()).logits.isfinite().all()


def swap(*heads, model=llama):
    return lambda: hf.swap_heads(model(), None, list(heads))


def gpt():
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=24, n_layer=1, n_head=4, vocab_size=50))


class Mine(transformers.LlamaForCausalLM):
    """Its own code would be lost."""


def mine():
    return Mine(llama().config)


MISTAKES = {
    "heads: the model has 4 heads, so give 4, got 8": swap(ph.Hyla()),
    "heads: Pooled must not read all queries, which a causal model hides": swap(ph.Pooled(4, network="sequence")),
    "swap_heads: heads with symbols copy rows of v_proj, so swap before the model is": swap(
        ph.Relational(4), model=lambda: llama().to("meta")
    ),
    "heads: dim of Hyla must be 4 but is 6": swap(ph.Hyla(4, dim=6), model=lambda: llama(head_dim=4)),
    "heads: kv_heads of Softmax must be 2 but is 4": swap(ph.Softmax(4, kv_heads=4)),
    "heads: Relational must be together with all heads that share its keys": swap(ph.Softmax(3), ph.Relational(1)),
    "heads: Hyla must read the model's own": swap(ph.Softmax(2), ph.Hyla(2, share=True)),
    "Relational must have symbols of single tokens": swap(ph.Relational(4, symbols=ph.RelationalSymbols())),
    "swap_heads: the model must be a LlamaForCausalLM, got Mine": swap(ph.Softmax(4), model=mine),
    "heads: layers without heads of their own would lose 'polyhead_hyla'": lambda: hf.swap_heads(
        llama(name="polyhead_hyla"), [1], ph.Hyla(4)
    ),
    "GPT2LMHeadModel must have q_proj, k_proj, v_proj and o_proj in layer 0": swap(ph.Softmax(4), model=gpt),
    "the model must be a causal language model of transformers, 'NoneType' is none": swap(model=torch.nn.Identity),
    "must be indices of the model's 2 layers but are [2]": lambda: hf.swap_heads(llama(), [2], ph.Hyla(4)),
    "the model must be a causal language model of transformers, 'vit' is none": lambda: hf.register("vit"),
    "must be a list for 2 layers": lambda: transformers.AutoModelForCausalLM.from_config(
        hf.with_heads(llama().config, [[ph.Softmax(4)]])
    ),
}


@pytest.mark.parametrize("line", MISTAKES)
def test_mistakes_are_one_clear_line(line):
    with refusing(line):
        MISTAKES[line]()


def test_a_name_behind_the_back_of_a_model_that_computes_attention_itself_is_refused():
    hf.register()
    config = transformers.GPTNeoConfig(
        hidden_size=16, num_layers=1, num_heads=2, vocab_size=500, attention_types=[[["global"], 1]]
    )
    model = transformers.GPTNeoForCausalLM(config)
    model.config._attn_implementation = "polyhead_hyla"
    with refusing("for 'polyhead_hyla', which is not known of the type 'gpt_neo'"):
        model(tokens(1, 4))
