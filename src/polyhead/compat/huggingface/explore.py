"""Hugging Face models from a local folder, ours included, for `polyhead.pages.explore`."""

import pathlib
from typing import Any

import torch
from torch import nn

from polyhead.compat.huggingface.taps import ours
from polyhead.spec.optional import optional


def load(folder: pathlib.Path, device: str | torch.device = "cpu") -> tuple[nn.Module, Any]:
    """The causal model in `folder`, in eval mode on `device`, and its tokenizer; nothing is downloaded.

    Weights are read from safetensors only, and no code in the folder is run.

    Raises ValueError if transformers is not installed, or if the folder has no such model or no tokenizer.
    """
    with optional(f"explore: {folder}", "polyhead[hf]"):
        from transformers import AutoModelForCausalLM, AutoTokenizer
    try:
        how: Any = {"local_files_only": True, "trust_remote_code": False}
        model: Any = AutoModelForCausalLM.from_pretrained(folder, use_safetensors=True, **how)
        tokenizer = AutoTokenizer.from_pretrained(folder, **how)
    except Exception as error:  # any error of the libraries that read a stranger's files
        reason = " ".join(str(error).split())
        raise ValueError(f"explore: {folder} must hold a causal model and its tokenizer ({reason})") from None
    return model.to(device).eval(), tokenizer


def reach(model: nn.Module) -> tuple[int | None, int | None]:
    """The context length and the vocabulary size of a foreign model, if its configuration has them.

    Raises ValueError for a model with our heads inside: `capture` would treat them as softmax heads.
    """
    config: Any = getattr(model, "config", None)
    heads = getattr(config, "_attn_implementation", None)
    if ours(heads):
        raise ValueError(f"explore: a model with its own softmax heads was wanted but {heads} are inside it")
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    length = getattr(config, "max_position_embeddings", None)
    known = getattr(config, "vocab_size", None)
    return length if isinstance(length, int) and length > 0 else None, known if isinstance(known, int) else None
