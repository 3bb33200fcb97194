"""Options that another library passes reach our ops, also those that a comparison of outputs would miss."""

import pytest
import torch

import polyhead as ph
from polyhead.compat import cs336, haiku
from polyhead.compat.dual_attention import arguments as dual_attention_read

BLOCK = {"n_heads_sa": 2, "n_heads_ra": 2, "dff": None, "activation": "swiglu", "dropout_rate": 0.3, "norm_first": True}


def test_blocks_of_dual_attention():
    fields = dual_attention_read.block(BLOCK, 8, dual=True).fields
    assert fields["feedforward"].hidden == 21  # int(2 / 3 * 4 * 8), odd as it may be
    assert (fields["dropout"], fields["residual_dropout"]) == (0.3, 0.3)
    with pytest.raises(ValueError, match="n_relations x rel_proj_dim must be 4, the heads' width, not 2 x 3"):
        dual_attention_read.block({**BLOCK, "ra_kwargs": {"rel_proj_dim": 3}}, 8, dual=True)


def test_positions_of_the_course():
    """The seventh argument is theta; a block hands token positions to its attention."""
    torch.manual_seed(0)
    models = [cs336.TransformerLM(11, 8, 8, 1, 2, 16, *last) for last in ((50.0,), ())]
    models += [cs336.TransformerLM(11, 8, 8, 1, 2, 16, rope_theta=50.0)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    given, usual, named = (model(torch.arange(8)[None]) for model in models)
    assert torch.equal(given, named)
    assert not torch.allclose(given, usual)
    block, x, where = models[0].layers[0], torch.randn(1, 4, 8), torch.tensor([0, 2, 3, 7])
    y = x + block.attn(block.ln1(x), where)
    torch.testing.assert_close(block(x, where), y + block.ffn(block.ln2(y)))
    assert not torch.allclose(block(x, where), block(x))


def test_the_tutorial_has_no_window():
    said = "no positions, q/k norms, window or causal mask but this one has not"
    with pytest.raises(ValueError, match=said):
        haiku.to_haiku(ph.MultiHeadAttention(8, ph.Softmax(2), bias=True, window=3))
    pytest.importorskip("flax")
    from polyhead.jaxside import convert, nnx

    with pytest.raises(ValueError, match=said):
        convert.to_haiku(nnx.MultiHeadAttention(8, ph.Softmax(2), bias=True, window=3))


def llama(**more):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=9, **sizes, **more)).eval()


def test_two_tokens_of_a_causal_model():
    from polyhead.compat import huggingface

    (taps,) = huggingface.capture(llama(), input_ids=torch.tensor([[1, 2]]))
    code = taps.groups[0].code()
    assert (code[..., 0, 1] == 0).all()
    assert (code[..., 1, 0] > 0).all()


def test_swapped_heads_are_in_the_mode_of_their_model():
    from polyhead.compat import huggingface

    model = llama()
    for mode in (False, True):
        huggingface.swap_heads(model.train(mode), None, ph.Hyla(2))
        assert {module.training for module in model.modules()} == {mode}


def test_heads_may_be_of_another_width_than_their_share():
    from polyhead.compat import huggingface

    model = llama(head_dim=4)
    with pytest.raises(ValueError, match="dim of Hyla must be 4 but is 8"):
        huggingface.swap_heads(model, None, ph.Hyla(2, dim=8))
    assert huggingface.swap_heads(model, None, ph.Hyla(2, dim=4))(torch.tensor([[1, 2]])).logits.shape == (1, 2, 9)


def test_a_cache_says_how_long_a_mask_is():
    pytest.importorskip("transformers")
    from polyhead.compat.huggingface.cache import PolyheadCache

    cache = PolyheadCache(1)
    cache.memory[0].length = 5
    assert cache.get_mask_sizes(3) == (8, 0)


def test_a_sequence_of_one_token_is_a_sequence():
    pytest.importorskip("transformers")
    from polyhead.compat.huggingface.model import PolyheadForCausalLM

    found = PolyheadForCausalLM._boundaries(object.__new__(PolyheadForCausalLM), torch.tensor([[0, 0, 1, 0, 0]]))
    assert found.tolist() == [0, 1, 3, 4, 5]
