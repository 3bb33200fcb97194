"""GELU in its tanh form, on a CPU by native code; gelu.cpp has the equations.

PyTorch's own kernel is bound by its tanh and takes four times as long as its other activations.
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
from polyhead.ops.latent_code import may_look
from polyhead.ops.native.check import check_function
from polyhead.ops.native.threads import pool, threads

LEAST = 1 << 14
"""Tensors with fewer numbers go to PyTorch."""


def gelu_tanh(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """`x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))`, as `F.gelu(x, approximate="tanh")`.

    Native code computes contiguous float32 tensors of at least `LEAST` numbers on a CPU, and PyTorch all others, all of
    `torch.compile`, `torch.export` and `torch.func`, derivatives in forward mode and second derivatives.

    >>> gelu_tanh(torch.tensor([-1.0, 0.0, 1.0]))
    tensor([-0.1588,  0.0000,  0.8412])
    """
    return _Gelu.apply(x) if _taken(x) else _plain(x)


def _plain(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _readable(x: Tensor) -> bool:
    """Has it numbers in memory that may be read now?  `is_grads_batched` of autograd uses the older kind of vmap."""
    return may_look(x) and type(x) in (Tensor, Parameter) and not torch._C._functorch.is_legacy_batchedtensor(x)


def _taken(x: Tensor) -> bool:
    """Is native code faster for this tensor, and right in the modes that are on?"""
    if not (_readable(x) and x.numel() >= LEAST and x.is_contiguous()):
        return False
    return native.NUMBERS.get(x.dtype) == x.dtype and not differentiated() and native.missing("gelu", x.dtype) is None


class Call(ctypes.Structure):
    """The struct GeluCall of gelu.cpp."""

    _fields_ = [
        ("n", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("x", "dout", "out", "pool")),
        ("threads", ctypes.c_int64),
    ]


def computed(x: Tensor, dout: Tensor | None = None) -> Tensor:
    """The output for a contiguous x, or with `dout`, contiguous too, the gradient of x."""
    out = torch.empty_like(x)
    at = None if dout is None else dout.data_ptr()
    native.call("gelu", x.dtype, Call(x.numel(), x.data_ptr(), at, out.data_ptr(), pool(), threads()))
    return out


class _Gelu(Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return computed(x)

    @staticmethod
    def backward(ctx: BackwardCFunction, dout: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        # Where a gradient of this gradient may be wanted, or many come at once, PyTorch has rules for it.
        if torch.is_grad_enabled() or differentiated() or not _readable(dout):
            return torch.ops.aten.gelu_backward(dout, x, approximate="tanh")
        return computed(x, dout.contiguous())


def _examples() -> list[Tensor]:
    """Both ends, what lies between, and lengths that fill no vector."""
    return [torch.linspace(-12, 12, n, dtype=torch.float64) for n in (3, 1000, 40007)]


check_function("gelu", _Gelu.apply, _plain, _examples)
