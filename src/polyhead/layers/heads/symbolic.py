"""Head groups whose values are symbols: the op of a mechanism with its further maps.

A group reads queries (b t h d) and keys (b s g d) from the layer's joint projection, or computes them from its own
hidden features.  `value` maps symbols; `q_rel` and `k_rel` (one map if symmetric) map tokens to relation queries and
keys.  A layer calls `features`, then `receive`, `send` and `values`, and passes the results to the op.
"""

from typing import Any, Unpack, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from polyhead import config
from polyhead.layers.device import Placement
from polyhead.layers.heads.functions import HeadGroup
from polyhead.layers.heads.sizes import Sizes
from polyhead.layers.symbols import start_std
from polyhead.ops.call import AttentionCall
from polyhead.ops.latent_code import relations as relate
from polyhead.ops.readable import is_readable

# Number of tokens on which the weights of relations are balanced.
PROBE = 32


class SymbolGroup(HeadGroup):
    """The base of heads whose values are symbols: `value` maps symbols, `q_rel` and `k_rel` map tokens.

    A symbol has the width `symbol_dim` and initially the standard deviation `symbol_std`.

    Args:
        relation_act: The activation of relations or, for the Abstractor, of scores.
        related: Numbers of relations of a query and of a key.
        relation_dim: Width of a relation; 0: no relations.
        symmetric: Whether queries and keys use one map to their relations.
    """

    normalise, act = "softmax", "identity"
    option_names = ("relation_act",)

    def __init__(
        self,
        mechanism: config.SymbolHeads,
        width: int,
        sizes: Sizes,
        relation_act: str,
        related: tuple[int, int] = (0, 0),
        relation_dim: int = 0,
        *,
        symmetric: bool = False,
        bias: bool = False,
        max_length: int = 512,
        **placement: Unpack[Placement],
    ) -> None:
        super().__init__(sizes)
        self.relation_act, hidden = relation_act, mechanism.hidden
        self.symbol_dim = mechanism.symbols.dim or width
        self.symbol_std = start_std(mechanism.symbols, width, max_length)
        self.width, self.related, self.relation_dim = width, related, relation_dim
        wide = hidden or width
        self.hidden: nn.ModuleDict | None = None
        if hidden:
            self.hidden = nn.ModuleDict()
            self.hidden["features"] = nn.Linear(width, hidden, **placement)
            self.hidden["q"] = nn.Linear(hidden, sizes.heads * sizes.dim, bias=bias, **placement)
            self.hidden["k"] = nn.Linear(hidden, sizes.kv_heads * sizes.dim, bias=bias, **placement)
        # Relations are mapped from the hidden features, if there are any; symmetric ones use `q_rel` on both sides.
        self.q_rel: nn.Linear | None = None
        self.k_rel: nn.Linear | None = None
        if relation_dim:
            self.q_rel = nn.Linear(wide, related[0] * relation_dim, bias=False, **placement)
            if not symmetric:
                self.k_rel = nn.Linear(wide, related[1] * relation_dim, bias=False, **placement)
        self.value = nn.Linear(self.symbol_dim, sizes.kv_heads * sizes.value_dim, bias=bias, **placement)
        self.relation_weight: nn.Parameter | None = None
        self.begin(self.kind, mechanism.impl)

    def features(self, x: Tensor) -> Tensor:
        """The tokens or their hidden features, from which relations (and hidden queries and keys) are mapped."""
        if self.hidden is None:
            return x
        return F.gelu(self.hidden["features"](x))

    def receive(self, f: Tensor) -> dict[str, Tensor]:
        """From the features of receivers: q_rel (b t r p) or (b t h p), and q (b t h d) with hidden features."""
        tensors = {}
        if self.hidden is not None:
            tensors["q"] = self.hidden["q"](f).unflatten(-1, (self.sizes.heads, self.sizes.dim))
        if self.q_rel is not None:
            tensors["q_rel"] = self.q_rel(f).unflatten(-1, (self.related[0], self.relation_dim))
        return tensors

    def send(self, f: Tensor) -> dict[str, Tensor]:
        """From the features of senders: k_rel (b s r p) or (b s g p), and k (b s g d) with hidden features."""
        tensors = {}
        if self.hidden is not None:
            tensors["k"] = self.hidden["k"](f).unflatten(-1, (self.sizes.kv_heads, self.sizes.dim))
        k_rel = self.k_rel
        if k_rel is None:  # symmetric, or no relations
            k_rel = self.q_rel
        if k_rel is not None:
            tensors["k_rel"] = k_rel(f).unflatten(-1, (self.related[1], self.relation_dim))
        return tensors

    def values(self, symbols: Float[Tensor, "... m"]) -> Float[Tensor, "... g e"]:
        """The mapped symbols of the heads, from symbols by key or from a table by offset."""
        return self.value(symbols).unflatten(-1, (self.sizes.kv_heads, self.sizes.value_dim))

    def arrays(self, call: AttentionCall) -> list[Tensor]:
        arrays = (call.q, call.k, call.q_rel, call.k_rel, call.v, self.relation_weight)
        return [array for array in arrays if array is not None]


class RelationalHeads(SymbolGroup):
    """Relational attention (ops.relational_attention): `relations` inner products of width `relation_dim` per pair.

    By default there is one relation per head, and the relations together are as wide as the heads' values together.

    Attributes:
        relation_weight: Maps relations to the output of a head (h e r).
        relation_init: How `relation_weight` begins, see `reset_parameters`; "balanced" depends on `symbol_std`.
    """

    kind = "relational"
    q_rel: nn.Linear
    relation_weight: nn.Parameter

    def __init__(self, mechanism: config.Relational, width: int, sizes: Sizes, **options: Any) -> None:
        heads, e = sizes.heads, sizes.value_dim
        r = mechanism.relations or heads
        relation_dim = mechanism.relation_dim or max(1, heads * e // r)
        act, symmetric = mechanism.relation_act, mechanism.symmetric
        super().__init__(mechanism, width, sizes, act, (r, r), relation_dim, symmetric=symmetric, **options)
        self.relations, self.relation_init = r, mechanism.relation_init
        self.relation_weight = nn.Parameter(self.value.weight.new_empty(heads, e, r))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise `relation_weight`; the maps must be initialised before, as linear maps are.

        "paper" is uniform within r^-1/2, "package" uniform within (e r)^-1/2.  "balanced" is normal: relations and
        symbols contribute equal variance to the output of a head that attends equally to PROBE tokens.  There inputs
        are N(0, 1) and symbols N(0, symbol_std^2).  The variance is measured with the current maps, on inputs that use
        no generator of the caller.

        Raises:
            ValueError: If "balanced" meets maps that are not initialised, or sharded.
        """
        if self.relation_weight.is_meta:  # models whose parameters are only counted
            return
        e, r = self.sizes.value_dim, self.relations
        if self.relation_init != "balanced":
            bound = (e * r) ** -0.5
            if self.relation_init == "paper":
                bound = r**-0.5
            nn.init.uniform_(self.relation_weight, -bound, bound)
            return
        draw = torch.Generator().manual_seed(0)
        like = self.q_rel.weight
        if hasattr(like, "full_tensor"):
            raise ValueError("RelationalHeads: parameters must be whole; call reset_parameters before they are sharded")
        x = torch.randn(1, PROBE, self.width, generator=draw, device="cpu").to(like)  # (1 t m)
        symbols = torch.randn(1, PROBE, self.symbol_dim, generator=draw, device="cpu").to(like)
        f = self.features(x)
        # With equal attention a head gets the means over keys of relations (1 r t) and of mapped symbols (1 g*e).
        related = relate(self.receive(f)["q_rel"], self.send(f)["k_rel"], relation_act=self.relation_act).mean(-1)
        retrieved = self.value(symbols * self.symbol_std).mean(1)
        # A weighted sum of r relations has r std^2 times their mean square: equate it to that of the symbols.
        std = (retrieved.square().mean() / (r * related.square().mean()).clamp(min=1e-12)).sqrt()
        if is_readable(std) and not (std.isfinite() and related.any()):
            raise ValueError(
                "RelationalHeads: relation_weight depends on maps that are not initialised; "
                "call reset_parameters of children first, as `layer.apply` does"
            )
        nn.init.normal_(self.relation_weight).mul_(std)


def symbol_group(group: nn.Module) -> SymbolGroup:
    """A group of heads with symbols, perhaps wrapped.  Raises ValueError if a wrapper does not pass its methods on."""
    for method in ("features", "receive", "send", "values"):
        if not hasattr(group, method):
            kind = type(group).__name__
            raise ValueError(f"{kind}: relational heads must have a method {method}, wrapped ones as well")
    return cast(SymbolGroup, group)


class DisentangledHeads(SymbolGroup):
    """Disentangled relational cross-attention (ops.disentangled_attention): one relation per head, by default as wide
    as its values.  Relation keys are grouped like keys."""

    kind = "disentangled"

    def __init__(self, mechanism: config.Disentangled, width: int, sizes: Sizes, **options: Any) -> None:
        symmetric = mechanism.symmetric
        if symmetric and sizes.kv_heads != sizes.heads:
            raise ValueError(
                f"Disentangled: symmetric relations need kv_heads = heads = {sizes.heads} but it is {sizes.kv_heads}"
            )
        act, related = mechanism.relation_act, (sizes.heads, sizes.kv_heads)
        relation_dim = mechanism.relation_dim or sizes.value_dim
        super().__init__(mechanism, width, sizes, act, related, relation_dim, symmetric=symmetric, **options)


class AbstractorHeads(SymbolGroup):
    """Relational cross-attention of the Abstractor (ops.abstractor_attention): symbols weighted by `act` of the scores,
    a softmax or a pointwise activation."""

    kind = "abstractor"

    def __init__(self, mechanism: config.Abstractor, width: int, sizes: Sizes, **options: Any) -> None:
        super().__init__(mechanism, width, sizes, mechanism.act, **options)
        # A pointwise activation acts on the scores itself, and its code is not normalised.
        if mechanism.act != "softmax":
            self.normalise = "identity"

    def options(self, call: AttentionCall) -> dict[str, Any]:
        return {"act": self.relation_act}
