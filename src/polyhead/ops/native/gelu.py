"""GELU in its tanh form, on a CPU by native code; gelu.cpp has the equations.

PyTorch's own kernel is bound by its tanh and takes four times as long as its other activations.  A bias that is added
here need not be copied before a product, nor its gradient be summed after it.
"""

import ctypes

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import BackwardCFunction, FunctionCtx
from torch.nn import Parameter

import polyhead.ops.native.library as native
from polyhead.ops.custom_op_rules import differentiated
from polyhead.ops.native.check import check_function
from polyhead.ops.native.threads import pool, threads
from polyhead.ops.readable import is_cheap_to_read

LEAST = 1 << 14
"""Tensors with fewer numbers go to PyTorch.  Also the size of a job."""

ROWS = 64
"""Rows of a job at most: the gradient of a bias is the sum of the jobs' sums, which keeps roundings small."""


def gelu_tanh(x: Float[Tensor, "... f"], bias: Float[Tensor, " f"] | None = None) -> Float[Tensor, "... f"]:
    """`z / 2 (1 + tanh(sqrt(2 / pi) (z + 0.044715 z^3)))` with z = x + bias, as `F.gelu(z, approximate="tanh")`.

    Native code computes contiguous float32 tensors of at least `LEAST` numbers on a CPU, and PyTorch all others, all of
    `torch.compile`, `torch.export` and `torch.func`, derivatives in forward mode and second derivatives.

    >>> gelu_tanh(torch.tensor([-1.0, 0.0, 1.0]))
    tensor([-0.1588,  0.0000,  0.8412])
    """
    ready = takes(x, x.numel(), *(() if bias is None else (bias,))) and x.is_contiguous()
    return _Gelu.apply(x, bias) if ready else _plain(x, bias)


def _plain(x: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.gelu(x if bias is None else x + bias, approximate="tanh")


def takes(x: Tensor, numbers: int, *more: Tensor) -> bool:
    """Whether native code would be right and faster for `numbers` numbers that are made of these tensors."""
    # Sizes are compared last, as a compiled graph must not depend on them.
    if not all(_readable(a) and a.dtype == x.dtype for a in (x, *more)) or numbers < LEAST:
        return False
    return native.NUMBERS.get(x.dtype) == x.dtype and not differentiated() and native.missing("gelu", x.dtype) is None


def _readable(x: Tensor) -> bool:
    """Has it numbers in memory that may be read now?  `is_grads_batched` of autograd uses the older kind of vmap."""
    return is_cheap_to_read(x) and type(x) in (Tensor, Parameter) and not torch._C._functorch.is_legacy_batchedtensor(x)


class GeluCallStruct(ctypes.Structure):
    """The struct GeluCall of gelu.cpp."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("n", "width", "rows")),
        *((name, ctypes.c_void_p) for name in ("x", "bias", "dout", "out", "dbias", "pool")),
        ("threads", ctypes.c_int64),
    ]


def computed(
    x: Tensor, bias: Tensor | None = None, dout: Tensor | None = None, *, learns: bool = False
) -> tuple[Tensor, Tensor | None]:
    """The output; or with `dout` the gradient of x and, if the bias `learns`, that of the bias.  All are contiguous."""
    width = LEAST if bias is None else len(bias)
    rows, out = min(max(1, LEAST // width), ROWS), torch.empty_like(x)
    parts = x.new_zeros(-(-x.numel() // (rows * width)), width) if learns else None
    at = (None if a is None else a.data_ptr() for a in (x, bias, dout, out, parts))
    native.call("gelu", x.dtype, GeluCallStruct(x.numel(), width, rows, *at, pool(), threads()))
    return out, None if parts is None else parts.sum(0)


class _Gelu(Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, *([] if bias is None else [bias]))
        return computed(x, None if bias is None else bias.contiguous())[0]

    @staticmethod
    def backward(ctx: BackwardCFunction, dout: Tensor) -> tuple[Tensor, Tensor | None]:
        rest: list[Tensor]
        x, *rest = ctx.saved_tensors
        bias, learns = rest[0] if rest else None, ctx.needs_input_grad[-1]
        # Where a gradient of this gradient may be wanted, or many come at once, PyTorch has rules for it.
        if torch.is_grad_enabled() or differentiated() or not _readable(dout):
            dx = torch.ops.aten.gelu_backward(dout, x if bias is None else x + bias, approximate="tanh")
            return dx, dx.sum_to_size(bias.shape) if bias is not None and learns else None
        return computed(x, None if bias is None else bias.contiguous(), dout.contiguous(), learns=learns)


def _examples() -> list[list[Tensor]]:
    """Both ends, what lies between, and lengths that fill no vector; biases of few and of many numbers."""
    line = [torch.linspace(-12, 12, n, dtype=torch.float64) for n in (3, 1000, 40007, 37 * 19, 3 * 20_000)]
    return [
        *([x] for x in line[:3]),
        [line[3].view(37, 19), torch.linspace(-1, 2, 19, dtype=torch.float64)],
        [line[4].view(3, 20_000), torch.linspace(-3, 1, 20_000, dtype=torch.float64)],
    ]


check_function("gelu", lambda *given: _Gelu.apply(*given, *(None,) * (2 - len(given))), _plain, _examples)
