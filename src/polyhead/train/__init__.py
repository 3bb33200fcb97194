"""Training: `run` trains one run in its folder, `sweep.sweep` many side by side, `population.train` many as one,
`load_model` reads one back, `read_batch` the batch with which one diverged; `fast_products` is for loops of your own.

Names are imported on first use, so that the worker and the command line start quickly.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polyhead.scale.population import training as population
    from polyhead.scale.sweep import jobs as sweep
    from polyhead.scale.sweep.jobs import Failure
    from polyhead.train.evaluation import evaluate
    from polyhead.train.products import Products, fast_products
    from polyhead.train.stop import Interrupted
    from polyhead.train.store.bad_batch import read_batch
    from polyhead.train.store.checkpoint import load_model
    from polyhead.train.store.files import Damaged
    from polyhead.train.store.folder import Result, read_config, read_result
    from polyhead.train.trainer import run

_HOMES = {
    "load_model": "checkpoint",
    "read_batch": "bad_batch",
    "evaluate": "evaluation",
    "Damaged": "files",
    "Result": "folder",
    "read_config": "folder",
    "read_result": "folder",
    "Products": "products",
    "fast_products": "products",
    "Failure": "sweep",
    "Interrupted": "stop",
    "run": "trainer",
}
__all__ = [
    "Damaged",
    "Failure",
    "Interrupted",
    "Products",
    "Result",
    "evaluate",
    "fast_products",
    "load_model",
    "population",
    "read_batch",
    "read_config",
    "read_result",
    "run",
    "sweep",
]


def __getattr__(name: str) -> Any:
    if name in ("population", "sweep"):  # modules: a function of such a name would be hidden by its module
        return importlib.import_module(f"polyhead.train.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
