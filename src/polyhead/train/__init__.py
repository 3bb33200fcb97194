"""Training.  `run` trains one run in its folder, `load_model` loads the trained model, and `read_batch` loads the batch
at which a run diverged.  `fast_products` is for your own training loops.  Many runs: `polyhead.scale`.

Names are imported on first use, so that the worker and the command line start quickly.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polyhead.train.evaluation import evaluate
    from polyhead.train.products import Products, fast_products
    from polyhead.train.stop import Interrupted
    from polyhead.train.store.bad_batch import read_batch
    from polyhead.train.store.checkpoint import load_model
    from polyhead.train.store.files import Damaged
    from polyhead.train.store.folder import Result, read_config, read_result
    from polyhead.train.trainer import run

_MODULES = {
    "load_model": "polyhead.train.store.checkpoint",
    "read_batch": "polyhead.train.store.bad_batch",
    "evaluate": "polyhead.train.evaluation",
    "Damaged": "polyhead.train.store.files",
    "Result": "polyhead.train.store.folder",
    "read_config": "polyhead.train.store.folder",
    "read_result": "polyhead.train.store.folder",
    "Products": "polyhead.train.products",
    "fast_products": "polyhead.train.products",
    "Interrupted": "polyhead.train.stop",
    "run": "polyhead.train.trainer",
}
__all__ = [
    "Damaged",
    "Interrupted",
    "Products",
    "Result",
    "evaluate",
    "fast_products",
    "load_model",
    "read_batch",
    "read_config",
    "read_result",
    "run",
]


if not TYPE_CHECKING:  # for a type checker, a package with this function would have every name

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
        return getattr(importlib.import_module(_MODULES[name]), name)
