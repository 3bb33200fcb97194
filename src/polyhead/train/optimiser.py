"""AdamW with decay on weight matrices only, and the schedule: linear warm-up from 0, cosine to a floor.

    lr(t) = lr t / warmup                                                               t < warmup
    lr(t) = lr (final + (1 - final) (1 + cos(pi (t - warmup) / (end - warmup))) / 2)    warmup <= t < end
    lr(t) = lr final                                                                    t >= end

t counts updates from 0, so with a warm-up the first update has lr 0.  `end` is the last update, steps - 1; with
`early_floor` it is steps - warmup: the original HYLA code counted warm-up twice.
Whether a parameter decays depends on the type of its module, never on the parameter's name.
"""

import inspect
import math

import torch
from torch import nn

from polyhead.config import Train
from polyhead.layers.attention import MultiHeadAttention
from polyhead.layers.feedforward import MixtureOfExperts
from polyhead.layers.heads.groups import HylaHeads, SoftmaxHeads
from polyhead.layers.heads.own import OwnHeads
from polyhead.layers.heads.symbolic import RelationalHeads
from polyhead.layers.norms import LayerNorm, RMSNorm
from polyhead.layers.positions import LearnedPositions, RelativePositionBias
from polyhead.layers.symbols import PositionSymbols, RelativeSymbols, SymbolicAttention

FUSED = ("cpu", "cuda", "mps")  # devices with a fused AdamW


class AdamW(torch.optim.AdamW):
    """AdamW without the wrappers around torch's own methods, which import its compiler: that takes seconds."""

    add_param_group = inspect.unwrap(torch.optim.AdamW.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.AdamW.zero_grad)
    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


def build(model: nn.Module, train: Train) -> AdamW:
    """AdamW with two parameter groups: with and without weight decay."""
    kinds = parameter_kinds(model)
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            if kinds[name] == "weights" or getattr(train.decay, kinds[name]):
                decayed.append(parameter)
            else:
                others.append(parameter)
    groups = []
    for parameters, strength in ((decayed, train.weight_decay), (others, 0.0)):
        if parameters:
            groups.append({"params": parameters, "weight_decay": strength})
    device = next(model.parameters()).device.type
    # `lr` is set before every update; 0 here makes a missing schedule obvious.
    return AdamW(groups, lr=0.0, betas=train.betas, eps=train.eps, fused=device in FUSED)


def parameter_kinds(model: nn.Module) -> dict[str, str]:
    """Each parameter's kind by name: `weights`, or the field of `Decay` that governs it.

    Raises:
        ValueError: For a module type that is not in the table: a new layer must declare its parameters.
    """
    kinds: dict[int, str] = {}
    for module in model.modules():
        # A drop-in for nn.MultiheadAttention has PyTorch's maps in place of `qkv`.
        if isinstance(module, MultiHeadAttention) and hasattr(module, "qkv") and module.qkv.bias is not None:
            kinds[id(module.qkv.bias)] = "qkv_biases"
        # Of a user's own heads, matrices are weights, and vectors count as norms.
        if isinstance(module, OwnHeads):
            for parameter in module.parameters():
                kinds[id(parameter)] = "weights" if parameter.ndim > 1 else "norms"
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in kinds:  # a tied matrix counts as its first owner's: an embedding
                kinds[id(parameter)] = _kind(module, name, parameter, path)
    return {name: kinds[id(parameter)] for name, parameter in model.named_parameters()}


def _kind(owner: nn.Module, name: str, parameter: nn.Parameter, path: str) -> str:
    if isinstance(owner, nn.Linear):
        return "weights" if parameter is owner.weight else "biases"
    if isinstance(owner, MixtureOfExperts):
        return "weights" if parameter.ndim == 3 else "biases"  # stacked over experts: matrices (n f m), biases (n f)
    if isinstance(owner, (HylaHeads, RelationalHeads)):
        return "weights"
    if isinstance(owner, SoftmaxHeads):  # the scores of sinks, which are added as a bias is
        return "biases"
    if isinstance(owner, (LayerNorm, RMSNorm)):
        return "norms"
    if isinstance(owner, RelativePositionBias):
        return "relative_bias"
    if isinstance(owner, (nn.Embedding, LearnedPositions, SymbolicAttention, PositionSymbols, RelativeSymbols)):
        return "embeddings"
    owned = f"{path}.{name}".removeprefix(".")  # the model itself has no path
    raise ValueError(f"optimiser: parameter {owned!r} belongs to {type(owner).__name__}, which has no decay rule")


def learning_rate(step: int, train: Train) -> float:
    """The learning rate of update number `step`, from 0."""
    if step < train.warmup:
        return train.lr * step / train.warmup
    end = train.steps - 1
    if train.early_floor:
        end = train.steps - train.warmup
    if step >= end:
        return train.lr * train.final
    cosine = 0.5 * (1.0 + math.cos(math.pi * (step - train.warmup) / (end - train.warmup)))
    return train.lr * (train.final + (1.0 - train.final) * cosine)
