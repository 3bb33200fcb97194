"""Initialisation presets, one per paper.

    hyla     (Schug et al. 2024, code: Flax defaults) matrices N(0, 1/fan_in), truncated at two standard deviations and
             rescaled; token tables N(0, 1/width)
    cs336    (course handout 3.4.1) matrices N(0, 2/(in + out)) and token tables N(0, 1), both truncated at three

In both, norms are 1 and biases 0.  The joint q/k/v matrix is filled like three separate projections; other modules have
their own rule, `reset_parameters`.  Relation weights are filled last, because they depend on the maps around them.  The
output map of a language model may get a smaller standard deviation, see `initial_logit_factor`.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from polyhead.config import Input, Logits, Output, Tokens
from polyhead.layers.attention import MultiHeadAttention
from polyhead.layers.feedforward import MixtureOfExperts
from polyhead.layers.heads.groups import HylaHeads, SoftmaxHeads
from polyhead.layers.heads.own import OwnHeads
from polyhead.layers.heads.symbolic import RelationalHeads
from polyhead.layers.norms import LayerNorm, RMSNorm
from polyhead.layers.positions import LearnedPositions, RelativePositionBias
from polyhead.layers.symbols import PositionSymbols, RelativeSymbols, SymbolicAttention
from polyhead.spec import PRESETS
from polyhead.spec.shapes import one_of

# Standard deviation of a unit normal truncated at +-2.
TRUNCATION = 0.87962566103423978

# Modules that initialise their own parameters under every preset.
NORMS_AND_TABLES = (RMSNorm, LayerNorm, RelativePositionBias, LearnedPositions)
SOURCES_OF_SYMBOLS = (SymbolicAttention, PositionSymbols, RelativeSymbols)
OWN_RULE = (*NORMS_AND_TABLES, *SOURCES_OF_SYMBOLS, SoftmaxHeads, OwnHeads, MixtureOfExperts)


@torch.no_grad()
def initialise(model: nn.Module, preset: str) -> None:
    """Initialise all parameters of `model` from torch's default generator."""
    one_of("initialise", "preset", preset, PRESETS)
    if all(parameter.is_meta for parameter in model.parameters()):
        return  # the meta device has nothing to fill, and checking each parameter would take most of the time
    # A drop-in for nn.MultiheadAttention has PyTorch's maps in place of `qkv`, and keeps its own initial values.
    layers = [m for m in model.modules() if isinstance(m, MultiHeadAttention) and hasattr(m, "qkv")]
    joint = [layer.qkv for layer in layers]
    for module in model.modules():
        if module in joint:  # filled in parts, with the attention around it
            continue
        if module in layers:
            _joint_matrix(module, preset)
            _zero(module.qkv.bias)
        elif isinstance(module, nn.Linear):
            _matrix(module.weight, module.in_features, module.out_features, preset)
            _zero(module.bias)
        elif isinstance(module, nn.Embedding):
            if preset == "hyla":
                nn.init.normal_(module.weight, std=module.embedding_dim**-0.5)
            else:
                nn.init.trunc_normal_(module.weight, a=-3.0, b=3.0)
        elif isinstance(module, HylaHeads) and module.value_weight is not None:
            e = module.sizes.value_dim
            _matrix(module.value_weight, e, e, preset)
        elif isinstance(module, OWN_RULE):
            module.reset_parameters()
    for module in model.modules():
        if isinstance(module, RelationalHeads):
            module.reset_parameters()


def _matrix(weight: Tensor, fan_in: int, fan_out: int, preset: str) -> None:
    if preset == "hyla":
        # A unit normal cut at two has the standard deviation TRUNCATION; the quotient restores the wanted one.
        std = fan_in**-0.5 / TRUNCATION
        nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)
    else:
        std = (2.0 / (fan_in + fan_out)) ** 0.5
        nn.init.trunc_normal_(weight, std=std, a=-3 * std, b=3 * std)


def _joint_matrix(layer: MultiHeadAttention, preset: str) -> None:
    """Queries, keys and values each have their own number of rows as fan-out, as separate maps would."""
    weight: Any = layer.qkv.weight
    full_weight = weight
    is_sharded = hasattr(weight, "full_tensor")  # a DTensor, whose parts would be copies
    if is_sharded:
        full_weight = nn.Parameter(torch.empty(weight.shape, dtype=weight.dtype, device=weight.device))
    for rows in full_weight.split(layer.widths):
        _matrix(rows, layer.dim, rows.shape[0], preset)
    if is_sharded:
        from torch.distributed.tensor import distribute_tensor

        weight.copy_(distribute_tensor(full_weight, weight.device_mesh, weight.placements))


def _zero(bias: Tensor | None) -> None:
    if bias is not None:
        nn.init.zeros_(bias)


def initial_logit_factor(inputs: Input, outputs: Output, dim: int, preset: str) -> float:
    """The factor of the initial map to a language model's logits, applied after the preset has filled it.

    Logits of variance v cost about v / 2 nats more than ln(count), the loss of a uniform prediction.  A tied table is
    scaled so that initial logits have variance 1/4 or, if `outputs.scaled` divides by sqrt(dim), so that its rows have
    variance 1 / dim.  With `inputs.scaled` it is divided by sqrt(dim) once more: a token's own row then dominates the
    stream and would give that token the logit sqrt(dim).  An untied map is scaled to logits of variance 1/4, too; in
    "cs336" only if the course's own rule costs more than ln(count) / 16.
    """
    if not (isinstance(inputs, Tokens) and isinstance(outputs, Logits)):
        return 1.0
    if not outputs.tied:
        preset_std = dim**-0.5
        if preset == "cs336":
            preset_std = (2 / (dim + outputs.count)) ** 0.5
            if dim * preset_std**2 / 2 <= math.log(outputs.count) / 16:
                return 1.0
        # After its norm the stream has unit variance, so logits have dim times the variance of the map.
        return 0.5 * dim**-0.5 / preset_std
    # Tied: the wanted deviation of the table, in units of dim^(-1/2), which is the deviation in the hyla preset.
    std = 0.5
    if outputs.scaled:
        std = 1.0
    elif inputs.scaled:
        std = 0.5 / dim**0.5
    if preset != "hyla":
        std *= dim**-0.5
    return std
