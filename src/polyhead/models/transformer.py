"""The one transformer: encoder, causal decoder, or both; any list of heads in every layer.

x = inputs(tokens, vectors or images) (+ positions);   x = block_1(x) ... block_l(x);   outputs(norm(x))

With an encoder, every block also looks at encoder(source), the stream after the encoder's last norm.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from polyhead import config
from polyhead.config import TransformerConfig
from polyhead.config.components import POSITIONS, narrower
from polyhead.layers import Device
from polyhead.layers.attention import MultiHeadAttention, Positions, rotary_tables
from polyhead.layers.block import TransformerBlock, build_norm
from polyhead.layers.cache import Cache
from polyhead.layers.feedforward import MixtureOfExperts, build_feedforward
from polyhead.layers.own import OwnVectors, way_of
from polyhead.layers.positions import LearnedPositions, SinusoidalPositions, places_in
from polyhead.layers.taps import Taps
from polyhead.models.initialise import initialise
from polyhead.models.inputs_outputs import (
    ClassOutput,
    LazyLogits,
    LinearOutput,
    TiedOutput,
    build_input,
    build_output,
)
from polyhead.models.rivals.abstractor import Abstractor
from polyhead.models.symbol_routing import Sources, recomputed
from polyhead.ops.call import Packed
from polyhead.spec.shapes import shaped


class Transformer(nn.Module):
    """Blocks between two ends: encoder, causal decoder or, with `encoder`, both; any list of heads in every layer.

    >>> model = Transformer(TransformerConfig(Tokens(100), Logits(100), dim=64, heads=[Softmax(4), Hyla(4)]))
    >>> model(torch.randint(100, (2, 16))).shape
    torch.Size([2, 16, 100])
    >>> reads = TransformerConfig(Tokens(50), Logits(50), dim=64, heads=[Softmax(4), Relational(4)])
    >>> writes = TransformerConfig(Tokens(100), Logits(100, tied=True), dim=64, causal=True, encoder=reads)
    >>> model = Transformer(writes)
    >>> model(torch.randint(100, (2, 16)), source=torch.randint(50, (2, 9))).shape
    torch.Size([2, 16, 100])

    `outputs=False`: without an output end; what comes out is the stream after the last norm, as an encoder gives it.
    """

    encoder: nn.Module | None
    _own: Sources

    def extra_repr(self) -> str:
        groups = ", ".join(f"{type(group).__name__}({group.heads})" for group in self.config.layer_heads(0))
        return f"dim={self.config.dim}, layers={self.config.layers}, heads=[{groups}], causal={self.config.causal}"

    def __init__(
        self,
        settings: TransformerConfig,
        *,
        outputs: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = settings
        self.encoder = _encoder(settings.encoder, device, dtype)
        self.inputs = build_input(settings.inputs, settings.dim, device=device, dtype=dtype)
        self.positions = _input_positions(settings, device, dtype)
        layers = [settings.layer_heads(i) for i in range(settings.layers)]
        crossing = [settings.layer_cross_heads(i) for i in range(settings.layers)]
        lender = self.encoder._own if settings.encoder_symbols and isinstance(self.encoder, Transformer) else None
        self._own = Sources(settings, layers, lender=lender, device=device, dtype=dtype)
        self._across = Sources(settings, crossing, cross=True, device=device, dtype=dtype)
        self.symbols, self.cross_symbols = self._own.shared, self._across.shared
        shared = _layer_positions(settings, device)
        self.blocks = nn.ModuleList(_block(settings, i, shared, device, dtype) for i in range(settings.layers))
        for block, *sources in zip(self.blocks, self._own.own, self._across.own, strict=True):
            for name, own in zip(("symbols", "cross_symbols"), sources, strict=True):
                if len(own):
                    block.add_module(name, own)
        last = settings.norm_order == "pre" if settings.final_norm is None else settings.final_norm
        norm, eps = settings.norm, settings.norm_eps
        self.norm = build_norm(norm, settings.dim, eps, device=device, dtype=dtype) if last else nn.Identity()
        end = settings.outputs
        self.outputs: nn.Module = nn.Identity()
        if outputs:
            self.outputs = build_output(end, self.inputs, settings.dim, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill all parameters by the preset `config.init` (an encoder by its own), from torch's default generator."""
        settings = self.config
        initialise(self, settings.init)
        if isinstance(self.outputs, LinearOutput | TiedOutput):
            factor = narrower(settings.inputs, settings.outputs, settings.dim, settings.init)
            with torch.no_grad():
                self.outputs.weight.mul_(factor)
        if isinstance(self.encoder, Transformer):
            self.encoder.reset_parameters()

    def length(self, inputs: Tensor) -> int:
        """How many tokens `inputs` become."""
        return inputs.shape[1] if not isinstance(self.config.inputs, config.Patches) else self.config.inputs.count

    @shaped
    def encode(
        self,
        source: Float[Tensor, "b s _"] | Int[Tensor, "b s"] | Float[Tensor, "b _ _ _"],
        mask: Bool[Tensor, "b s"] | None = None,
        *,
        taps: list[Taps] | None = None,
    ) -> Float[Tensor, "b _ m"]:
        """What the decoder looks at: the output of the encoder (b s m) for `source`, real where `mask` is True."""
        if self.encoder is None:
            raise ValueError("Transformer: it has no encoder, so no source was wanted but one came")
        if taps is None:
            return self.encoder(source, mask=mask)
        seen: list[Taps] = []
        encoded = self.encoder(source, mask=mask, taps=seen)
        taps.extend(dataclasses.replace(layer, name=f"encoder {i}") for i, layer in enumerate(seen))
        return encoded

    @shaped
    def forward(
        self,
        inputs: Float[Tensor, "b t c"] | Int[Tensor, "b t"] | Float[Tensor, "b c height width"],
        *,
        mask: Bool[Tensor, "b t"] | None = None,
        positions: Int[Tensor, "#b t"] | None = None,
        tail: int | None = None,
        keep: Sequence[Tensor | None] | None = None,
        source: Float[Tensor, "b s _"] | Int[Tensor, "b s"] | Float[Tensor, "b _ _ _"] | None = None,
        source_mask: Bool[Tensor, "b _"] | None = None,
        encoded: Float[Tensor, "b _ m"] | None = None,
        cu_seqlens: Packed | None = None,
        cache: Cache | None = None,
        taps: list[Taps] | None = None,
        stream: list[Tensor] | None = None,
        lazy: bool = False,
    ) -> Float[Tensor, "b _ _"] | LazyLogits:
        """`mask` is True at real tokens; `taps` collects one Taps per layer (those of an encoder first, then self- and
        cross-attention of each layer in turn, by name), `stream` what enters each block, and last what the outputs are
        made of.  Tokens may come as their embeddings (b t m).

        `positions` are 0, 1, ... unless they are given: padding counts, too.  So rows of several lengths are padded on
        the left, with a mask and positions that count real tokens (any number at padding), to get what they get alone.

        `tail`: only the last that many positions are wanted, (b tail c); the last layer then computes no others.
        `keep`: for each layer what multiplies its code, (b|1 h|1 t s), instead of its own dropout, or None.
        `source` is what the encoder reads, real where `source_mask` is True; `encoded`, in its place, what `encode`
        made of it.  `cu_seqlens` (int32, n + 1): the one sample is n sequences one after the other, number i rows
        cu_seqlens[i] to cu_seqlens[i + 1]; each gets what it gets alone.  `cache` holds the tokens before `inputs` and
        takes these; `mask` is then that of the new tokens, and their padding stays hidden.  `lazy`: what comes out are
        logits that are never made as a whole, which can be asked for their cross entropy and for the likeliest.
        """
        given = _Given(mask, positions, keep, encoded, source_mask, cu_seqlens, cache, stream)
        self._check(given, source, tail)
        if source is not None:
            given = given._replace(context=self.encode(source, source_mask, taps=taps))
        x = self._embed(inputs, given)
        if tail is not None and not 1 <= tail <= x.shape[1]:
            raise ValueError(f"Transformer: tail must be 1 to {x.shape[1]} (the positions) but is {tail}")
        # Given positions are those of the keys, too: then the last layer computes all, and the end is cut out.
        wanted = tail if positions is None and cache is None else None
        x = self._through(x, given, wanted, taps)
        x = self.norm(x if tail is None else x[:, -tail:])
        if stream is not None:
            stream.append(x)
        if lazy:
            return self._lazy(x)
        return self.outputs(x, mask) if self._pools else self.outputs(x)

    def _lazy(self, x: Tensor) -> Tensor | LazyLogits:
        if isinstance(self.outputs, LinearOutput | TiedOutput) and isinstance(self.config.outputs, config.Logits):
            return self.outputs.lazy(x)
        if not isinstance(self.config.outputs, config.Logits) or isinstance(self.outputs, nn.Identity):
            raise ValueError(
                f"Transformer: lazy outputs are Logits() but those of this model are {self.config.outputs}"
            )
        return self.outputs(x)

    @property
    def _pools(self) -> bool:
        """Whether the outputs, wrapped or not, are one answer for all positions."""
        return any(isinstance(part, ClassOutput) for part in self.outputs.modules())

    def _check(self, given: "_Given", source: Tensor | None, tail: int | None) -> None:
        keep, cache, context = given.keep, given.cache, given.context
        if self.encoder is None and (source is not None or context is not None):
            raise ValueError("Transformer: it has no encoder, so no source was wanted but one came")
        if self.encoder is not None and (source is None) == (context is None):
            raise ValueError("Transformer: its encoder reads a source: source or, once encoded, encoded must be given")
        if keep is not None and len(keep) != len(self.blocks):
            raise ValueError(
                f"Transformer: keep must hold one tensor, or None, a layer: {len(self.blocks)}, not {len(keep)}"
            )
        if tail is not None and self._pools:
            raise ValueError(f"Transformer: a class is read off all positions, so tail must be None but is {tail}")
        if cache is not None and (len(cache) != len(self.blocks) or not self.config.causal):
            raise ValueError(
                f"Transformer: a cache of {len(self.blocks)} layers and causal=True go together but "
                f"{len(cache)} layers and causal={self.config.causal} came"
            )
        if given.cu_seqlens is None:
            return
        alone = {"tail": tail, "cache": cache, "encoder": self.encoder}
        strange = [name for name, value in alone.items() if value is not None]
        strange += ["Classes()"] if self._pools else []
        if strange:
            raise ValueError(f"Transformer: with cu_seqlens inputs are several sequences, without {strange[0]}")

    def _embed(self, inputs: Tensor, given: "_Given") -> Tensor:
        x = self.inputs(inputs)
        if given.cache is not None:
            given.cache.expect(given.mask, x)
        if self.positions is None:
            return x
        where = given.positions
        if where is None and given.cu_seqlens is not None:
            where = places_in(given.cu_seqlens, x.shape[1])
        elif where is None:
            first = 0 if given.cache is None else given.cache.length
            where = torch.arange(first, first + x.shape[1], device=x.device)[None]
        return x + self.positions(where).to(x.dtype)

    def _through(self, x: Tensor, given: "_Given", tail: int | None, taps: list[Taps] | None) -> Tensor:
        """All blocks; the last computes nothing but the tail."""
        # What is told of a layer, and what a cache takes, must not come twice.
        again = self.config.checkpoint and self.training and taps is None and given.cache is None
        real = given.mask if given.cache is None else None  # a cache knows which tokens are real
        mask, context_mask = (None if m is None else m[:, None, None] for m in (real, given.context_mask))
        context, embedded = given.context, x
        made: dict[int, Tensor] = {}
        made_of_context: dict[int, Tensor] = {}
        for i, block in enumerate(self.blocks):
            if given.stream is not None:
                given.stream.append(x)
            cache = None if given.cache is None else given.cache[i]
            symbols = self._own.read(
                i, x, embedded, made, mask=given.mask, cu_seqlens=given.cu_seqlens, positions=given.positions,
                cache=cache, again=again,
            )  # fmt: skip
            across = None
            if context is not None:
                shown = given.context_mask
                across = self._across.read(i, context, context, made_of_context, mask=shown, cache=cache, again=again)
            seen: list[Taps] | None = None if taps is None else []
            entering = x
            x = recomputed(block, again)(
                x,
                context,
                mask=mask,
                context_mask=context_mask,
                positions=given.positions,
                tail=tail if i == len(self.blocks) - 1 else None,
                keep=None if given.keep is None else given.keep[i],
                symbols=symbols,
                context_symbols=across,
                cu_seqlens=given.cu_seqlens,
                cache=cache,
                taps=seen,
            )
            if taps is not None and seen is not None:
                taps += self._shown(i, seen, (entering, embedded), given)
        return x

    def _shown(self, layer: int, seen: list[Taps], stream: tuple[Tensor, Tensor], given: "_Given") -> list[Taps]:
        """The taps of a block with what its symbols are; of an encoder-decoder by name."""
        if given.cache is None:  # which holds no stream to read symbols off
            seen[0] = self._own.shown(seen[0], layer, *stream, given.mask, given.cu_seqlens)
            if given.context is not None:
                seen[1] = self._across.shown(seen[1], layer, given.context, given.context, given.context_mask)
        if self.encoder is None:
            return seen
        names = (f"decoder {layer}", f"cross {layer}")
        return [dataclasses.replace(taps, name=name) for taps, name in zip(seen, names, strict=True)]

    def auxiliary_loss(self) -> Tensor | float:
        """What the last forward adds to the loss beside the task's: the load balance of mixtures of experts, else 0."""
        encoder: Any = self.encoder  # or what wraps it
        added = encoder.auxiliary_loss() if hasattr(encoder, "auxiliary_loss") else 0.0
        if not isinstance(self.config.feedforward, config.Experts):
            return added
        losses = [m.balance_loss for m in self.blocks.modules() if isinstance(m, MixtureOfExperts)]
        total = torch.stack([loss for loss in losses if loss is not None]).sum()
        return added + self.config.feedforward.balance * total


class _Given(NamedTuple):
    """What all blocks are given beside the stream."""

    mask: Tensor | None
    positions: Tensor | None
    keep: Sequence[Tensor | None] | None
    context: Tensor | None
    context_mask: Tensor | None
    cu_seqlens: Tensor | None
    cache: Cache | None
    stream: list[Tensor] | None


def _encoder(
    settings: TransformerConfig | config.AbstractorConfig | None, device: Device, dtype: torch.dtype | None
) -> nn.Module | None:
    if settings is None:
        return None
    if isinstance(settings, TransformerConfig):
        return Transformer(settings, outputs=False, device=device, dtype=dtype)
    return Abstractor(settings, device=device, dtype=dtype)


def _input_positions(
    settings: TransformerConfig, device: Device, dtype: torch.dtype | None
) -> LearnedPositions | SinusoidalPositions | OwnVectors | None:
    if _is_own(settings.positions) and way_of(settings.positions) == "vectors":
        heads = sum(group.heads for group in settings.layer_heads(0))
        return OwnVectors(settings.positions, heads, settings.dim, settings.max_length, device=device, dtype=dtype)
    if isinstance(settings.positions, config.Learned):
        return LearnedPositions(settings.max_length, settings.dim, device=device, dtype=dtype)
    if isinstance(settings.positions, config.Sinusoidal):
        return SinusoidalPositions(settings.max_length, settings.dim, device=device, dtype=dtype)
    return None


def _layer_positions(settings: TransformerConfig, device: Device) -> Positions:
    """What every layer gets: rotary tables made once and shared; a relative bias is each layer's own."""
    positions = settings.positions
    if isinstance(positions, config.Rotary):
        layers = [settings.layer_heads(i) for i in range(settings.layers)]
        theta, layout, length = positions.theta, positions.layout, settings.max_length
        return rotary_tables(layers, settings.dim, theta=theta, layout=layout, max_length=length, device=device)
    if _is_own(positions):
        return None if way_of(positions) == "vectors" else positions
    return positions if isinstance(positions, (config.RelativeBias, config.Alibi)) else None


def _is_own(positions: config.Position | None) -> TypeGuard[config.Position]:
    """Whether they are a user's."""
    return positions is not None and not isinstance(positions, POSITIONS)


def _block(
    settings: TransformerConfig,
    layer: int,
    positions: Positions,
    device: Device,
    dtype: torch.dtype | None,
) -> TransformerBlock:
    def attention(heads: Sequence[config.Mechanism], *, own: bool) -> MultiHeadAttention:
        """Of the layer's own tokens, or to another sequence: there each of the two counts its own positions."""
        return MultiHeadAttention(
            settings.dim,
            heads,
            causal=settings.causal and own,
            positions=positions if own else None,
            bias=settings.bias,
            window=settings.window if own else None,
            qk_norm=settings.qk_norm,
            dropout=settings.dropout,
            dropout_shared=settings.dropout_shared,
            max_length=settings.max_length,
            own_symbols=False,
            device=device,
            dtype=dtype,
        )

    across = settings.layer_cross_heads(layer)
    own = attention(settings.layer_heads(layer), own=True)
    cross = attention(across, own=False) if across else None
    return TransformerBlock(
        own,
        build_feedforward(settings.feedforward, settings.dim, device=device, dtype=dtype),
        cross=cross,
        norm=settings.norm,
        norm_eps=settings.norm_eps,
        norm_order=settings.norm_order,
        dropout=settings.residual_dropout,
        device=device,
        dtype=dtype,
    )
