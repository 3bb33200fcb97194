"""Any op in tiles, derived from its reference: memory O(t) instead of O(t^2), and exact gradients.

The output of a mechanism is a sum over keys, so a tile of queries i and keys j is a small call of the reference:

    out_i       = sum over tiles of reference(q_i, k_j, v_j, bias_ij, ...)
    gradients   = sum over tiles of those of the reference, given dout_i

If keys are normalised or pooled in another way, a tile has all keys that its queries may attend to; otherwise a part
of them.  Only the arguments are saved; the backward pass recomputes each tile.  Sums are in at least float32.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from polyhead.ops.call import AttentionCall, Masks, both
from polyhead.ops.kernel import Gradients, Kernel, Outputs, empty_output, unsupported_by_kernels
from polyhead.ops.latent_code import wide
from polyhead.ops.tiles import Tile, VisibleTiles
from polyhead.spec import SOFTMAX_AXIS

QUERIES, KEYS = 128, 256
"""The most queries in a tile, and the most keys if it does not need all of them."""

NUMBERS = 1 << 23
"""The most numbers in the largest intermediate of a tile; a tile has at least one query."""

TILED_AXES = {
    "q": "bthd",
    "k": "bsgd",
    "v": "bsge",
    "q_rel": "btrp",
    "k_rel": "bsrp",
    "bias": "bhts",
    "mask": "bhts",
    "keep": "bhts",
    "out": "bthe",
}
"""Axes of the tensors that are cut into tiles; an axis of size 1 is shared by all tiles."""

AXES_BY_OFFSET = {("bias", 2): "hn", ("v", 3): "nge"}

EXCLUDED_AT_TOP_LEVEL = torch._C._dispatch_tls_local_exclude_set()
"""Dispatch keys excluded at top level.  A compiled graph runs our op with autograd excluded; the backward pass of a
tile restores these keys."""

Reference = Callable[[AttentionCall], Tensor]


def is_preferred(call: AttentionCall) -> bool:
    """Whether tiles were measured to be no slower than the reference.

    Causal attention gains from 2^20 pairs b t s on.  Full attention uses tiles only to save memory: from 2^26 pairs on
    each (b h t s) tensor of the reference takes 2 GB.  Pooled heads have more numbers for each pair.
    """
    pairs = call.q.shape[0] * call.q.shape[1] * call.k.shape[1]
    if call.network == "pair":
        return pairs * call.v.shape[-1] * call.q.shape[2] >= 1 << 23
    if call.network == "query":
        least = 1 << 22 if call.masks.causal else 1 << 29
        return pairs * call.v.shape[-1] >= least
    least = 1 << 20 if call.masks.causal else 1 << 26
    return pairs >= least


def tiled(op: str, reference: Reference, preferred: Callable[[AttentionCall], bool] = is_preferred) -> Kernel:
    """The impl "blocked" of an op, whose public function has the name `op`."""

    def forward_pass(call: AttentionCall) -> Outputs:
        return [output_by_tiles(reference, call)]

    def backward_pass(call: AttentionCall, grad_outputs: Outputs) -> Gradients:
        return gradients_by_tiles(reference, call, grad_outputs[0])

    return Kernel(
        op=op,
        impl="blocked",
        forward_pass=forward_pass,
        backward_pass=backward_pass,
        unsupported_reason=unsupported_by_tiles,
        preferred=preferred,
    )


def unsupported_by_tiles(call: AttentionCall) -> str | None:
    """Why tiles cannot compute a call, or None."""
    if call.network == "sequence":
        return "has some queries in a tile, but network='sequence' reads all of them at once"
    return unsupported_by_kernels(call)


def output_by_tiles(reference: Reference, call: AttentionCall) -> Tensor:
    """The output of `reference` (b t h e), tile by tile."""
    # Many tiles add to an output: half precision would lose the small ones.
    total = wide(empty_output(call)[0]).zero_()
    with torch.no_grad():
        for samples, tile, tile_masks in _tiles(call):
            tensors = {}
            for name, tensor in call.learned_tensors().items():
                tensors[name] = _to_compute_dtype(_cut(name, tensor, samples, tile, call))
            _cut("out", total, samples, tile, call).add_(reference(tile_masks.with_tensors(tensors)))
    return total.to(call.q.dtype)


def gradients_by_tiles(reference: Reference, call: AttentionCall, grad_output: Tensor) -> Gradients:
    """Gradients of all learnable tensors of a call, tile by tile, given that of the output of `reference`."""
    learned = call.learned_tensors()
    gradients = {}
    for name, tensor in learned.items():
        dtype = wide(tensor).dtype
        gradients[name] = torch.zeros_like(tensor, dtype=dtype, memory_format=torch.contiguous_format)

    for samples, tile, tile_masks in _tiles(call):
        leaves = {}
        for name, tensor in learned.items():
            part = _to_compute_dtype(_cut(name, tensor, samples, tile, call))
            leaves[name] = part.detach().requires_grad_()
        included = torch._C._dispatch_tls_local_include_set()
        with torch._C._ForceDispatchKeyGuard(included, EXCLUDED_AT_TOP_LEVEL), torch.enable_grad():
            output = reference(tile_masks.with_tensors(leaves))
            # A tile is a function of its own: its gradients are those of the whole, as outputs of tiles are added.
            cotangent = _cut("out", grad_output, samples, tile, call).to(output.dtype)
            tile_gradients = torch.autograd.grad(output, list(leaves.values()), cotangent, materialize_grads=True)
        for name, gradient in zip(leaves, tile_gradients, strict=True):
            _cut(name, gradients[name], samples, tile, call).add_(gradient)
    return gradients


def _to_compute_dtype(x: Tensor) -> Tensor:
    """`x` in the dtype of the computation: on a CPU at least float32, as half precision is no faster there."""
    return wide(x) if x.device.type == "cpu" else x


def _cut(name: str, x: Tensor, samples: slice, tile: Tile, call: AttentionCall) -> Tensor:
    """A view of the part of `x` that belongs to a tile and to some samples; all of a weight, which has no axes here."""
    axes = TILED_AXES.get(name, "")[-x.ndim :]  # a mask of fewer dimensions has the last ones of (b h t s)
    axes = AXES_BY_OFFSET.get((name, x.ndim), axes)
    parts = {"b": samples, "t": tile.q, "s": tile.k, "n": tile.offsets(call.q.shape[1])}
    index = [slice(None)] * len(axes)
    for i, axis in enumerate(axes):
        if axis in parts and x.shape[i] > 1:  # an axis of size 1 is broadcast over all tiles
            index[i] = parts[axis]
    return x[tuple(index)]


def _tiles(call: AttentionCall) -> Iterator[tuple[slice, Tile, AttentionCall]]:
    """Yield samples, a tile, and the call with everything that hides keys of the tile as one mask.

    Tiles without a visible pair are skipped.
    """
    t, s = call.lengths
    b = call.q.shape[0]
    ranges = VisibleTiles(call.masks, t, s, call.q.device)
    max_samples, max_queries, max_keys = _tile_sizes(call)
    for q0 in range(0, t, max_queries):
        q1 = min(q0 + max_queries, t)
        first, end = ranges.keys(q0, q1)
        for k0 in range(first, end, max_keys):
            tile = Tile(q0, q1, k0, min(k0 + max_keys, end))
            in_range = ~ranges.hidden(tile) if ranges.hides(tile) else None
            for b0 in range(0, b, max_samples):
                samples = slice(b0, min(b0 + max_samples, b))
                mask = None if call.masks.mask is None else _cut("mask", call.masks.mask, samples, tile, call)
                keep = None if call.keep is None else _cut("keep", call.keep, samples, tile, call)
                yield samples, tile, replace(call, masks=Masks(both(mask, in_range)), keep=keep)


def _tile_sizes(call: AttentionCall) -> tuple[int, int, int]:
    """Numbers of samples, queries and keys of a tile: its largest intermediate has at most NUMBERS numbers."""
    t, s = call.lengths
    b, h, e = call.q.shape[0], call.q.shape[2], call.v.shape[-1]
    width = max(1, h, e)
    if call.q_rel is not None:
        width = max(width, call.q_rel.shape[2])
    if call.value_weight is not None:
        width = max(width, e * max(h, e))
    if call.pool:
        width = max(width, h * e)

    # The reference normalises or pools over the keys that it is given.
    needs_whole_rows = SOFTMAX_AXIS.get(call.normalise) == "s" or call.act == "softmax" or call.pool != ""
    keys = s if needs_whole_rows else min(s, KEYS)
    keys = max(1, keys)
    queries = max(1, min(t, QUERIES, NUMBERS // (keys * width)))
    samples = max(1, min(b, NUMBERS // (queries * keys * width)))
    return samples, queries, keys
