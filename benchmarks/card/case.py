"""One row's worth of work: a call of an op held to its reference, or several ways to compute it that take turns."""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from agreement.rounding import Rounded
from torch import Tensor

from polyhead.ops.dispatch import TENSORS, resolve
from polyhead.timing.measure import Clock, peak

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "tf32": torch.float32}
UNITS = {"bf16": (0.75 * 2**-8, 0.0), "fp16": (0.75 * 2**-11, 0.0), "fp32": (2**-24, None), "tf32": (2**-24, 2**-10)}
"""How far a step of the equation is off at most, at random (0.75: then the mean square is that of a rounding), and by
how much products cut what they multiply: tensor cores do so in tf32; numbers of 16 bits they take whole."""

DRAWS = 16
"""References whose steps are rounded at random."""


@dataclass(frozen=True)
class Setting:
    """Where it runs; `dry`: a CPU, tiny sizes."""

    device: torch.device
    dry: bool
    repeats: int


@dataclass(frozen=True)
class Item:
    """A row that is to be had; its key says whether there is one already."""

    key: str
    run: Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class Shape:
    """Sizes and limits of a call of an op."""

    op: str
    b: int = 2
    t: int = 50
    s: int = 50
    h: int = 8
    g: int = 8
    d: int = 64
    r: int = 8
    options: tuple[tuple[str, Any], ...] = ()
    bias: bool = False
    mask: bool = False
    edges: tuple[int, ...] = ()
    by_offset: bool = False


def tensors(
    shape: Shape, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> tuple[list[Tensor], dict[str, Any]]:
    """The op's tensors, in order, and the options of a call: normal numbers."""
    b, t, s, d, r = (1 if shape.edges else shape.b), shape.t, shape.s, shape.d, shape.r
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device).to(dtype).requires_grad_()

    values = draw(t + s - 1, shape.g, d) if shape.by_offset else draw(b, s, shape.g, d)
    sizes = {"q": (b, t, shape.h, d), "k": (b, s, shape.g, d), "q_rel": (b, t, r, d), "k_rel": (b, s, r, d)}
    sizes["relation_weight"] = (shape.h, d, r)
    made = [draw(*sizes[name]) if name in sizes else values for name in TENSORS[shape.op]]
    options = dict(shape.options)
    if shape.bias:
        options["bias"] = draw(shape.h, t + s - 1)
    if shape.mask:  # part of a wider one, as of a cache that is not full
        wide = torch.rand(b, 1, 1, s + 7, generator=generator, device=device) > 0.3
        options["mask"] = wide[..., 3 : s + 3]
    if shape.edges:
        options["cu_seqlens"] = torch.tensor(shape.edges, dtype=torch.int32, device=device)
    return made, options


@contextlib.contextmanager
def rounding(kind: str) -> Iterator[None]:
    """Products of float32 round to tf32, or do not."""
    matmul = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "tf32" if kind == "tf32" else "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def both(op: str, impl: str, made: Sequence[Tensor], options: dict[str, Any], dout: Tensor | None) -> list[Tensor]:
    """The output, and all gradients if there is one of the output."""
    out = resolve(op, impl)(*made, **options)
    leaves = [*made, *(x for x in (options.get("bias"),) if x is not None)]
    return [out.detach()] if dout is None else [out.detach(), *torch.autograd.grad(out, leaves, dout.to(out.dtype))]


def double(x: Any) -> Any:
    """A tensor on the CPU, in float64 if it is of numbers; anything else as it is."""
    if not isinstance(x, Tensor):
        return x
    x = x.detach().cpu()
    return x.double().requires_grad_() if x.is_floating_point() else x


def distances(x: Tensor, y: Tensor) -> tuple[float, float]:
    """Norm of the difference, and that of the row (the last dimension) that is farthest off."""
    off = torch.nan_to_num((x.double().cpu() - y).abs(), nan=torch.inf)
    return off.norm().item(), off.norm(dim=-1).max().item() if off.numel() else 0.0


def farthest(each: Iterable[list[Tensor]], exact: list[Tensor]) -> list[tuple[float, ...]]:
    """`distances` of several computations, the largest of each tensor."""
    found = [[distances(x, y) for x, y in zip(all_, exact, strict=True)] for all_ in each]
    return [tuple(map(max, zip(*of_one, strict=True))) for of_one in zip(*found, strict=True)]


def rounded(
    op: str, kind: str, made: Sequence[Tensor], options: dict[str, Any], dout: Tensor
) -> Iterator[list[Tensor]]:
    """The reference in float64, each step off by as much as a rounding, at random (Monte Carlo arithmetic)."""
    unit, terms = UNITS[kind]
    for n in range(DRAWS):
        with Rounded(unit, n, terms), padded() if terms else contextlib.nullcontext():
            yield both(op, "reference", made, options, dout)


@contextlib.contextmanager
def padded() -> Iterator[None]:
    """Sums of products of a single term get a second one, 0: PyTorch would not compute them as products of matrices.

    Tensor cores cut what they multiply, however few terms there are.
    """
    plain = torch.einsum

    def einsum(pattern: str, *tensors: Tensor) -> Tensor:
        ins, _, out = pattern.partition("->")
        each = zip(tensors, ins.split(","), strict=True)
        return plain(pattern, *(two(x, {*letters} - {*out}, letters) for x, letters in each))

    def two(x: Tensor, summed: set[str], letters: str) -> Tensor:
        for n, letter in enumerate(letters):
            if letter in summed and x.shape[n] == 1:
                x = torch.cat((x, torch.zeros_like(x)), n)
        return x

    with mock.patch.object(torch, "einsum", einsum):
        yield


def parity(shape: Shape, kind: str, setting: Setting, impl: str = "triton", calls: int = 2) -> dict[str, Any]:
    """Errors of an impl against the reference in float64, and what is allowed; seconds of the first calls.

    Allowed is twice the largest error of the reference: in this dtype, and in float64 with steps that are rounded at
    random as this dtype rounds them.  So it is known what roundings do where the truth is 0, where a relu has its kink,
    and in tf32, which no CPU has.  It is held to by the norm of a tensor and by its worst row, without a margin.
    """
    with rounding(kind):
        made, options = tensors(shape, DTYPES[kind], setting.device)
        dout = torch.randn(*made[0].shape[:3], shape.d, generator=torch.Generator().manual_seed(1)).to(made[0])
        seconds = []
        for _ in range(calls):
            start = time.perf_counter()
            came = both(shape.op, impl, made, options, dout)
            if setting.device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        naive = both(shape.op, "reference", made, options, dout)
    wide = [double(x) for x in made], {name: double(x) for name, x in options.items()}, dout.double().cpu()
    exact = both(shape.op, "reference", *wide)
    errors = farthest([came], exact)
    own = farthest([naive, *rounded(shape.op, kind, *wide)], exact)
    pairs = [zip(*each, strict=True) for each in zip(errors, own, strict=True)]
    red = [n for n, each in enumerate(pairs) if any(x > 2 * y for x, y in each)]
    norms = [y.norm().item() or 1.0 for y in exact]
    shown = [[x[0] / norm for x, norm in zip(all_, norms, strict=True)] for all_ in (errors, own)]
    row: dict[str, Any] = {"errors": shown[0], "reference": shown[1], "first": seconds[0], "second": seconds[-1]}
    inputs = {"shape": shape, "tensors": made, "options": options, "dout": dout, "came": came, "exact": exact}
    return row | ({"red": red, "inputs": inputs} if red else {})


def timed(calls: dict[str, Callable[[], object]], setting: Setting) -> dict[str, Any]:
    """Milliseconds (fastest, median) and MiB of each call; they take turns.  What fails says why on a card."""
    clock, rows, seconds = Clock(setting.device), {}, {}
    for name, call in calls.items():
        try:
            call()
            rows[name] = {"mib": peak(setting.device, call) / 2**20}
            seconds[name] = []
        except Exception as error:
            if setting.dry:
                raise
            rows[name] = {"skipped": f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:120]}"}
            torch.cuda.empty_cache()
    for _ in range(setting.repeats):
        for name, all_ in seconds.items():
            all_.append(clock.seconds(calls[name]))
    for name, all_ in seconds.items():
        rows[name] |= {"ms": min(all_) * 1e3, "median": statistics.median(all_) * 1e3}
    return {"sides": rows}
