"""The sources of symbols of a transformer: which source each layer reads, and its symbols there.

Symbols are computed from the residual stream before a block's first norm; those of cross-attention from the context.  A
`shared` source is one module for all layers; other sources belong to one layer.  Self- and cross-attention never share
a source.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Unpack

from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from polyhead import config
from polyhead.config import TransformerConfig
from polyhead.layers.cache import LayerCache
from polyhead.layers.device import Placement
from polyhead.layers.symbols import RelationalSymbols, SymbolicAttention, build_symbols
from polyhead.layers.taps import Taps
from polyhead.ops.kernel import needs_more_than_backward

# The model and the block in which the sources of a layer are registered.
Owners = tuple[nn.Module | None, nn.Module | None]


class Sources:
    """The sources that the groups of each layer read, by index.

    Their modules are registered in `shared`, or in `by_layer` of their layer.

    Args:
        cross: Whether the sources are those of a decoder's cross-attention.
    """

    def __init__(
        self,
        settings: TransformerConfig,
        layers: Sequence[config.Heads],
        *,
        cross: bool = False,
        **placement: Unpack[Placement],
    ) -> None:
        self.cross = cross
        self.shared = nn.ModuleList()
        self.by_layer = [nn.ModuleList() for _ in layers]
        # A source's number is its place in `registered` (its list, and its index there) and in `reads_embedded`.
        # `numbers` has the number of each layer's groups, None for a group without symbols.
        self.registered: list[tuple[nn.ModuleList, int]] = []
        self.reads_embedded: list[bool] = []
        self.numbers: list[list[int | None]] = []
        # Cross-attention reads symbols of the encoder's tokens: its length counts, and no order hides neighbours.
        length = settings.max_length
        if cross and settings.encoder is not None:
            length = settings.encoder.max_length
        causal = settings.causal and not cross
        self.number_by_key: dict[object, int] = {}
        build = functools.partial(build_symbols, dim=settings.dim, causal=causal, max_length=length, **placement)
        for layer, heads in enumerate(layers):
            numbers: list[int | None] = []
            for group in heads:
                if isinstance(group, config.SymbolHeads):
                    numbers.append(self._add(group.symbols, layer, build))
                else:
                    numbers.append(None)
            self.numbers.append(numbers)

    def _add(self, source: config.SymbolSource, layer: int, build: Callable[..., nn.Module]) -> int:
        """The number of a source of a layer, which is built if it is new."""
        # Groups of a layer with equal settings read one source; if it is shared, those of all layers do.
        key: object = (source, layer)
        home = self.by_layer[layer]
        if source.shared:
            key = source
            home = self.shared
        if key in self.number_by_key:
            return self.number_by_key[key]
        number = len(self.registered)
        self.number_by_key[key] = number
        self.registered.append((home, len(home)))
        home.append(build(source, cache_key=number))
        self.reads_embedded.append(self.cross or getattr(source, "once", False))
        return number

    def module(self, number: int, owners: Owners) -> nn.Module:
        """The module of a source as it is registered now, in the model or in the block of its layer: it and the block
        may have been wrapped or replaced, for example by copies."""
        home, index = self.registered[number]
        model, block = owners
        owner = block
        if home is self.shared:
            owner = model
        name = "symbols"
        if self.cross:
            name = "cross_symbols"
        # A foreign block may have no such list, or another one; then the list that was built here is used.
        registered = getattr(owner, name, None)
        if isinstance(registered, nn.ModuleList) and len(registered) == len(home):
            home = registered
        return home[index]

    def layer_of(self, block: nn.Module, index: int) -> int:
        """The layer for which block number `index` was built: others may have been dropped, or it may be foreign."""
        layer = getattr(block, "layer", None)
        if isinstance(layer, int) and layer < len(self.numbers):
            return layer
        return index

    def symbols_of_layer(
        self,
        layer: int,
        owners: Owners,
        x: Float[Tensor, "b s m"],
        embedded: Float[Tensor, "b s m"],
        computed_symbols: dict[int, Tensor],
        *,
        cache: LayerCache | None,
        recompute: bool,
        **arguments: Tensor | None,
    ) -> list[Tensor | None] | None:
        """The symbols of each group of a layer (None for a group without symbols), or None if no group has any.

        Args:
            x: The layer's input, or the context.
            embedded: Read in place of `x` by sources that are called once per model.
            computed_symbols: Keeps the symbols of those sources from layer to layer.
            recompute: Whether the backward pass recomputes a source, by activation checkpointing.
            **arguments: Further arguments of a source.
        """
        numbers = self.numbers[layer]
        if all(number is None for number in numbers):
            return None

        def computed(number: int) -> Tensor:
            source = checkpointed(self.module(number, owners), recompute and cache is None)
            tokens = embedded if self.reads_embedded[number] else x
            symbols_of = functools.partial(source, tokens, **arguments)
            if cache is None:
                return symbols_of()
            if self.cross:  # the context is the same in every step
                return cache.cross.computed_once(("symbols", number), lambda: {"symbols": symbols_of()})["symbols"]
            return symbols_of(first=cache.length, cache=cache)

        # Called twice, a source would add the same tokens to the cache twice.
        for number in dict.fromkeys(numbers):
            if number is not None and not (self.reads_embedded[number] and number in computed_symbols):
                computed_symbols[number] = computed(number)
        symbols: list[Tensor | None] = []
        for number in numbers:
            symbols.append(None if number is None else computed_symbols[number])
        return symbols

    def with_assignments(
        self,
        taps: Taps,
        layer: int,
        owners: Owners,
        x: Float[Tensor, "b s m"],
        embedded: Float[Tensor, "b s m"],
        **arguments: Tensor | None,
    ) -> Taps:
        """`taps` of a layer with the attention of tokens over symbols, for groups with symbolic attention.

        Tokens are `x` or, for sources that are called once per model, `embedded`.
        """
        groups = list(taps.groups)
        for i, number in enumerate(self.numbers[layer]):
            if number is None:
                continue
            module = self.module(number, owners)
            if isinstance(module, (SymbolicAttention, RelationalSymbols)):
                tokens = embedded if self.reads_embedded[number] else x
                assigned = module.assignments(tokens, **arguments)
                groups[i] = dataclasses.replace(groups[i], assignments=assigned)
        return dataclasses.replace(taps, groups=tuple(groups))


def checkpointed(module: nn.Module, recompute: bool) -> Callable[..., Tensor]:
    """`module`; if `recompute`, with activation checkpointing: it saves its inputs and recomputes the rest.

    torch.func has no such saving, so that its derivatives keep all.
    """
    if not recompute or needs_more_than_backward():
        return module
    return functools.partial(checkpoint, module, use_reentrant=False)
