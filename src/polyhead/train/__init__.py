"""Training.  `run` trains one run in its folder; `load_model` loads the trained model.  Many runs: `polyhead.scale`.

Names are imported on first use, so that the worker answers signals before torch is imported.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polyhead.train.evaluation import evaluate
    from polyhead.train.products import fast_products
    from polyhead.train.stop import Interrupted
    from polyhead.train.store.checkpoint import load_model
    from polyhead.train.store.files import Damaged
    from polyhead.train.store.folder import Result, read_config, read_result
    from polyhead.train.trainer import run

_MODULES = {
    "Damaged": "polyhead.train.store.files",
    "Interrupted": "polyhead.train.stop",
    "Result": "polyhead.train.store.folder",
    "evaluate": "polyhead.train.evaluation",
    "fast_products": "polyhead.train.products",
    "load_model": "polyhead.train.store.checkpoint",
    "read_config": "polyhead.train.store.folder",
    "read_result": "polyhead.train.store.folder",
    "run": "polyhead.train.trainer",
}
__all__ = [
    "Damaged",
    "Interrupted",
    "Result",
    "evaluate",
    "fast_products",
    "load_model",
    "read_config",
    "read_result",
    "run",
]


if not TYPE_CHECKING:  # for a type checker, a package with `__getattr__` has every name

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
        return getattr(importlib.import_module(_MODULES[name]), name)
