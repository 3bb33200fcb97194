"""Head groups as NNX modules: the function of a mechanism with its own parameters.

A group reads queries (b t h d), keys (b s g d) and values (b s g e) from the layer's joint projection.  In a group
whose values are symbols, `value` maps symbols, and `q_rel` and `k_rel` map tokens.  Names are those of
`polyhead.layers`.
"""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx

from polyhead import config
from polyhead.config.sizes import Sizes
from polyhead.jaxside.abstractor import abstractor_attention, code as abstractor_code
from polyhead.jaxside.call import Array, AttentionCall
from polyhead.jaxside.disentangled import disentangled_attention
from polyhead.jaxside.hyla import hyla
from polyhead.jaxside.latent_code import code as latent_code, relations
from polyhead.jaxside.linear import linear_attention
from polyhead.jaxside.nnx.components import Initialiser, Linear, parted
from polyhead.jaxside.pooled import pooled_attention
from polyhead.jaxside.relational import relational_attention
from polyhead.jaxside.softmax import softmax_attention
from polyhead.spec.numbers import PROBE

CODES: dict[type, Callable[[AttentionCall], jax.Array]] = {
    config.Softmax: latent_code,
    config.Linear: latent_code,
    config.Hyla: latent_code,
    config.Relational: latent_code,
    config.Disentangled: latent_code,
    config.Abstractor: abstractor_code,
    config.Pooled: latent_code,
}
"""Mechanism -> the code function of its reference."""

Made = dict[str, Array]


def code(self: "Group", x: AttentionCall) -> Array:
    """The code of all pairs (b h t s) before dropout, by the function that computes the output.

    Raises ValueError for a subclass with its own `__call__` and without its own `code`.
    """
    if type(self).__call__.__module__ != __name__:
        who = type(self).__name__
        raise ValueError(f"{who}: the code of its __call__ is not known: give the class a method `code` beside it")
    m = self.mechanism
    x = replace(x, v=None, keep=None, normalise=getattr(m, "normalise", x.normalise), act=getattr(m, "act", x.act))
    coder = next(coder for kind, coder in CODES.items() if isinstance(m, kind))
    return coder(jax.tree.map(jnp.asarray, x))


class ValueHeads(nnx.Module):
    """Softmax, linear, HYLA and pooled heads, whose values come from tokens.  `value_weight` is for a deep HYLA."""

    value_weight: nnx.Param | None
    symbol_dim = None
    code = code

    def __init__(self, mechanism: config.Mechanism, sizes: Sizes, draw: Initialiser) -> None:
        self.mechanism, self.sizes, e = mechanism, sizes, sizes.value_dim
        deep = isinstance(mechanism, config.Hyla) and mechanism.value_depth == 2
        self.value_weight = draw.matrix(sizes.heads, e, e) if deep else None

    def __call__(self, x: AttentionCall) -> Array:
        m = self.mechanism
        if isinstance(m, config.Softmax):
            return softmax_attention(
                x.q, x.k, x.v, bias=x.bias, mask=x.mask, causal=x.causal, window=x.window, keep=x.keep, impl=m.impl
            )
        if isinstance(m, config.Linear):
            return linear_attention(
                x.q, x.k, x.v, bias=x.bias, mask=x.mask, causal=x.causal, window=x.window, keep=x.keep, impl=m.impl,
                normalise=m.normalise, act=m.act,
            )  # fmt: skip
        if isinstance(m, config.Pooled):
            return pooled_attention(
                x.q, x.k, x.v, bias=x.bias, mask=x.mask, causal=x.causal, window=x.window, keep=x.keep, impl=m.impl,
                normalise=m.normalise, act=m.act, pool=m.pool, network=m.network,
            )  # fmt: skip
        assert isinstance(m, config.Hyla)
        deep = None if self.value_weight is None else self.value_weight[...]
        return hyla(
            x.q, x.k, x.v, bias=x.bias, mask=x.mask, causal=x.causal, window=x.window, keep=x.keep, impl=m.impl,
            normalise=m.normalise, act=m.act, value_weight=deep,
        )  # fmt: skip


class HiddenMaps(nnx.Module):
    """Queries and keys by an MLP: linear maps of the hidden layer `gelu(W x + b)`."""

    def __init__(self, width: int, hidden: int, sizes: Sizes, draw: Initialiser, *, bias: bool) -> None:
        self.features = Linear(width, hidden, draw)
        self.q = Linear(hidden, sizes.heads * sizes.dim, draw, bias=bias)
        self.k = Linear(hidden, sizes.kv_heads * sizes.dim, draw, bias=bias)

    def __call__(self, x: Array) -> Array:
        return jax.nn.gelu(self.features(x), approximate=False)


class SymbolGroup(nnx.Module):
    """Relational, disentangled and Abstractor heads: their values are symbols of width `symbol_dim`.

    `symbol_std`: the initial standard deviation of symbols, used to balance the relation weights.
    """

    q_rel: Linear | None
    k_rel: Linear | None
    hidden: HiddenMaps | None
    relation_weight: nnx.Param | None
    code = code

    def __init__(
        self,
        mechanism: config.SymbolHeads,
        width: int,
        sizes: Sizes,
        draw: Initialiser,
        *,
        bias: bool,
        symbol_std: float,
    ) -> None:
        self.mechanism, self.sizes, self.symbol_dim = mechanism, sizes, mechanism.symbols.dim or width
        hidden = mechanism.hidden
        self.hidden = HiddenMaps(width, hidden, sizes, draw, bias=bias) if hidden else None
        self.relations, self.relation_dim = r, p = _relations(mechanism, sizes)
        wide, relates = hidden or width, not isinstance(mechanism, config.Abstractor)
        both = relates and not getattr(mechanism, "symmetric", False)
        self.q_rel = Linear(wide, r * p, draw, bias=False) if relates else None
        sent = sizes.kv_heads if isinstance(mechanism, config.Disentangled) else r
        self.k_rel = Linear(wide, sent * p, draw, bias=False) if both else None
        self.value = Linear(self.symbol_dim, sizes.kv_heads * sizes.value_dim, draw, bias=bias)
        self.relation_weight = (
            self._weight(mechanism, draw, symbol_std) if isinstance(mechanism, config.Relational) else None
        )

    def _weight(self, mechanism: config.Relational, draw: Initialiser, symbol_std: float) -> nnx.Param:
        """`relation_weight`, initialised as by `RelationalHeads.reset_parameters` of `polyhead.layers`."""
        e, r, init = self.sizes.value_dim, self.relations, mechanism.relation_init
        shape = (self.sizes.heads, e, r)
        if init != "balanced":
            return draw.uniform(*shape, bound=(r if init == "paper" else e * r) ** -0.5)
        assert self.q_rel is not None
        wide = (self.q_rel if self.hidden is None else self.hidden.features).weight.shape[1]
        x, symbols = (jax.random.normal(jax.random.key(0), (1, PROBE, m), draw.dtype) for m in (wide, self.symbol_dim))
        f = self.features(x)
        related = relations(self.receive(f)["q_rel"], self.send(f)["k_rel"], relation_act=mechanism.relation_act)
        retrieved = jnp.square(self.value(symbols * symbol_std).mean(1)).mean()
        std = jnp.sqrt(retrieved / jnp.maximum(r * jnp.square(related.mean(-1)).mean(), 1e-12))
        return nnx.Param(draw.normal(*shape)[...] * std)

    def features(self, x: Array) -> Array:
        """The tokens or their hidden features, from which relations (and hidden queries and keys) are mapped."""
        return x if self.hidden is None else self.hidden(x)

    def receive(self, f: Array) -> Made:
        """q_rel (b t r p); with hidden features also q (b t h d)."""
        made = {} if self.hidden is None else {"q": parted(self.hidden.q(f), self.sizes.heads)}
        return made if self.q_rel is None else made | {"q_rel": parted(self.q_rel(f), self.relations)}

    def send(self, f: Array) -> Made:
        """k_rel (b s r|g p); with hidden features also k (b s g d)."""
        made = {} if self.hidden is None else {"k": parted(self.hidden.k(f), self.sizes.kv_heads)}
        if self.q_rel is None:
            return made
        own = isinstance(self.mechanism, config.Disentangled)
        k_rel = (self.q_rel if self.k_rel is None else self.k_rel)(f)
        return made | {"k_rel": parted(k_rel, self.sizes.kv_heads if own else self.relations)}

    def values(self, symbols: Array) -> Array:
        """The mapped symbols of the heads (... g e), from symbols by key or from a table by offset."""
        return parted(self.value(symbols), self.sizes.kv_heads)

    def __call__(self, x: AttentionCall) -> Array:
        m = self.mechanism
        if isinstance(m, config.Abstractor):
            return abstractor_attention(
                x.q, x.k, x.v, bias=x.bias, mask=x.mask, causal=x.causal, window=x.window, keep=x.keep, impl=m.impl,
                act=m.act,
            )  # fmt: skip
        if isinstance(m, config.Disentangled):
            return disentangled_attention(
                x.q, x.k, x.q_rel, x.k_rel, x.v, bias=x.bias, mask=x.mask, causal=x.causal, window=x.window,
                keep=x.keep, impl=m.impl, relation_act=m.relation_act,
            )  # fmt: skip
        assert isinstance(m, config.Relational)
        assert self.relation_weight is not None
        return relational_attention(
            x.q, x.k, x.q_rel, x.k_rel, x.v, self.relation_weight[...], bias=x.bias, mask=x.mask, causal=x.causal,
            window=x.window, keep=x.keep, impl=m.impl, relation_act=m.relation_act,
        )  # fmt: skip


Group = ValueHeads | SymbolGroup


def _relations(mechanism: config.SymbolHeads, sizes: Sizes) -> tuple[int, int]:
    """The number and the width of relations."""
    h, e = sizes.heads, sizes.value_dim
    if isinstance(mechanism, config.Relational):
        count = mechanism.relations or h
        return count, mechanism.relation_dim or max(1, h * e // count)
    if isinstance(mechanism, config.Disentangled):
        if mechanism.symmetric and sizes.kv_heads != h:
            raise ValueError(
                f"Disentangled: symmetric relations need kv_heads = heads = {h} but it is {sizes.kv_heads}"
            )
        return h, mechanism.relation_dim or e
    return 0, 0
