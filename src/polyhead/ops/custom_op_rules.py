"""Shared parts of the custom ops: how a call becomes a custom op, its derivatives, and its rule for vmap.

PyTorch knows only the backward pass of a custom op; in forward mode it silently takes the tangent as 0.  So backends
made of custom ops refuse every other kind of differentiation, and "auto" then takes an impl of PyTorch's own
operations.  Double backward (create_graph=True) shows only when the backward pass runs.  Then an impl that "auto" chose
lets the reference compute the gradients from the same tensors; an impl chosen by name raises RuntimeError.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from polyhead.ops.call import AttentionCall
from polyhead.spec import MECHANISMS

PUBLIC = {row.folder: row.op for row in MECHANISMS}
"""Op -> name of its public function."""

REFERENCES: dict[str, Callable[[AttentionCall], Tensor]] = {}
"""Op -> its reference, for second derivatives; dispatch.py fills it."""

LEARNED = ("q", "k", "v", "q_rel", "k_rel", "relation_weight", "value_weight", "bias")
"""Tensors that may have a gradient, in the order of a custom op's arguments; an empty tensor stands for None."""

FIXED = ("mask", "keep", "cu_seqlens")
"""The other tensors, in the order of a custom op's arguments."""

Outputs = list[Tensor]
Gradients = dict[str, Tensor]
"""Name among LEARNED -> gradient."""


def _transforms() -> tuple[int, int, int]:
    """How many transforms of torch.func are active: reverse mode, forward mode, vmap."""
    names = [level.key().name for level in torch._C._functorch.get_interpreter_stack() or ()]
    return names.count("Grad"), names.count("Jvp"), names.count("Vmap")


_transforms._dynamo_marked_constant = True  # type: ignore[attr-defined]  # a graph is made anew where they change


def backward_only(x: AttentionCall) -> str | None:
    """Why custom ops cannot give the required derivatives, or None."""
    if x.keep is not None and x.keep.requires_grad:
        return "takes no keep that requires a gradient"
    return "takes no derivatives of torch.func or in forward mode" if differentiated() else None


def backward_once(x: AttentionCall) -> str | None:
    """Why PyTorch's fused kernels cannot give them, or None: they support one backward pass, and no vmap."""
    if x.keep is not None:
        return "takes no keep"
    more = differentiated_further()
    return "takes no derivatives in forward mode, of derivatives or under vmap" if more else None


def differentiated_further() -> bool:
    """May a derivative be required that PyTorch's fused kernels do not support?"""
    reverse, forward, batched = _transforms()
    return bool(forward or reverse > 1 or (reverse and batched) or _dual())


def differentiated() -> bool:
    """May a derivative be required in another way than by a backward pass?"""
    reverse, forward, _ = _transforms()
    return bool(reverse or forward or _dual())


def _dual() -> bool:
    return forward_ad._current_level >= 0


def check_backward(who: str, impl: str) -> None:
    """Call in a backward pass: raises RuntimeError if it is itself differentiated in forward mode."""
    if differentiated():
        raise RuntimeError(f"{who}: impl {impl!r} has no derivative of its gradient; use impl='reference'")


def no_second_derivative(who: str, impl: str) -> Callable[..., None]:
    """The function that autograd calls for the derivative of a backward pass; it raises RuntimeError."""

    def refuse(ctx: Any, *grads: Any) -> None:
        raise RuntimeError(f"{who}: impl {impl!r} has no second derivative; use impl='reference'")

    return refuse


def by_reference(
    run: Callable[[list[Tensor]], Sequence[Tensor]], tensors: list[Tensor], douts: Sequence[Tensor]
) -> list[Tensor]:
    """Gradients of `tensors`, recomputed by PyTorch's own operations, which can be differentiated again."""
    again = torch.is_grad_enabled()
    with torch.enable_grad(), torch.autocast(tensors[0].device.type, enabled=False):
        # Aliases give the gradient of this use alone; the tensors may have been used elsewhere.
        own = [x.view_as(x) for x in tensors]
        outs = list(run(own))
        leaves = [x for x in own if x.requires_grad]
        grads = iter(torch.autograd.grad(outs, leaves, douts, create_graph=again, materialize_grads=True))
    return [next(grads) if x.requires_grad else torch.zeros_like(x) for x in own]


# ------------------------------------------------------------------------------------------------ a call as a custom op
def learned(x: AttentionCall) -> dict[str, Tensor]:
    """The tensors of a call that may have a gradient, by name."""
    given = {name: getattr(x, name) for name in LEARNED}
    return {name: a for name, a in given.items() if a is not None}


def like_values(x: AttentionCall) -> Outputs:
    """An empty tensor for the output (b t h e)."""
    return [x.q.new_empty(*x.q.shape[:3], x.v.shape[-1])]


@dataclass(frozen=True)
class Kernel:
    """The functions of a custom op.

    `forward` computes the outputs of a call, `backward` its gradients from those of the outputs.  `like` returns empty
    tensors with the shapes of the outputs.  `again` computes the outputs by PyTorch's own operations (None: by the op's
    reference).  With `saves_outputs`, `backward` gets the outputs, too, after their gradients.  A `guard` calls
    `forward` and `backward` or replaces them; its argument says whether "auto" chose the impl.
    """

    op: str
    impl: str
    forward: Callable[[AttentionCall], Outputs]
    backward: Callable[[AttentionCall, Outputs], Gradients]
    like: Callable[[AttentionCall], Outputs] = like_values
    again: Callable[[AttentionCall], Outputs] | None = None
    saves_outputs: bool = False
    device_types: str | None = None
    guard: "Guard | None" = None

    @property
    def who(self) -> str:
        """The name of the op's public function."""
        return PUBLIC[self.op]

    def anew(self, x: AttentionCall) -> Outputs:
        """The outputs, recomputed by PyTorch's own operations."""
        return [REFERENCES[self.op](x)] if self.again is None else self.again(x)


class Guard(Protocol):
    """Calls the kernel of a custom op, or replaces its result."""

    def forward(self, kernel: Kernel, x: AttentionCall, auto: bool) -> Outputs: ...

    def backward(self, kernel: Kernel, x: AttentionCall, douts: Outputs, auto: bool) -> Gradients: ...


def packed(x: AttentionCall) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors of a call in the order of LEARNED, and mask, keep and cu_seqlens; empty tensors for None."""
    none = x.q.new_empty(0)
    tensors, fixed = ([getattr(x, name) for name in names] for names in (LEARNED, FIXED))
    return [none if a is None else a for a in tensors], [none if a is None else a for a in fixed]


def unpacked(
    tensors: list[Tensor],
    fixed: list[Tensor],
    *,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    normalise: str = "softmax",
    act: str = "identity",
    pool: str = "",
    network: str = "",
) -> AttentionCall:
    """The inverse of `packed`, given the options that are not tensors; no shape depends on these."""
    q, k, v, *rest = tensors
    optional = [None if x.shape == (0,) else x for x in (*rest, *fixed)]
    q_rel, k_rel, relation_weight, value_weight, bias, mask, keep, cu_seqlens = optional
    return AttentionCall(
        q, k, v, bias, mask, keep, causal, window, cu_seqlens, normalise=normalise, value_weight=value_weight,
        q_rel=q_rel, k_rel=k_rel, relation_weight=relation_weight, act=act, scale=scale, pool=pool,
        network=network,
    )  # fmt: skip


def custom_op(kernel: Kernel) -> Callable[[AttentionCall, bool], Outputs]:
    """Register a kernel as `torch.ops.polyhead.OP_IMPL`; returns a function of a call and of `twice`.

    `twice`: the reference computes second derivatives.  The op is opaque to `torch.compile`; it has a rule for vmap,
    and its backward pass is a custom op, too.
    """
    name = f"polyhead::{kernel.op}_{kernel.impl}"

    def run(
        tensors: list[Tensor],
        fixed: list[Tensor],
        *,
        causal: bool,
        window: int | None = None,
        scale: float,
        normalise: str,
        act: str,
        pool: str = "",
        network: str = "",
        twice: bool = False,
    ) -> list[Tensor]:
        x = unpacked(
            tensors, fixed, causal=causal, window=window, scale=scale, normalise=normalise, act=act, pool=pool,
            network=network,
        )  # fmt: skip
        with torch.autocast(x.q.device.type, enabled=False):
            return kernel.forward(x) if kernel.guard is None else kernel.guard.forward(kernel, x, twice)

    def fake(tensors, fixed, **options):  # type: ignore[no-untyped-def]
        return kernel.like(unpacked(tensors, fixed))

    forward = torch.library.custom_op(name, run, mutates_args=(), device_types=kernel.device_types)
    forward.register_fake(fake)
    backward = _backward_op(f"{name}_backward", kernel)
    forward.register_autograd(_gradient(kernel, backward), setup_context=_setup(kernel))
    forward.register_vmap(vmapped(forward))

    def call(x: AttentionCall, twice: bool) -> Outputs:
        tensors, fixed = packed(x)
        return forward(
            tensors, fixed, causal=x.causal, window=x.window, scale=x.factor, normalise=x.normalise, act=x.act,
            pool=x.pool, network=x.network, twice=twice,
        )  # fmt: skip

    return call


def _backward_op(name: str, kernel: Kernel) -> Callable[..., Outputs]:
    """The custom op of the backward pass: gradients in the order of LEARNED, empty for absent tensors.

    Its argument `douts` has the gradients of the outputs, then the saved outputs.
    """
    guard = kernel.guard

    def run(
        douts: list[Tensor],
        tensors: list[Tensor],
        fixed: list[Tensor],
        *,
        causal: bool,
        window: int | None = None,
        scale: float,
        normalise: str,
        act: str,
        pool: str = "",
        network: str = "",
        twice: bool = False,
    ) -> list[Tensor]:
        x = unpacked(
            tensors, fixed, causal=causal, window=window, scale=scale, normalise=normalise, act=act, pool=pool,
            network=network,
        )  # fmt: skip
        with torch.autocast(x.q.device.type, enabled=False):
            grads = kernel.backward(x, douts) if guard is None else guard.backward(kernel, x, douts, twice)
        return [_as(grads.get(name), like) for name, like in zip(LEARNED, tensors, strict=True)]

    def fake(douts, tensors, fixed, **options):  # type: ignore[no-untyped-def]
        return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors]

    backward = torch.library.custom_op(name, run, mutates_args=(), device_types=kernel.device_types)
    backward.register_fake(fake)
    backward.register_autograd(no_second_derivative(kernel.who, kernel.impl))
    backward.register_vmap(vmapped(backward))
    return backward


def _as(grad: Tensor | None, like: Tensor) -> Tensor:
    """A gradient in the dtype of its tensor; zeros if it is None."""
    if grad is None:
        return torch.zeros_like(like, memory_format=torch.contiguous_format)
    return grad.to(like.dtype).contiguous()


def _setup(kernel: Kernel) -> Callable[..., None]:
    def setup(ctx, inputs, keyword_only_inputs, output):  # type: ignore[no-untyped-def]
        ctx.options = {name: value for name, value in keyword_only_inputs.items() if name != "twice"}
        ctx.twice = keyword_only_inputs["twice"]  # True if "auto" chose this impl
        ctx.save_for_backward(*inputs[0], *inputs[1], *(output if kernel.saves_outputs else ()))

    return setup


def _gradient(kernel: Kernel, backward: Callable[..., Outputs]) -> Callable[..., Any]:
    def gradient(ctx: Any, douts: Outputs) -> tuple[Outputs, list[None]]:
        check_backward(kernel.who, kernel.impl)
        saved, n = list(ctx.saved_tensors), len(LEARNED)  # read once: activation checkpointing unpacks them only once
        tensors, fixed, outs = saved[:n], saved[n : n + len(FIXED)], saved[n + len(FIXED) :]
        if (many := batched(douts)) and not ctx.twice:
            raise RuntimeError(f"{kernel.who}: impl {kernel.impl!r} takes no is_grads_batched; use impl='reference'")
        if ctx.twice and (torch.is_grad_enabled() or many):
            grads = by_reference(lambda own: kernel.anew(unpacked(own, fixed, **ctx.options)), tensors, douts)
        else:
            grads = backward([*douts, *outs], tensors, fixed, **ctx.options, twice=ctx.twice)
        return grads, [None] * len(fixed)

    return gradient


def batched(douts: Outputs) -> bool:
    """Do many gradients come as one (is_grads_batched)?  That is an older vmap, without rules for custom ops."""
    return not torch.compiler.is_compiling() and any(map(torch._C._functorch.is_legacy_batchedtensor, douts))


def vmapped(op: Callable[..., Any]) -> Callable[..., Any]:
    """The vmap rule of an op on lists of tensors; the first tensor and the results are (b ...).

    The new dimension is folded into b.  If a tensor has no dimension b, such as a bias by offset, the op is called once
    per entry of the new dimension.  An empty one-dimensional tensor stands for an absent one.
    """

    def rule(info: Any, in_dims: Any, *args: Any, **options: object) -> tuple[Any, Any]:
        call = functools.partial(op, **options)
        (leaves, form), (dims, _), n = tree_flatten(args), tree_flatten(in_dims), info.batch_size
        paired = zip(leaves, dims, strict=True)
        whole = [x.expand(n, *x.shape) if dim is None else x.movedim(dim, 0) for x, dim in paired]
        b = whole[0].shape[1]

        if all(x.shape[1:] == (0,) or (x.ndim == 5 and x.shape[1] == b) for x in whole):
            folded = [x[0] if x.ndim == 2 else x.flatten(0, 1) for x in whole]
            outs = call(*tree_unflatten(folded, form))  # gradients of absent tensors are empty
            out = tree_map(lambda x: x.new_empty(n, 0) if x.shape == (0,) else x.unflatten(0, (n, b)), outs)
        else:
            outs = [call(*tree_unflatten([x[i] for x in whole], form)) for i in range(n)]
            out = tree_map(lambda *each: torch.stack(each), *outs)
        return out, tree_map(lambda _: 0, out)

    return rule
