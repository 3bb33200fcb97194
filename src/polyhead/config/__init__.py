"""All configurations, as frozen dataclasses: models, tasks, runs.  They import neither torch nor jax.

mechanisms.py: groups of heads.  components.py: positions, feed-forward layers, inputs and outputs.  rivals.py: models
of the literature.  task.py: Batch and the abstract Task.  run.py: TransformerConfig, Train, Run.  serial.py: JSON.
"""

import warnings
from typing import TYPE_CHECKING, Any

from polyhead.config.components import (
    Alibi,
    Classes,
    Experts,
    FeedForward,
    Input,
    Learned,
    Logits,
    Mlp,
    Output,
    Patches,
    Position,
    RelativeBias,
    Rotary,
    Sinusoidal,
    Swiglu,
    Tokens,
    Values,
    Vectors,
    narrower,
)
from polyhead.config.mechanisms import *  # noqa: F403  (groups of heads and sources of symbols)
from polyhead.config.mechanisms import SymbolHeads, Symbols, SymbolSource, __all__ as _mechanisms
from polyhead.config.rivals import (
    AbstractorConfig,
    CoRelNetConfig,
    PrediNetConfig,
)
from polyhead.config.run import (
    BlindToOrder,
    Decay,
    Heads,
    Model,
    Run,
    Train,
    TransformerConfig,
    check_run,
    digest,
    from_dict,
    head_list,
    load,
    save,
    warn_if_blind,
)
from polyhead.config.serial import (
    non_semantic,
    to_dict,
)
from polyhead.config.task import (
    Batch,
    Task,
    stream,
)

__all__ = [
    *_mechanisms,
    "AbstractorConfig",
    "Alibi",
    "Batch",
    "BlindToOrder",
    "Classes",
    "CoRelNetConfig",
    "Decay",
    "Experts",
    "FeedForward",
    "Heads",
    "Input",
    "Learned",
    "Logits",
    "Mlp",
    "Model",
    "Output",
    "Patches",
    "Position",
    "PrediNetConfig",
    "RelativeBias",
    "Rotary",
    "Run",
    "Sinusoidal",
    "Swiglu",
    "SymbolHeads",
    "SymbolSource",
    "Symbols",
    "Task",
    "Tokens",
    "Train",
    "TransformerConfig",
    "Values",
    "Vectors",
    "check_run",
    "digest",
    "from_dict",
    "head_list",
    "load",
    "narrower",
    "non_semantic",
    "save",
    "stream",
    "to_dict",
    "warn_if_blind",
]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name != "plain":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        warnings.warn("config.plain is config.non_semantic now", DeprecationWarning, stacklevel=2)
        return non_semantic


def __dir__() -> list[str]:
    return sorted(__all__)
