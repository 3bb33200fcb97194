"""What the custom ops of several backends share: a rule for vmap, the refusal of a second derivative."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten


def no_second_derivative(who: str, impl: str) -> Callable[..., None]:
    """What autograd calls for the derivative of a backward pass: RuntimeError in one line."""

    def refuse(ctx: Any, *grads: Any) -> None:
        raise RuntimeError(f"{who}: impl {impl!r} has no second derivative; use impl='reference'")

    return refuse


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
    ) -> tuple[Any, Any]:
        options = {"causal": causal, "scale": scale, "act": act, "normalise": normalise}
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
