"""One row's worth of work: a call of an op held to its reference, or several ways to compute it that take turns."""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polyhead.ops.dispatch import TENSORS, resolve
from polyhead.timing.measure import Clock, peak

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "tf32": torch.float32}
SLACK = {"bf16": 2.0**-12, "fp16": 2.0**-12, "fp32": 2.0**-18, "tf32": 2.0**-9}
"""Relative error that is allowed beside twice that of the reference in the same dtype."""


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
    return x.detach().double().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x


def relative(x: Tensor, y: Tensor) -> float:
    """Error over the norm; of what ought to be 0, the error itself."""
    return (x.double() - y).norm().item() / (y.norm().item() or 1.0)


def cut(x: Any) -> Any:
    """Numbers that tf32 holds."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return x
    return (x.detach().view(torch.int32) & -(1 << 13)).view(torch.float32).requires_grad_()


def kinked(shape: Shape) -> bool:
    """Does a gradient jump where a relu's argument is 0?  A rounding there is as large as the gradient it turns on."""
    options = dict(shape.options)
    return options.get("act", "relu") == "relu" if shape.op == "hyla" else options.get("relation_act") == "relu"


def parity(shape: Shape, kind: str, setting: Setting, impl: str = "triton", calls: int = 2) -> dict[str, Any]:
    """Errors of an impl and of the reference, against the reference in float64; seconds of the first calls.

    At a relu's kink one draw of numbers may be unlucky, for the reference, too: there all of three must be red.
    """
    for seed in range(3):
        row = attempt(shape, kind, setting, impl, calls, seed=seed)
        if "red" not in row or not kinked(shape):
            break
    return row | {"tries": seed + 1}


def attempt(shape: Shape, kind: str, setting: Setting, impl: str, calls: int, *, seed: int) -> dict[str, Any]:
    """`parity` of one draw."""
    with rounding(kind):
        made, options = tensors(shape, DTYPES[kind], setting.device, seed)
        dout = torch.randn(*made[0].shape[:3], shape.d, generator=torch.Generator().manual_seed(1)).to(made[0])
        seconds = []
        for _ in range(calls):
            start = time.perf_counter()
            came = both(shape.op, impl, made, options, dout)
            if setting.device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        rounds = kind == "tf32" and setting.device.type == "cpu"  # whose own products do not
        own_made, own_options = made, options
        if rounds:
            own_made, own_options = [cut(x) for x in made], {name: cut(x) for name, x in options.items()}
        naive = both(shape.op, "reference", own_made, own_options, dout)
    wide = {name: double(x) for name, x in options.items()}
    exact = both(shape.op, "reference", [double(x) for x in made], wide, dout.double())
    errors = [relative(x, y) for x, y in zip(came, exact, strict=True)]
    own = [relative(x, y) for x, y in zip(naive, exact, strict=True)]
    red = [n for n, (x, y) in enumerate(zip(errors, own, strict=True)) if not x <= 2 * y + SLACK[kind]]
    row: dict[str, Any] = {"errors": errors, "reference": own, "first": seconds[0], "second": seconds[-1]}
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
