"""Our mechanisms by name in models of transformers: softmax equals SDPA, and results do not depend on the batch."""

import functools

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import polyhead as ph
from polyhead.compat import huggingface as hf

F64 = torch.float64
SMALL = {
    "vocab_size": 50,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "head_dim": 6,
}
NAMES = ["polyhead_softmax", "polyhead_linear", "polyhead_linear_rms", "polyhead_hyla", "polyhead_hyla_softmax"]
OPS = {
    "polyhead_softmax": ph.ops.softmax_attention,
    "polyhead_linear": ph.ops.linear_attention,
    "polyhead_linear_rms": functools.partial(ph.ops.linear_attention, normalise="rms_heads"),
    "polyhead_hyla": ph.ops.hyla,
    "polyhead_hyla_softmax": functools.partial(ph.ops.hyla, normalise="softmax"),
}


@pytest.fixture(scope="module")
def library():
    import transformers

    transformers.logging.set_verbosity_error()
    hf.register()
    return transformers


@pytest.fixture
def make(library):
    def make(name="sdpa", kind="llama", dtype=F64, **options):
        torch.manual_seed(0)
        config = library.AutoConfig.for_model(kind, **{**SMALL, **options})
        model = library.AutoModelForCausalLM.from_config(config, attn_implementation=name).to(dtype)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.3)
        return model.eval()

    return make


def tokens(b=2, t=7, seed=1):
    return torch.randint(1, 50, (b, t), generator=torch.Generator().manual_seed(seed))


def padded(side):
    """Two sequences of 7 and 4 tokens, their attention mask and which places of the second are real."""
    ids, mask = tokens(), torch.ones(2, 7, dtype=torch.long)
    real = slice(3, 7) if side == "left" else slice(0, 4)
    mask[1] = 0
    mask[1, real] = 1
    return ids, mask, real


def test_the_names_are_those_of_the_table():
    assert list(hf.NAMES) == NAMES


@pytest.mark.parametrize("side", [None, "left", "right"], ids=str)
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3", "gemma", "olmo2", "granite", "cohere"])
def test_softmax_is_sdpa(make, kind, side):
    """Logits at real tokens, and gradients; Mistral with a window, Granite with a scale of its own."""
    options = {"mistral": {"sliding_window": 3}, "granite": {"attention_multiplier": 0.7}}.get(kind, {})
    model = make(kind=kind, dtype=torch.float32, **options)
    ids, mask, _ = padded(side or "right")
    mask = torch.ones_like(mask) if side is None else mask
    results = []
    for name in ("sdpa", "polyhead_softmax"):
        model.set_attn_implementation(name)
        logits = model(ids, attention_mask=mask).logits[mask.bool()]
        results.append((logits, torch.autograd.grad(logits.float().log_softmax(-1)[:, 3].mean(), model.parameters())))
    assert_close(*results, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(make, name, side):
    model = make(name)
    ids, mask, real = padded(side)
    with torch.no_grad():
        batch, alone = model(ids, attention_mask=mask).logits, [model(ids[:1]).logits, model(ids[1:, real]).logits]
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        placed = model(ids, attention_mask=mask, position_ids=positions).logits
    # Angles are made in float32, so that other positions are another rounding.
    assert_close((batch[:1], batch[1:, real]), tuple(alone), rtol=1e-5, atol=1e-5)
    assert_close((placed[:1], placed[1:, real]), tuple(alone), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("name", "window"), [*((name, None) for name in NAMES), ("polyhead_hyla", 3)])
def test_a_cache_changes_nothing(library, make, name, window):
    """Tokens after others, several at once and one by one, with the caches that transformers makes itself."""
    model = make(name, **({} if window is None else {"kind": "mistral", "sliding_window": window}))
    ids = tokens(t=9)
    static = library.StaticCache(config=model.config, max_cache_len=12)
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        for cache in (library.DynamicCache(config=model.config), static):
            steps = [(0, 4), (4, 7), (7, 8), (8, 9)]
            parts = [model(ids[:, a:b], past_key_values=cache, use_cache=True).logits for a, b in steps]
            assert_close(torch.cat(parts, 1), whole, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["polyhead_linear", "polyhead_hyla"])
def test_generation_of_a_padded_batch_is_that_of_each_alone(make, name):
    model = make(name)
    ids, mask, real = padded("left")
    how = {"max_new_tokens": 6, "do_sample": False}
    found = model.generate(ids, attention_mask=mask, **how)
    assert torch.equal(found, model.generate(ids, attention_mask=mask, use_cache=False, **how))
    alone = model.generate(ids[1:, real], **how)
    assert torch.equal(found[1:, 7:], alone[:, 4:])
    assert len(alone.unique()) > 3


@pytest.mark.parametrize("name", NAMES)
def test_the_function_is_the_op(library, name):
    """Grouped heads, every kind of mask, a scale, a bias: against the op by its equation."""
    torch.manual_seed(2)
    q, k, v = (torch.randn(2, n, h, 6, dtype=F64) for n, h in ((5, 4), (7, 2), (7, 2)))
    mask = torch.rand(2, 1, 5, 7) > 0.4
    bias = torch.randn(2, 4, 5, 7, dtype=F64)
    smallest = torch.finfo(F64).min
    own = {
        "everything": ({"attention_mask": None, "is_causal": False}, {}),
        "boolean": ({"attention_mask": mask}, {"mask": mask}),
        "longer": ({"attention_mask": torch.cat((mask, ~mask), -1)}, {"mask": mask}),
        "per head": ({"attention_mask": bias > 0}, {"mask": bias > 0}),
        "added": ({"attention_mask": bias.masked_fill(~mask, smallest)}, {"mask": mask, "bias": bias}),
        "position bias": ({"attention_mask": mask, "position_bias": bias}, {"mask": mask, "bias": bias}),
        "scale": ({"attention_mask": mask, "scaling": 0.3}, {"mask": mask, "scale": 0.3}),
    }
    function, module = library.AttentionInterface()[name], nn.Module()
    module.is_causal = True
    for what, (given, wanted) in own.items():
        y, weights = function(module, *(x.transpose(1, 2) for x in (q, k, v)), **given)
        assert weights is None
        assert_close(y, OPS[name](q, k, v, impl="reference", **wanted), msg=lambda text, what=what: f"{what}: {text}")


def test_a_prefill_of_a_fixed_cache_is_aligned_with_its_first_place(library):
    function, module = library.AttentionInterface()["polyhead_hyla"], nn.Module()
    module.is_causal = True
    q, k, v = (torch.randn(1, n, 2, 4, dtype=F64) for n in (3, 3, 3))
    rest = torch.randn(2, 1, 5, 2, 4, dtype=F64)  # of a cache with places for 8
    longer = [torch.cat((x, more), 1).transpose(1, 2) for x, more in zip((k, v), rest, strict=True)]
    y, _ = function(module, q.transpose(1, 2), *longer, None)
    assert_close(y, ph.ops.hyla(q, k, v, causal=True))
    one, _ = function(module, q[:, :1].transpose(1, 2), *longer, None)  # a step sees all that is there
    assert_close(one, ph.ops.hyla(q[:, :1], *(x.transpose(1, 2) for x in longer)))


@pytest.mark.parametrize("name", NAMES)
def test_dropout_is_of_the_code(library, name):
    """With values that name their key, softmax and linear heads put out the code itself."""
    torch.manual_seed(3)
    function, module = library.AttentionInterface()[name], nn.Module().train()
    q, k = (torch.randn(1, 2, 8, 8, dtype=F64).abs() for _ in range(2))
    v = torch.eye(8, dtype=F64).expand(1, 2, 8, 8)
    code, _ = function(module, q, k, v, None, is_causal=False)
    y, _ = function(module, q, k, v, None, is_causal=False, dropout=0.25)
    if "hyla" not in name:
        kept = y != 0
        assert 10 < (~kept).sum() < 60
        assert_close(y[kept], code[kept] / 0.75)
    assert (y - code).abs().max() > 1e-3


def test_a_hyla_llama_trains(make):
    """With dropout and gradient checkpointing, on one batch."""
    model = make("polyhead_hyla", dtype=torch.float32, attention_dropout=0.1).train()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.05)
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()  # newer, older name
    optimiser, ids = torch.optim.AdamW(model.parameters(), lr=1e-2), tokens(4, 8)
    losses = []
    for _ in range(20):
        optimiser.zero_grad()
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.75 * losses[0]
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.model.layers[0].self_attn.parameters())


@pytest.mark.parametrize("name", ["polyhead_softmax", "polyhead_hyla"])
def test_what_is_not_plain_is_one_clear_line(library, make, name):
    model = make(name, "gemma2", dtype=torch.float32)
    with pytest.raises(ValueError, match=r"^polyhead: ") as caught:
        model(tokens())
    assert str(caught.value) == "polyhead: Gemma2Attention must be plain attention but softcap changes it"
    q = torch.zeros(1, 2, 3, 4)
    function = library.AttentionInterface()[name]
    for option in ("s_aux", "cache"):
        with pytest.raises(ValueError, match=f"^polyhead: Module must be plain attention but {option} changes it$"):
            function(nn.Module(), q, q, q, None, **{option: q})
    with pytest.raises(ValueError, match=r"^polyhead: Module must have masks \(b h t s\) but one is \(1, 3\)$"):
        function(nn.Module(), q, q, q, torch.ones(1, 3))
    with pytest.raises(ValueError, match=r"^polyhead: Module must have masks that are boolean or floating but one is "):
        function(nn.Module(), q, q, q, torch.ones(1, 1, 3, 3).long())


def test_a_learned_bias_that_begins_at_0_is_learned(library):
    q, bias = torch.randn(1, 4, 3, 6), torch.zeros(1, 4, 3, 3, requires_grad=True)
    function = library.AttentionInterface()["polyhead_hyla"]
    y, _ = function(nn.Module(), q, q, q, None, is_causal=False, position_bias=bias)
    assert torch.autograd.grad(y.square().sum(), bias)[0].abs().min() > 0


def test_what_would_be_passed_over_is_one_clear_line(make):
    model, ids, edges = make("polyhead_hyla"), tokens(1, 6), torch.tensor([0, 3, 6], dtype=torch.int32)
    low = torch.zeros(1, 1, 6, 6, dtype=F64).masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), -1e9)
    for options, line in (
        ({"output_attentions": True}, "hands out no attentions but output_attentions=True came"),
        ({"cu_seq_lens_q": edges}, "must get position_ids that restart in each sequence, not only cu_seq_lens_q"),
        ({"attention_mask": low}, "-inf or a Boolean mask hides pairs from HylaHeads but a mask with -1e+09 came"),
    ):
        for one in (model, hf.swap_heads(make(), [1], ph.Hyla(4))):
            with pytest.raises(ValueError, match=r"^polyhead: ") as caught:
                one(ids, **options)
            assert line in str(caught.value)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]])
    packed = model(ids, position_ids=positions, cu_seq_lens_q=edges, use_cache=False).logits
    assert_close(packed, torch.cat((model(ids[:, :3]).logits, model(ids[:, 3:]).logits), 1))


def test_names_are_found_late():
    assert hf.swap_heads.__module__ == "polyhead.compat.huggingface.heads"
    with pytest.raises(AttributeError, match=r"^module 'polyhead.compat.huggingface' has no attribute 'nothing'$"):
        getattr(hf, "nothing")  # noqa: B009


def test_heads_that_a_name_cannot_stand_for():
    """A line that says what to do instead, when a model is made and when it is told later."""
    import transformers

    llama = transformers.LlamaConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
    model = transformers.AutoModelForCausalLM.from_config(llama)
    line = r"^polyhead: relational heads read more .* use polyhead\.compat\.huggingface\.swap_heads\(model, layers, "
    for ask in (
        lambda name: transformers.AutoModelForCausalLM.from_config(llama, attn_implementation=name),
        model.set_attn_implementation,
    ):
        with pytest.raises(ValueError, match=line):
            ask("polyhead_relational")
        with pytest.raises(ValueError, match=r"did you mean 'polyhead_hyla'\? \(choose from polyhead_s"):
            ask("polyhead_hylas")
