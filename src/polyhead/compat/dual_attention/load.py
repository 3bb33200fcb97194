"""The package `dual-attention` (Altabaa and Lafferty 2024): its models and state dicts as ours, and back.

    load / save                     a state dict and its model's arguments  <->  polyhead.Transformer
    from_folder, to_folder          the same, as published: config.json and model.safetensors
    load_block, load_attention      one of its blocks, or of its attention modules

    >>> parts = {"heads": Softmax(4), "positions": Rotary(), "feedforward": Swiglu(), "causal": True}
    >>> model = Transformer(TransformerConfig(Tokens(50), Logits(50, tied=True), dim=32, **parts))
    >>> state_dict, arguments = save(model)             # of the package's TransformerLM(**arguments)
    >>> arguments["n_heads"], arguments["activation"], arguments["pos_enc_type"], len(state_dict)
    (4, 'swiglu', 'RoPE', 26)
    >>> load(state_dict, arguments)(torch.randint(50, (2, 9))).shape
    torch.Size([2, 9, 50])

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
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from polyhead.compat.dual_attention import arguments as read, export as write, tensors as places
from polyhead.compat.dual_attention.models import Layout, plan
from polyhead.compat.foreign import check_functions, uncompiled
from polyhead.config import RelativeSymbols, Rotary, SymbolicAttention, SymbolSource, TransformerConfig, Values, Vectors
from polyhead.layers.attention import MultiHeadAttention
from polyhead.layers.block import TransformerBlock
from polyhead.layers.positions import SinusoidalPositions
from polyhead.models.transformer import Transformer
from polyhead.spec.shapes import one_of

WHO = "dual_attention"
CONFIG, WEIGHTS = "config.json", "model.safetensors"
CLASSES = {
    "Attention": "sa",
    "RelationalAttention": "ra",
    "RelationalCrossAttention": "rca",
    "DisentangledRelationalCrossAttention": "disrca",
    "DualAttention": "dual",
}
"""The package's attention modules."""


@contextlib.contextmanager
def _named(what: str) -> Iterator[None]:
    """Context manager: error messages inside begin with the name of the function."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{WHO}.{what}: {error}") from None


# --------------------------------------------------------------------------------------------------------------- models
def load(state_dict: Mapping[str, Tensor], config: Mapping[str, Any] | None = None, **arguments: Any) -> Transformer:
    """A model of the package as ours, on the device and in the dtype of its tensors.

    `config`: the arguments of its constructor, as in a published config.json; they may also be given by name.  The
    prefix `_orig_mod.` of torch.compile is removed.

    Raises ValueError, which names it, for an argument or a key that is missing or unknown, a tensor of a wrong shape,
    and an option without an equivalent in ours.
    """
    with _named("load"):
        its = plan({**({} if config is None else read.by_name(config)), **arguments})
        state = _tensors(state_dict, its.unused)
        like = next(iter(state.values()))
        model = _build(its.settings, like)
        places.fill(model, list(places.of_model(model, its)), state, _constants(its))
    return model


def _tensors(state_dict: Mapping[str, Tensor], unused: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """The tensors without those that no head reads.  Raises ValueError unless all are floating tensors."""
    state = {key: value for key, value in uncompiled(state_dict).items() if not key.startswith(unused)}
    for key, value in state.items():
        if not isinstance(value, Tensor) or not value.is_floating_point():
            came = f"of {value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise ValueError(f"{key} must be a floating tensor but is {came}")
    if not state:
        raise ValueError("the state dict is empty")
    return state


def _build(settings: TransformerConfig, like: Tensor) -> Transformer:
    parts = [settings, settings.encoder] if isinstance(settings.encoder, TransformerConfig) else [settings]
    groups = [group for part in parts for group in part.layer_heads(0)]
    if any(getattr(getattr(group, "symbols", None), "tied", False) for group in groups):
        with torch.random.fork_rng(devices=[]):  # not on the meta device: to_empty would break shared tensors
            return Transformer(settings, device=like.device, dtype=like.dtype)
    return Transformer(settings, device="meta", dtype=like.dtype).to_empty(device=like.device)


def _constants(its: Layout) -> dict[str, Tensor]:
    """The tables of sines in the state dict of its sequence models."""
    names = ("source", "target") if its.kind == "sequence" else ()
    sides = zip(names, its.lengths, strict=True) if names else ()
    dim = its.settings.dim
    return {f"layers.{name}_pos_embedder.pe": SinusoidalPositions(n, dim).table.value for name, n in sides}


_MODULES = {"sa": r"self_att\w+", "ra": r"relational_attention", "cross": r"cross_attn"}


def save(model: Transformer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The inverse of `load`: a state dict, copied, and the arguments of the package's constructor.

    A bias of zeros is omitted if the package does not need it.

    Raises ValueError, which names the field or the tensor, for all that the package cannot express: for instance non-
    zero entries of the output projection between two kinds of heads, which training creates, or a user's function.
    """
    check_functions(f"{WHO}.save", model)
    with _named("save"):
        ours = write.plain(model.config)
        sides = {"": model.config, "decoder": model.config, "encoder": model.config.encoder}
        biased = [side for side, settings in sides.items() if getattr(settings, "bias", False)]
        every = {(side, f"{module}.{what}") for side in biased for module in _MODULES for what in ("kv", "out")}
        _, state = _written(model, ours, every)
        needed = {(side, kind) for side, kind in every if _any_bias(state, side, kind, _shares(sides[side]))}
        its, state = _written(model, ours, needed)
    return state, its


def _written(
    model: Transformer, ours: TransformerConfig, biases: write.Biases
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    its = write.arguments(ours, biases)
    layout = plan(its)
    if differs := write.difference(write.plain(layout.settings), ours):
        raise ValueError(differs)
    state = places.take(model, list(places.of_model(model, layout)))
    like = next(iter(state.values()))
    state = {key: value for key, value in state.items() if ".target_embedder.weights." not in key}
    return its, state | {key: value.to(like) for key, value in _constants(layout).items()}


def _shares(settings: Any) -> bool:
    return isinstance(settings, TransformerConfig) and any(group.share for group in settings.layer_heads(0))


def _any_bias(state: Mapping[str, Tensor], side: str, kind: str, shared: bool) -> bool:
    """Whether a bias of these modules has a non-zero entry; shared keys belong to the relational module."""
    module, _, what = kind.partition(".")
    letter = "wo" if what == "out" else "wv" if shared and module == "sa" else "w[kv]"
    pattern = re.compile(rf"{side and side + '_blocks'}.*{_MODULES[module]}\.{letter}\w*\.bias$")
    return any(value.any() for key, value in state.items() if pattern.search(key))


def from_folder(path: str | pathlib.Path, *, device: str | torch.device = "cpu") -> Transformer:
    """Load a published model: a folder with config.json and model.safetensors.  Nothing is unpickled."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    folder = pathlib.Path(path)
    with _named("from_folder"):
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


def to_folder(model: Transformer, path: str | pathlib.Path) -> None:
    """Write a folder for `from_folder` and the package's `from_pretrained`; a tensor with several keys is written
    once."""
    from safetensors.torch import save_file

    state, config = save(model)
    folder = pathlib.Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    distinct = {value.data_ptr(): key for key, value in reversed(state.items())}
    kept = {key: value.contiguous() for key, value in state.items() if distinct[value.data_ptr()] == key}
    save_file(kept, folder / WEIGHTS, {"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


# --------------------------------------------------------------------------------------------------------- single parts
def load_block(
    state_dict: Mapping[str, Tensor], config: Mapping[str, Any], *, rotary: bool = False, max_length: int = 2048
) -> TransformerBlock:
    """A block of the package, of an encoder or (with n_heads_cross) a decoder, as ours; the caller passes symbols.

    `rotary`: the package's calls pass rotary angles.  Position-relative symbols are passed as their table.
    """
    with _named("load_block"):
        dim, own = _width(config)
        dual, decoder = "n_heads_sa" in own or "n_heads_ra" in own, "n_heads_cross" in own
        source = _given_source(own.get("ra_kwargs") or {})
        found = read.block(own, dim, dual=dual, decoder=decoder, source=source)
        ends: dict[str, Any] = {"inputs": Vectors(dim), "outputs": Values(1), "dim": dim, "layers": 1}
        if decoder:
            ends["encoder"] = TransformerConfig(Vectors(dim), Values(1), dim=dim, layers=1)
        settings = TransformerConfig(
            **(ends | dict(found.fields)), positions=Rotary() if rotary else None, max_length=max_length
        )
        state = _tensors(state_dict)
        like = next(iter(state.values()))
        made = Transformer(settings, device="meta", dtype=like.dtype).blocks[0].to_empty(device=like.device)
        assert isinstance(made, TransformerBlock)
        places.fill(made, list(places.of_block(made, found)), state, {})
    return made


def _width(config: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    """The model width, and the other arguments."""
    own = dict(read.by_name(config))
    dim = own.pop("d_model", None)
    if not isinstance(dim, int) or isinstance(dim, bool) or dim < 1:
        raise ValueError(f"d_model must be an integer of at least 1 but is {dim!r}")
    return dim, own


def load_attention(
    state_dict: Mapping[str, Tensor],
    config: Mapping[str, Any],
    *,
    cls: str = "DualAttention",
    causal: bool = False,
    rotary: bool = False,
    max_length: int = 2048,
) -> MultiHeadAttention:
    """An attention module of the package as our layer; the caller passes symbols, relative ones as a table.

    `cls`: its class (see CLASSES); `config`: its arguments.  `causal` and `rotary`: in the package its calls decide
    these.  If `total_n_heads` says that it is a part of a wider layer, its output is the first features of ours.
    """
    with _named("load_attention"):
        kind, (dim, own) = CLASSES[one_of("arguments", "cls", cls, CLASSES)], _width(config)
        groups = _groups(kind, dim, own, causal)
        state = _tensors(state_dict)
        like = next(iter(state.values()))
        layer = MultiHeadAttention(
            dim,
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
        places.fill(layer, list(places.of_attention(layer, groups)), state, {})
    return layer


def _groups(kind: str, dim: int, own: Mapping[str, Any], causal: bool) -> tuple[read.PackageHeads, ...]:
    if kind == "dual":
        its = read.options(own, ("n_heads_sa", "n_heads_ra", "dropout"), read.DUAL)
        return read.dual_groups({**its, "causal": causal}, dim, "", _given_source(its["ra_kwargs"] or {}))
    wanted = {**read.SENSORY, "add_bias_out": False} if kind == "sa" else read.RELATIONAL[kind]
    its = read.options(own, ("n_heads",), {"dropout": 0.0, "total_n_heads": None, **wanted})
    heads, inner = its["n_heads"], {name: its[name] for name in wanted}
    width = read.Width(dim, its["total_n_heads"] or heads, heads)
    if kind == "sa":
        return (read.sensory({"arguments": inner}, "arguments", heads, width, ""),)
    source = _given_source(inner)
    return (read.relational({"ra_kwargs": inner}, kind, heads, width, "", source=source, causal=causal),)


def _given_source(its: Mapping[str, Any]) -> SymbolSource:
    """A placeholder source for symbols that the caller passes."""
    return RelativeSymbols() if its.get("use_relative_positional_symbols") else SymbolicAttention()
