"""The latent code of any Hugging Face model that calls its attention through the interface of transformers.

    taps = capture(model, input_ids=ids, attention_mask=mask)      one Taps per call of attention, in order
    codes(taps[0], -1, -1)                                         polyhead.analysis reads them like our own

For one forward pass our function computes the model's softmax attention, and records its arguments: q and k as they
enter the scores (after rotation and norms), v, mask and bias.

The inputs, outputs and projections of layers are None: transformers' functions do not get them.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask, sdpa_mask

from polyhead.compat.foreign import check_mask, limits
from polyhead.layers.heads.functions import code_with
from polyhead.layers.taps import GroupTaps, Taps, looking
from polyhead.ops.registry import code_of
from polyhead.ops.softmax.op import softmax_attention

NAME = "polyhead"
"""The name of our function in the interface; it is not saved in a configuration."""

PREFIX = "polyhead_"
"""The names of our heads as `attn_implementation` begin with it, and so do model types that hold them."""

EAGER: set[type] = set()
"""Configurations of models under our names that do not support SDPA: every mask is made for these."""

REFUSED = ("sinks", "head_mask", "indices", "block_indices")
"""Options of some models with which attention is not softmax(q k + bias) over the mask."""


def capture(model: nn.Module, batch: Mapping[str, Any] | Tensor | None = None, **inputs: Any) -> list[Taps]:
    """One forward pass, without dropout, gradients or cache: the taps of every call of attention, in order.

    `batch`: a mapping of inputs (as a tokeniser returns), or the model's main input alone.

    >>> import transformers
    >>> gpt = transformers.GPT2Model(transformers.GPT2Config(vocab_size=100, n_embd=32, n_layer=2, n_head=4))
    >>> taps = capture(gpt, torch.randint(100, (3, 7)))
    >>> [(layer.name, *layer.groups[0].q.shape) for layer in taps]
    [('h.0.attn', 3, 7, 4, 8), ('h.1.attn', 3, 7, 4, 8)]

    A query without a visible key (padding on the left) has the code 0.  Afterwards the model is as before.

    Raises ValueError if the model does not use the interface, or if its attention is not plain softmax attention.
    """
    arguments = inputs_by_name(model, batch, inputs)
    recorder = _Recorder({module: name for name, module in model.named_modules()})
    for module in model.modules():
        if not getattr(module, "_supports_sdpa", True):
            recorder.eager_modules.update(module.modules())
    with torch.inference_mode(False), _recording(model, recorder), looking(model):
        model(**arguments)
    # A model that computes attention itself called nothing of ours; empty taps would look like a result.
    if not recorder.taps:
        name = type(model).__name__
        raise ValueError(
            f"capture: {name} must call its attention through transformers' AttentionInterface but called none"
        )
    return recorder.taps


def is_polyhead(name: object) -> bool:
    """Whether an `attn_implementation` is one of our heads."""
    return isinstance(name, str) and name.startswith(PREFIX)


def is_causal_without_mask(module: nn.Module, is_causal: bool | None, t: int, *, eager: bool) -> bool:
    """Whether a module without a mask is causal for `t` queries: a single one comes after all keys.

    `eager`: it is of a model without SDPA.  These never are: they make every causal mask, and their `is_causal` may be
    wrong, as nothing reads it.
    """
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    return not eager and bool(is_causal) and t > 1


def inputs_by_name(
    model: nn.Module, batch: Mapping[str, Any] | Tensor | None, inputs: Mapping[str, Any]
) -> dict[str, Any]:
    """The inputs of a call by name, with tensors on the model's device; `batch` may be the main input alone.

    Offloaded parameters are on the meta device until accelerate loads them, and then it moves the inputs, too.
    """
    if isinstance(batch, Tensor):
        batch = {getattr(model, "main_input_name", "input_ids"): batch}
    arguments = {**(batch or {}), **inputs}
    device = next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            arguments[name] = value.to(device)
    return arguments


@contextlib.contextmanager
def _recording(model: nn.Module, recorder: "_Recorder") -> Iterator[None]:
    """Context manager: the model uses our attention; afterwards its configurations are as before."""
    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, eager_mask if recorder.eager_modules else sdpa_mask)
    configs = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        heads = getattr(config, _IMPLEMENTATION, None)
        if is_polyhead(heads):  # their code is not that of softmax attention
            raise ValueError(f"capture: {type(model).__name__} must run softmax attention but its heads are {heads}")
        if hasattr(config, _IMPLEMENTATION):
            configs[id(config)] = config

    settings = {_IMPLEMENTATION: NAME, "use_cache": False}  # a cache would copy keys and values
    before = [(c, name, getattr(c, name)) for c in configs.values() for name in settings if hasattr(c, name)]
    token = _ACTIVE.set(recorder)
    try:
        for config, name, _ in before:
            setattr(config, name, settings[name])
        yield
    finally:
        _ACTIVE.reset(token)
        for config, name, value in before:
            setattr(config, name, value)


_IMPLEMENTATION = "_attn_implementation_internal"
_ACTIVE: ContextVar["_Recorder"] = ContextVar("recorder")


def _attend(module: nn.Module, *tensors: Any, **options: Any) -> tuple[Tensor, None]:
    return _ACTIVE.get().attend(module, *tensors, **options), None


@dataclass
class _Recorder:
    """Follows one forward pass."""

    names: dict[nn.Module, str]
    eager_modules: set[nn.Module] = field(default_factory=set)  # the modules of models without SDPA
    taps: list[Taps] = field(default_factory=list)

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        scaling: float | None = None,
        is_causal: bool | None = None,
        position_bias: Tensor | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """The function that the interface calls, on (b h t d) tensors; returns (b t h e)."""
        name = self.names.get(module, type(module).__name__)
        for option in REFUSED:
            if options.get(option) is not None:
                raise ValueError(f"capture: {name} must be plain softmax attention but {option} changes its code")
        # From the layout of transformers (b h t d) to ours (b t h d).
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        t, s = q.shape[1], k.shape[1]
        is_eager = module in self.eager_modules
        if attention_mask is None and is_causal_without_mask(module, is_causal, t, eager=is_eager):
            # As for SDPA: no mask and a causal module mean the causal mask, aligned at the first key.
            attention_mask = torch.ones(t, s, dtype=torch.bool, device=q.device).tril()[None, None]
        bias, mask = limits(masks(f"capture: a mask of {name}", (attention_mask, position_bias), s), t, s, q.dtype)
        scale = q.shape[-1] ** -0.5 if scaling is None else scaling
        extras: dict[str, Any] = {"softcap": softcap, "sinks": flat(s_aux)}
        group = GroupTaps(
            kind="softmax",
            normalise="softmax",
            act="identity",
            depth=1,
            q=q,
            k=k,
            v=v,
            output=softmax_attention(q, k, v, bias=bias, mask=mask, scale=scale, **extras).contiguous(),
            bias=bias,
            mask=mask,
            causal=False,  # foreign masks include causality
            scale=scale,
            w_value=None,
            b_value=None,
            w_out=None,
            value_weight=None,
            coder=partial(code_with, code_of("softmax"), extras),
        )
        self.taps.append(Taps(x=None, context=None, output=None, b_out=None, groups=(group,), name=name))
        return group.output


def flat(sinks: Tensor | None) -> Tensor | None:
    """Scores of sinks, which models pass as `s_aux`, by head (h)."""
    return None if sinks is None else sinks.flatten()


def masks(caller: str, arrays: Sequence[Tensor | None], s: int) -> list[Tensor]:
    """Foreign masks, cut to the first `s` keys: further ones are empty rows of a static cache.

    Raises ValueError, with `caller`, unless each is (b h t s), and Boolean or floating.
    """
    cut = []
    for array in arrays:
        if array is None:
            continue
        if array.ndim != 4:
            raise ValueError(f"{caller} must be (b h t s) but is {tuple(array.shape)}")
        check_mask(caller, array)
        cut.append(array[..., :s])
    return cut
