"""Training.  `run` trains one run in its folder; `load_model` loads the trained model.  Many runs: `polyhead.scale`.

Names are imported on first use, so that the worker answers signals before torch is imported.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polyhead.train.device import fast_products as fast_products
    from polyhead.train.evaluation import evaluate as evaluate
    from polyhead.train.stop import Interrupted as Interrupted
    from polyhead.train.store.checkpoint import load_model as load_model
    from polyhead.train.store.files import Damaged as Damaged
    from polyhead.train.store.folder import Result as Result, read_config as read_config, read_result as read_result
    from polyhead.train.trainer import run as run

_MODULES = {
    "Damaged": "store.files",
    "Interrupted": "stop",
    "Result": "store.folder",
    "evaluate": "evaluation",
    "fast_products": "device",
    "load_model": "store.checkpoint",
    "read_config": "store.folder",
    "read_result": "store.folder",
    "run": "trainer",
}
__all__ = [*_MODULES]


if not TYPE_CHECKING:  # for a type checker, a package with `__getattr__` has every name

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
