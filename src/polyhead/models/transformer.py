"""The transformer: encoder, causal decoder, or both; any list of heads in every layer.

x = inputs(tokens, vectors or images) (+ positions);   x = block_1(x) ... block_l(x);   outputs(norm(x))

With an encoder, every block also attends to encoder(source), the stream after the encoder's last norm.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Unpack

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from polyhead import config
from polyhead.config import SymbolHeads, SymbolicAttention, TransformerConfig
from polyhead.config.mechanisms import MECHANISMS
from polyhead.layers.attention import MultiHeadAttention, Positions
from polyhead.layers.block import TransformerBlock, build_norm
from polyhead.layers.cache import Cache, whole
from polyhead.layers.device import Device, Placement
from polyhead.layers.feedforward import MixtureOfExperts, build_feedforward
from polyhead.layers.positions import LearnedPositions, SinusoidalPositions, leave_meta, places_in, rotary_tables
from polyhead.layers.projection import computes, hooked
from polyhead.layers.taps import Taps
from polyhead.models.initialise import initial_logit_factor, initialise
from polyhead.models.inputs_outputs import (
    ClassOutput,
    LazyLogits,
    LinearOutput,
    TiedOutput,
    TokenInput,
    build_input,
    build_output,
    check_mask,
    input_positions,
)
from polyhead.models.rivals.abstractor import PRESET, AbstractorModel
from polyhead.models.symbol_routing import Owners, Sources, checkpointed
from polyhead.ops.call import Packed
from polyhead.spec.shapes import shaped


class Transformer(nn.Module):
    """Inputs, blocks, outputs: an encoder, a causal decoder or, with `encoder`, both; any list of heads in every layer.

    >>> heads = [Softmax(4), Hyla(4)]
    >>> model = Transformer(TransformerConfig(Tokens(100), Logits(100), dim=64, heads=heads, causal=True))
    >>> model(torch.randint(100, (2, 16))).shape
    torch.Size([2, 16, 100])
    >>> reads = TransformerConfig(Tokens(50), Logits(50), dim=64, heads=[Softmax(4), Relational(4)])
    >>> writes = TransformerConfig(Tokens(100), Logits(100, tied=True), dim=64, causal=True, encoder=reads)
    >>> model = Transformer(writes)
    >>> model(torch.randint(100, (2, 16)), source=torch.randint(50, (2, 9))).shape
    torch.Size([2, 16, 100])

    Args:
        outputs: Whether there is an output module; without one, as in an encoder, the last norm's stream is returned.
    """

    encoder: nn.Module | None
    _self_sources: Sources

    def __init__(
        self,
        settings: TransformerConfig,
        *,
        outputs: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _warn_if_blind(settings)
        self.config = settings
        placement = Placement(device=device, dtype=dtype)
        self.encoder = None
        if isinstance(settings.encoder, TransformerConfig):
            self.encoder = Transformer(settings.encoder, outputs=False, **placement)
        elif settings.encoder is not None:
            if settings.encoder.outputs is not None:
                raise ValueError("Transformer: an encoder returns its stream, so its outputs must be None")
            self.encoder = AbstractorModel(settings.encoder, **placement)
        self.inputs = build_input(settings.inputs, settings.dim, **placement)
        self.positions = input_positions(settings, **placement)
        layers = [settings.layer_heads(i) for i in range(settings.layers)]
        cross_layers = [settings.layer_cross_heads(i) for i in range(settings.layers)]
        self._self_sources = Sources(settings, layers, **placement)
        self._cross_sources = Sources(settings, cross_layers, cross=True, **placement)
        self.symbols, self.cross_symbols = self._self_sources.shared, self._cross_sources.shared
        # Layers share rotary tables, but each has its own relative bias; other positions are added to the inputs.
        shared: Positions = None
        if isinstance(settings.positions, config.Rotary):
            shared = rotary_tables(settings.positions, layers, settings.dim, settings.max_length, device)
        elif isinstance(settings.positions, (config.RelativeBias, config.Alibi)):
            shared = settings.positions
        self.blocks = nn.ModuleList()
        for i in range(settings.layers):
            block = _block(settings, i, shared, **placement)
            if len(self._self_sources.by_layer[i]):
                block.add_module("symbols", self._self_sources.by_layer[i])
            if len(self._cross_sources.by_layer[i]):
                block.add_module("cross_symbols", self._cross_sources.by_layer[i])
            self.blocks.append(block)
        # By default only a pre-norm model has a last norm: the blocks of a post-norm model end with one.
        has_final_norm = settings.final_norm
        if has_final_norm is None:
            has_final_norm = settings.norm_order == "pre"
        self.norm: nn.Module = nn.Identity()
        if has_final_norm:
            self.norm = build_norm(settings.norm, settings.dim, settings.norm_eps, **placement)
        self.outputs: nn.Module = nn.Identity()
        if outputs:
            self.outputs = build_output(settings.outputs, self.inputs, settings.dim, **placement)
        self.reset_parameters()
        self.register_load_state_dict_post_hook(_tie)
        self.register_load_state_dict_post_hook(leave_meta)

    def reset_parameters(self) -> None:
        """Initialise all parameters by the preset `config.init` (an encoder by its own), from torch's default
        generator."""
        settings = self.config
        initialise(self, settings.init)
        # The initial loss of a language model should be near ln(tokens).  A tied map scales the token table itself.
        if isinstance(self.outputs, LinearOutput | TiedOutput):
            factor = initial_logit_factor(settings.inputs, settings.outputs, settings.dim, settings.init)
            with torch.no_grad():
                self.outputs.weight.mul_(factor)
        # `initialise` has filled the encoder, too, by this model's preset; an encoder with its own is filled again.
        if isinstance(self.encoder, Transformer):
            self.encoder.reset_parameters()
        elif isinstance(self.encoder, AbstractorModel) and settings.init != PRESET:
            initialise(self.encoder, PRESET)

    def __setattr__(self, name: str, value: object) -> None:
        """Tied logits take the table of a new input module."""
        super().__setattr__(name, value)  # type: ignore[arg-type]
        if name == "inputs" and isinstance(value, TokenInput) and "outputs" in self._modules:
            for part in self.outputs.modules():
                if isinstance(part, TiedOutput):
                    part.source = (value,)
            _tie(self)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Transformer":
        super()._apply(fn, recurse)
        _tie(self)
        return self

    def length(self, inputs: Tensor) -> int:
        """The number of tokens of `inputs`."""
        if isinstance(self.config.inputs, config.Patches):
            return self.config.inputs.count
        return inputs.shape[1]

    @shaped
    def encode(
        self,
        source: Float[Tensor, "b s _"] | Int[Tensor, "b s"] | Float[Tensor, "b _ _ _"],
        mask: Bool[Tensor, "b s"] | None = None,
        *,
        taps: list[Taps] | None = None,
    ) -> Float[Tensor, "b _ m"]:
        """The encoder's output (b s m) for `source`, to which the decoder attends; `mask` is True at real tokens."""
        if self.encoder is None:
            raise ValueError("Transformer: source must be None, as it has no encoder")
        if taps is None:
            return self.encoder(source, mask=mask)
        layer_taps: list[Taps] = []
        encoded = self.encoder(source, mask=mask, taps=layer_taps)
        for i, layer in enumerate(layer_taps):
            taps.append(dataclasses.replace(layer, name=f"encoder {i}"))
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
        outputs: bool = True,
    ) -> Float[Tensor, "b _ _"] | LazyLogits:
        """The outputs (b t c), or (b 1 c) for `Classes`.

        Sequences of different lengths can give the same results as alone.  Pad them on the left, and pass a mask and
        positions that count real tokens (any in range at padding).

        Args:
            inputs: Embeddings (b t m) may be given in place of tokens.
            mask: True at real tokens (b t); with a `cache`, at real new tokens, and padding stays masked later.
            positions: By default 0, 1, ..., and padding counts, too.
            tail: Return only the last `tail` positions (b tail c).  Without positions and a cache, the last layer then
                computes no others.
            keep: For each layer (or None) a factor of its code, (b|1 h|1 t s), in place of its own dropout.
            source: The encoder's input.
            source_mask: True at real tokens of the source.
            encoded: The result of `encode`, in place of a source.
            cu_seqlens: The edges (int32, n + 1) of n packed sequences in the single sample, which are masked from one
                another.  Sequence i has the rows cu_seqlens[i] to cu_seqlens[i + 1].
            cache: Holds the tokens before `inputs`; the call adds `inputs` to the cache.
            taps: Collects one Taps per layer.  With an encoder, the encoder's come first, then self- and
                cross-attention of each layer, by name.
            stream: Collects the input of each block, and last that of the outputs.
            lazy: Return `LazyLogits`, which are never stored as a whole and compute their cross entropy and argmax.
            outputs: Whether to apply the output module; otherwise the result is the stream (b t m) after the last norm.

        Raises:
            ValueError: For shapes or combinations of arguments that do not match.
        """
        arguments = _BlockArguments(mask, positions, keep, encoded, source_mask, cu_seqlens, cache, stream)
        self._check(arguments, source, tail)
        if source is not None:
            arguments = arguments._replace(context=self.encode(source, source_mask, taps=taps))
        with whole(cache):
            x = self._embed(inputs, arguments)
            if tail is not None and not 1 <= tail <= x.shape[1]:
                raise ValueError(f"Transformer: tail must be 1 to {x.shape[1]} (the positions) but is {tail}")
            # Given positions and a cache belong to the keys, too: then the last layer computes all positions.
            tail_of_last_layer = None
            if positions is None and cache is None:
                tail_of_last_layer = tail
            x = self._through(x, arguments, tail_of_last_layer, taps)
            if tail is not None:
                x = x[:, -tail:]
            x = self.norm(x)
            if stream is not None:
                stream.append(x)
            if not outputs:
                return x
            if lazy:
                return self._lazy(x)
            if self._pools:
                return self.outputs(x, mask)
            return self.outputs(x)

    def _lazy(self, x: Tensor) -> Tensor | LazyLogits:
        if not isinstance(self.config.outputs, config.Logits) or isinstance(self.outputs, nn.Identity):
            raise ValueError(
                f"Transformer: lazy outputs are Logits() but those of this model are {self.config.outputs}"
            )
        # A subclass's `forward` or a hook may change the logits, so then they are computed in full.
        is_plain = computes(self.outputs, LinearOutput.forward, TiedOutput.forward) and not hooked(self.outputs)
        if is_plain and isinstance(self.outputs, LinearOutput | TiedOutput):
            return self.outputs.lazy(x)
        return self.outputs(x)

    @property
    def _pools(self) -> bool:
        """Whether the outputs, wrapped or not, pool all positions."""
        return any(isinstance(part, ClassOutput) for part in self.outputs.modules())

    def _check(self, arguments: "_BlockArguments", source: Tensor | None, tail: int | None) -> None:
        keep, cache, context = arguments.keep, arguments.cache, arguments.context
        check_mask("Transformer", "source_mask (b s)", arguments.context_mask, context)
        if self.encoder is None and any(x is not None for x in (source, context, arguments.context_mask)):
            raise ValueError("Transformer: source and source_mask must be None, as it has no encoder")
        if self.encoder is not None and (source is None) == (context is None):
            raise ValueError("Transformer: its encoder reads a source: source or, once encoded, encoded must be given")
        if keep is not None and len(keep) != len(self.blocks):
            raise ValueError(
                f"Transformer: keep must hold one tensor, or None, a layer: {len(self.blocks)}, not {len(keep)}"
            )
        if tail is not None and self._pools:
            raise ValueError(f"Transformer: a class is read off all positions, so tail must be None but is {tail}")
        if cache is not None and not isinstance(cache, Cache):
            raise ValueError(f"Transformer: cache must be a Cache but is a {type(cache).__name__}")
        if cache is not None and cache.length and self._pools:
            raise ValueError(f"Transformer: a class is read off all positions, but {cache.length} are in the cache")
        if cache is not None and (len(cache) != len(self.blocks) or not self.config.causal):
            raise ValueError(
                f"Transformer: a cache of {len(self.blocks)} layers and causal=True go together, "
                f"got {len(cache)} layers and causal={self.config.causal}"
            )
        if arguments.cu_seqlens is None:
            return
        exclusive = {"tail": tail, "cache": cache, "encoder": self.encoder, "Classes()": self._pools or None}
        strange = [name for name, value in exclusive.items() if value is not None]
        if strange:
            raise ValueError(f"Transformer: with cu_seqlens inputs are several sequences, without {strange[0]}")

    def _embed(self, inputs: Tensor, arguments: "_BlockArguments") -> Tensor:
        x = self.inputs(inputs)
        check_mask("Transformer", "mask (b t)", arguments.mask, x)
        if arguments.cache is not None:
            arguments.cache.expect(arguments.mask, x)
        if self.positions is None:
            return x
        # Positions (b|1 t) are given, or start anew in each packed sequence, or go on after the tokens in the cache.
        positions, options = arguments.positions, {}
        if positions is None and arguments.cu_seqlens is not None:
            positions = places_in(arguments.cu_seqlens, x.shape[1])
        elif positions is None:
            first = 0
            if arguments.cache is not None:
                first = arguments.cache.length
            end = first + x.shape[1]
            positions = torch.arange(first, end, device=x.device)[None]
            # Counted positions are read only for the error: reading them would synchronise the device.
            is_ours = isinstance(self.positions, (LearnedPositions, SinusoidalPositions))
            if is_ours and not torch.compiler.is_compiling() and end <= self.config.max_length:
                options = {"check": False}
        return x + self.positions(positions, **options).to(x.dtype)

    def _through(self, x: Tensor, arguments: "_BlockArguments", tail: int | None, taps: list[Taps] | None) -> Tensor:
        """All blocks; the last computes only the tail."""
        # Checkpointing runs a block twice, which must neither collect taps twice nor add tokens to a cache twice.
        recompute = self.config.checkpoint and self.training and taps is None and arguments.cache is None
        embedded, last = x, len(self.blocks) - 1
        # Symbols by number of their source; those of a source that is called once per model serve later layers, too.
        self_symbols: dict[int, Tensor] = {}
        cross_symbols: dict[int, Tensor] = {}
        # Masks (b 1 1 s) of the keys of self-attention, unless a cache has them, and of those of the context.
        mask = context_mask = None
        if arguments.mask is not None and arguments.cache is None:
            mask = arguments.mask[:, None, None]
        if arguments.context_mask is not None:
            context_mask = arguments.context_mask[:, None, None]
        for i, block in enumerate(self.blocks):
            if arguments.stream is not None:
                arguments.stream.append(x)
            # A model may have lost blocks: symbols go by the number of the layer, caches by the place of the block.
            layer, owners = self._self_sources.layer_of(block, i), (self, block)
            cache = keep = None
            if arguments.cache is not None:
                cache = arguments.cache[i]
            if arguments.keep is not None:
                keep = arguments.keep[i]
            options: dict[str, Any] = {"cache": cache, "recompute": recompute}
            symbols = self._self_sources.symbols_of_layer(
                layer, owners, x, embedded, self_symbols, mask=arguments.mask, cu_seqlens=arguments.cu_seqlens,
                positions=arguments.positions, **options,
            )  # fmt: skip
            context, context_symbols = arguments.context, None
            if context is not None:
                context_symbols = self._cross_sources.symbols_of_layer(
                    layer, owners, context, context, cross_symbols, mask=arguments.context_mask, **options
                )
            block_input = x
            layer_taps: list[Taps] | None = None if taps is None else []
            x = checkpointed(block, recompute)(
                x,
                context,
                mask=mask,
                context_mask=context_mask,
                positions=arguments.positions,
                tail=tail if i == last else None,
                keep=keep,
                symbols=symbols,
                context_symbols=context_symbols,
                cu_seqlens=arguments.cu_seqlens,
                cache=cache,
                taps=layer_taps,
            )
            if taps is not None and layer_taps is not None:
                taps += self._complete(layer, owners, layer_taps, (block_input, embedded), arguments)
        return x

    def _complete(
        self,
        layer: int,
        owners: Owners,
        layer_taps: list[Taps],
        stream: tuple[Tensor, Tensor],
        arguments: "_BlockArguments",
    ) -> list[Taps]:
        """The taps of a block, with its attention over symbols; in an encoder-decoder with names."""
        if arguments.cache is None:  # a cache does not hold the stream of earlier tokens
            layer_taps[0] = self._self_sources.with_assignments(
                layer_taps[0], layer, owners, *stream, mask=arguments.mask, cu_seqlens=arguments.cu_seqlens
            )
            context = arguments.context
            if context is not None:
                layer_taps[1] = self._cross_sources.with_assignments(
                    layer_taps[1], layer, owners, context, context, mask=arguments.context_mask
                )
        if self.encoder is None:
            return layer_taps
        names = (f"decoder {layer}", f"cross {layer}")
        return [dataclasses.replace(taps, name=name) for taps, name in zip(layer_taps, names, strict=True)]

    def auxiliary_loss(self) -> Tensor | float:
        """The term that the last forward adds to the task's loss: the load balance of mixtures of experts, or 0."""
        encoder: Any = self.encoder  # possibly wrapped
        total = 0.0
        if hasattr(encoder, "auxiliary_loss"):
            total = encoder.auxiliary_loss()
        if not isinstance(self.config.feedforward, config.Experts):
            return total
        losses = []
        for module in self.blocks.modules():
            if isinstance(module, MixtureOfExperts) and module.balance_loss is not None:
                losses.append(module.balance_loss)
        if not losses:
            raise ValueError("Transformer: auxiliary_loss is of the last forward pass, but there was none")
        return total + self.config.feedforward.balance * torch.stack(losses).sum()


class _BlockArguments(NamedTuple):
    """The arguments of `forward` that blocks read; `keep` and `cache` have an entry for each block."""

    mask: Tensor | None
    positions: Tensor | None
    keep: Sequence[Tensor | None] | None
    context: Tensor | None
    context_mask: Tensor | None
    cu_seqlens: Tensor | None
    cache: Cache | None
    stream: list[Tensor] | None


def _block(
    settings: TransformerConfig, layer: int, positions: Positions, **placement: Unpack[Placement]
) -> TransformerBlock:
    # What self- and cross-attention have in common.  The model owns the sources of symbols, so attention builds none.
    attention = functools.partial(
        MultiHeadAttention,
        settings.dim,
        bias=settings.bias,
        qk_norm=settings.qk_norm,
        dropout=settings.dropout,
        dropout_shared=settings.dropout_shared,
        max_length=settings.max_length,
        own_symbols=False,
        **placement,
    )
    self_attention = attention(
        settings.layer_heads(layer), causal=settings.causal, positions=positions, window=settings.window
    )
    # Cross-attention has no positions, because each sequence counts its own.
    cross, cross_heads = None, settings.layer_cross_heads(layer)
    if cross_heads:
        cross = attention(cross_heads)
    return TransformerBlock(
        self_attention,
        build_feedforward(settings.feedforward, settings.dim, **placement),
        cross=cross,
        norm=settings.norm,
        norm_eps=settings.norm_eps,
        norm_order=settings.norm_order,
        dropout=settings.residual_dropout,
        layer=layer,
        **placement,
    )


def _tie(model: Transformer, _: object = None) -> None:
    """Tie logits to tokens: off the meta device, and by `assign=True`, each got its own table."""
    for part in model.outputs.modules():  # a wrapper may hold the output module
        if isinstance(part, TiedOutput):
            part.tie()


class BlindToOrder(UserWarning):
    """The outputs of a transformer of tokens do not depend on the order of the tokens."""


def _warn_if_blind(settings: object) -> None:
    """Warn if a model of these settings cannot see the order of tokens.

    Such a model reads tokens, is not causal, and has no positions, no window and only symbols of symbolic attention.
    A model with heads of a user is trusted: its heads may see the order.

    Raises:
        ValueError: For anything but a TransformerConfig.
    """
    if not isinstance(settings, TransformerConfig):
        raise ValueError(f"Transformer: settings must be a TransformerConfig, got {settings!r:.60}")
    if settings.positions is not None or settings.causal or settings.window is not None:
        return
    if not isinstance(settings.inputs, config.Tokens):
        return
    for group in settings.groups():
        has_positions = isinstance(group, SymbolHeads) and type(group.symbols) is not SymbolicAttention
        if not isinstance(group, MECHANISMS) or has_positions:
            return
    text = "Transformer: it is blind to the order of its tokens: give positions, such as Rotary(), or causal=True"
    warnings.warn(text, BlindToOrder, stacklevel=3)
