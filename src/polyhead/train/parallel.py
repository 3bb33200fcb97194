"""How several processes train one model: data parallel (each holds the whole model) or sharded (each holds a part).

Both use PyTorch: DistributedDataParallel and FSDP2's `fully_shard`.  They change how the model is called and where its
tensors are stored, never what it computes.  A single process needs none of this.
"""

import contextlib
import warnings
from collections import Counter
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from polyhead.models.transformer import Transformer
from polyhead.train.world import World


def shard(model: nn.Module, world: World) -> None:
    """Leave this rank's part of the model, on its device: parameters become DTensors.  Buffers stay where they are."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    # Our outputs are views.  FSDP2 warns against changing them in place; nothing does.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
    mesh = init_device_mesh(world.device.type, (world.size,))
    for unit in [*units(model), model]:  # one unit at a time, so the device never holds the whole model
        fully_shard(unit, mesh=mesh)


def units(model: nn.Module) -> list[nn.Module]:
    """The FSDP units: the blocks of a transformer.  All other parameters belong to the root unit.

    If a block holds symbols, they are read before the block is called; then its other modules are the units.  A
    parameter shared by two units would be sharded twice, so a module with such a parameter is no unit.
    """
    candidates: list[nn.Module] = []
    for module in model.modules():
        if not isinstance(module, Transformer):
            continue
        for block in module.blocks:
            children = dict(block.named_children())
            sources = children.pop("symbols", None), children.pop("cross_symbols", None)
            if sources == (None, None):
                candidates.append(block)
            else:
                candidates.extend(children.values())

    # A parameter that is used more often in the model than in the unit belongs to another unit, too.
    model_uses = _uses_of_parameters(model)
    chosen = []
    for unit in candidates:
        uses = _uses_of_parameters(unit)
        if uses and all(model_uses[key] == count for key, count in uses.items()):
            chosen.append(unit)
    return chosen


def _uses_of_parameters(model: nn.Module) -> Counter[int]:
    """How often each parameter is used in `model`, by its identity."""
    counts: Counter[int] = Counter()
    for _, module in model.named_modules(remove_duplicate=False):
        counts.update(map(id, module.parameters(recurse=False)))
    return counts


def replicated(model: nn.Module, world: World) -> nn.Module:
    """The module that training calls instead of `model`, of which each rank has a copy; it has the same parameters."""
    devices = [world.device] if world.device.type == "cuda" else None
    # Every parameter of our models gets a gradient, so DDP need not search for unused ones.
    call = DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)
    call.broadcast_buffers = False  # buffers are position tables and never change
    return call


def gradient_sync(call: Any, last: bool) -> contextlib.AbstractContextManager[object]:
    """A context for one forward and backward pass.  Gradients are accumulated locally, and summed over ranks in the
    `last` pass of an update."""
    if isinstance(call, DistributedDataParallel) and not last:
        return call.no_sync()
    if hasattr(call, "set_requires_gradient_sync"):
        call.set_requires_gradient_sync(last)
    return contextlib.nullcontext()


def reshard(model: nn.Module) -> None:
    """Reshard the parameters that a forward pass gathered, when no backward pass follows."""
    module: Any
    for module in model.modules():
        if hasattr(module, "reshard"):  # a unit, or the root
            module.reshard()


def full_tensor(tensor: Any) -> Tensor:
    """The full tensor of a DTensor; any other tensor unchanged.  All ranks must call it together."""
    return tensor.full_tensor() if is_part(tensor) else tensor


def is_part(tensor: object) -> bool:
    return hasattr(tensor, "full_tensor")


def local_part(tensor: Any) -> Tensor:
    """The part of a tensor that this rank holds."""
    return tensor.to_local() if is_part(tensor) else tensor


def distributed_like(value: Tensor, tensor: Any) -> Tensor:
    """`value`, which every rank holds in full, distributed like `tensor`: a DTensor, or unchanged."""
    if not is_part(tensor):
        return value.to(tensor.device, copy=True)
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(tensor.device), tensor.device_mesh, tensor.placements, src_data_rank=None)
