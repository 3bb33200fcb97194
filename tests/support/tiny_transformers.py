"""Tiny models of transformers, ours among them, and tokens for them."""

import pytest
import torch
from torch import nn

from polyhead.config import Hyla, Logits, Rotary, Softmax, Tokens, TransformerConfig

transformers = pytest.importorskip("transformers")
hf = pytest.importorskip("polyhead.compat.huggingface")
transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

F64 = torch.float64
_FIELDS = transformers.modeling_outputs.BaseModelOutputWithPast.__dataclass_fields__
CACHE = "cache" if "cache" in _FIELDS else "past_key_values"
"""The name of the cache among arguments and outputs, which transformers 5.24 changed."""

COUNT = 50
"""Tokens that the models know; 0 is padding."""

SMALL = {"vocab_size": COUNT, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
SMALL |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
GREEDY = {"max_new_tokens": 4, "do_sample": False}
STEPS = [(0, 4), (4, 7), (7, 8), (8, 9)]
"""Tokens that are given one after the other to a model with a cache: several at once, and one by one."""


def drawn(module, std=0.3):
    """With random weights, in evaluation."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=std)
    return module.eval()


def foreign(name="sdpa", kind="llama", dtype=F64, std=0.3, **options):
    """A causal model of transformers of this kind, with this attention; std=None: as the library initialises it."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **{**SMALL, **options})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=name).to(dtype)
    return model.eval() if std is None else drawn(model, std)


def llama(dtype=F64, std=0.3, **options):
    """A Llama with biases, which our heads can be put into."""
    return foreign(dtype=dtype, std=std, **{"attention_bias": True, **options})


def ours(kind="PolyheadForCausalLM", **changes):
    """A model of ours in transformers, in evaluation."""
    fields = {"inputs": Tokens(COUNT), "outputs": Logits(COUNT), "dim": 16, "layers": 2, "causal": True}
    fields |= {"max_length": 24, "heads": (Softmax(2), Hyla(2)), "positions": Rotary()}
    torch.manual_seed(0)
    return getattr(hf, kind)(hf.PolyheadConfig(TransformerConfig(**{**fields, **changes}))).eval()


def tokens(b=2, t=7, seed=1):
    return torch.randint(1, COUNT, (b, t), generator=torch.Generator().manual_seed(seed))


def padded(side):
    """Two sequences of 7 and 4 tokens, their attention mask, and the places of the second that are real."""
    ids, mask = tokens(), torch.ones(2, 7, dtype=torch.long)
    real = slice(3, 7) if side == "left" else slice(0, 4)
    mask[1] = 0
    mask[1, real] = 1
    return ids, mask, real


def positions(mask):
    """The number of real tokens before each."""
    return (mask.cumsum(-1) - 1).clamp(min=0)


def stepwise(model, ids, cache):
    """The logits of `STEPS` with a cache."""
    with torch.no_grad():
        parts = [model(ids[:, a:b], **{CACHE: cache}, use_cache=True).logits for a, b in STEPS]
    return torch.cat(parts, 1)
