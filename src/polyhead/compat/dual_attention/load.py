"""Load language models of the package `dual-attention` (Altabaa and Lafferty 2024) as ours.

    load               a state dict and its model's arguments -> polyhead.Transformer
    from_folder        the same, as published: config.json and model.safetensors

Different here: the package's output projections, one per kind of heads, are the diagonal blocks of one projection.
Biases that it does not have are 0.  Its gelu is our gelu_tanh.  In training it applies dropout twice to attention
outputs.  Its dual language model ignores `bias`, and so do we.  Its other kinds of heads, biases of heads and shared
queries, and any option without an equivalent in ours, are an error.
"""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from polyhead.compat.dual_attention.arguments import settings_of
from polyhead.compat.dual_attention.tensors import of_model
from polyhead.compat.mapping import fill, uncompiled
from polyhead.models.transformer import Transformer
from polyhead.spec.values import one_line


def load(state_dict: Mapping[str, Tensor], config: Mapping[str, Any] | None = None, **arguments: Any) -> Transformer:
    """Return a language model of the package as ours, on the device and in the dtype of its tensors.

    Args:
        config: The arguments of the model's constructor, as a published config.json has them.
        **arguments: Such arguments by name; they replace those in `config`.

    Raises:
        ValueError: For an argument or a key that is missing or unknown, a tensor of a wrong shape, and an option
            without an equivalent in ours.  The message names the argument, key or option.
    """
    state = uncompiled(state_dict)
    try:
        options = {**(config or {}), **arguments}
        settings = settings_of(options)
        if not options.get("n_heads_ra"):  # the package has retrievers that no head reads
            state = {key: value for key, value in state.items() if "symbol_retrievers" not in key}
        for key, value in state.items():
            if not isinstance(value, Tensor) or not value.is_floating_point():
                raise ValueError(f"{key} must be a floating tensor")
        if not state:
            raise ValueError("the state dict is empty")
        # The model gets the dtype and the device of its file; every parameter is then filled from it.
        like = next(iter(state.values()))
        model = Transformer(settings, device="meta", dtype=like.dtype).to_empty(device=like.device)
    except (TypeError, ValueError) as error:  # TypeError: an argument of another type
        raise ValueError(f"dual_attention.load: {error}") from None
    fill("dual_attention.load", model, list(of_model(model, is_dual="n_heads_ra" in options)), state)
    return model


def from_folder(path: str | pathlib.Path, *, device: str | torch.device = "cpu") -> Transformer:
    """Return a published model from its folder with config.json and model.safetensors.  Nothing is unpickled."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    folder = pathlib.Path(path)
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        state = load_file(folder / "model.safetensors", device=str(device))
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        raise ValueError(
            f"dual_attention.from_folder: {folder} must hold a published model ({one_line(error)})"
        ) from None
    return load(state, config)
