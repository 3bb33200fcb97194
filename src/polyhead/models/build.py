"""The network of a configuration: the table of all models that a run can train."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from polyhead.config import AbstractorConfig, CoRelNetConfig, Model, PrediNetConfig, TransformerConfig
from polyhead.layers.device import Device
from polyhead.models.rivals.abstractor import AbstractorModel
from polyhead.models.rivals.corelnet_predinet import CoRelNet, PrediNet
from polyhead.models.transformer import Transformer

# Type of a configuration -> its network, called with the configuration, `device` and `dtype`. The network's forward
# takes `inputs` and `mask` (True at real tokens, or None) and, if the task has them, `tail`, `source` and
# `source_mask`. It returns (b t c), or (b 1 c) for `Classes`.
NETWORKS: dict[type, Callable[..., nn.Module]] = {
    TransformerConfig: Transformer,
    AbstractorConfig: AbstractorModel,
    CoRelNetConfig: CoRelNet,
    PrediNetConfig: PrediNet,
}


class Undrawn(TorchFunctionMode):
    """Normal numbers are not drawn.  On the meta device there are none, and asking for them imports torch's compiler,
    which takes a second."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is nn.init.normal_:
            return kwargs["tensor"]
        if function is Tensor.normal_:
            return args[0]
        return function(*args, **kwargs)


def build(settings: Model, *, device: Device = None, dtype: torch.dtype | None = None) -> nn.Module:
    """The network of the configuration `settings`; its parameters are drawn from torch's default generator.

    Raises:
        ValueError: For a configuration without a network, and for a model that does not fit into memory.
    """
    if type(settings) not in NETWORKS:
        names = ", ".join(kind.__name__ for kind in NETWORKS)
        raise ValueError(f"build: the settings must be of a model ({names}), got a {type(settings).__name__}")
    is_meta = device is not None and torch.device(device).type == "meta"
    try:
        with Undrawn() if is_meta else contextlib.nullcontext():
            return NETWORKS[type(settings)](settings, device=device, dtype=dtype)
    except (RuntimeError, MemoryError, TypeError, OverflowError) as error:  # torch raises any of these
        if isinstance(error, MemoryError) or any(word in str(error).lower() for word in ("memory", "overflow")):
            reason = str(error).partition("\n")[0]
            raise ValueError(f"build: this {type(settings).__name__} is too large ({reason})") from None
        raise
