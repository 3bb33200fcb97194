"""Masks and positions in the conventions of transformers, as our transformer takes them.

Padding is zeros of `attention_mask`; in a row of several sequences `position_ids` restart at 0.  Eager code reads these
numbers.  Recorded code (torch.compile, torch.export, make_fx, vmap) decides by tensors, and asserts what eager raises.
"""

import torch
from torch import Tensor

from polyhead.compat.huggingface.cache import PolyheadCache
from polyhead.layers.positions import places_in
from polyhead.ops.readable import is_readable


def require(condition: Tensor, message: str) -> None:
    """Raise ValueError unless all entries of `condition` are True, or RuntimeError where recorded code runs.

    Under `torch.jit.trace`, which would drop this check, a ValueError is always raised.
    """
    if torch.jit.is_tracing():
        raise ValueError(f"{message}, which torch.jit.trace cannot check: give Boolean masks or use torch.export")
    if not torch.compiler.is_compiling():
        # Under vmap the tensor inside the wrapper has the numbers of all samples.
        while torch._C._functorch.is_functorch_wrapped_tensor(condition):
            condition = torch._C._functorch.get_unwrapped(condition)
    if not is_readable(condition):
        torch._assert_async(condition.all(), message)
    elif not condition.all():
        raise ValueError(message)


def place_tokens(
    model: str, tokens: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, cache: PolyheadCache | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Mask, positions and `cu_seqlens` of `tokens` (b t ...), which follow those in the cache.

    Args:
        model: The name with which errors begin.
        attention_mask: Shape (b s), 1 at real tokens, those in the cache included.

    Returns:
        A mask (b t), None if all tokens are real; positions (b|1 t), None if counted; the edges of packed sequences,
            None for one sequence.

    Raises:
        ValueError: For other shapes or numbers, for a mask that contradicts the cache, and for packed sequences with a
            cache, with padding, or in several rows.
    """
    b, t = tokens.shape[:2]
    num_cached = 0 if cache is None else cache.get_seq_length()
    s = num_cached + t
    if attention_mask is not None and attention_mask.shape != (b, s):
        dims = tuple(attention_mask.shape)
        raise ValueError(f"{model}: attention_mask must be (b s) = {(b, s)}, the tokens before included, but is {dims}")
    if position_ids is not None and tuple(position_ids.shape) not in ((b, t), (1, t)):
        raise ValueError(f"{model}: position_ids must be (b|1 t) = {(b, t)} but is {tuple(position_ids.shape)}")

    # Padding.  A mask of True only costs time, and would hide that positions restart.
    mask = None
    if attention_mask is not None:
        mask = attention_mask.bool()
        if attention_mask.dtype != torch.bool:
            require(attention_mask == mask, f"{model}: attention_mask must be 1 at tokens and 0 at padding")
        if cache is not None and num_cached:
            agrees = mask[:, cache[0].gone : num_cached]
            if cache[0].real is not None:
                agrees = agrees == cache[0].real[:, : agrees.shape[1]]
            require(agrees, f"{model}: attention_mask must be as before at the tokens in the cache")
        if is_readable(mask) and mask.all():
            mask = None
    if position_ids is None:
        if mask is None:
            return None, None, None
        positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
        return mask[:, num_cached:], positions[:, num_cached:], None
    if mask is not None:
        mask = mask[:, num_cached:]

    # Positions that are counted need not be passed on.
    is_plain = mask is None and (cache is None or "positions" not in cache[0])
    if is_plain and is_readable(position_ids):
        counted = torch.arange(num_cached, s, device=position_ids.device)
        if torch.equal(position_ids, counted.expand_as(position_ids)):
            return None, None, None

    # Several sequences in one row: positions restart, and no token is padding.
    restarts = position_ids.diff() <= 0
    if mask is not None:
        before = torch.where(mask, position_ids, -1).cummax(-1).values[:, :-1]
        is_unordered = mask[:, 1:] & (position_ids[:, 1:] <= before)
        all_real = mask.all()
        require(all_real | ~is_unordered, f"{model}: sequences one after the other must come without padding")
        restarts = restarts & all_real
    if cache is not None:
        require(~restarts, f"{model}: sequences one after the other must come without a cache")
    elif b != 1:
        require(~restarts, f"{model}: sequences one after the other come in one row (1 t)")
    elif not is_readable(restarts):
        # Recorded code does not know whether it is packed: the positions may also be those of one sequence.
        return mask, position_ids, sequence_edges(model, position_ids, restarts[0])
    elif restarts.any():
        return None, None, sequence_edges(model, position_ids, restarts[0])
    return mask, position_ids, None


def sequence_edges(model: str, position_ids: Tensor, restarts: Tensor) -> Tensor:
    """Return the edges (`cu_seqlens`) of the sequences in the single row `position_ids` (1 t).

    Args:
        restarts: Shape (t - 1), True before the first token of a further sequence.

    Raises:
        ValueError: If positions of several sequences do not count from 0.
    """
    t = position_ids.shape[1]
    if is_readable(restarts):
        starts = restarts.nonzero()[:, 0] + 1
    else:
        # The shape must not depend on numbers.  Surplus edges are empty sequences behind the last token.
        starts = torch.where(restarts, torch.arange(1, t, device=restarts.device), t).sort().values
    # Edges are the first rows of all sequences, and one behind the last row.
    end = starts.new_full((1,), t)
    edges = torch.cat((torch.zeros_like(end), starts, end)).int()
    counts_from_0 = ~restarts.any() | (places_in(edges, t) == position_ids)
    require(counts_from_0, f"{model}: position_ids must count from 0 in each of the sequences in a row")
    return edges
