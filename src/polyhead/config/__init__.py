"""All configurations, as frozen dataclasses: models and runs.  They import neither torch nor jax.

mechanisms.py: groups of heads.  components.py: positions, feed-forward layers, inputs and outputs.  rivals.py: models
of the literature.  run.py: TransformerConfig, Train, Run.  serial.py: from JSON values.
"""

from polyhead.config.components import *  # noqa: F403
from polyhead.config.mechanisms import *  # noqa: F403
from polyhead.config.mechanisms import SymbolHeads as SymbolHeads, Symbols as Symbols, SymbolSource as SymbolSource
from polyhead.config.rivals import *  # noqa: F403
from polyhead.config.run import *  # noqa: F403
from polyhead.spec.checked import non_semantic as non_semantic
