"""Load models of the package `dual-attention` (Altabaa and Lafferty 2024) as ours.

    load               a state dict and its model's arguments -> polyhead.Transformer
    from_folder        the same, as published: config.json and model.safetensors
    load_attention     one of its attention modules -> polyhead.MultiHeadAttention

The arguments determine the model: vocab_size means a language model, image_shape a vision model, input_spec a
sequence-to-sequence model; each with dual attention (n_heads_sa, n_heads_ra) or without (n_heads).

The same in both: rotary positions rotate pairs (2j, 2j + 1) of attention's queries and keys, not of relations;
relations are scaled by p ** -0.5 and shared by heads; symbols are computed from the stream before the first norm; eps
of norms is 1e-5.

Represented differently here: its output projections, one per kind of heads, are the diagonal blocks of one projection.
The package scales keys by the head width even if keys have another width, so our queries are multiplied by
(key_dim / head) ** 0.5.  The scale of symbolic attention is part of its query map.  Biases that it does not have are 0.
Its gelu is our gelu_tanh.  Its image_shape has width before height.  It multiplies vectors of a sequence by the root of
the width; here the map itself does.  In its state dict a shared tensor has several keys, and a file may hold only one.

Different in training: the package applies dropout twice to attention outputs, and never to a decoder's feed-forward
outputs.  Arguments that the package ignores are ignored here: n_layers_dec of its dual sequence-to-sequence model
(which has as many layers as the encoder), n_heads_cross of the plain one, `bias` of its dual language model,
tie_weights.  Refused are symbolic attention with dropout, which the package applies in evaluation, too, and a softmax
of relations under a causal mask, which attends to future tokens there.
"""

import contextlib
import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from polyhead.compat.dual_attention import arguments as package, tensors
from polyhead.compat.dual_attention.models import Layout, plan
from polyhead.compat.foreign import uncompiled
from polyhead.config import RelativeSymbols, Rotary, SymbolicAttention, SymbolSource, TransformerConfig
from polyhead.layers.attention import MultiHeadAttention
from polyhead.layers.positions import SinusoidalPositions
from polyhead.models.transformer import Transformer
from polyhead.spec.shapes import one_of

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
CLASSES = {
    "Attention": "sa",
    "RelationalAttention": "ra",
    "RelationalCrossAttention": "rca",
    "DisentangledRelationalCrossAttention": "disrca",
    "DualAttention": "dual",
}
"""The package's attention modules."""


@contextlib.contextmanager
def _errors_of(function: str) -> Iterator[None]:
    """Context manager: error messages inside begin with the name of the function."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"dual_attention.{function}: {error}") from None


def load(state_dict: Mapping[str, Tensor], config: Mapping[str, Any] | None = None, **arguments: Any) -> Transformer:
    """Return a model of the package as ours, on the device and in the dtype of its tensors.

    `config` holds the arguments of its constructor, as a published config.json does; they may also be given by name.
    The prefix `_orig_mod.` of torch.compile is removed.

    Raises ValueError, which names it, for an argument or a key that is missing or unknown, a tensor of a wrong shape,
    and an option without an equivalent in ours.
    """
    with _errors_of("load"):
        if config is not None:
            arguments = {**package.by_name(config), **arguments}
        layout = plan(arguments)
        state = _floating_tensors(state_dict, layout.unused)
        model = _empty_model(layout.settings, next(iter(state.values())))
        tensors.fill(model, list(tensors.of_model(model, layout)), state, _position_tables(layout))
    return model


def _floating_tensors(state_dict: Mapping[str, Tensor], unused: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """The tensors that a head reads.  Raises ValueError unless all are floating tensors."""
    state = {}
    for key, value in uncompiled(state_dict).items():
        if key.startswith(unused):
            continue
        if not isinstance(value, Tensor) or not value.is_floating_point():
            kind = f"of {value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise ValueError(f"{key} must be a floating tensor but is {kind}")
        state[key] = value
    if not state:
        raise ValueError("the state dict is empty")
    return state


def _empty_model(settings: TransformerConfig, like: Tensor) -> Transformer:
    sides = [settings]
    if isinstance(settings.encoder, TransformerConfig):
        sides.append(settings.encoder)
    groups = [group for side in sides for group in side.layer_heads(0)]
    if any(getattr(getattr(group, "symbols", None), "tied", False) for group in groups):
        # Not on the meta device: to_empty would break shared tensors.
        with torch.random.fork_rng(devices=[]):
            return Transformer(settings, device=like.device, dtype=like.dtype)
    return Transformer(settings, device="meta", dtype=like.dtype).to_empty(device=like.device)


def _position_tables(layout: Layout) -> dict[str, Tensor]:
    """The tables of sines in the state dict of the package's sequence models."""
    tables = {}
    if layout.kind == "sequence":
        for side, length in zip(("source", "target"), layout.lengths, strict=True):
            table = SinusoidalPositions(length, layout.settings.dim).table
            tables[f"layers.{side}_pos_embedder.pe"] = table.value
    return tables


def from_folder(path: str | pathlib.Path, *, device: str | torch.device = "cpu") -> Transformer:
    """Return a published model from its folder with config.json and model.safetensors.  Nothing is unpickled."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    folder = pathlib.Path(path)
    with _errors_of("from_folder"):
        for name in (CONFIG, WEIGHTS):
            if not (folder / name).is_file():
                raise ValueError(f"{folder} has no {name}")
        try:
            config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{folder / CONFIG} is not valid JSON ({error})") from None
        if not isinstance(config, dict):
            raise ValueError(f"{folder / CONFIG} holds no arguments by name")
        try:
            state = load_file(folder / WEIGHTS, device=str(device))
        except SafetensorError as error:
            raise ValueError(f"{folder / WEIGHTS} is damaged ({error})") from None
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

    `cls` is its class (see CLASSES), `config` holds its arguments.  In the package, calls decide `causal` and
    `rotary`.  If `total_n_heads` says that it is a part of a wider layer, its output is the first features of ours.
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
            bias=any(group.bias_kv or group.bias_out for group in groups),
            dropout=float(config.get("dropout", 0.0)),
            max_length=max_length,
            own_symbols=False,
            device="meta",
            dtype=like.dtype,
        ).to_empty(device=like.device)
        tensors.fill(layer, list(tensors.of_attention(layer, groups)), state, {})
    return layer


def attention_groups(cls: str, config: Mapping[str, Any], *, causal: bool) -> tuple[package.PackageHeads, ...]:
    """Return the groups of heads in an attention module of the package with these arguments."""
    kind = CLASSES[one_of("arguments", "cls", cls, CLASSES)]
    given = dict(package.by_name(config))
    dim = given.pop("d_model", None)
    if not isinstance(dim, int) or isinstance(dim, bool) or dim < 1:
        raise ValueError(f"d_model must be an integer of at least 1 but is {dim!r}")
    if kind == "dual":
        options = package.options(given, ("n_heads_sa", "n_heads_ra", "dropout"), package.DUAL)
        source = _placeholder_source(options["ra_kwargs"] or {})
        return package.dual_groups({**options, "causal": causal}, dim, "", source)

    optional = package.RELATIONAL[kind] if kind != "sa" else {**package.SENSORY, "add_bias_out": False}
    options = package.options(given, ("n_heads",), {"dropout": 0.0, "total_n_heads": None, **optional})
    heads = options["n_heads"]
    width = package.Width(dim, options["total_n_heads"] or heads, heads)
    inner = {name: options[name] for name in optional}
    if kind == "sa":
        return (package.sensory({"arguments": inner}, "arguments", heads, width, ""),)
    source = _placeholder_source(inner)
    return (package.relational({"ra_kwargs": inner}, kind, heads, width, "", source=source, causal=causal),)


def _placeholder_source(arguments: Mapping[str, Any]) -> SymbolSource:
    """A source for symbols that the caller passes."""
    return RelativeSymbols() if arguments.get("use_relative_positional_symbols") else SymbolicAttention()
