"""Check of the Triton kernels at their first use: do they agree with the reference on this GPU?

A configuration is everything that is compiled into a kernel, and whether a call is longer than a check.  At its first
call at most ROWS queries of two samples are computed three times: by the kernels, and by PyTorch's own operations in
the same dtype and in float64.  The first backward pass is checked in the same way.  A kernel that is wrong, does not
compile or does not fit on the GPU is reported once.  Then impl="auto" computes that configuration in tiles of the
reference, and impl="triton" raises RuntimeError.
"""

import warnings
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from polyhead.ops.call import AttentionCall
from polyhead.ops.hyla.reference import reference
from polyhead.ops.kernel import Gradients, Outputs, empty_output
from polyhead.ops.tiling import gradients_by_tiles, output_by_tiles

Result = TypeVar("Result")
Results = dict[str, Tensor]
"""Name -> the output, or the gradient of that name."""

Pass = Callable[[AttentionCall, Tensor | None], Results]
"""A pass of a call, given the gradient of its output if it is the backward pass."""

ROWS, KEYS = 128, 256
"""The most queries and keys in a check: with more than 128 keys, several programs divide the keys of few queries."""

SLACK = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2.0**-8}
"""Relative error allowed in addition to twice the error of PyTorch's own operations in the same dtype.  float32 may be
computed in tf32."""

VERDICTS: dict[Hashable, str | None] = {}
"""Configuration -> what is wrong with it, as a part of a sentence, or None."""


def checked_forward(launch: Callable[[AttentionCall], Outputs], call: AttentionCall) -> Outputs:
    """The output by `launch`, or by tiles of the reference if the kernel is wrong."""

    def kernels(call: AttentionCall, _: Tensor | None) -> Results:
        return {"the output": launch(call)[0]}

    def tiles(call: AttentionCall, _: Tensor | None) -> Results:
        return {"the output": output_by_tiles(reference, call)}

    return list(_kernels_or_tiles("forward", call, None, kernels, tiles).values())


def checked_backward(
    launch: Callable[[AttentionCall, Outputs], Gradients], call: AttentionCall, grad_outputs: Outputs
) -> Gradients:
    """The gradients by `launch`, or by tiles of the reference if a kernel is wrong."""

    def kernels(call: AttentionCall, cotangent: Tensor | None) -> Results:
        assert cotangent is not None
        return launch(call, [cotangent])

    def tiles(call: AttentionCall, cotangent: Tensor | None) -> Results:
        assert cotangent is not None
        return gradients_by_tiles(reference, call, cotangent)

    return _kernels_or_tiles("backward", call, grad_outputs[0], kernels, tiles)


def _kernels_or_tiles(pass_: str, call: AttentionCall, cotangent: Tensor | None, kernels: Pass, tiles: Pass) -> Results:
    """The result of the kernels, checked at their first call, or of tiles where they are wrong."""
    forward_key, key = configuration("forward", call), configuration(pass_, call)
    # While a CUDA graph is captured, after its warm-up, the device must not be waited for.
    is_capturing = call.q.is_cuda and torch.cuda.is_current_stream_capturing()
    is_unchecked = VERDICTS.get(forward_key) is None and key not in VERDICTS
    if is_unchecked and call.q.numel() * call.k.numel() > 0 and not is_capturing:
        VERDICTS[key] = None
        fault = _attempt(lambda: first_difference(call, kernels, tiles))
        if fault is not None:
            _report(pass_, call, fault)
    reason = VERDICTS.get(forward_key) or VERDICTS.get(key)  # a wrong forward pass rules out both
    if reason is None:
        result = _attempt(lambda: kernels(call, cotangent))
        if not isinstance(result, str):
            return result
        reason = _report(pass_, call, result)
    if call.impl != "auto":
        raise RuntimeError(f"hyla: impl 'triton' {reason}; use impl='auto' or 'reference'")
    return tiles(call, cotangent)


def _report(pass_: str, call: AttentionCall, reason: str) -> str:
    """Keep the reason why a configuration is not used, and warn the caller of "auto"."""
    VERDICTS[configuration(pass_, call)] = reason
    if call.impl == "auto":
        warning = f"hyla: impl 'triton' {reason}; tiles of the reference compute it instead"
        warnings.warn(warning, RuntimeWarning, stacklevel=2)
    return reason


def first_difference(call: AttentionCall, kernels: Pass, tiles: Pass) -> str | None:
    """The first result of a part of a call that is further from the exact one than allowed, in words, or None."""
    part = first_rows(call)
    cotangent = waves(empty_output(part)[0])
    results, plain = kernels(part, cotangent), tiles(part, cotangent)
    wide_part = part.with_tensors({name: tensor.double() for name, tensor in part.learned_tensors().items()})
    exact = tiles(wide_part, cotangent.double())
    for name, result in results.items():
        norm = exact[name].norm().item() or 1.0
        error = (result.double() - exact[name]).norm().item() / norm
        plain_error = (plain[name].double() - exact[name]).norm().item() / norm
        limit = 2 * plain_error + SLACK.get(call.q.dtype, 1e-9)
        if not error <= limit:  # NaN as well
            return f"is wrong on this card: {name} is {error:.1e} off, {limit:.1e} are allowed ({call.q.dtype})"
    return None


def configuration(pass_: str, call: AttentionCall) -> Hashable:
    """Everything that is compiled in, the layout of the tensors, and how the lengths compare with those of a check."""
    layouts: list[Hashable] = []
    for name, tensor in call.tensors().items():
        if tensor is None:
            layouts.append(None)
            continue
        # Triton specialises on contiguous rows and on strides that are multiples of 16.
        strides = tensor.stride(-1) == 1, all(stride % 16 == 0 for stride in tensor.stride()[:-1])
        layouts.append((tensor.ndim, tensor.shape[2:], tensor.is_contiguous(), strides))
        if name in ("bias", "mask", "cu_seqlens"):
            layouts[-1] = (tensor.ndim, tensor.is_contiguous(), strides)
    t, s = call.lengths
    lengths = t == 1, t >= ROWS, s > ROWS
    precision = torch.backends.cuda.matmul.fp32_precision
    options = call.masks.causal, call.masks.window is None, call.normalise, call.act, precision
    return pass_, call.q.device, call.q.dtype, tuple(layouts), lengths, options


def first_rows(call: AttentionCall) -> AttentionCall:
    """A smaller call of the first rows in the same layout; numbers that test little are replaced."""
    t, s = call.lengths
    num_queries = min(t, ROWS)
    most_keys = KEYS if t < ROWS else ROWS
    num_keys = min(s, most_keys)
    tensors = {"q": call.q[:2, :num_queries], "k": call.k[:2, :num_keys], "v": call.v[:2, :num_keys]}
    if call.bias is not None:
        tensors["bias"] = call.bias[:, t - num_queries : t + num_keys - 1]
    for name, tensor in tensors.items():
        is_telling = tensor.isfinite().all() & tensor.any()
        if not is_telling:
            tensors[name] = waves(tensor)
    mask, cu_seqlens = call.masks.mask, call.masks.cu_seqlens
    if mask is not None:
        if mask.ndim == 4:
            mask = mask[:2]
        mask = mask[..., :num_keys]
    if cu_seqlens is not None:
        cu_seqlens = cu_seqlens.clamp(max=num_queries)
    masks = replace(call.masks, mask=mask, cu_seqlens=cu_seqlens)
    return replace(call.with_tensors(tensors), masks=masks)


def waves(like: Tensor) -> Tensor:
    """Numbers between -1 and 1 without repetition and without a random generator, in the layout of `like`."""
    numbers = torch.arange(like.numel(), device=like.device).double().mul(0.7).sin().view(like.shape)
    return torch.empty_like(like).copy_(numbers)


def _attempt(run: Callable[[], Result]) -> Result | str:
    """The result of `run`, or Triton's error as a part of a sentence."""
    try:
        return run()
    except Exception as error:
        if not type(error).__module__.startswith("triton") and "PassManager" not in str(error):
            raise
        first_line = str(error).strip().splitlines()[0][:120]
        return f"cannot be launched on this card ({type(error).__name__}: {first_line})"
