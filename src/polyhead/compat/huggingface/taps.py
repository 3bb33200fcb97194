"""The latent code of any Hugging Face model that calls its attention through the interface of transformers.

    taps = capture(model, input_ids=ids, attention_mask=mask)      one Taps per call of attention, in order
    codes(taps[0], -1, -1)                                         polyhead.analysis reads them like our own

For one forward pass our function computes the model's attention.  It computes the same softmax attention and records
its arguments: q and k as they enter the scores (after rotation and norms), v, mask and bias.

The weights around the code are found by following tensors, not by name.  A linear layer is the value projection if v is
a view of its output; it is the output projection if its input is the output of attention.  If another operation lies
between (a norm of values, a gate on the output, a cache), or changes the result (a hook, an adapter of PEFT), or if
accelerate has offloaded them, the weights are None.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from polyhead.compat.foreign import check_mask, limits, softmax_group
from polyhead.layers.taps import Taps, looking
from polyhead.spec.optional import optional

NAME = "polyhead"
"""The name of our function in the interface; it is not saved in a configuration."""

PREFIX = "polyhead_"
"""The names of our heads as `attn_implementation` begin with it, and so do model types that hold them."""

EAGER: set[type] = set()
"""Configurations of models under our names that do not support SDPA: every mask is made for these; see `causal`."""

REFUSED = ("softcap", "s_aux", "sinks", "head_mask", "indices", "block_indices")
"""Options of some models with which attention is not softmax(q k + bias) over the mask."""


def capture(model: nn.Module, batch: Mapping[str, Any] | Tensor | None = None, **inputs: Any) -> list[Taps]:
    """One forward pass, without dropout, gradients or cache: the taps of every call of attention, in order.

    `batch`: a mapping of inputs (as a tokeniser returns), or the model's main input alone; `inputs` adds inputs by
    name.  Tensors are moved to the model's device.

    >>> import transformers
    >>> gpt = transformers.GPT2Model(transformers.GPT2Config(vocab_size=100, n_embd=32, n_layer=2, n_head=4))
    >>> taps = capture(gpt, torch.randint(100, (3, 7)))
    >>> [(layer.name, *layer.q.shape) for layer in taps]
    [('h.0.attn', 3, 7, 4, 8), ('h.1.attn', 3, 7, 4, 8)]

    `context` is the tensor from which the values are computed.  A query without a visible key (padding on the left) has
    the code 0.  Afterwards the model's attention, configuration and modes are restored, and hooks are removed.

    Raises ValueError if the model does not use the interface, or if its attention is not plain softmax attention.
    """
    given = by_name(model, batch, inputs)
    names = {module: name for name, module in model.named_modules()}
    recorder = _Recorder(names, {part for inner in without_sdpa(model) for part in inner.modules()})
    with torch.inference_mode(False), _watched(model, recorder), looking(model):
        model(**given)
    if not recorder.found:
        raise ValueError(
            f"capture: {type(model).__name__} must call its attention through transformers' AttentionInterface "
            "but called none"
        )
    return recorder.found


def ours(name: object) -> bool:
    """Whether an `attn_implementation` is one of our heads."""
    return isinstance(name, str) and name.startswith(PREFIX)


def without_sdpa(model: nn.Module) -> list[nn.Module]:
    """The inner models that do not support SDPA."""
    return [module for module in model.modules() if not getattr(module, "_supports_sdpa", True)]


def causal(module: nn.Module, is_causal: bool | None, *, eager: bool) -> bool:
    """Whether a module without a mask is causal.

    `eager`: it is of a model without SDPA.  These never are: they make every causal mask, and their `is_causal` may be
    wrong, as nothing reads it.
    """
    return not eager and bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)


def by_name(model: nn.Module, batch: Mapping[str, Any] | Tensor | None, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs of a call by name, with tensors on the model's device; `batch` may be the main input alone.

    Offloaded parameters are on the meta device until accelerate loads them, and then it moves the inputs, too.
    """
    given = {getattr(model, "main_input_name", "input_ids"): batch} if isinstance(batch, Tensor) else batch or {}
    device = next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))
    return {name: x.to(device) if isinstance(x, Tensor) else x for name, x in {**given, **inputs}.items()}


@contextlib.contextmanager
def _watched(model: nn.Module, recorder: "_Recorder") -> Iterator[None]:
    """Context manager: use our attention and hook linear layers; afterwards restore configurations and remove hooks."""
    linear = _interface(bool(recorder.eager))
    configs = {id(c): c for module in model.modules() if hasattr(c := getattr(module, "config", None), _IMPL)}
    foreign = [name for c in configs.values() if ours(name := getattr(c, _IMPL))]
    if foreign:  # their code is not that of softmax attention
        raise ValueError(f"capture: {type(model).__name__} must run softmax attention but its heads are {foreign[0]}")
    during = {_IMPL: NAME, "use_cache": False}  # a cache would copy keys and values
    before = [(c, name, getattr(c, name)) for c in configs.values() for name in during if hasattr(c, name)]
    hooks = []
    active = _ACTIVE.set(recorder)
    try:
        for config, name, _ in before:
            setattr(config, name, during[name])
        adapters = [module for module in model.modules() if isinstance(getattr(module, "base_layer", None), nn.Module)]
        others = [child for module in adapters for name, child in module.named_children() if name != "base_layer"]
        matrices = {part for child in others for part in child.modules()}  # they read the input of the base layer
        for module in model.modules():
            if type(module) in linear and module not in matrices:  # a subclass may compute something else
                hooks.append(module.register_forward_hook(recorder.linear, prepend=True))
                hooks.append(module.register_forward_hook(recorder.changed))
        hooks += [module.register_forward_hook(recorder.changed) for module in adapters]
        yield
    finally:
        _ACTIVE.reset(active)
        for hook in hooks:
            hook.remove()
        for config, name, value in before:
            setattr(config, name, value)


_IMPL = "_attn_implementation_internal"
_ACTIVE: ContextVar["_Recorder"] = ContextVar("recorder")


def _interface(eager: bool) -> tuple[type[nn.Module], ...]:
    """Register our attention with the masks of SDPA, or of eager attention; returns the classes of linear layers."""
    with optional("polyhead.compat.huggingface", "polyhead[hf]"):
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import eager_mask, sdpa_mask
        from transformers.pytorch_utils import Conv1D

    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, eager_mask if eager else sdpa_mask)
    return nn.Linear, Conv1D


def _attend(module: nn.Module, *tensors: Any, **options: Any) -> tuple[Tensor, None]:
    return _ACTIVE.get().attend(module, *tensors, **options), None


@dataclass(frozen=True)
class _Linear:
    """A call of a linear layer."""

    module: nn.Module
    x: Tensor
    y: Tensor
    version: int  # version of y, which detects in-place changes

    @property
    def weight(self) -> Tensor | None:
        """The weight [out, in], or None if it is offloaded; Conv1D of transformers stores it transposed."""
        weight = self.module.get_parameter("weight").detach()
        return None if weight.is_meta else weight if isinstance(self.module, nn.Linear) else weight.T

    @property
    def bias(self) -> Tensor | None:
        bias = self.module.bias
        return bias.detach() if isinstance(bias, Tensor) and not bias.is_meta else None


@dataclass
class _Recorder:
    """Follows one forward pass."""

    names: dict[nn.Module, str]
    eager: set[nn.Module]  # the modules of models without SDPA
    found: list[Taps] = field(default_factory=list)
    linears: list[_Linear] = field(default_factory=list)  # linear calls since the last attention, without `out`
    out: _Linear | None = None  # the output projection of the last attention
    version: int = 0  # version of the last attention's output

    def linear(self, module: nn.Module, args: tuple[Tensor, ...], y: Tensor) -> None:
        """A hook on linear layers."""
        if not args:
            return
        call = _Linear(module, args[0], y, y._version)
        if not self.found or not self._reads_heads(call):
            self.linears.append(call)
        elif self.out is None:
            self.out, taps = call, self.found[-1]
            heads = taps.groups[0]
            weight, (h, e) = call.weight, heads.output.shape[2:]
            w_out = None if weight is None else weight.unflatten(1, (h, e)).transpose(0, 1)
            output = y.reshape(*heads.output.shape[:2], -1)
            self.found[-1] = replace(taps, output=output, b_out=call.bias, groups=(replace(heads, w_out=w_out),))

    def changed(self, module: nn.Module, args: object, y: Tensor) -> None:
        """A hook on linear layers and adapters, after all other hooks: a changed output has unknown weights."""
        out = self.out
        if out is None or (y is out.y and y._version == out.version):
            return
        if any(part is out.module for part in module.modules()):
            taps = self.found[-1]
            self.found[-1] = replace(taps, output=None, b_out=None, groups=(replace(taps.groups[0], w_out=None),))

    def _reads_heads(self, call: _Linear) -> bool:
        heads, x = self.found[-1].groups[0].output, call.x
        same = x.data_ptr() == heads.data_ptr() and x.numel() == heads.numel() and x.is_contiguous()
        return same and x.shape[-1] == heads.shape[2:].numel() and heads._version == self.version

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
        **options: Any,
    ) -> Tensor:
        """The function that the interface calls, on (b h t d) tensors; returns (b t h e)."""
        name = self.names.get(module, type(module).__name__)
        for option in REFUSED:
            if options.get(option) is not None:
                raise ValueError(f"capture: {name} must be plain softmax attention but {option} changes its code")
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        if attention_mask is None and causal(module, is_causal, eager=module in self.eager) and q.shape[1] > 1:
            # As for SDPA: no mask and a causal module mean the causal mask, aligned at the first key.
            ones = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device)
            attention_mask = ones.tril()[None, None]
        given = masks(f"capture: a mask of {name}", (attention_mask, position_bias), k.shape[1])
        bias, mask = limits(given, q.shape[1], k.shape[1], q.dtype)
        x, context, w_value, b_value = self._inputs(module, q, v)
        group = softmax_group(q, k, v, bias=bias, mask=mask, scale=scaling, w_value=w_value, b_value=b_value)
        self.version = group.output._version
        self.linears.clear()
        self.out = None
        self.found.append(Taps(x=x, context=context, output=None, b_out=None, groups=(group,), name=name))
        return group.output

    def _inputs(self, module: nn.Module, q: Tensor, v: Tensor) -> tuple[Tensor | None, ...]:
        """What the queries and the values are made of (b t m), (b s m), and the value projection, where known."""
        (b, t, _, _), s = q.shape, v.shape[1]
        inner = set(module.modules())
        inputs = {id(call.x): call.x for call in self.linears if call.module in inner}
        for call in reversed(self.linears):
            rows = _columns(v, call)
            if rows is None:
                continue
            others = [x for key, x in inputs.items() if key != id(call.x)] or [call.x]
            x = others[0].reshape(b, t, -1) if len(others) == 1 and others[0].shape[:-1].numel() == b * t else None
            weight, bias = (None if array is None else array[rows] for array in (call.weight, call.bias))
            return x, call.x.reshape(b, s, -1), weight, bias
        return None, None, None, None


def masks(what: str, given: Sequence[Tensor | None], s: int) -> list[Tensor]:
    """Foreign masks, cut to the first `s` keys: further ones are empty rows of a static cache.

    Raises ValueError, with `what`, unless each is (b h t s), and Boolean or floating.
    """
    found = [array for array in given if array is not None]
    for array in found:
        if array.ndim != 4:
            raise ValueError(f"{what} must be (b h t s) but is {tuple(array.shape)}")
        check_mask(what, array)
    return [array[..., :s] for array in found]


def _columns(v: Tensor, call: _Linear) -> Tensor | None:
    """(g e): the outputs of a linear layer (b s c) that v (b s g e) is a view of, or None if it is not."""
    y = call.y
    b, s, g, e = v.shape
    c = y.shape[-1]
    mine = y.untyped_storage().data_ptr() == v.untyped_storage().data_ptr() and y._version == call.version
    rows = (b == 1 or v.stride(0) == s * c) and (s == 1 or v.stride(1) == c)
    if not mine or not rows or not y.is_contiguous() or y.numel() != b * s * c:
        return None
    first, head, width = int(v.storage_offset() - y.storage_offset()), int(v.stride(2)), int(v.stride(3))
    columns = torch.tensor([[first + i * head + j * width for j in range(e)] for i in range(g)], device=v.device)
    return columns if columns.min() >= 0 and columns.max() < c else None
