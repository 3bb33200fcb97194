"""The sides that `polyhead bench` compares: options, input tensors, implementations, and their work.

reference, sdpa, blocked, ...   the op's implementations that support the inputs
compiled                        torch.compile(reference)
stock                           F.scaled_dot_product_attention of the same shape, as a known baseline
dual-attention                  relational attention of the authors' package, if installed
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyhead.ops.dispatch import BACKENDS, PUBLIC, TENSORS, resolve
from polyhead.spec import MECHANISMS, amount
from polyhead.spec.shapes import one_of
from polyhead.train.device import pick_device

DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}
LENGTHS = {"cpu": (256, 512, 1024, 2048), "cuda": (256, 512, 1024, 2048, 4096, 8192, 16384)}
REPEATS = {"cpu": 3, "cuda": 20}
PASSES = ("forward", "forward+backward")


@dataclass(frozen=True)
class Options:
    """What to measure; `settled` fills in defaults of the device and raises ValueError for invalid options."""

    op: str
    lengths: tuple[int, ...] = ()
    batch: int = 1
    heads: int = 8
    dim: int = 64
    relations: int = 8
    causal: bool = True
    window: int | None = None
    dtype: str | None = None
    device: str = "auto"
    threads: int = 1
    fast_products: bool = True
    repeats: int | None = None
    sides: tuple[str, ...] = ()
    compile: bool | None = None
    memory: float | None = None

    def settled(self) -> "Options":
        """The options with all defaults filled in: ascending lengths, the device's name, memory in GiB."""
        one_of("bench", "op", self.op, BACKENDS)
        for name in ("batch", "heads", "dim", "relations", "window", "threads", "repeats"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"bench: {name} must be at least 1 but is {value}")
        if any(t < 1 for t in self.lengths):
            raise ValueError(f"bench: lengths must be at least 1 but one is {min(self.lengths)}")
        if self.memory is not None and not self.memory > 0:
            raise ValueError(f"bench: memory must be above 0 GiB but is {self.memory}")
        if self.op == "relational" and self.heads * self.dim % self.relations:
            raise ValueError(
                f"bench: relations must divide heads x dim = {self.heads * self.dim} but are {self.relations}"
            )
        cpu = self.device == "auto" and not torch.cuda.is_available()
        device = pick_device("cpu" if cpu else self.device)
        if device.type not in LENGTHS:
            raise ValueError(f"bench: can time cpu and cuda, not {device.type}")
        gpu = device.type == "cuda"
        dtype = self.dtype or ("bfloat16" if gpu else "float32")
        return replace(
            self,
            lengths=tuple(sorted(set(self.lengths or LENGTHS[device.type]))),
            dtype=one_of("bench", "dtype", dtype, DTYPES),
            device=str(device),
            repeats=self.repeats or REPEATS[device.type],
            compile="compiled" in self.sides if self.sides else (gpu if self.compile is None else self.compile),
            memory=available(device) / 2**30 if self.memory is None else self.memory,
        )


def available(device: torch.device) -> float:
    """Bytes that a measurement may use: most of the free memory."""
    if device.type == "cuda":
        return 0.9 * torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo", encoding="utf-8") as file:
            kib = next(int(line.split()[1]) for line in file if line.startswith("MemAvailable"))
    except OSError:  # not Linux
        return 8.0 * 2**30
    return 0.8 * kib * 2**10


# -------------------------------------------------------------------------------------------------------------- tensors
def tensors(options: Options, t: int, batch: int | None = None) -> dict[str, Tensor]:
    """The op's tensors by name, and `cotangent`, the gradient of the output: normal numbers with seed 0."""
    b, h, d, r = batch or options.batch, options.heads, options.dim, options.relations
    rel = (b, t, r, h * d // r) if options.op == "relational" else (b, t, h, d)
    sizes = {"q_rel": rel, "k_rel": rel, "relation_weight": (h, d, r)}
    where = torch.device(options.device)
    generator = torch.Generator(where).manual_seed(0)

    def draw(size: tuple[int, ...]) -> Tensor:
        return torch.randn(size, generator=generator, device=where).to(DTYPES[str(options.dtype)])

    made = {name: draw(sizes.get(name, (b, t, h, d))).requires_grad_() for name in TENSORS[options.op]}
    return made | {"cotangent": draw((b, t, h, d))}


def operations(options: Options, t: int, which: str) -> int:
    """Useful FLOPs: two per multiply-add of the equation (spec.MECHANISMS) at the visible pairs.

    A backward pass counts twice the forward pass.  Recomputation and masked pairs do not count.

    >>> operations(Options("hyla", heads=8, dim=64, causal=False), 1024, "forward")   # 2 x 3 x 8 x 64 x 1024^2
    3221225472
    """
    (work,) = (m.work for m in MECHANISMS if m.op == PUBLIC[options.op])
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


class _Given(nn.Module):
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
    projections = [_Given() for _ in range(5)]
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
