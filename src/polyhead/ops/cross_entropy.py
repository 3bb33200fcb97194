"""Cross entropy that never stores all logits: it computes a tile of tokens and vocabulary entries at a time.

    l_tc = factor (x_t . w_c + b_c),   z_t = log sum_c exp l_tc,   loss_t = z_t - l_t,target(t)

The sum runs online over tiles, relative to the largest logit so far.  The backward pass recomputes each tile from z:

    dl_tc = dloss_t (exp(l_tc - z_t) - [c = target(t)]),   dx = factor dl w,   dw = factor dl' x,   db = factor sum_t dl

Memory is that of a tile and of the gradients.  It takes a third more work than stored logits: one more product of x and
w.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from polyhead.ops.kernel import gradients_by_autograd, is_grads_batched, needs_more_than_backward
from polyhead.ops.latent_code import wide
from polyhead.ops.precision import product_dtype
from polyhead.spec.shapes import shaped

CHUNK = 4096
"""Vocabulary entries in a tile."""

TILE = {"cpu": 2**21}
"""Logits in a tile, by device: 8 MB of float32 stay in a core's cache."""

TILE_ELSEWHERE = 2**25


@shaped
def chunked_cross_entropy(
    x: Float[Tensor, "t m"],
    weight: Float[Tensor, "c m"],
    bias: Float[Tensor, "c"] | None,
    targets: Int[Tensor, "t"],
    *,
    factor: float = 1.0,
    chunk: int = CHUNK,
) -> Float[Tensor, "t"]:
    """Cross entropy of each target in nats, with the logits factor (x weight' + bias); only a tile of them exists.

    >>> x, weight = torch.randn(5, 8), torch.randn(100, 8)
    >>> loss = chunked_cross_entropy(x, weight, None, torch.arange(5), chunk=30)
    >>> torch.allclose(loss, F.cross_entropy(x @ weight.T, torch.arange(5), reduction="none"), atol=1e-5)
    True

    `chunk`: vocabulary entries in a tile.  Under autocast, products are in its dtype; all sums are in at least float32.
    A target outside the vocabulary raises ValueError on a CPU.  On an accelerator it costs NaN, because a check would
    synchronise.
    """
    return _entropy(x, weight, bias, targets, factor, chunk, guess=False)[0]


@shaped
def chunked_guesses(
    x: Float[Tensor, "t m"],
    weight: Float[Tensor, "c m"],
    bias: Float[Tensor, "c"] | None,
    targets: Int[Tensor, "t"],
    *,
    factor: float = 1.0,
    chunk: int = CHUNK,
) -> tuple[Float[Tensor, "t"], Int[Tensor, "t"]]:
    """`chunked_cross_entropy`, and from the same tiles the most likely vocabulary entry: the first of equals, or -1
    where a logit is NaN."""
    losses, z, guesses = _entropy(x, weight, bias, targets, factor, chunk, guess=True)
    return losses, guesses.masked_fill(z.isnan(), -1)


def _entropy(
    x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, factor: float, chunk: int, *, guess: bool
) -> tuple[Tensor, Tensor, Tensor]:
    if chunk < 1:
        raise ValueError(f"chunked_cross_entropy: chunk must be at least 1 but is {chunk}")
    dtype = product_dtype(x)
    x, weight, targets = x.to(dtype), weight.to(dtype), targets.long()
    if bias is not None:
        bias = bias.to(dtype)
    if needs_more_than_backward():
        return _whole(_logits(x, weight, bias, factor), targets, guess=guess)
    return _forward(x, weight, bias, targets, factor=factor, chunk=chunk, guess=guess)


def _whole(logits: Tensor, targets: Tensor, *, guess: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The same from all logits (t c) at once, for derivatives that tiles do not support."""
    z = logits.logsumexp(-1)
    best = targets.new_zeros(0)
    if guess:
        best = logits.max(-1).indices
    return z - logits.gather(-1, targets[:, None])[:, 0], z, best


def _tiles(x: Tensor, weight: Tensor, chunk: int) -> Iterator[tuple[slice, list[slice]]]:
    """Yield blocks of tokens, each with the chunks of the vocabulary."""
    n, v = len(x), len(weight)
    rows = max(1, TILE.get(x.device.type, TILE_ELSEWHERE) // min(chunk, v))
    columns = [slice(c, min(c + chunk, v)) for c in range(0, v, chunk)]
    for r in range(0, n, rows):
        yield slice(r, min(r + rows, n)), columns


def _logits(x: Tensor, weight: Tensor, bias: Tensor | None, factor: float) -> Tensor:
    """A tile of logits in new memory, in at least float32."""
    logits = wide(F.linear(x, weight, bias))
    if factor != 1.0:
        logits.mul_(factor)
    return logits


def _tile_of_logits(
    x: Tensor, weight: Tensor, bias: Tensor | None, rows: slice, columns: slice, factor: float
) -> Tensor:
    """The logits of some tokens and some vocabulary entries."""
    if bias is not None:
        bias = bias[columns]
    return _logits(x[rows], weight[columns], bias, factor)


@torch.library.custom_op("polyhead::chunked_cross_entropy", mutates_args=())
def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, *, factor: float, chunk: int, guess: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses, z, and the most likely entries (empty unless `guess`)."""
    if x.device.type == "cpu" and len(x):
        for target in (int(targets.min()), int(targets.max())):
            if not 0 <= target < len(weight):
                raise ValueError(f"chunked_cross_entropy: targets must be 0 to {len(weight) - 1} but {target} came")
    chosen = torch.full_like(x[:, 0], float("nan"), dtype=wide(x[:0]).dtype)
    z, best = torch.empty_like(chosen), targets.new_zeros(len(x) if guess else 0, dtype=torch.long)
    with torch.autocast(x.device.type, enabled=False):
        for rows, chunks in _tiles(x, weight, chunk):
            # Start at the smallest finite number: where all entries have bias -inf, -inf - (-inf) would be NaN.
            top, total = torch.full_like(z[rows], torch.finfo(z.dtype).min), torch.zeros_like(z[rows])
            for columns in chunks:
                logits = _tile_of_logits(x, weight, bias, rows, columns, factor)
                is_inside, columns_of_targets = _columns_of_targets(targets[rows], columns)
                target_logits = logits.gather(1, columns_of_targets)[:, 0]
                chosen[rows] = torch.where(is_inside, target_logits, chosen[rows])
                if guess:
                    highest, column = logits.max(-1)
                    best[rows] = torch.where(highest > top, column + columns.start, best[rows])
                else:
                    highest = logits.amax(-1)
                highest = torch.maximum(top, highest)
                total = total * (top - highest).exp() + logits.sub_(highest[:, None]).exp_().sum(-1)
                top = highest
            z[rows] = total.log_().add_(top)
    return z - chosen, z, best


def _columns_of_targets(targets: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """(t) whether a target is in this chunk of the vocabulary, and (t 1) its place there, any if it is not."""
    is_inside = (targets >= columns.start) & (targets < columns.stop)
    return is_inside, (targets - columns.start).clamp(0, columns.stop - columns.start - 1)[:, None]


@_forward.register_fake
def _(x, weight, bias, targets, *, factor, chunk, guess):  # type: ignore[no-untyped-def]
    losses = x.new_empty(len(x), dtype=wide(x).dtype)
    return losses, torch.empty_like(losses), targets.new_empty(len(x) if guess else 0, dtype=torch.long)


@torch.library.custom_op("polyhead::chunked_cross_entropy_backward", mutates_args=())
def _backward(
    dloss: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    z: Tensor,
    *,
    factor: float,
    chunk: int,
    needs_gradient: list[bool],
) -> list[Tensor]:
    """Gradients of x, weight and bias; empty where not `needs_gradient`."""
    grads = [torch.zeros_like(like, dtype=z.dtype) for like in _like_gradients(x, weight, needs_gradient)]
    with torch.autocast(x.device.type, enabled=False):
        for rows, chunks in _tiles(x, weight, chunk):
            for columns in chunks:
                dlogits = _tile_of_logits(x, weight, bias, rows, columns, factor)
                dlogits.sub_(z[rows, None]).exp_()
                is_inside, columns_of_targets = _columns_of_targets(targets[rows], columns)
                dlogits.scatter_add_(1, columns_of_targets, -is_inside[:, None].to(dlogits.dtype))
                dlogits.mul_((dloss[rows] * factor)[:, None])
                narrow = dlogits.to(x.dtype)
                if needs_gradient[0]:
                    _add_product(grads[0][rows], narrow, weight[columns])
                if needs_gradient[1]:
                    _add_product(grads[1][columns], narrow.T, x[rows])
                if needs_gradient[2]:
                    grads[2][columns] += dlogits.sum(0)
    return [grad.to(x.dtype) for grad in grads]


def _like_gradients(x: Tensor, weight: Tensor, needs_gradient: list[bool]) -> list[Tensor]:
    """Tensors of the shapes of the gradients; without rows where no gradient is needed."""
    tensors = []
    for tensor, is_needed in zip((x, weight, weight[:, 0]), needs_gradient, strict=True):
        tensors.append(tensor if is_needed else tensor[:0])
    return tensors


def _add_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out += a b; the sum over tiles has the dtype of `out`."""
    if out.dtype == a.dtype:
        out.addmm_(a, b)
    else:
        out += a @ b


@_backward.register_fake
def _(dloss, x, weight, bias, targets, z, *, factor, chunk, needs_gradient):  # type: ignore[no-untyped-def]
    return [torch.empty_like(like) for like in _like_gradients(x, weight, needs_gradient)]


def _setup(ctx, inputs, keyword_only_inputs, output):  # type: ignore[no-untyped-def]
    ctx.factor, ctx.chunk = keyword_only_inputs["factor"], keyword_only_inputs["chunk"]
    ctx.save_for_backward(*inputs, output[1])
    ctx.mark_non_differentiable(output[1], output[2])


def _grad(ctx, dloss, *nothing):  # type: ignore[no-untyped-def]
    if needs_more_than_backward():
        _refuse(ctx)
    needs_gradient = [bool(needs) for needs in ctx.needs_input_grad[:3]]
    if is_grads_batched([dloss]):
        x, weight, bias, targets, _ = ctx.saved_tensors
        return *_all_at_once(dloss, (x, weight, bias), targets, ctx.factor), None
    grads = torch.ops.polyhead.chunked_cross_entropy_backward(
        dloss, *ctx.saved_tensors, factor=ctx.factor, chunk=ctx.chunk, needs_gradient=needs_gradient
    )
    for i, is_needed in enumerate(needs_gradient):
        if not is_needed:
            grads[i] = None
    return *grads, None


def _all_at_once(
    dloss: Tensor, arguments: tuple[Tensor, Tensor, Tensor | None], targets: Tensor, factor: float
) -> list[Tensor | None]:
    """Gradients of many losses (is_grads_batched), from all logits."""
    tensors = [argument for argument in arguments if argument is not None]

    def losses(leaves: list[Tensor]) -> list[Tensor]:
        x, weight, *bias = leaves
        logits = _logits(x, weight, bias[0] if bias else None, factor)
        return [_whole(logits, targets, guess=False)[0]]

    return [*gradients_by_autograd(losses, tensors, [dloss]), None][:3]


def _refuse(ctx, *grads):  # type: ignore[no-untyped-def]
    raise RuntimeError("chunked_cross_entropy: it has no second derivative; use F.cross_entropy of the logits")


_forward.register_autograd(_grad, setup_context=_setup)
_backward.register_autograd(_refuse)
