"""May the numbers of a tensor be read now?  Everything in the package that looks at values asks here.

Code that is recorded once and run again must not depend on the numbers of the recording, and tensors without numbers
have none to give.  So `is_readable` is False in `torch.compile` and `torch.export`, in `torch.jit.trace`, in `make_fx`,
in `FakeTensorMode`, on the meta device, under `vmap` over the tensor, and while a CUDA graph is captured.
"""

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, is_in_torch_dispatch_mode


def is_readable(x: Tensor) -> bool:
    """Whether the numbers of `x` may be read.  On an accelerator reading waits for the device."""
    # Compiled code stops at this line: torch.compile could not trace the others.
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    if not isinstance(x, Tensor) or isinstance(x, FakeTensor) or x.is_meta:  # a proxy of torch.fx is no tensor
        return False
    if is_in_torch_dispatch_mode() and _is_recording():
        return False
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    return not is_batched(x)


def is_cheap_to_read(x: Tensor) -> bool:
    """Whether the numbers of `x` may be read without waiting for a device."""
    return x.device.type == "cpu" and is_readable(x)


def _is_recording() -> bool:
    """Whether a dispatch mode of PyTorch's own records or fakes operations.  Modes that only watch, such as
    FlopCounterMode, compute real numbers."""
    modes = _get_current_dispatch_mode_stack()
    return not modes or any(mode.is_infra_mode() for mode in modes)


def is_batched(x: Tensor) -> bool:
    """Whether `x` is many tensors at once: under `torch.func.vmap`, or under autograd's `is_grads_batched`."""
    functorch = torch._C._functorch
    # Each transform of torch.func wraps the tensor once: grad(vmap(f)) holds the batched tensor inside.
    while functorch.is_functorch_wrapped_tensor(x):
        if functorch.is_batchedtensor(x):
            return True
        x = functorch.get_unwrapped(x)
    return functorch.is_legacy_batchedtensor(x)
