"""The block and the transformer as Flax NNX modules, from the same `TransformerConfig` as the PyTorch modules.

x = inputs(tokens or vectors) (+ positions);   x = block_1(x) ... block_l(x);   outputs(norm(x))

pre-norm:   x = x + attention(norm1(x));   x = x + feedforward(norm2(x))
post-norm:  x = norm1(x + attention(x));   x = norm2(x + feedforward(x))
"""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from polyhead import config
from polyhead.jaxside.call import Array, scaled
from polyhead.jaxside.nnx.attention import MultiHeadAttention, Symbols, checked_positions
from polyhead.jaxside.nnx.components import (
    Embedding,
    Identity,
    Initialiser,
    Linear,
    MlpLayer,
    Norm,
    SwigluLayer,
    dropped,
    rows_of,
)
from polyhead.jaxside.nnx.positions import LearnedPositions, SinusoidalPositions
from polyhead.jaxside.nnx.symbols import build_symbols
from polyhead.spec import NORM_ORDERS
from polyhead.spec.shapes import check_rate, named, one_of

WHO = "polyhead.jaxside.nnx.Transformer"


@named
class TransformerBlock(nnx.Module):
    """Attention and a feed-forward layer, each with a residual; the arguments of `polyhead.TransformerBlock`."""

    def __init__(
        self,
        attention: MultiHeadAttention,
        feedforward: nnx.Module,
        *,
        norm: str = "layer",
        norm_eps: float = 1e-5,
        norm_order: str = "pre",
        dropout: float = 0.0,
        dtype: DTypeLike = jnp.float32,
    ) -> None:
        self.pre = one_of("TransformerBlock", "norm_order", norm_order, NORM_ORDERS) == "pre"
        check_rate("TransformerBlock", dropout)
        draw = Initialiser(None, dtype=dtype)  # for norms, which draw nothing
        self.norm1 = Norm(attention.dim, draw, kind=norm, eps=norm_eps)
        self.attention = attention
        self.norm2 = Norm(attention.dim, draw, kind=norm, eps=norm_eps)
        self.feedforward = feedforward
        self.dropout = dropout
        self.symbols: nnx.List[Any] = nnx.List([])

    @named
    def __call__(
        self,
        x: Array,
        *,
        mask: Array | None = None,
        positions: Array | None = None,
        keep: Array | None = None,
        symbols: Symbols = None,
        rngs: nnx.Rngs | None = None,
    ) -> Array:
        """(b t m) from x (b t m); the arguments of `MultiHeadAttention`.  With `rngs` dropout is active."""
        looked = self.attention(
            self.norm1(x) if self.pre else x, mask=mask, positions=positions, keep=keep, symbols=symbols, rngs=rngs
        )
        x = x + dropped(looked, self.dropout, rngs)
        if self.pre:
            return x + dropped(self.feedforward(self.norm2(x)), self.dropout, rngs)
        x = self.norm1(x)
        return self.norm2(x + dropped(self.feedforward(x), self.dropout, rngs))


class TokenInput(nnx.Module):
    """Tokens (b t) through a table whose rows are multiplied by `factor`; NaN for tokens outside of it."""

    def __init__(self, end: config.Tokens, dim: int, draw: Initialiser) -> None:
        self.count, self.factor = end.count, dim**0.5 if end.scaled else 1.0
        self.table = Embedding(end.count, dim, draw)

    def __call__(self, tokens: Array) -> Array:
        if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise ValueError(f"{WHO}: integer tokens (b t) were wanted but {tokens.dtype} {tuple(tokens.shape)} came")
        x = rows_of(self.table.weight[...], tokens)
        return x if self.factor == 1.0 else scaled(x, self.factor)


class VectorInput(nnx.Module):
    """Vectors (b t size) through a linear map."""

    def __init__(self, end: config.Vectors, dim: int, draw: Initialiser) -> None:
        self.size = end.size
        self.linear = Linear(end.size, dim, draw, bias=end.bias)

    def __call__(self, vectors: Array) -> Array:
        if vectors.ndim != 3 or vectors.shape[-1] != self.size:
            raise ValueError(f"{WHO}: inputs (b t {self.size}) were wanted but {tuple(vectors.shape)} came")
        return self.linear(vectors)


class LinearOutput(nnx.Module):
    """`size` numbers per position."""

    def __init__(self, dim: int, size: int, draw: Initialiser, *, bias: bool) -> None:
        self.linear = Linear(dim, size, draw, bias=bias)

    def __call__(self, x: Array) -> Array:
        return self.linear(x)


class TiedOutput(nnx.Module):
    """Logits by the token table itself."""

    def __init__(self, table: Embedding, factor: float) -> None:
        self.table, self.factor = table, factor

    def __call__(self, x: Array) -> Array:
        return scaled(jnp.einsum("btm,cm->btc", x, self.table.weight[...]), self.factor)


@named
class Transformer(nnx.Module):
    """The model of a `TransformerConfig`, with the parameters of `polyhead.Transformer` under the same names.

    `rngs` (default: nnx.Rngs(0)) draws them by the preset `config.init`.

    Raises ValueError for an option that exists in PyTorch only: encoders, experts, patches, classes, relational
    symbols and `checkpoint`.
    """

    def __init__(
        self, settings: config.TransformerConfig, *, rngs: nnx.Rngs | None = None, dtype: DTypeLike = jnp.float32
    ) -> None:
        config.warn_if_blind(settings)
        check(settings)
        rngs = nnx.Rngs(0) if rngs is None else rngs
        draw, dim = Initialiser(rngs, settings.init, dtype), settings.dim
        self.config = settings
        self.inputs = _input(settings, draw)
        self.positions = _input_positions(settings, draw)
        shared, own, self.reads, self.once = _sources(settings, draw)
        self.symbols = nnx.List(shared)
        self.blocks = nnx.List([_block(settings, i, draw) for i in range(settings.layers)])
        for block, modules in zip(self.blocks, own, strict=True):
            block.symbols.extend(modules)
        last = settings.norm_order == "pre" if settings.final_norm is None else settings.final_norm
        self.norm = Norm(dim, draw, kind=settings.norm, eps=settings.norm_eps) if last else Identity()
        self.outputs = _output(settings, self.inputs, draw)
        logits = self.outputs.table if isinstance(self.outputs, TiedOutput) else self.outputs.linear
        logits.weight[...] = logits.weight[...] * config.narrower(settings.inputs, settings.outputs, dim, settings.init)

    @named
    def __call__(
        self,
        inputs: Array,
        *,
        mask: Array | None = None,
        positions: Array | None = None,
        tail: int | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> Array:
        """Outputs (b t c) for tokens (b t) or vectors (b t c); with `tail`, only those of the last `tail` positions.

        `mask` (b t) is True at real tokens; `positions` (b|1 t) are 0, 1, ... by default.  With `rngs` dropout is
        active; it reads the stream "dropout".
        """
        x = self.inputs(inputs)
        b, t = x.shape[:2]
        if mask is not None and (mask.dtype != bool or mask.shape != (b, t)):
            raise ValueError(f"{WHO}: mask must be boolean (b t) = {(b, t)} but is {mask.dtype} {tuple(mask.shape)}")
        positions = checked_positions(WHO, positions, b, t)
        if tail is not None and not 1 <= tail <= t:
            raise ValueError(f"{WHO}: tail must be 1 to {t} (the positions) but is {tail}")
        if self.positions is not None:
            if positions is None and t > self.config.max_length:
                raise ValueError(f"{WHO}: {t} positions but max_length is {self.config.max_length}")
            x = x + self.positions(jnp.arange(t)[None] if positions is None else positions).astype(x.dtype)
        embedded = x
        made: dict[int, Array] = {}
        look = None if mask is None else mask[:, None, None, :]
        for block, reads in zip(self.blocks, self.reads, strict=True):
            symbols = self._symbols(block, reads, x, embedded, made, positions)
            x = block(x, mask=look, positions=positions, symbols=symbols, rngs=rngs)
        return self.outputs(self.norm(x if tail is None else x[:, -tail:]))

    def _symbols(
        self,
        block: TransformerBlock,
        reads: tuple[tuple[bool, int] | None, ...],
        x: Array,
        embedded: Array,
        made: dict[int, Array],
        positions: Array | None,
    ) -> Symbols:
        """The symbols of each group of a block; `made` keeps those of sources that are called once per model."""
        given: dict[tuple[bool, int], Array] = {}
        for read in reads:
            if read is None or read in given:
                continue
            shared, i = read
            if not (shared and self.once[i]):
                given[read] = (self.symbols if shared else block.symbols)[i](x, positions)
                continue
            if i not in made:
                made[i] = self.symbols[i](embedded, positions)
            given[read] = made[i]
        return [None if read is None else given[read] for read in reads]


def check(settings: config.TransformerConfig) -> None:
    """Raise ValueError for the first option that exists in PyTorch only."""
    kinds: dict[str, tuple[Any, ...]] = {
        "inputs": (config.Tokens, config.Vectors),
        "outputs": (config.Logits, config.Values),
        "feedforward": (config.Mlp, config.Swiglu),
    }
    for name, valid in kinds.items():
        if not isinstance(value := getattr(settings, name), valid):
            raise ValueError(f"{WHO}: {name}={type(value).__name__}() exists in PyTorch only")
    if settings.encoder is not None:
        raise ValueError(f"{WHO}: encoder= exists in PyTorch only")
    if settings.checkpoint:
        raise ValueError(f"{WHO}: checkpoint=True exists in PyTorch only: use nnx.remat")


def _sources(settings: config.TransformerConfig, draw: Initialiser) -> tuple[list[Any], list[list[Any]], Any, Any]:
    """Shared sources of symbols, those of each layer, the source of each group, which shared ones are called once."""
    shared: list[Any] = []
    own: list[list[Any]] = [[] for _ in range(settings.layers)]
    known: dict[Any, tuple[bool, int]] = {}
    libraries: dict[Any, nnx.Variable] = {}
    once, reads = [], []
    for layer in range(settings.layers):
        row: list[tuple[bool, int] | None] = []
        for group in settings.layer_heads(layer):
            if not isinstance(group, config.SymbolHeads):
                row.append(None)
                continue
            source = group.symbols
            if not source.shared and getattr(source, "once", False):
                raise ValueError(f"{WHO}: symbols with once=True and shared=False exist in PyTorch only")
            key = source if source.shared else (source, layer)
            if key not in known:
                place = shared if source.shared else own[layer]
                known[key] = (source.shared, len(place))
                module: Any = build_symbols(source, settings.dim, settings.max_length, draw)
                place.append(module)
                once += [getattr(source, "once", False)] * source.shared
                if getattr(source, "tied", False):
                    module.library = libraries.setdefault(source, module.library)
            row.append(known[key])
        reads.append(tuple(row))
    return shared, own, tuple(reads), tuple(once)


def _block(settings: config.TransformerConfig, layer: int, draw: Initialiser) -> TransformerBlock:
    positions, kind = settings.positions, settings.feedforward
    added = isinstance(positions, (config.Learned, config.Sinusoidal))
    attention = MultiHeadAttention(
        settings.dim,
        settings.layer_heads(layer),
        causal=settings.causal,
        positions=None if added else positions,
        bias=settings.bias,
        window=settings.window,
        qk_norm=settings.qk_norm,
        dropout=settings.dropout,
        dropout_shared=settings.dropout_shared,
        max_length=settings.max_length,
        own_symbols=False,
        init=settings.init,
        rngs=draw.rngs,
        dtype=draw.dtype,
    )
    if isinstance(kind, config.Swiglu):
        forward: nnx.Module = SwigluLayer(settings.dim, kind.hidden, draw, bias=kind.bias)
    else:
        assert isinstance(kind, config.Mlp)
        forward = MlpLayer(settings.dim, kind.hidden, draw, act=kind.act, bias=kind.bias)
    return TransformerBlock(
        attention, forward, norm=settings.norm, norm_eps=settings.norm_eps, norm_order=settings.norm_order,
        dropout=settings.residual_dropout, dtype=draw.dtype,
    )  # fmt: skip


def _input(settings: config.TransformerConfig, draw: Initialiser) -> TokenInput | VectorInput:
    end = settings.inputs
    if isinstance(end, config.Tokens):
        return TokenInput(end, settings.dim, draw)
    assert isinstance(end, config.Vectors)
    return VectorInput(end, settings.dim, draw)


def _input_positions(
    settings: config.TransformerConfig, draw: Initialiser
) -> LearnedPositions | SinusoidalPositions | None:
    if isinstance(settings.positions, config.Learned):
        return LearnedPositions(settings.max_length, settings.dim, draw)
    if isinstance(settings.positions, config.Sinusoidal):
        return SinusoidalPositions(settings.max_length, settings.dim)
    return None


def _output(settings: config.TransformerConfig, source: nnx.Module, draw: Initialiser) -> LinearOutput | TiedOutput:
    end = settings.outputs
    if isinstance(end, config.Values):
        return LinearOutput(settings.dim, end.size, draw, bias=end.bias)
    assert isinstance(end, config.Logits)
    if not end.tied:
        return LinearOutput(settings.dim, end.count, draw, bias=end.bias)
    if not isinstance(source, TokenInput) or source.count != end.count:
        raise ValueError(f"{WHO}: tied logits need Tokens({end.count}) as inputs")
    return TiedOutput(source.table, settings.dim**-0.5 if end.scaled else 1.0)
