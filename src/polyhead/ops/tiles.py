"""Parts that several backends share: refusals, key masks, tiles of scores and biases, derivatives of activations."""

import functools
import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from polyhead.ops.call import AttentionCall
from polyhead.ops.latent_code import act, allowed, dense, hides, of_pairs, sequence_of, share, wide
from polyhead.ops.torch_kernels import torch_attention


def refuse(who: str, impl: str, reason: str | None) -> None:
    """Raise ValueError if there is a reason why an explicit impl cannot take the inputs."""
    if reason is not None:
        raise ValueError(f"{who}: impl {impl!r} {reason}; use impl='auto' or 'reference'")


def is_key_mask(mask: Tensor) -> bool:
    """Is the mask the same for every head and query: (b|1, 1, 1, s) or fewer dimensions?"""
    return all(size == 1 for size in mask.shape[-3:-1])


def mask_of_keys(x: AttentionCall) -> Tensor | None:
    """A mask for which `is_key_mask` holds, as (b|1 s)."""
    if x.mask is None:
        return None
    return of_pairs(x.mask)[:, 0, 0].expand(-1, x.k.shape[1])


def dense_limits(x: AttentionCall) -> str | None:
    """Why a call has a tensor with a number for each pair, which kernels do not read, or None."""
    if x.keep is not None:
        return "takes no keep"
    if x.bias is not None and x.bias.ndim != 2:
        return f"takes biases by offset (h t+s-1) only, not {tuple(x.bias.shape)}"
    return mask_of_pairs(x)


def mask_of_pairs(x: AttentionCall) -> str | None:
    """Why the mask is not a key mask, or None."""
    if x.mask is None or is_key_mask(x.mask):
        return None
    return f"takes masks of keys (b|1, 1, 1, s) only, not {tuple(x.mask.shape)}"


def stateless(x: AttentionCall) -> str | None:
    """Why the keys cannot be summed into a state that is independent of the query, or None if they can."""
    if x.normalise != "identity":
        return f"takes normalise='identity' only, not {x.normalise!r}"
    if x.bias is not None:
        return "takes no bias"
    if x.keep is not None:
        return "takes no keep"
    if x.window is not None:
        return "takes no window"
    return mask_of_pairs(x)


_IN_PLACE = {"relu": torch.relu_, "sigmoid": torch.sigmoid_, "tanh": torch.tanh_}


def activate(name: str, z: Tensor) -> Tensor:
    """act(z), written over z if the derivative can be computed from the result."""
    return _IN_PLACE[name](z) if name in _IN_PLACE else act(name)(z)


def activate_backward(name: str, grad: Tensor, z: Tensor, out: Tensor) -> Tensor:
    """grad * act'(z), written to `out`; `z` is as `activate` left it."""
    aten = torch.ops.aten
    if name == "identity":
        return out.copy_(grad)
    if name == "relu":
        return aten.threshold_backward.grad_input(grad, z, 0, grad_input=out)
    if name in _IN_PLACE:  # sigmoid, tanh
        return getattr(aten, f"{name}_backward").grad_input(grad, z, grad_input=out)
    if name == "silu":
        return aten.silu_backward.grad_input(grad, z, grad_input=out)
    approximate = "tanh" if name == "gelu_tanh" else "none"
    return aten.gelu_backward.grad_input(grad, z, approximate=approximate, grad_input=out)


class Buffers:
    """Memory that all tiles of a call share: taking a name again overwrites the earlier tensor of that name."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.flat: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised contiguous tensor."""
        size = math.prod(shape)
        flat = self.flat.get(name)
        if flat is None or flat.numel() < size:
            flat = self.flat[name] = torch.empty(size, dtype=dtype, device=self.device)
        return flat[:size].view(shape)


NARROW = 16
"""The most columns with which a product is faster transposed (4 to 6 times at 4 and 8 columns, 1.4 times at 16)."""


def is_narrow(x: Tensor, y: Tensor) -> bool:
    """Does x @ y have few columns, while both other dimensions are large?"""
    return y.shape[2] <= NARROW < min(x.shape[1:])


def product(x: Tensor, y: Tensor) -> Tensor:
    """x @ y for (n i j) @ (n j k)."""
    return torch.bmm(y.mT, x.mT).mT if is_narrow(x, y) else torch.bmm(x, y)


def accumulate(out: Tensor, x: Tensor, y: Tensor, alpha: float = 1.0) -> None:
    """out += alpha x @ y for (n i j) @ (n j k); `out` may have a wider dtype than the factors.

    `out` must be the sum or a view of it, never a copy: use slices and `view`.
    """
    if out.dtype == x.dtype and out.is_contiguous() and not is_narrow(x, y):
        torch.baddbmm(out, x, y, alpha=alpha, out=out)
    else:
        out.add_(product(x, y), alpha=alpha)


@dataclass(frozen=True)
class Tile:
    """Queries q0 to q1 and keys k0 to k1, ends excluded."""

    q0: int
    q1: int
    k0: int
    k1: int

    @property
    def q(self) -> slice:
        return slice(self.q0, self.q1)

    @property
    def k(self) -> slice:
        return slice(self.k0, self.k1)

    def within(self, outer: "Tile") -> slice:
        """The keys of this tile as a slice of the keys of `outer`, which contains it."""
        return slice(self.k0 - outer.k0, self.k1 - outer.k0)

    def offsets(self, t: int) -> slice:
        """The columns j - i + t - 1 of a tensor by offset that the tile reads."""
        return slice(self.k0 - self.q1 + t, self.k1 - self.q0 + t - 1)


def reach(
    t: int, s: int, device: torch.device, *, causal: bool, window: int | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """For each query the first visible key and one past the last, ignoring masks: two non-decreasing (t) of int32.

    For a query without a visible key the range is empty.
    """
    place = torch.arange(s - t, s, device=device, dtype=torch.int32)
    first, end = torch.zeros_like(place), torch.full_like(place, s)
    if causal:
        end = place + 1
    if window is not None:
        window = min(window, t + s)  # keep sums within int32
        first, end = place - (window - 1), torch.minimum(end, place + window)
    if cu_seqlens is not None:
        edges = F.pad(cu_seqlens[1:], (1, 0))  # rows behind the last edge form one more sequence
        number = sequence_of(cu_seqlens, t)
        first, end = torch.maximum(first, edges[number]), torch.minimum(end, F.pad(edges[1:], (0, 1), value=t)[number])
    return first.clamp_(min=0), end.clamp_(min=0, max=s)


class VisibleTiles:
    """`reach` for tiles: which tiles have a visible pair and which have only visible pairs, ignoring masks."""

    def __init__(
        self,
        t: int,
        s: int,
        device: torch.device,
        *,
        causal: bool = False,
        window: int | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> None:
        self.t, self.s = t, s
        self.limited = causal or window is not None or cu_seqlens is not None
        if self.limited:
            host = None if cu_seqlens is None else cu_seqlens.cpu()
            ends = reach(t, s, torch.device("cpu"), causal=causal, window=window, cu_seqlens=host)
            self.first, self.end = (x.tolist() for x in ends)
            self.rows = [x.to(device) for x in ends]

    def keys(self, q0: int, q1: int) -> tuple[int, int]:
        """The first key that any of these queries may attend to, and one past the last."""
        return (self.first[q0], self.end[q1 - 1]) if self.limited else (0, self.s)

    def queries(self, k0: int, k1: int) -> tuple[int, int]:
        """The first query that may attend to any of these keys, and one past the last."""
        return (bisect_right(self.end, k0), bisect_left(self.first, k1)) if self.limited else (0, self.t)

    def edges(self, at: Tile) -> list[Tile]:
        """The parts of a tile (some keys, all queries) in which a pair may be hidden."""
        if not self.limited:
            return []
        left, right = min(self.first[at.q1 - 1], at.k1), max(self.end[at.q0], at.k0)
        if left >= right:
            return [at]
        parts = (at.k0, left), (right, at.k1)
        return [Tile(at.q0, at.q1, k0, k1) for k0, k1 in parts if k0 < k1]

    def hidden(self, at: Tile) -> Tensor:
        """True at hidden pairs (q k)."""
        first, end = (x[at.q, None] for x in self.rows)
        keys = torch.arange(at.k0, at.k1, device=first.device)
        return (keys < first) | (keys >= end)


Hidden = list[tuple[slice, Tensor]]
"""Pairs of a slice of a tile's keys and a mask of its hidden pairs; pairs of all other keys are visible."""


def hide(x: Tensor, hidden: Hidden, value: float) -> Tensor:
    """Set the hidden pairs of `x` (... q k) to `value`, in place."""
    for keys, where in hidden:
        x[..., keys].masked_fill_(where, value)
    return x


@dataclass
class Scores:
    """Tiles of the scores of one chunk of the batch, with their biases and masks.

    q is ((b h) t d), k is ((b h) s d).  bias, mask and keep are None or views of shape (b h t s); a bias by offset is
    (h t+s-1).  Samples and heads may be swapped in all of them: then `heads` counts samples, the inner dimension, and a
    bias by offset is (h 1 t+s-1).
    """

    q: Tensor
    k: Tensor
    heads: int
    scale: float
    reach: VisibleTiles
    bias: Tensor | None
    mask: Tensor | None
    keep: Tensor | None
    stats: torch.dtype
    buffers: Buffers

    def tile(self, at: Tile) -> Tensor:
        """(b h q k) scores of the tile in the dtype of the statistics; the next call overwrites them."""
        q, k = self.q[:, at.q], self.k[:, at.k].transpose(1, 2)
        s = self.buffers.take("scores", (q.shape[0], q.shape[1], k.shape[2]), q.dtype)
        s = torch.baddbmm(s, q, k, beta=0, alpha=self.scale, out=s).unflatten(0, (-1, self.heads)).to(self.stats)
        return s if self.bias is None else s.add_(self.bias_tile(self.bias, at))

    def bias_tile(self, bias: Tensor, at: Tile) -> Tensor:
        """(b|1 h q k) of a bias; a bias by offset is read at column j - i + t - 1."""
        if bias.ndim == 4:
            return bias[:, :, at.q, at.k]
        t = self.q.shape[1]
        return bias[..., at.offsets(t)].unfold(-1, at.k1 - at.k0, 1).flip(-2)

    def backward(self, at: Tile, ds: Tensor, dq: Tensor, dk: Tensor, dbias: Tensor | None) -> None:
        """Add the gradients of q ((b h) t d), k ((b h) s d) and bias, given those of a tile of scores (b h q k)."""
        if dbias is not None and dbias.ndim < 4:
            offsets = (dbias, ds.sum(0)) if dbias.ndim == 2 else (dbias.squeeze(1), ds.sum(1))
            add_offsets(*offsets, at, self.q.shape[1])
        elif dbias is not None:
            target = dbias[:, :, at.q, at.k]
            target += ds.sum_to_size(target.shape)
        flat = ds.flatten(0, 1).to(self.q.dtype)
        accumulate(dq[:, at.q], flat, self.k[:, at.k], self.scale)
        accumulate(dk[:, at.k], flat.transpose(1, 2), self.q[:, at.q], self.scale)

    def hidden(self, at: Tile) -> Hidden:
        """The pairs of the tile that are masked, have a bias of -inf or are out of reach; broadcasts to (b h q k)."""
        hidden = [(part.within(at), self.reach.hidden(part)) for part in self.reach.edges(at)]
        if self.mask is not None:
            hidden.append((slice(None), ~self.mask[:, :, at.q, at.k]))
        if self.bias_hides and self.bias is not None:
            hidden.append((slice(None), self.bias_tile(self.bias, at) == -math.inf))
        return hidden

    @functools.cached_property
    def bias_hides(self) -> bool:
        """May the bias hold -inf?  Only a CPU is checked; on other devices the check would synchronise."""
        return self.bias is not None and (self.bias.device.type != "cpu" or bool(self.bias.isneginf().any()))


def add_offsets(grad: Tensor, ds: Tensor, at: Tile, t: int) -> None:
    """Add the gradient (h q k) of a tile of scores to the gradient of a bias by offset (h t+s-1), along diagonals."""
    h, q, k = ds.shape
    skewed = ds.new_zeros(h, 1, q, q + k - 1)
    diagonals(skewed).copy_(ds.unsqueeze(1))
    grad[:, at.offsets(t)] += skewed.sum((1, 2))


def diagonals(skewed: Tensor) -> Tensor:
    """A view (h b q k) by key of a contiguous (h b q q+k-1) by offset."""
    h, b, q, n = skewed.shape
    # Row i starts at column q - 1 - i, so equal offsets share a column.
    return skewed.as_strided((h, b, q, n - q + 1), (b * q * n, q * n, n - 1, 1), skewed.storage_offset() + q - 1)


BIASED = 256 * 256
"""The fewest pairs t s for which `fused` is no slower than the reference with a bias: it takes PyTorch's slow path."""


def fused(x: AttentionCall) -> Tensor:
    """Softmax attention by PyTorch's kernels.

    The kernels align a causal mask with the first key, are slow for unequal widths of keys and values, and leave rows
    without keys undefined.  This function corrects all three.
    """
    (t, s), h, e = x.lengths, x.q.shape[2], x.v.shape[-1]
    scale, causal = x.factor, x.causal
    if t == 1:
        causal = False  # a single query is the last one: it sees every key
    # With unequal widths PyTorch silently takes an O(t^2) path.  Padding with zeros changes neither scores nor sums.
    width = max(x.q.shape[-1], e)
    q, k, v = (_pad(a, width).transpose(1, 2) for a in (x.q, share(x.k, h), share(x.v, h)))
    if scale <= 0:
        q, scale = q * scale, 1.0  # the kernels multiply the -inf of their own causal mask by the scale
    if x.bias is None and not x.limited and (not causal or t == s):
        out = torch_attention(q, k, v, causal=causal, scale=scale)
    else:
        out = _masked(q, k, v, x.bias, allowed(replace(x, causal=causal)), scale)
    return out[..., :e].transpose(1, 2)


def _pad(x: Tensor, width: int) -> Tensor:
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def _narrowed(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """A bias with at least one finite number in each row, in the dtype of the kernels."""
    if bias.numel():
        # A softmax ignores what all keys of a query share.  Narrowed with it, their differences would be lost; and the
        # kernels' backward pass has the logarithm of a sum, which -1e9 at all keys would round away.
        bias = wide(bias)
        bias = bias - bias.detach().amax(-1, keepdim=True)
    return bias.to(dtype)


def _masked(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, look: Tensor | None, scale: float) -> Tensor:
    t, s = q.shape[2], k.shape[2]
    nowhere = None
    if look is not None:
        look = of_pairs(look)
        # A row without keys would be 0 / 0.  It attends to all keys instead; its result, and so its gradient, is set to
        # 0.
        nowhere = ~look.any(-1, keepdim=True)
        look = (look | nowhere).expand(*look.shape[:2], t, s)
    attn_mask = look
    if bias is not None:
        hidden, bias = hides(bias), dense(bias, t, s)
        bias = bias if bias.ndim == 4 else bias[None]
        attn_mask = bias if look is None else bias.masked_fill(~look, -math.inf)
        if hidden is not None:  # the bias, too, may leave a row without keys
            alone = (attn_mask == -math.inf).all(-1, keepdim=True)
            nowhere, attn_mask = alone if nowhere is None else alone | nowhere, attn_mask.masked_fill(alone, 0)
        attn_mask = _narrowed(attn_mask, q.dtype)
    out = torch_attention(q, k, v, mask=attn_mask, scale=scale)
    if bias is not None and 0 in (*out.shape, s):
        out = out + 0 * bias.sum()  # from nothing the kernels make an output without a gradient for the bias
    return out if nowhere is None else out.masked_fill(nowhere, 0)
