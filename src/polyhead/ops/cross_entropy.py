"""Cross entropy that never stores all logits: only those of a block of tokens exist at once.

    l_tc = factor (x_t . w_c + b_c),   loss_t = log sum_c exp l_tc - l_t,target(t)

The backward pass computes the logits of each block again, so training takes a third more work than with stored logits.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from polyhead.ops.kernel import needs_more_than_backward
from polyhead.ops.latent_code import wide
from polyhead.ops.precision import product_dtype
from polyhead.ops.readable import is_cheap_to_read
from polyhead.spec.shapes import shaped

BLOCK, BLOCK_ELSEWHERE = 1 << 23, 1 << 25
"""The most logits in a block on a CPU and on an accelerator; it has at least one token."""


@shaped
def chunked_cross_entropy(
    x: Float[Tensor, "t m"],
    weight: Float[Tensor, "c m"],
    bias: Float[Tensor, "c"] | None,
    targets: Int[Tensor, "t"],
    *,
    factor: float = 1.0,
) -> Float[Tensor, "t"]:
    """Cross entropy of each target in nats, with the logits factor (x weight' + bias) of a block of tokens at a time.

    Under autocast, products are in its dtype; all sums are in at least float32.

    >>> x, weight = torch.randn(5, 8), torch.randn(100, 8)
    >>> loss = chunked_cross_entropy(x, weight, None, torch.arange(5))
    >>> torch.allclose(loss, F.cross_entropy(x @ weight.T, torch.arange(5), reduction="none"), atol=1e-5)
    True

    Raises:
        ValueError: For a target outside the vocabulary on a CPU.  In compiled code and on an accelerator the loss of
            such a target is NaN, because a check would synchronise.
    """
    blocks = list(_blocks(x, weight, bias, targets))
    if len(blocks) == 1 or not torch.is_grad_enabled() or needs_more_than_backward():
        return torch.cat([_losses(*block, factor) for block in blocks])
    losses = []
    for block in blocks:
        losses.append(checkpoint(_losses, *block, factor, use_reentrant=False, preserve_rng_state=False))
    return torch.cat(losses)


@shaped
def chunked_guesses(
    x: Float[Tensor, "t m"],
    weight: Float[Tensor, "c m"],
    bias: Float[Tensor, "c"] | None,
    targets: Int[Tensor, "t"],
    *,
    factor: float = 1.0,
) -> tuple[Float[Tensor, "t"], Int[Tensor, "t"]]:
    """`chunked_cross_entropy` without its memory for gradients, and from the same logits the most likely vocabulary
    entry: the first of equals, or -1 where a logit is NaN."""
    losses, guesses = [], []
    for rows, block_weight, block_bias, row_targets in _blocks(x, weight, bias, targets):
        logits = _logits(rows, block_weight, block_bias, factor)
        losses.append(_cross_entropy(logits, row_targets))
        highest, entries = logits.max(-1)
        guesses.append(entries.masked_fill(highest.isnan(), -1))
    return torch.cat(losses), torch.cat(guesses)


def _blocks(
    x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor | None, Tensor]]:
    """Yield blocks of tokens, with the weight, the bias and their targets."""
    _check_targets(targets, len(weight))
    x = x.to(product_dtype(x))
    if torch.is_grad_enabled():
        # Blocks add up their gradients in the dtype of what they share.
        weight, bias = wide(weight), None if bias is None else wide(bias)
    else:
        weight = weight.to(x.dtype)  # once, not in each block
    block = BLOCK if x.device.type == "cpu" else BLOCK_ELSEWHERE
    num_rows = max(1, block // len(weight))
    for rows, targets_of_rows in zip(x.split(num_rows), targets.long().split(num_rows), strict=True):
        yield rows, weight, bias, targets_of_rows


def _check_targets(targets: Tensor, num_classes: int) -> None:
    """Raise ValueError for a target outside the vocabulary, where targets may be read."""
    if not is_cheap_to_read(targets) or not len(targets):
        return
    for target in (int(targets.min()), int(targets.max())):
        if not 0 <= target < num_classes:
            raise ValueError(f"chunked_cross_entropy: targets must be 0 to {num_classes - 1}, got {target}")


def _losses(x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, factor: float) -> Tensor:
    return _cross_entropy(_logits(x, weight, bias, factor), targets)


def _logits(x: Tensor, weight: Tensor, bias: Tensor | None, factor: float) -> Tensor:
    """The logits of a block (t c), from products in the dtype of x, in at least float32."""
    if bias is not None:
        bias = bias.to(x.dtype)
    logits = wide(F.linear(x, weight.to(x.dtype), bias))
    if factor == 1.0:
        return logits
    return logits * factor


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The loss of each row of logits; NaN for a target outside the vocabulary, -100 among them."""
    last = logits.shape[-1] - 1
    chosen = logits.gather(-1, targets.clamp(0, last)[:, None])[:, 0]
    is_entry = (targets >= 0) & (targets <= last)
    return torch.where(is_entry, logits.logsumexp(-1) - chosen, torch.nan)
