"""Load language models and attention modules of the package `dual-attention` (Altabaa and Lafferty 2024) as ours.

    load               a state dict and its model's arguments -> polyhead.Transformer
    from_folder        the same, as published: config.json and model.safetensors
    load_attention     one of its attention modules -> polyhead.MultiHeadAttention

The same in both: rotary positions rotate pairs (2j, 2j + 1) of attention's queries and keys, not of relations;
relations are scaled by p ** -0.5 and shared by heads; symbols are computed from the stream before the first norm.

Different here: the package's output projections, one per kind of heads, are the diagonal blocks of one projection.
Biases that it does not have are 0.  Its gelu is our gelu_tanh.  In training it applies dropout twice to attention
outputs.  Its dual language model ignores `bias`, and so do we.

Loading raises an error for:

- keys of another width than heads (`key_dim`);
- a `scale` of symbolic attention;
- dropout of symbols, which the package applies in evaluation, too;
- symbol libraries that layers share without their queries;
- a softmax of relations under a causal mask, which attends to future tokens there.
"""

import contextlib
import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from polyhead.compat.dual_attention import tensors
from polyhead.compat.dual_attention.attention import attention_groups, by_name
from polyhead.compat.dual_attention.language import layout_of
from polyhead.compat.foreign import uncompiled
from polyhead.config import Rotary
from polyhead.layers.attention import MultiHeadAttention
from polyhead.models.transformer import Transformer

CONFIG = "config.json"
WEIGHTS = "model.safetensors"


@contextlib.contextmanager
def _errors_of(function: str) -> Iterator[None]:
    """Context manager: error messages inside begin with the name of the function."""
    try:
        yield
    except (TypeError, ValueError) as error:  # TypeError: an argument of another type
        raise ValueError(f"dual_attention.{function}: {error}") from None


def load(state_dict: Mapping[str, Tensor], config: Mapping[str, Any] | None = None, **arguments: Any) -> Transformer:
    """Return a language model of the package as ours, on the device and in the dtype of its tensors.

    `config` holds the arguments of its constructor, as a published config.json does; they may also be given by name.
    The prefix `_orig_mod.` of torch.compile is removed.

    Raises ValueError, which names it, for an argument or a key that is missing or unknown, a tensor of a wrong shape,
    and an option without an equivalent in ours.
    """
    with _errors_of("load"):
        if config is not None:
            arguments = {**by_name(config), **arguments}
        layout = layout_of(arguments)
        state = _floating_tensors(state_dict, layout.unused)
        like = next(iter(state.values()))
        model = Transformer(layout.settings, device="meta", dtype=like.dtype).to_empty(device=like.device)
        tensors.fill(model, list(tensors.of_model(model, layout)), state)
    return model


def _floating_tensors(state_dict: Mapping[str, Tensor], unused: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """The tensors that a head reads.  Raises ValueError unless all are floating tensors."""
    state = {}
    for key, value in uncompiled(state_dict).items():
        if key.startswith(unused):
            continue
        if not isinstance(value, Tensor):
            raise ValueError(f"{key} must be a floating tensor but is a {type(value).__name__}")
        if not value.is_floating_point():
            raise ValueError(f"{key} must be a floating tensor but is of {value.dtype}")
        state[key] = value
    if not state:
        raise ValueError("the state dict is empty")
    return state


def from_folder(path: str | pathlib.Path, *, device: str | torch.device = "cpu") -> Transformer:
    """Return a published model from its folder with config.json and model.safetensors.  Nothing is unpickled."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    folder = pathlib.Path(path)
    with _errors_of("from_folder"):
        try:
            config = by_name(json.loads((folder / CONFIG).read_text(encoding="utf-8")))
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"{folder / CONFIG} must be a JSON file with arguments by name ({error})") from None
        try:
            state = load_file(folder / WEIGHTS, device=str(device))
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{folder / WEIGHTS} must be a file of safetensors ({error})") from None
    return load(state, config)


def load_attention(
    state_dict: Mapping[str, Tensor],
    config: Mapping[str, Any],
    *,
    cls: str = "DualAttention",
    causal: bool = False,
    rotary: bool = False,
    max_length: int = 2048,
) -> MultiHeadAttention:
    """Return an attention module of the package as our layer; the caller passes symbols, relative ones as a table.

    `cls` is the name of its class (see attention.CLASSES), `config` holds its arguments.  In the package, calls decide
    `causal` and `rotary`.
    """
    with _errors_of("load_attention"):
        groups = attention_groups(cls, config, causal=causal)
        state = _floating_tensors(state_dict)
        like = next(iter(state.values()))
        layer = MultiHeadAttention(
            config["d_model"],
            [group.mechanism for group in groups],
            causal=causal,
            positions=Rotary() if rotary else None,
            bias=any(group.has_bias_kv or group.has_bias_out for group in groups),
            dropout=float(config.get("dropout", 0.0)),
            max_length=max_length,
            own_symbols=False,
            device="meta",
            dtype=like.dtype,
        ).to_empty(device=like.device)
        tensors.fill(layer, list(tensors.of_attention(layer, groups)), state)
    return layer
