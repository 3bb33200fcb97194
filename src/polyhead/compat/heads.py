"""Groups of our heads inside attention modules of other libraries: what all replacements share."""

from collections.abc import Iterable, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from polyhead import config
from polyhead.layers.call import no_script
from polyhead.layers.device import Placement
from polyhead.layers.heads.functions import compiled, has_user_function
from polyhead.layers.heads.groups import build
from polyhead.layers.symbols import build_symbols
from polyhead.ops.readable import is_readable
from polyhead.spec.table import NORMALISE, SOFTMAX_AXIS

Heads = config.Mechanism | Sequence[config.Mechanism] | None

LARGEST_HIDING = -9e3
"""Libraries add -1e4, -1e9 and the like in place of -inf.  Such a number hides a pair from a softmax over keys only."""


class Groups(nn.Module):
    """Groups of heads without maps of their own, and the sources of their symbols."""

    __prepare_scriptable__ = no_script

    def add_groups(
        self, heads: config.Heads, width: int, *, bias: bool, max_length: int, **placement: Unpack[Placement]
    ) -> None:
        """Build the groups for a causal model of this width, and each distinct source of symbols once."""
        total = config.total_heads(heads)
        groups: list[Any] = []
        for mechanism in heads:
            if isinstance(mechanism, config.Softmax) and mechanism.gate:
                raise ValueError("heads: Softmax must have no gate here; use ph.MultiHeadAttention")
            groups.append(build(mechanism, width, total, bias=bias, max_length=max_length, **placement))
        self.groups = nn.ModuleList(groups)
        # Groups with equal sources read one module.
        self.symbols = nn.ModuleList()
        self.source_of: list[int | None] = []
        distinct: list[config.SymbolSource] = []
        for mechanism in heads:
            source = getattr(mechanism, "symbols", None)
            if source is not None and source not in distinct:
                distinct.append(source)
                module = build_symbols(source, width, causal=True, max_length=max_length, **placement)
                self.symbols.append(module)
            self.source_of.append(None if source is None else distinct.index(source))


def is_plain(module: nn.Module) -> bool:
    """Whether a module has no hooks and no `forward` of its own (as accelerate sets it), which a replacement loses."""
    attributes = vars(module)
    for name, attribute in attributes.items():
        if name.endswith("_hooks") and attribute:
            return False
    return "forward" not in attributes


def added(layer: str, groups: Iterable[nn.Module], bias: Tensor | None) -> Tensor | None:
    """Return an added mask as these heads read it.

    Heads without a softmax over keys would read -1e9 as a score.  Where such numbers may not be read, as in compiled
    code, they become -inf.

    Raises:
        ValueError: For such numbers where they may be read.
    """
    if bias is None or not bias.numel():
        return bias
    for group in groups:
        inner = compiled(group)
        normalise = getattr(inner, "normalise", None)
        # A softmax over keys makes such a code 0, but relations and pooling do not read the code alone.
        has_relation_softmax = getattr(inner, "q_rel", None) is not None and inner.relation_act == "softmax"
        reads_code_alone = getattr(inner, "pool", "sum") == "sum" and not has_relation_softmax
        if normalise not in NORMALISE or has_user_function(group):
            continue
        if SOFTMAX_AXIS.get(normalise) == "s" and reads_code_alone:
            continue
        if not is_readable(bias):
            return bias.masked_fill(bias <= LARGEST_HIDING, -torch.inf)
        # -inf hides in all heads; float16 rounds -1e9 to it.
        lowest = bias.masked_fill(bias == -torch.inf, 0).amin().item()
        if lowest <= LARGEST_HIDING:
            kind = type(compiled(group)).__name__
            raise ValueError(f"{layer}: -inf or a Boolean mask hides pairs from {kind}, got a mask with {lowest:g}")
    return bias
