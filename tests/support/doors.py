"""Every way to use a mechanism, in a tiny size: built, called as a whole, and called step by step with a cache.

A door is a module with parameters; `call` and `steps` give the same numbers (b t ...) in two ways.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import polyhead as ph
from polyhead import config, ops
from polyhead.layers.cache import Cache, LayerCache
from polyhead.spec import MECHANISMS

B, T, HEADS, D, V = 2, 7, 8, 4, 40
SIZES = {"b": B, "t": T, "s": T, "h": HEADS, "g": 2, "d": D, "e": D, "r": 3, "p": 4}
SPANS = (slice(0, 4), slice(4, 5), slice(5, T))
"""What the calls of `steps` are given."""


@dataclass(frozen=True)
class Door:
    """What one computes with, and two ways to do so.  `part(module, span, cache)`: the outputs at some places."""

    module: nn.Module
    part: Callable[[nn.Module, slice, Any], Tensor]
    cache: Callable[[], Any]

    def call(self, module: nn.Module) -> Tensor:
        return self.part(module, slice(0, T), None)

    def steps(self, module: nn.Module) -> Tensor:
        cache = self.cache()
        return torch.cat([self.part(module, span, cache) for span in SPANS], 1)


def groups(name: str) -> list[config.Mechanism]:
    """The heads of a mechanism or, of "mixture", half as many of each."""
    # Many: rms over few heads divides by what is nearly 0.
    made = [getattr(config, row.config)(HEADS // 2 if name == "mixture" else HEADS) for row in MECHANISMS]
    return made if name == "mixture" else [x for x in made if type(x).__name__ == name]


KINDS = tuple(row.config for row in MECHANISMS)


def op(name: str) -> Door:
    """The function alone, on tensors that are all there is; a relative bias stays in float32."""
    row = next(row for row in MECHANISMS if row.config == name)
    run, axes = getattr(ops, row.op), {**row.tensors, **row.optional}
    module = nn.ParameterDict()
    for tensor, letters in axes.items():
        module[tensor] = nn.Parameter(torch.randn([SIZES[x] for x in letters.split()]))
    bias = torch.randn(HEADS, 2 * T - 1)

    def part(module: nn.Module, span: slice, cache: None) -> Tensor:
        first, last = span.start, span.stop
        given = {name: getattr(module, name) for name in axes}
        for tensor, letters in axes.items():
            if "t" in letters.split():
                given[tensor] = given[tensor][:, first:last]
            elif "s" in letters.split():
                given[tensor] = given[tensor][:, :last]
        # Column j - i + t - 1 for queries first to last: the offset 0 is column T - 1 of the whole.
        own = bias[:, T - last : T - first + last - 1]
        return run(**given, bias=own, causal=True)

    return Door(module, part, lambda: None)


def layer(name: str) -> Door:
    """Attention with rotary positions and normalised queries and keys."""
    heads = groups(name)
    wide = sum(group.heads for group in heads) * D
    module = ph.MultiHeadAttention(wide, heads, causal=True, positions=ph.Rotary(), qk_norm=True, max_length=T)
    x = torch.randn(B, T, wide)

    def part(module: nn.Module, span: slice, cache: LayerCache | None) -> Tensor:
        return module(x[:, span].to(next(module.parameters()).dtype), cache=cache)

    return Door(module, part, LayerCache)


def settings(name: str) -> config.TransformerConfig:
    """A language model of two layers."""
    heads = groups(name)
    ends, parts = (ph.Tokens(V), ph.Logits(V, tied=True)), {"positions": ph.Rotary(), "feedforward": ph.Swiglu(32)}
    dim = sum(group.heads for group in heads) * D
    return ph.TransformerConfig(*ends, dim=dim, heads=heads, max_length=T, causal=True, **parts)


def transformer(name: str) -> Door:
    """Our own model."""
    model = ph.Transformer(settings(name))
    return Door(model, lambda model, span, cache: model(tokens_of()[:, span], cache=cache), lambda: Cache(2))


def tokens_of() -> Tensor:
    return torch.randint(V, (B, T), generator=torch.Generator().manual_seed(3))


DOORS = {
    "op": (op, KINDS),
    "layer": (layer, ("mixture",)),
    "transformer": (transformer, ("mixture",)),
}
"""Name of the door -> what builds it, of which kinds of heads."""


# ------------------------------------------------------------------------------------------------- measures of "near"
TIMES = 2
"""How often the error of a run whose every operation is rounded may be made: see tests/test_precision.py."""

DRAWS = 3
"""Models whose errors are taken together."""


def draws(door: str) -> range:
    """The seeds of the models behind a door; twice as many bare layers, whose tails no other layer evens out."""
    return range(2 * DRAWS if door == "layer" else DRAWS)


def weights_of(out: Tensor) -> Tensor:
    """Of the sum that is differentiated."""
    return torch.randn(out.shape, generator=torch.Generator().manual_seed(7))


def measured(module: nn.Module, call: Callable[[nn.Module], Tensor]) -> tuple[Tensor, Tensor]:
    """Outputs, and the gradients of a random sum of them as one vector; a gradient has its parameter's dtype."""
    out = call(module)
    weights = weights_of(out)
    parameters = [p for p in module.parameters() if p.requires_grad]
    grads = torch.autograd.grad((out.float() * weights).sum(), parameters, materialize_grads=True)
    assert [grad.dtype for grad in grads] == [parameter.dtype for parameter in parameters]
    return out.detach(), torch.cat([grad.flatten().float() for grad in grads])


class Rounding(TorchDispatchMode):
    """The result of every operation in float32 is rounded to `dtype`."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = function(*args, **(kwargs or {}))
        return out if function._schema.is_mutable or function.is_view else tree_map(self.rounded, out)

    def rounded(self, x):  # type: ignore[no-untyped-def]
        return x.to(self.dtype).float() if isinstance(x, torch.Tensor) and x.dtype == torch.float32 else x


def off(came: Tensor, wanted: Tensor) -> float:
    """The relative error."""
    return ((came.float() - wanted).norm() / wanted.norm()).item()
