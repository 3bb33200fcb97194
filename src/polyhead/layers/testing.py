"""Checks of the promises that every mechanism must keep, for a user's mechanisms and for ours.

    import polyhead as ph
    ph.testing.check(Cosine(4))                     all promises, in a second or two
    ph.testing.check(Cosine(4), "causality")        one of `ph.testing.PROMISES`

Each check builds a layer of these heads in float64.  An AssertionError says which promise is broken.
"""

import copy
import typing
from collections.abc import Callable

import torch
from torch import Tensor

from polyhead.config import Mechanism, serial, to_dict
from polyhead.config.mechanisms import MECHANISMS, RelationalSymbols, SymbolSource
from polyhead.extensions import foreign
from polyhead.layers.attention import MultiHeadAttention
from polyhead.layers.cache import LayerCache
from polyhead.spec.shapes import one_of

__all__ = ["PROMISES", "check"]

# Width of a head, and length of a sequence.
WIDTH, TOKENS = 4, 6


def check(mechanism: Mechanism, *promises: str) -> None:
    """Check that heads of `mechanism` keep the named promises, or all of `PROMISES` if none is named.

    Raises:
        AssertionError: If the heads break a promise.
        ValueError: For an unknown promise, and for anything but a mechanism.
    """
    if not isinstance(mechanism, Mechanism):
        raise ValueError(f"testing.check: it must get a mechanism such as Softmax(4), got {mechanism!r:.60}")
    for name in promises:
        one_of("testing.check", "promise", name, PROMISES)
    for name in promises or PROMISES:
        with torch.random.fork_rng(devices=[]):  # the caller's random numbers are left alone
            torch.default_generator.manual_seed(0)
            try:
                PROMISES[name](mechanism)
            except AssertionError as broken:
                raise AssertionError(f"{type(mechanism).__name__}: {broken}") from broken


def _layer(mechanism: Mechanism, *, causal: bool = False, window: int | None = None) -> MultiHeadAttention:
    layer = MultiHeadAttention(
        WIDTH * mechanism.heads, [mechanism], causal=causal, window=window, max_length=2 * TOKENS, dtype=torch.float64
    )
    return layer.eval()


def _tokens(mechanism: Mechanism, batch: int = 2, tokens: int = TOKENS) -> Tensor:
    return torch.randn(batch, tokens, WIDTH * mechanism.heads, dtype=torch.float64)


def _same(actual: Tensor, expected: Tensor, broken: str) -> None:
    assert actual.shape == expected.shape, f"{broken}: {tuple(actual.shape)} in place of {tuple(expected.shape)}"
    is_close = torch.allclose(actual, expected, rtol=1e-9, atol=1e-9)
    assert is_close, f"{broken}: it differs by {(actual - expected).abs().max():.1e}"


def _parity(mechanism: Mechanism) -> None:
    """A sequence gives the same alone and in a batch, and float32 agrees with float64."""
    layer, x = _layer(mechanism), _tokens(mechanism)
    y = layer(x)
    _same(layer(x[1:]), y[1:], "a sequence depends on others of its batch")
    others = copy.deepcopy(layer).float()(x.float()).double()
    assert torch.allclose(others, y, rtol=1e-3, atol=1e-3), "float32 is far from float64"


def _causality(mechanism: Mechanism) -> None:
    """Later tokens and tokens outside the window have no influence."""
    layer, x = _layer(mechanism, causal=True), _tokens(mechanism)
    _same(layer(x)[:, :4], layer(x[:, :4]), "a token sees its future")
    if isinstance(getattr(mechanism, "symbols", None), RelationalSymbols):
        return  # a symbol in the window is made of its token's neighbours, which may lie before the window
    layer, far = _layer(mechanism, causal=True, window=2), x.clone()
    far[:, 0] += 1
    _same(layer(far)[:, 2:], layer(x)[:, 2:], "a token sees beyond its window")


def _masks(mechanism: Mechanism) -> None:
    """A masked key acts like an absent key, the code of a masked pair is 0, and a query without keys returns 0."""
    layer, x = _layer(mechanism), _tokens(mechanism)
    mask = torch.ones(TOKENS, dtype=torch.bool)
    mask[-1] = False
    y, code = layer(x, mask=mask[None, None, None], return_code=True)
    _same(y, layer(x, x[:, :-1], mask=mask[None, None, None, :-1]), "a hidden key is read")
    _same(code[..., -1], torch.zeros_like(code[..., -1]), "a hidden pair has a code")
    x.requires_grad_()
    y = layer(x, mask=torch.zeros(TOKENS, TOKENS, dtype=torch.bool))
    _same(y, torch.zeros_like(y), "a query without keys does not return 0")
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all(), "a query without keys has infinite or NaN gradients"


def _packing(mechanism: Mechanism) -> None:
    """Packed sequences, with `cu_seqlens`, give the same as separate ones."""
    layer, x = _layer(mechanism, causal=True), _tokens(mechanism, 1)
    y = layer(x, cu_seqlens=torch.tensor([0, 2, TOKENS], dtype=torch.int32))
    apart = torch.cat([layer(x[:, :2]), layer(x[:, 2:])], dim=1)
    _same(y, apart, "packed sequences see each other")


def _dropout(mechanism: Mechanism) -> None:
    """`keep` multiplies the code: heads with keep 0 return 0."""
    layer, x = _layer(mechanism), _tokens(mechanism)
    keep = torch.zeros(1, mechanism.heads, TOKENS, TOKENS, dtype=torch.float64)
    y = layer(x, keep=keep)
    _same(y, torch.zeros_like(y), "keep does not multiply the code")


def _gradients(mechanism: Mechanism) -> None:
    """Gradients agree with finite differences and reach every parameter."""
    layer, x = _layer(mechanism), _tokens(mechanism, 1, 3).requires_grad_()
    agrees = torch.autograd.gradcheck(layer, (x,), raise_exception=False)
    assert agrees, "the gradients are not those of the function"
    layer(x).square().sum().backward()
    without_gradient = [name for name, p in layer.named_parameters() if p.requires_grad and p.grad is None]
    assert not without_gradient, f"no gradient reaches {', '.join(without_gradient)}"


def _cache(mechanism: Mechanism) -> None:
    """Token by token with a cache gives the same as one call."""
    layer, x, cache = _layer(mechanism, causal=True), _tokens(mechanism), LayerCache()
    with torch.no_grad():
        steps = torch.cat([layer(x[:, i : i + 1], cache=cache) for i in range(TOKENS)], dim=1)
    _same(steps, layer(x), "a cached step is not the uncached one")


def _file(mechanism: Mechanism) -> None:
    """The mechanism is written to a file and read back as an equal value, and its parameters load."""
    foreign(mechanism, "testing")
    known = {kind.__name__: kind for kind in (*MECHANISMS, *typing.get_args(SymbolSource))}
    again = serial.build(to_dict(mechanism), known, "testing", (Mechanism,))
    assert again == mechanism, f"a file gives {again} back for {mechanism}"
    layer, other, x = _layer(mechanism), _layer(again), _tokens(mechanism)
    other.load_state_dict(layer.state_dict())
    _same(other(x), layer(x), "a layer that is loaded computes something else")


CHECKS = (_parity, _causality, _masks, _packing, _dropout, _gradients, _cache, _file)
PROMISES: dict[str, Callable[[Mechanism], None]] = {check.__name__.removeprefix("_"): check for check in CHECKS}
"""Name of a promise -> its check."""
