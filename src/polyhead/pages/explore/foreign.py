"""Models of Hugging Face on the page: from a local folder, ours included; their limits and their taps."""

import pathlib
from typing import Any, cast

import torch

from polyhead.spec.optional import optional
from polyhead.spec.values import one_line

with optional("explore: a model of Hugging Face", "polyhead[hf]"):
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    from polyhead.compat.huggingface import capture as capture  # it also registers our models


def load(folder: pathlib.Path, device: str | torch.device = "cpu") -> tuple[torch.nn.Module, Any]:
    """The causal model in `folder`, in eval mode on `device`, and its tokenizer; no code in the folder is run.

    Raises:
        ValueError: If the folder lacks one of them, or some weights.
    """
    options: Any = {"local_files_only": True, "trust_remote_code": False}
    verbosity, has_progress = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()  # its report prints names of a stranger's tensors as they are
    logging.disable_progress_bar()
    try:
        loaded = AutoModelForCausalLM.from_pretrained(folder, use_safetensors=True, output_loading_info=True, **options)
        model, info = cast("tuple[torch.nn.Module, dict[str, Any]]", loaded)
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
        tokenizer.encode("a")  # settings of another type fail in a call, too
        with torch.no_grad():
            model(torch.zeros(1, 1, dtype=torch.long))  # sizes that contradict each other fail in a call
    except Exception as error:  # any error of the libraries that read a stranger's files
        raise ValueError(f"explore: {folder} must hold a causal model and its tokenizer ({one_line(error)})") from None
    finally:
        logging.set_verbosity(verbosity)
        if has_progress:
            logging.enable_progress_bar()
    missing = sorted(info["missing_keys"])
    if missing:  # transformers has filled them with random numbers
        raise ValueError(f"explore: {folder} must hold all weights, but {len(missing)} are missing, first {missing[0]}")
    return model.eval().to(device), tokenizer


def limits(model: Any) -> tuple[int | None, int | None]:
    """The context length and the vocabulary size of a model, if its configuration has them."""
    sizes = model.config.get_text_config()
    return getattr(sizes, "max_position_embeddings", None), getattr(sizes, "vocab_size", None)
