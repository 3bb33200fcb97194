"""All configurations, as frozen dataclasses: models, tasks, runs.  They import neither torch nor jax.

mechanisms.py: groups of heads.  components.py: positions, feed-forward layers, inputs and outputs.  rivals.py: models
of the literature.  run.py: TransformerConfig, Train, Run.  serial.py: JSON.
"""

from polyhead.config.checked import non_semantic
from polyhead.config.components import *  # noqa: F403
from polyhead.config.components import __all__ as _components
from polyhead.config.mechanisms import *  # noqa: F403
from polyhead.config.mechanisms import SymbolHeads, Symbols, SymbolSource, __all__ as _mechanisms
from polyhead.config.rivals import AbstractorConfig, CoRelNetConfig, PrediNetConfig
from polyhead.config.run import *  # noqa: F403
from polyhead.config.run import __all__ as _run
from polyhead.config.serial import to_dict

__all__ = [
    *_components,
    *_mechanisms,
    *_run,
    "AbstractorConfig",
    "CoRelNetConfig",
    "PrediNetConfig",
    "SymbolHeads",
    "SymbolSource",
    "Symbols",
    "non_semantic",
    "to_dict",
]
