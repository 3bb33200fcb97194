"""Models of Hugging Face from a local folder, ours among them, for `polyhead.pages.explore`."""

import pathlib
from typing import Any

import torch
from torch import nn

from polyhead.spec.optional import optional


def load(folder: pathlib.Path, device: str | torch.device = "cpu") -> tuple[nn.Module, Any]:
    """The causal model in `folder`, in eval mode on `device`, and its tokenizer; nothing is fetched.

    Weights are read from safetensors only, and no code that lies in the folder is run.

    ValueError: transformers is not installed, or the folder holds no such model or no tokenizer.
    """
    with optional(f"explore: {folder}", "polyhead[hf]"):
        from transformers import AutoModelForCausalLM, AutoTokenizer
    try:
        how: Any = {"local_files_only": True, "trust_remote_code": False}
        model: Any = AutoModelForCausalLM.from_pretrained(folder, use_safetensors=True, **how)
        tokenizer = AutoTokenizer.from_pretrained(folder, **how)
    except Exception as error:  # of whichever library reads the part that a stranger wrote
        reason = " ".join(str(error).split())
        raise ValueError(f"explore: {folder} must hold a causal model and its tokenizer ({reason})") from None
    return model.to(device).eval(), tokenizer


def reach(model: nn.Module) -> tuple[int | None, int | None]:
    """How many tokens a foreign model can read, and how many it knows, where its configuration says so.

    ValueError for a model with our heads inside: `capture` would take them for softmax heads.
    """
    config: Any = getattr(model, "config", None)
    heads = str(getattr(config, "_attn_implementation", ""))
    if heads.startswith("polyhead_"):
        raise ValueError(f"explore: a model with its own softmax heads was wanted but {heads} are inside it")
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    length = getattr(config, "max_position_embeddings", None)
    known = getattr(config, "vocab_size", None)
    return length if isinstance(length, int) and length > 0 else None, known if isinstance(known, int) else None
