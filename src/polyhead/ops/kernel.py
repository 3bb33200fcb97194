"""Kernels: pairs of functions, forward and backward, registered as custom ops with autograd.

PyTorch knows only the backward pass of a custom op; in forward mode it silently takes the tangent as 0.  So kernels
refuse every other kind of differentiation, and vmap; "auto" then takes an implementation made of PyTorch's own
operations.  Double backward (create_graph=True) and many gradients at once show only when the backward pass runs: then
a kernel raises RuntimeError.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from polyhead.ops.call import AttentionCall, Masks
from polyhead.ops.readable import is_batched
from polyhead.spec import mechanism

LIBRARY = torch.library.Library("polyhead", "FRAGMENT")
"""Our ops in PyTorch's table of all ops, as `torch.ops.polyhead`."""

Outputs = list[Tensor]
Gradients = dict[str, Tensor]
"""Name of a learned tensor -> its gradient."""

REQUIRED = ("q", "k", "v")
"""Tensors that every call has."""

OPTION_SCHEMA = (
    'bool causal, SymInt? window=None, float scale, str normalise, str act, str impl="auto", '
    'str pool="", str network="", float? softcap=None'
)
"""The options of every kernel."""


# --------------------------------------------------------------------------------------- which derivatives are required
def _active_transforms() -> tuple[int, int, int]:
    """How many transforms of torch.func are active: reverse mode, forward mode, vmap."""
    interpreters = torch._C._functorch.get_interpreter_stack() or ()
    names = [interpreter.key().name for interpreter in interpreters]
    return names.count("Grad"), names.count("Jvp"), names.count("Vmap")


# torch.compile calls it once, untraced, and makes a new graph where the transforms change.
_active_transforms._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _is_forward_mode() -> bool:
    """Whether torch.autograd.forward_ad computes tangents."""
    return forward_ad._current_level >= 0


def needs_more_than_backward() -> bool:
    """Whether a derivative may be required in another way than by a backward pass."""
    reverse, forward, _ = _active_transforms()
    return bool(reverse or forward or _is_forward_mode())


def needs_more_than_one_backward() -> bool:
    """Whether a derivative may be required that PyTorch's fused kernels do not support."""
    reverse, forward, vmap = _active_transforms()
    return bool(forward or reverse > 1 or (reverse and vmap) or _is_forward_mode())


def unsupported_by_kernels(call: AttentionCall) -> str | None:
    """Why custom ops cannot give the required derivatives, or None."""
    if call.keep is not None and call.keep.requires_grad:
        return "takes no keep that requires a gradient"
    if any(_active_transforms()) or _is_forward_mode():
        return "takes no vmap, derivatives of torch.func or forward mode"
    return None


def unsupported_by_fused_attention(call: AttentionCall) -> str | None:
    """Why PyTorch's fused kernels cannot take a call, or None: they support one backward pass, and no vmap."""
    if call.keep is not None:
        return "takes no keep"
    if needs_more_than_one_backward():
        return "takes no derivatives in forward mode, of derivatives or under vmap"
    return None


# -------------------------------------------------------------------------------------------------------------- kernels
def empty_output(call: AttentionCall) -> Outputs:
    """An empty tensor for the output (b t h e)."""
    return [call.q.new_empty(*call.q.shape[:3], call.v.shape[-1])]


def first_output(call: AttentionCall, outputs: Outputs) -> Tensor:
    """The first output of a kernel, which most have alone, in the dtype of the call."""
    return outputs[0].to(call.q.dtype)


@dataclass
class Kernel:
    """A pair of functions as the custom op `torch.ops.polyhead.OP_IMPL`.

    A kernel is opaque to `torch.compile`, and its backward pass is a custom op.

    Attributes:
        forward_pass: Computes the outputs of a call.
        backward_pass: Computes the gradients of a call from those of the outputs.
        combine: Turns the outputs into (b t h e); autograd differentiates it.
        empty_outputs: Allocates tensors with the shapes of the outputs.
        saves_outputs: Whether `backward_pass` gets the outputs, too, after their gradients.
        device_types: Where the op runs, such as "cpu"; None means everywhere.
    """

    op: str  # the name of its public function
    impl: str
    forward_pass: Callable[[AttentionCall], Outputs]
    backward_pass: Callable[[AttentionCall, Outputs], Gradients]
    unsupported_reason: Callable[[AttentionCall], str | None]
    preferred: Callable[[AttentionCall], bool]
    combine: Callable[[AttentionCall, Outputs], Tensor] = first_output
    empty_outputs: Callable[[AttentionCall], Outputs] = empty_output
    saves_outputs: bool = False
    device_types: str | None = None

    def __post_init__(self) -> None:
        row = mechanism(self.op)
        # PyTorch takes time for every tensor in a schema, so a kernel has only those of its mechanism.
        self.tensor_names: list[str] = []
        for name in (*row.tensors, *row.optional, *row.torch_only, "bias", "mask", "keep", "cu_seqlens"):
            if name == "symbols":  # a call has them as its values
                self.tensor_names.append("v")
            elif name != "softcap":  # a number, among the options
                self.tensor_names.append(name)
        # Of three names, one required: "Tensor q, Tensor? bias, Tensor? mask".
        tensors = [f"Tensor {name}" if name in REQUIRED else f"Tensor? {name}" for name in self.tensor_names]
        self.schema = f"{', '.join(tensors)}, *, {OPTION_SCHEMA}"
        self.custom_op = _register(self)

    @property
    def op_name(self) -> str:
        """The name of the custom op in `torch.ops.polyhead`."""
        return f"{self.op.removesuffix('_attention')}_{self.impl}"

    def forward(self, call: AttentionCall) -> Tensor:
        """The output (b t h e), differentiable once."""
        tensors, options = self.arguments(call)
        return self.combine(call, self.custom_op(*tensors, **options))

    def arguments(self, call: AttentionCall) -> tuple[list[Tensor | None], dict[str, Any]]:
        """The call as the arguments of the custom op: its tensors in order, and the options."""
        by_name = call.tensors()
        options = {
            "causal": call.masks.causal, "window": call.masks.window, "scale": call.score_scale,
            "normalise": call.normalise, "act": call.act, "impl": call.impl,
            "pool": call.pool, "network": call.network, "softcap": call.softcap,
        }  # fmt: skip
        return [by_name[name] for name in self.tensor_names], options

    def call_of(
        self, tensors: Sequence[Tensor | None], *, causal: bool, window: int | None = None, **options: Any
    ) -> AttentionCall:
        """The inverse of `arguments`."""
        by_name: dict[str, Any] = dict(zip(self.tensor_names, tensors, strict=True))
        masks = Masks(by_name.pop("mask"), causal, window, by_name.pop("cu_seqlens"))
        return AttentionCall(**by_name, masks=masks, **options)


def check_backward(kernel: Kernel, grad_outputs: Outputs) -> None:
    """Raise RuntimeError in a backward pass that is itself differentiated in forward mode, or takes many gradients at
    once, by vmap or autograd's is_grads_batched."""
    reason = ""
    if needs_more_than_backward():
        reason = "has no derivative of its gradient"
    elif not torch.compiler.is_compiling() and any(is_batched(grad) for grad in grad_outputs):
        reason = "takes no batched gradients"
    if reason:
        raise RuntimeError(f"{kernel.op}: impl {kernel.impl!r} {reason}; use impl='reference' or torch.func")


def _register(kernel: Kernel) -> Callable[..., Outputs]:
    """Register the forward pass, with the backward pass as its derivative."""

    def forward(*tensors: Tensor | None, **options: Any) -> list[Tensor]:
        call = kernel.call_of(tensors, **options)
        with torch.autocast(call.q.device.type, enabled=False):
            return kernel.forward_pass(call)

    def fake_forward(*tensors: Tensor | None, **options: Any) -> list[Tensor]:
        return kernel.empty_outputs(kernel.call_of(tensors, **options))

    backward_op = _register_backward(kernel)

    def setup_context(ctx, inputs, keyword_only_inputs, output):  # type: ignore[no-untyped-def]
        ctx.options = dict(keyword_only_inputs)
        saved_outputs = output if kernel.saves_outputs else ()
        ctx.save_for_backward(*inputs, *saved_outputs)

    def gradient(ctx: Any, grad_outputs: Outputs) -> tuple[Tensor | None, ...]:
        check_backward(kernel, grad_outputs)
        saved = list(ctx.saved_tensors)  # read once: activation checkpointing unpacks them only once
        count = len(kernel.tensor_names)
        tensors, outputs = saved[:count], saved[count:]
        gradients = backward_op([*grad_outputs, *outputs], *tensors, **ctx.options)
        # Absent tensors, masks and dropout get None, which PyTorch reads as "no gradient".
        learned = kernel.call_of(tensors, **ctx.options).learned_tensors()
        by_name = dict(zip(learned, gradients, strict=True))
        return tuple(by_name.get(name) for name in kernel.tensor_names)

    definition = f"{kernel.op_name}({kernel.schema}) -> Tensor[]"
    return _define(kernel, definition, forward, fake_forward, gradient, setup_context)


def _register_backward(kernel: Kernel) -> Callable[..., Outputs]:
    """Register the backward pass: gradients of the learned tensors that are present, in the order of `learned_tensors`.

    Its argument `grad_outputs` holds the gradients of the outputs, then the saved outputs.
    """

    def backward(grad_outputs: list[Tensor], *tensors: Tensor | None, **options: Any) -> list[Tensor]:
        call = kernel.call_of(tensors, **options)
        # Autocast would round operations inside the pass once more; the arguments have their dtype already.
        with torch.autocast(call.q.device.type, enabled=False):
            gradients = kernel.backward_pass(call, grad_outputs)
        learned = call.learned_tensors()
        return [_gradient_like(tensor, gradients.get(name)) for name, tensor in learned.items()]

    def fake_backward(grad_outputs: list[Tensor], *tensors: Tensor | None, **options: Any) -> list[Tensor]:
        learned = kernel.call_of(tensors, **options).learned_tensors()
        return [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in learned.values()]

    def no_second_derivative(ctx: Any, *grads: Any) -> None:
        raise RuntimeError(
            f"{kernel.op}: impl {kernel.impl!r} has no second derivative; use impl='reference' or torch.func"
        )

    definition = f"{kernel.op_name}_backward(Tensor[] grad_outputs, {kernel.schema}) -> Tensor[]"
    return _define(kernel, definition, backward, fake_backward, no_second_derivative)


def _define(
    kernel: Kernel,
    definition: str,
    function: Callable[..., Outputs],
    fake: Callable[..., Outputs],
    gradient: Callable[..., Any],
    setup_context: Callable[..., None] | None = None,
) -> Callable[..., Outputs]:
    """Define an op and return it.  `fake` gives shapes without numbers, for torch.compile.

    `torch.library.custom_op` would do the same, but its first call imports torch's compiler, which takes a second.
    """
    name = definition.partition("(")[0]
    dispatch_key = "CompositeExplicitAutograd" if kernel.device_types is None else kernel.device_types.upper()
    LIBRARY.define(definition, tags=(torch.Tag.pt2_compliant_tag,))  # torch.compile keeps it in its graphs
    LIBRARY.impl(name, function, dispatch_key)
    torch.library.register_fake(f"polyhead::{name}", fake, lib=LIBRARY)
    torch.library.register_autograd(f"polyhead::{name}", gradient, setup_context=setup_context, lib=LIBRARY)
    op: Callable[..., Outputs] = getattr(torch.ops.polyhead, name).default
    return op


def _gradient_like(tensor: Tensor, gradient: Tensor | None) -> Tensor:
    """A gradient in the dtype of its tensor; zeros if it is None."""
    if gradient is None:
        return torch.zeros_like(tensor, memory_format=torch.contiguous_format)
    return gradient.to(tensor.dtype).contiguous()
