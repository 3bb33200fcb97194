"""The sides that `polyhead bench` compares: input tensors, implementations, and their work.

reference, sdpa, blocked, ...   the op's implementations that support the inputs
compiled                        torch.compile(reference)
stock                           F.scaled_dot_product_attention of the same shape, as a known baseline
dual-attention                  relational attention of the authors' package, if installed
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyhead.ops.dispatch import BACKENDS, PUBLIC, TENSORS, resolve
from polyhead.spec import amount, mechanism
from polyhead.spec.lazy import own_names
from polyhead.timing.options import Options

__dir__ = own_names(__name__)

PASSES = ("forward", "forward+backward")


# -------------------------------------------------------------------------------------------------------------- tensors
def tensors(options: Options, t: int, batch: int | None = None) -> dict[str, Tensor]:
    """The op's tensors by name, and `cotangent`, the gradient of the output: normal numbers with seed 0."""
    b, h, d, r = batch or options.batch, options.heads, options.dim, options.relations
    rel = (b, t, r, h * d // r) if options.op == "relational" else (b, t, h, d)
    sizes = {"q_rel": rel, "k_rel": rel, "relation_weight": (h, d, r)}
    where = torch.device(options.device)
    generator = torch.Generator(where).manual_seed(0)

    def draw(size: tuple[int, ...]) -> Tensor:
        return torch.randn(size, generator=generator, device=where).to(getattr(torch, str(options.dtype)))

    made = {name: draw(sizes.get(name, (b, t, h, d))).requires_grad_() for name in TENSORS[options.op]}
    return made | {"cotangent": draw((b, t, h, d))}


def operations(options: Options, t: int, which: str) -> int:
    """Useful FLOPs: two per multiply-add of the equation (spec.MECHANISMS) at the visible pairs.

    A backward pass counts twice the forward pass.  Recomputation and masked pairs do not count.

    >>> operations(Options("hyla", heads=8, dim=64, causal=False), 1024, "forward")   # 2 x 3 x 8 x 64 x 1024^2
    3221225472
    """
    work = mechanism(PUBLIC[options.op]).work
    d, r, h = options.dim, options.relations, options.heads
    # Without a model width only the op counts, without projections.
    sizes = {"m": 0, "d": d, "e": d, "p": h * d // r if options.op == "relational" else d, "r": r, "h": h}
    alone, with_key = (amount(work, sizes | {"s": s}) for s in (0, 1))
    adds = options.batch * h * (t * alone + pairs(options, t) * (with_key - alone))
    return 2 * adds * (1 if which == "forward" else 3)


def pairs(options: Options, t: int) -> int:
    """The number of visible query-key pairs of a sample."""
    window = min(options.window or t, t)
    past = window * t - window * (window - 1) // 2  # including the token itself
    return past if options.causal else 2 * past - t


# ---------------------------------------------------------------------------------------------------------------- sides
@dataclass(frozen=True)
class Side:
    """One side of a comparison.  `run` is called with the tensors in `takes`, by name.

    `same`: it computes the op, so parity is checked; `square`: its memory grows with t^2.
    """

    name: str
    run: Callable[..., Tensor]
    takes: tuple[str, ...]
    same: bool = True
    square: bool = False

    def forward(self, given: Mapping[str, Tensor]) -> Tensor:
        """One forward pass without a graph."""
        with torch.no_grad():
            return self.run(*(given[name] for name in self.takes))

    def both(self, given: Mapping[str, Tensor]) -> list[Tensor]:
        """The output and the gradient of every tensor."""
        leaves = [given[name] for name in self.takes]
        out = self.run(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, given["cotangent"])]

    def of(self, which: str) -> Callable[[Mapping[str, Tensor]], object]:
        """The pass called `which` (PASSES)."""
        return self.forward if which == "forward" else self.both


def sides(options: Options, probe: Mapping[str, Tensor]) -> tuple[list[Side], dict[str, str]]:
    """The reference, every implementation that supports `probe`, and the others; and why some are omitted."""
    op, found, absent = options.op, [], {}
    takes = TENSORS[op]
    for impl in ("reference", *(name for name in BACKENDS[op] if name != "reference")):
        if impl == "triton" and not probe["q"].is_cuda:  # Triton's interpreter is only for tests
            absent[impl] = "takes CUDA tensors only"
            continue
        side = Side(
            impl,
            functools.partial(resolve(op, impl), causal=options.causal, window=options.window),
            takes,
            square=impl == "reference",
        )
        try:
            side.forward(probe)
        except ValueError as error:
            absent[impl] = str(error).partition(f"impl {impl!r} ")[2].partition(";")[0] or str(error)
            continue
        found.append(side)
    values = "v" if "v" in takes else "symbols"
    found.append(Side("stock", functools.partial(_stock, causal=options.causal), ("q", "k", values), same=False))
    if op == "relational":
        try:
            found.append(Side("dual-attention", _package(options), takes, square=True))
        except (ImportError, ValueError) as error:
            absent["dual-attention"] = str(error)
    return found, absent


def compiled(options: Options) -> Side:
    """torch.compile(reference), for one length."""
    reference, causal, window = resolve(options.op, "reference"), options.causal, options.window

    def run(*given: Tensor) -> Tensor:
        return reference(*given, causal=causal, window=window)

    return Side("compiled", torch.compile(run, dynamic=False), TENSORS[options.op], same=False, square=True)


def _stock(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)


class _FixedProjection(nn.Module):
    """A projection with a given result, so that the package's layer computes only the op."""

    result: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return self.result


def _package(options: Options) -> Callable[..., Tensor]:
    """Relational attention of the package `dual-attention`, without its projections."""
    if options.window is not None:
        raise ValueError("takes no window")
    try:
        from dual_attention.relational_attention import RelationalAttention
    except ImportError:
        raise ImportError("is not installed (pip install dual-attention)") from None
    layer = RelationalAttention(options.heads * options.dim, options.heads, n_relations=options.relations)
    projections = [_FixedProjection() for _ in range(5)]
    layer.wq_attn, layer.wk_attn, layer.wq_rel, layer.wk_rel, layer.wv = projections
    layer.wo = nn.Identity()
    del layer.wr

    def run(*given: Tensor) -> Tensor:
        *flat, layer.wr = (*(x.flatten(2) for x in given[:-1]), given[-1])
        for projection, x in zip(projections, flat, strict=True):
            projection.result = x
        out = layer(flat[0], flat[-1], is_causal=options.causal)[0]
        return out.unflatten(-1, (options.heads, options.dim))

    return run
