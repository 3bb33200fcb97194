"""Multi-head attention over any list of head groups, side by side.

    y = W_out [group_1(q, k, v) | group_2(q, k, v) | ...],    [q | k | v] = W_qkv x

One matrix multiply makes all queries, keys and values (two in cross-attention), one makes the output.  The rows of
`qkv` are [queries of all groups | keys of all groups | values of all groups], head after head.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from polyhead import config
from polyhead.layers import Device
from polyhead.layers.heads import HeadGroup, build
from polyhead.layers.norms import LayerNorm
from polyhead.layers.positions import AlibiBias, RelativePositionBias, RotaryEmbedding
from polyhead.layers.taps import GroupTaps, Taps
from polyhead.ops.code import dense, latent_code
from polyhead.shapes import shaped

Positions = config.Position | nn.ModuleDict | None


def rotary_tables(
    layers: Sequence[Sequence[config.Mechanism]],
    dim: int,
    *,
    theta: float = 1e4,
    layout: str = "interleaved",
    max_length: int = 512,
    device: Device = None,
) -> nn.ModuleDict:
    """One rotary table per head width, to be shared by all layers."""
    widths = {group.dim or dim // sum(g.heads for g in heads) for heads in layers for group in heads}
    tables = {str(d): RotaryEmbedding(d, theta, max_length, layout=layout, device=device) for d in sorted(widths)}
    return nn.ModuleDict(tables)


class MultiHeadAttention(nn.Module):
    """Self- or cross-attention with any mixture of heads.

    >>> attention = MultiHeadAttention(64, [Softmax(4), Hyla(4)], causal=True)
    >>> attention(torch.randn(2, 10, 64)).shape
    torch.Size([2, 10, 64])

    `dim` is the model width; heads that name no width of their own get dim // (all heads).  `positions`: Rotary,
    RelativeBias or Alibi, or rotary tables shared with other layers.  `dropout` is a rate on the latent code, one
    draw per element or, with `dropout_shared`, one mask for the batch and all heads.  `qk_norm`: LayerNorm without
    bias on q and k, per head.  `window`: a query sees only keys less than `window` positions away.
    """

    def __init__(
        self,
        dim: int,
        heads: config.Mechanism | Sequence[config.Mechanism],
        *,
        causal: bool = False,
        positions: Positions = None,
        bias: bool = False,
        window: int | None = None,
        qk_norm: bool = False,
        dropout: float = 0.0,
        dropout_shared: bool = False,
        max_length: int = 512,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"MultiHeadAttention: dropout must be in [0, 1) but is {dropout}")
        if window is not None and window < 1:
            raise ValueError(f"MultiHeadAttention: window must be at least 1 but is {window}")
        heads = config.head_list("MultiHeadAttention", heads)
        self.dim, self.causal, self.window, self.max_length = dim, causal, window, max_length
        self.dropout, self.dropout_shared = dropout, dropout_shared
        self.total_heads = sum(group.heads for group in heads)
        groups = [build(mechanism, dim, self.total_heads, device=device, dtype=dtype) for mechanism in heads]
        self.groups = nn.ModuleList(groups)
        self.sizes = [group.sizes for group in groups]
        self.widths = [sum(group.sizes.widths[i] for group in groups) for i in range(3)]
        self.qkv = nn.Linear(dim, sum(self.widths), bias=bias, device=device, dtype=dtype)
        values = sum(group.sizes.heads * group.sizes.value_dim for group in groups)
        self.out = nn.Linear(values, dim, bias=bias, device=device, dtype=dtype)
        self._add_positions(positions, heads, max_length, device, dtype)
        widths = [group.sizes.dim for group in groups for _ in range(2)]  # q and k of one group, then the next
        norms = [LayerNorm(d, eps=1e-6, bias=False, device=device, dtype=dtype) for d in widths]
        self.qk_norms = nn.ModuleList(norms) if qk_norm else None

    def _add_positions(
        self,
        positions: Positions,
        heads: Sequence[config.Mechanism],
        length: int,
        device: Device,
        dtype: torch.dtype | None,
    ) -> None:
        self.rotary: nn.ModuleDict | None = None
        self.relative: RelativePositionBias | AlibiBias | None = None
        if isinstance(positions, nn.ModuleDict):
            self.rotary = positions
        elif isinstance(positions, config.Rotary):
            theta, layout = positions.theta, positions.layout
            self.rotary = rotary_tables([heads], self.dim, theta=theta, layout=layout, max_length=length, device=device)
        elif isinstance(positions, config.RelativeBias):
            buckets = positions.buckets or length
            distance = positions.max_distance or buckets
            both = positions.bidirectional
            self.relative = RelativePositionBias(
                self.total_heads, buckets, distance, bidirectional=both, device=device, dtype=dtype
            )
        elif isinstance(positions, config.Alibi):
            self.relative = AlibiBias(self.total_heads, device=device)
        elif positions is not None:
            raise ValueError(
                f"MultiHeadAttention: positions must be Rotary(), RelativeBias() or Alibi() but is {positions}"
            )

    @shaped
    def forward(
        self,
        x: Float[Tensor, "b t m"],
        context: Float[Tensor, "b s m"] | None = None,
        *,
        mask: Bool[Tensor, "..."] | None = None,
        bias: Float[Tensor, "..."] | None = None,
        positions: Int[Tensor, "#b t"] | None = None,
        keep: Float[Tensor, "..."] | None = None,
        return_code: bool = False,
        taps: list[Taps] | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """y (b t m); with `return_code` also the code of all pairs (b h t s), before dropout.

        `mask` is boolean, True where looking is allowed, and broadcasts to (b h t s).  `bias` adds to the scores:
        (b|1 h|1 t s), or by offset (h, t+s-1).  `positions` are those of x (default 0, 1, ...); a context counts
        from 0.  `keep` (b|1 h|1 t s) multiplies the code in place of the layer's own dropout, in eval mode, too: 0 in
        a head takes that head away.
        """
        source = x if context is None else context
        self._check(x, source, mask, bias, keep)
        projected = self._project(x, context)
        bias = self._bias(bias, x, source, context is None, positions)
        mask = self._window(mask, x, source, context is None, positions)
        keep = self._keep(x, source) if keep is None else keep
        outputs, codes, seen, first = [], [], [], 0
        for i, group in enumerate(self._groups()):
            last = first + self.sizes[i].heads
            q, k, v = self._place(i, projected[i], positions, context is None)
            its_bias, its_mask, its_keep = (_heads(a, first, last) for a in (bias, mask, keep))
            y = group(q, k, v, bias=its_bias, mask=its_mask, causal=self.causal, keep=its_keep)
            outputs.append(y.flatten(2))
            if return_code:
                how = group.normalise
                codes.append(latent_code(q, k, normalise=how, bias=its_bias, mask=its_mask, causal=self.causal))
            if taps is not None:
                seen.append(self._tap(i, (q, k, v, y), its_bias, its_mask))
            first = last
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
        result = self.out(joined)
        if taps is not None:
            taps.append(Taps(x=x, context=source, output=result, b_out=self.out.bias, groups=tuple(seen)))
        return (result, torch.cat(codes, dim=1)) if return_code else result

    def _groups(self) -> list[HeadGroup]:
        return list(self.groups)  # type: ignore[arg-type]

    def _check(self, x: Tensor, source: Tensor, mask: Tensor | None, bias: Tensor | None, keep: Tensor | None) -> None:
        if x.shape[-1] != self.dim:
            raise ValueError(f"MultiHeadAttention: m = {self.dim} but x (b t m) = {tuple(x.shape)}")
        wanted = (x.shape[0], self.total_heads, x.shape[1], source.shape[1])
        if mask is not None and not _broadcasts(mask.shape, wanted):
            raise ValueError(
                f"MultiHeadAttention: mask must broadcast to (b h t s) = {wanted} but is {tuple(mask.shape)}"
            )
        if bias is not None and not (bias.ndim == 4 and _broadcasts(bias.shape, wanted)):
            by_offset = (wanted[1], wanted[2] + wanted[3] - 1)
            if tuple(bias.shape) != by_offset:
                shape = tuple(bias.shape)
                raise ValueError(
                    f"MultiHeadAttention: bias must be (b h t s) = {wanted} or (h t+s-1) = {by_offset} but is {shape}"
                )
        # Queries and keys written out, as the backends want them; only batch and heads may be shared.
        if keep is not None and not (
            keep.shape[-2:] == wanted[2:] and keep.ndim == 4 and _broadcasts(keep.shape, wanted)
        ):
            raise ValueError(
                f"MultiHeadAttention: keep must be (b|1 h|1 t s), here {wanted}, but is {tuple(keep.shape)}"
            )

    def _project(self, x: Tensor, context: Tensor | None) -> list[tuple[Tensor, Tensor, Tensor]]:
        """q (b t h d), k (b s g d), v (b s g e) of each group."""
        queries = self.widths[0]
        if context is None:
            parts = self.qkv(x).split(self.widths, dim=-1)
        else:
            weight, offset = self.qkv.weight, self.qkv.bias
            q = F.linear(x, weight[:queries], None if offset is None else offset[:queries])
            kv = F.linear(context, weight[queries:], None if offset is None else offset[queries:])
            parts = (q, *kv.split(self.widths[1:], dim=-1))
        if len(self.groups) == 1:
            split = [[part] for part in parts]
        else:
            split = [part.split([size.widths[i] for size in self.sizes], dim=-1) for i, part in enumerate(parts)]
        return [
            (
                q.unflatten(-1, (size.heads, size.dim)),
                k.unflatten(-1, (size.kv_heads, size.dim)),
                v.unflatten(-1, (size.kv_heads, size.value_dim)),
            )
            for size, q, k, v in zip(self.sizes, *split, strict=True)
        ]

    def _place(
        self, i: int, qkv: tuple[Tensor, Tensor, Tensor], positions: Tensor | None, own: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Normalise and rotate the queries and keys of group `i`."""
        q, k, v = qkv
        if self.qk_norms is not None:
            q, k = self.qk_norms[2 * i](q), self.qk_norms[2 * i + 1](k)
        if self.rotary is not None:
            rotate = self.rotary[str(q.shape[-1])]
            t, s = q.shape[1], k.shape[1]
            if positions is None and max(t, s) > self.max_length:
                raise ValueError(f"MultiHeadAttention: {max(t, s)} positions but max_length is {self.max_length}")
            # Positions counted here are in range by the test above; reading them would wait for the device.
            where = torch.arange(t, device=q.device)[None] if positions is None else positions
            whence = where if own else torch.arange(s, device=k.device)[None]
            q = rotate(q, where[..., None], check=positions is not None)
            k = rotate(k, whence[..., None], check=positions is not None)
        return q, k, v

    def _bias(
        self, bias: Tensor | None, x: Tensor, source: Tensor, own: bool, positions: Tensor | None
    ) -> Tensor | None:
        """The sum of the given bias and the position bias; by offset (h, t+s-1) unless one of them is dense."""
        if self.relative is None:
            return bias
        t, s = x.shape[1], source.shape[1]
        if isinstance(self.relative, AlibiBias):
            self.relative.slopes(x)  # it has no parameter that a state dict could bring from the meta device
        if positions is None:
            relative = self.relative(t, s, offset=s - t if self.causal else 0).to(x.dtype)
        else:
            keys = positions if own else torch.arange(s, device=x.device)[None]
            relative = self.relative.dense(positions, keys).to(x.dtype)
        if bias is None:
            return relative
        if bias.ndim != relative.ndim:
            bias, relative = (dense(a, t, s) for a in (bias, relative))
        return bias + relative

    def _window(
        self, mask: Tensor | None, x: Tensor, source: Tensor, own: bool, positions: Tensor | None
    ) -> Tensor | None:
        """`mask` without the keys that are `window` positions away or more."""
        if self.window is None:
            return mask
        t, s = x.shape[1], source.shape[1]
        keys = torch.arange(s, device=x.device)[None]
        queries = torch.arange(t, device=x.device)[None] + (s - t if self.causal else 0)
        if positions is not None:
            queries, keys = positions, positions if own else keys
        near = (queries[:, None, :, None] - keys[:, None, None, :]).abs() < self.window
        return near if mask is None else mask & near

    def _keep(self, x: Tensor, source: Tensor) -> Tensor | None:
        if not self.training or self.dropout == 0.0:
            return None
        return self.draw_keep(x.shape[0], x.shape[1], source.shape[1], device=x.device, dtype=x.dtype)

    def draw_keep(
        self,
        b: int,
        t: int,
        s: int,
        *,
        device: Device = None,
        dtype: torch.dtype | None = None,
        generator: torch.Generator | None = None,
    ) -> Float[Tensor, "_ _ {t} {s}"]:
        """One draw of this layer's dropout, the `keep` of `forward`: 0 or 1 / (1 - rate)."""
        shape = (1, 1, t, s) if self.dropout_shared else (b, self.total_heads, t, s)
        draw = torch.rand(shape, generator=generator, device=device)
        return (draw >= self.dropout).to(dtype or draw.dtype) / (1.0 - self.dropout)

    def _tap(
        self, i: int, qkvy: tuple[Tensor, Tensor, Tensor, Tensor], bias: Tensor | None, mask: Tensor | None
    ) -> GroupTaps:
        group, size, before = self._groups()[i], self.sizes[i], self.sizes[:i]
        row = self.widths[0] + self.widths[1] + sum(other.widths[2] for other in before)
        rows = slice(row, row + size.widths[2])
        column = sum(other.heads * other.value_dim for other in before)
        columns = self.out.weight[:, column : column + size.heads * size.value_dim]
        offset = self.qkv.bias
        q, k, v, y = qkvy
        return GroupTaps(
            kind=group.kind,
            normalise=group.normalise,
            act=group.act,
            depth=group.depth,
            q=q,
            k=k,
            v=v,
            output=y,
            bias=bias,
            mask=mask,
            causal=self.causal,
            scale=size.dim**-0.5,
            w_value=self.qkv.weight[rows].unflatten(0, (size.kv_heads, size.value_dim)),
            b_value=None if offset is None else offset[rows].unflatten(0, (size.kv_heads, size.value_dim)),
            w_out=columns.unflatten(1, (size.heads, size.value_dim)).transpose(0, 1),
            value_weight=group.value_weight,
        )


def _broadcasts(shape: Sequence[int], wanted: Sequence[int]) -> bool:
    sizes = zip(reversed(shape), reversed(wanted), strict=False)
    return len(shape) <= len(wanted) and all(size in (1, want) for size, want in sizes)


def _heads(array: Tensor | None, first: int, last: int) -> Tensor | None:
    """The heads `first` to `last` of a bias (b h t s) or (h t+s-1), a mask of 1 to 4 dimensions or a dropout mask."""
    if array is None or array.ndim == 1:
        return array
    if array.ndim == 2:  # by offset if floating; a (t s) mask is for all heads
        return array[first:last] if array.is_floating_point() else array
    return array if array.shape[-3] == 1 else array[..., first:last, :, :]
