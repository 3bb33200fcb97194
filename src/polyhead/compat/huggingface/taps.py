"""The latent code of any Hugging Face model that calls its attention through the interface of transformers.

    taps = capture(model, input_ids=ids, attention_mask=mask)      one Taps per call of attention, in order
    codes(taps[0], -1, -1)                                         polyhead.analysis reads them like our own

For one forward pass our function computes the model's softmax attention, and records its arguments: q and k as they
enter the scores (after rotation and norms), v, mask and bias.

The weights around the code are found by following tensors, not by name.  A linear layer is the value projection if v is
a view of its output; it is the output projection if its input is the output of attention.  If another operation lies
between or changes the result (a norm, a gate, a hook, a cache, an adapter), or if accelerate has offloaded them, the
weights are None.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask, sdpa_mask
from transformers.pytorch_utils import Conv1D

from polyhead.compat.foreign import check_mask, limits, softmax_group
from polyhead.layers.taps import Taps, looking

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
    >>> [(layer.name, *layer.q.shape) for layer in taps]
    [('h.0.attn', 3, 7, 4, 8), ('h.1.attn', 3, 7, 4, 8)]

    `context` is the tensor from which the values are computed.  A query without a visible key (padding on the left) has
    the code 0.  Afterwards the model is as before.

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
    """Context manager: use our attention and hook linear layers; afterwards restore configurations and remove hooks."""
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

    # The matrices of an adapter read the input of its base layer, but are no projections.
    adapters = [module for module in model.modules() if isinstance(getattr(module, "base_layer", None), nn.Module)]
    matrices: set[nn.Module] = set()
    for adapter in adapters:
        for name, child in adapter.named_children():
            if name != "base_layer":
                matrices.update(child.modules())

    settings = {_IMPLEMENTATION: NAME, "use_cache": False}  # a cache would copy keys and values
    before = [(c, name, getattr(c, name)) for c in configs.values() for name in settings if hasattr(c, name)]
    hooks = []
    token = _ACTIVE.set(recorder)
    try:
        for config, name, _ in before:
            setattr(config, name, settings[name])
        for module in model.modules():
            if type(module) in (nn.Linear, Conv1D) and module not in matrices:  # a subclass may compute something else
                hooks.append(module.register_forward_hook(recorder.linear, prepend=True))
                hooks.append(module.register_forward_hook(recorder.forget_if_changed))
        for adapter in adapters:
            hooks.append(adapter.register_forward_hook(recorder.forget_if_changed))
        yield
    finally:
        _ACTIVE.reset(token)
        for hook in hooks:
            hook.remove()
        for config, name, value in before:
            setattr(config, name, value)


_IMPLEMENTATION = "_attn_implementation_internal"
_ACTIVE: ContextVar["_Recorder"] = ContextVar("recorder")


def _attend(module: nn.Module, *tensors: Any, **options: Any) -> tuple[Tensor, None]:
    return _ACTIVE.get().attend(module, *tensors, **options), None


@dataclass(frozen=True)
class _Linear:
    """A call of a linear layer."""

    module: nn.Module
    x: Tensor
    y: Tensor
    version: int  # version of y, which detects in-place changes

    def weight_and_bias(self) -> list[Tensor | None]:
        """The weight [out, in] and the bias; None where there is none, or accelerate has offloaded it."""
        weight: Any = self.module.weight
        if not isinstance(self.module, nn.Linear):  # Conv1D of transformers stores it transposed
            weight = weight.T
        known: list[Any] = [weight, self.module.bias]
        return [None if x is None or x.is_meta else x.detach() for x in known]


@dataclass
class _Recorder:
    """Follows one forward pass."""

    names: dict[nn.Module, str]
    eager_modules: set[nn.Module] = field(default_factory=set)  # the modules of models without SDPA
    taps: list[Taps] = field(default_factory=list)
    linears: list[_Linear] = field(default_factory=list)  # linear calls since the last attention, without `output`
    output: _Linear | None = None  # the output projection of the last attention
    version: int = 0  # version of the last attention's output

    def linear(self, module: nn.Module, args: tuple[Tensor, ...], y: Tensor) -> None:
        """A hook on linear layers: the first that reads the output of attention is the output projection."""
        if not args:
            return
        call = _Linear(module, args[0], y, y._version)
        if not self.taps or not self._reads_heads(call.x):
            self.linears.append(call)
        elif self.output is None:
            self.output, heads = call, self.taps[-1].groups[0]
            weight, bias = call.weight_and_bias()
            if weight is not None:
                weight = weight.unflatten(1, heads.output.shape[2:]).transpose(0, 1)
            self._set_output(y.reshape(*heads.output.shape[:2], -1), weight, bias)

    def forget_if_changed(self, module: nn.Module, args: object, y: Tensor) -> None:
        """A hook on linear layers and adapters, after all other hooks: a changed output has unknown weights."""
        call = self.output
        if call is None or (y is call.y and y._version == call.version):
            return
        if any(part is call.module for part in module.modules()):
            self._set_output(None, None, None)

    def _set_output(self, output: Tensor | None, weight: Tensor | None, bias: Tensor | None) -> None:
        layer = self.taps[-1]
        group = replace(layer.groups[0], w_out=weight)
        self.taps[-1] = replace(layer, output=output, b_out=bias, groups=(group,))

    def _reads_heads(self, x: Tensor) -> bool:
        heads = self.taps[-1].groups[0].output
        is_same = x.data_ptr() == heads.data_ptr() and x.numel() == heads.numel() and x.is_contiguous()
        return is_same and x.shape[-1] == heads.shape[2:].numel() and heads._version == self.version

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
        x, context, w_value, b_value = self._inputs(module, q, v)
        group = softmax_group(
            q, k, v, bias=bias, mask=mask, scale=scaling, softcap=softcap, sinks=flat(s_aux), w_value=w_value,
            b_value=b_value,
        )  # fmt: skip
        self.version = group.output._version
        self.linears.clear()
        self.output = None
        self.taps.append(Taps(x=x, context=context, output=None, b_out=None, groups=(group,), name=name))
        return group.output

    def _inputs(self, module: nn.Module, q: Tensor, v: Tensor) -> tuple[Tensor | None, ...]:
        """What the queries and the values are made of (b t m), (b s m), and the value projection, where known."""
        (b, t, _, _), s = q.shape, v.shape[1]
        parts = set(module.modules())
        inputs = {id(call.x): call.x for call in self.linears if call.module in parts}
        for call in reversed(self.linears):
            rows = _columns(v, call)
            if rows is None:
                continue
            # Queries read the same tensor as values or, in cross-attention, the only other one.
            others = [x for key, x in inputs.items() if key != id(call.x)] or [call.x]
            x = None
            if len(others) == 1 and others[0].shape[:-1].numel() == b * t:
                x = others[0].reshape(b, t, -1)
            w_value, b_value = (None if known is None else known[rows] for known in call.weight_and_bias())
            return x, call.x.reshape(b, s, -1), w_value, b_value
        return None, None, None, None


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


def _columns(v: Tensor, call: _Linear) -> Tensor | None:
    """(g e): the outputs of a linear layer (b s c) that v (b s g e) is a view of, or None if it is not."""
    y = call.y
    b, s, g, e = v.shape
    c = y.shape[-1]
    is_view = y.untyped_storage().data_ptr() == v.untyped_storage().data_ptr() and y._version == call.version
    has_rows = (b == 1 or v.stride(0) == s * c) and (s == 1 or v.stride(1) == c)
    if not is_view or not has_rows or not y.is_contiguous() or y.numel() != b * s * c:
        return None
    first = int(v.storage_offset() - y.storage_offset())
    heads, widths = torch.arange(g, device=v.device), torch.arange(e, device=v.device)
    columns = first + heads[:, None] * int(v.stride(2)) + widths * int(v.stride(3))
    return columns if columns.min() >= 0 and columns.max() < c else None
