"""What the custom ops of several backends share: which derivatives they have, and a rule for vmap.

Of a custom op PyTorch knows the backward pass and no more: in forward mode it takes the tangent for 0, without a word.
So a backend made of such ops refuses to be differentiated in any other way, and "auto" takes one of PyTorch's own
operations, at every size.  That a backward pass is to be differentiated again (create_graph=True) is known only when it
runs: then tiles that "auto" chose have the reference compute it, from the same tensors, and others refuse.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from polyhead.ops.latent_code import Inputs

REFERENCES: dict[str, Callable[..., Tensor]] = {}
"""Op -> its reference, for `by_reference`: written by dispatch.py."""


def _transforms() -> tuple[int, int, int]:
    """How many of torch.func's transforms we are in: of reverse mode, of forward mode, of vmap."""
    names = [level.key().name for level in torch._C._functorch.get_interpreter_stack() or ()]
    return names.count("Grad"), names.count("Jvp"), names.count("Vmap")


_transforms._dynamo_marked_constant = True  # type: ignore[attr-defined]  # a graph is made anew where they change


def backward_only(inputs: Inputs) -> str | None:
    """Why custom ops cannot give the derivatives that are asked for, or None."""
    if inputs.keep is not None and inputs.keep.requires_grad:
        return "takes no keep that requires a gradient"
    return "takes no derivatives of torch.func or in forward mode" if differentiated() else None


def backward_once(inputs: Inputs) -> str | None:
    """Why PyTorch's fused kernels cannot, or None: they know one derivative in reverse mode, of one call at a time."""
    if inputs.keep is not None:
        return "takes no keep"
    more = differentiated_further()
    return "takes no derivatives in forward mode, of derivatives or under vmap" if more else None


def differentiated_further() -> bool:
    """Does anybody ask for a derivative that PyTorch's fused kernels do not know?"""
    reverse, forward, batched = _transforms()
    return bool(forward or reverse > 1 or (reverse and batched) or _dual())


def differentiated() -> bool:
    """Does anybody ask for a derivative in another way than by a backward pass?"""
    reverse, forward, _ = _transforms()
    return bool(reverse or forward or _dual())


def _dual() -> bool:
    return forward_ad._current_level >= 0


def check_backward(who: str, impl: str) -> None:
    """In a backward pass: RuntimeError if it is itself differentiated in forward mode."""
    if differentiated():
        raise RuntimeError(f"{who}: impl {impl!r} has no derivative of its gradient; use impl='reference'")


def no_second_derivative(who: str, impl: str) -> Callable[..., None]:
    """What autograd calls for the derivative of a backward pass: RuntimeError in one line."""

    def refuse(ctx: Any, *grads: Any) -> None:
        raise RuntimeError(f"{who}: impl {impl!r} has no second derivative; use impl='reference'")

    return refuse


def by_reference(
    run: Callable[[list[Tensor]], Sequence[Tensor]], tensors: list[Tensor], douts: Sequence[Tensor]
) -> list[Tensor]:
    """Gradients of `tensors`, computed anew by PyTorch's own operations, so that they can be differentiated again."""
    # Aliases, as the gradient of this use alone is wanted, whatever else a tensor was used for before.
    own = [x.view_as(x) for x in tensors]
    with torch.enable_grad(), torch.autocast(tensors[0].device.type, enabled=False):
        outs = run(own)
        learned = [x for x in own if x.requires_grad]
        grads = iter(torch.autograd.grad(outs, learned, douts, create_graph=True, materialize_grads=True))
    return [next(grads) if x.requires_grad else torch.zeros_like(x) for x in own]


def vmapped(op: Callable[..., Any]) -> Callable[..., Any]:
    """A rule for vmap, for an op on lists of tensors, of which the first is (b ...), as are the results.

    The new dimension becomes a part of b, unless a tensor is one for all b, as a bias by offset is: then the op is
    called once for each.  An empty tensor of one dimension stands for one that is not given.
    """

    def rule(
        info: Any,
        in_dims: Any,
        *args: Any,
        causal: bool | None = None,
        window: int | None = None,
        scale: float | None = None,
        act: str | None = None,
        normalise: str | None = None,
        twice: bool | None = None,
    ) -> tuple[Any, Any]:
        options = {"causal": causal, "scale": scale, "act": act, "normalise": normalise, "twice": twice}
        options = {name: x for name, x in options.items() if x is not None}  # what the op has
        options |= {} if causal is None else {"window": window}
        (leaves, form), (dims, _), n = tree_flatten(args), tree_flatten(in_dims), info.batch_size
        paired = zip(leaves, dims, strict=True)
        whole = [x.expand(n, *x.shape) if dim is None else x.movedim(dim, 0) for x, dim in paired]
        b = whole[0].shape[1]

        if all(x.shape[1:] == (0,) or (x.ndim == 5 and x.shape[1] == b) for x in whole):
            folded = [x[0] if x.ndim == 2 else x.flatten(0, 1) for x in whole]
            out = tree_map(lambda x: x.unflatten(0, (n, b)), op(*tree_unflatten(folded, form), **options))
        else:
            outs = [op(*tree_unflatten([x[i] for x in whole], form), **options) for i in range(n)]
            out = tree_map(lambda *each: torch.stack(each), *outs)
        return out, tree_map(lambda _: 0, out)

    return rule
