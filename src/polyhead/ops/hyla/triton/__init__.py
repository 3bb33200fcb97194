"""HYLA on CUDA in three Triton kernels.  A tile has some queries i and keys j of all heads; a is its code.

    forward    z_ij = sum_h a_hij v_jh            y = act(z)              out_ih += sum_j a_hij y_ij
    backward   dy_ij = sum_h a_hij dout_ih        dz = dy act'(z)         da_hij = dout_ih . y_ij + dz_ij . v_jh
               dv_jh += sum_i a_hij dz_ij         ds = da through the normaliser, then dq, dk and dbias
    rms        a = c s,  c = (mean_h s^2 + eps)^(-1/2)                    ds = c (da - a mean_h(a da))

One kernel computes the output, one the gradients of queries and bias, one those of keys and values.  Each recomputes
the codes, so only the arguments are saved.  There are no atomic additions: gradients are deterministic.  Schug et al.
2024, "Attention as a hypernetwork", eq. 6.

    POLYHEAD_TRITON=check   (default) each configuration is checked at its first use (first_use.py)
    POLYHEAD_TRITON=1       no checks
    POLYHEAD_TRITON=0       no kernels

The files that import triton are imported when a kernel runs, because polyhead must be importable without triton.
"""

import os
from typing import Any

import torch

from polyhead.ops.call import AttentionCall
from polyhead.ops.hyla.triton import first_use
from polyhead.ops.kernel import Gradients, Outputs, unsupported_by_kernels
from polyhead.ops.tiles import unsupported_mask
from polyhead.spec.optional import is_installed
from polyhead.spec.shapes import one_of

IS_INSTALLED = is_installed("triton")
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton's interpreter runs the kernels.  Read once, because compiled code cannot query it."""

MODE = one_of("polyhead.ops", "POLYHEAD_TRITON", os.environ.get("POLYHEAD_TRITON", "check"), ("check", "1", "0"))

LARGEST_HEADS = {2: (64, 2048), 4: (32, 1024), 8: (16, 256)}
"""Bytes of a number -> the most heads, and the most heads x width of queries; both are padded to powers of two >=
16."""


def unsupported_reason(call: AttentionCall) -> str | None:
    """Why the kernels do not take a call, as a part of a sentence, or None."""
    for reason in (unsupported_device(call), unsupported_options(call), unsupported_by_kernels(call)):
        if reason is not None:
            return reason
    return unsupported_size(call.q)


def is_preferred(call: AttentionCall) -> bool:
    """On a GPU, where the alternative is tiles in PyTorch, which launch thousands of kernels."""
    return call.q.is_cuda


def unsupported_device(call: AttentionCall) -> str | None:
    """Why Triton kernels cannot or must not run on these tensors, or None."""
    if not IS_INSTALLED:
        return "needs triton, which is not installed"
    if MODE == "0":
        return "is turned off by POLYHEAD_TRITON=0"
    if IS_INTERPRETED:
        return None
    if not call.q.is_cuda:
        return "takes CUDA tensors only"
    if call.q.dtype == torch.float64:
        return "takes no torch.float64 on a card"
    return None


def unsupported_options(call: AttentionCall) -> str | None:
    """Why the kernels take no call with these options, on any device, or None."""
    if call.normalise not in ("rms_heads", "identity"):
        return f"takes normalise='rms_heads' or 'identity' only, not {call.normalise!r}"
    if call.act not in ("relu", "identity"):
        return f"takes act='relu' or 'identity' only, not {call.act!r}"
    for name in ("value_weight", "keep"):
        if getattr(call, name) is not None:
            return f"takes no {name}"
    if call.bias is not None and call.bias.ndim != 2:
        return f"takes biases by offset (h t+s-1) only, not {tuple(call.bias.shape)}"
    return unsupported_mask(call.masks)


def unsupported_size(q: torch.Tensor) -> str | None:
    """Why queries have too many heads or too wide ones, or None.  A card may have too little memory for fewer: its
    first launch finds that (first_use.py)."""
    heads, width = (max(16, 1 << (size - 1).bit_length()) for size in q.shape[2:])  # padded, as in a program
    max_heads, max_numbers = LARGEST_HEADS[q.itemsize]
    if heads <= max_heads and heads * width <= max_numbers:
        return None
    limits = f"at most {max_heads} heads and heads x width up to {max_numbers} (padded, {q.dtype})"
    return f"takes {limits}, not {q.shape[2]} x {q.shape[3]}"


def is_tf32() -> bool:
    """Whether products of float32 may round to tf32.  Not read from `allow_tf32`, which raises once `fp32_precision`
    was set."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


is_tf32._dynamo_marked_constant = True  # type: ignore[attr-defined]


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory per program of a kernel: 99 KB on most consumer GPUs, 227 on an H100 and in the
    interpreter.

    It reads a property of the device and no data, so compiled code may call it.
    """
    if device.type != "cuda":
        return 227 << 10
    card: Any = torch.cuda.get_device_properties(device)
    return getattr(card, "shared_memory_per_block_optin", 64 << 10)


def forward_pass(call: AttentionCall) -> Outputs:
    """The output (b t h e)."""
    if MODE == "check" and not IS_INTERPRETED:
        return first_use.checked_forward(launch_forward, call)
    return launch_forward(call)


def backward_pass(call: AttentionCall, grad_outputs: Outputs) -> Gradients:
    """The gradients of q, k, v and, if given, bias."""
    if MODE == "check" and not IS_INTERPRETED:
        return first_use.checked_backward(launch_backward, call, grad_outputs)
    return launch_backward(call, grad_outputs)


def launch_forward(call: AttentionCall) -> Outputs:
    """The output by the kernels, unchecked."""
    from polyhead.ops.hyla.triton import kernels

    with torch.cuda.device_of(call.q):
        return [kernels.forward(kernels.prepare(call, shared_memory(call.q.device), is_tf32()))]


def launch_backward(call: AttentionCall, grad_outputs: Outputs) -> Gradients:
    """The gradients by the kernels, unchecked."""
    from polyhead.ops.hyla.triton import kernels

    with torch.cuda.device_of(call.q):
        problem = kernels.prepare(call, shared_memory(call.q.device), is_tf32())
        gradients = kernels.backward(problem, grad_outputs[0])
    return dict(zip(("q", "k", "v", "bias"), gradients, strict=False))
