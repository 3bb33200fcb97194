"""Training.  `run` trains one run in its folder, `load_model` loads the trained model, and `read_batch` loads the batch
at which a run diverged.  `fast_products` is for your own training loops.  Many runs: `polyhead.scale`.

Names are imported on first use, so that the worker and the command line start quickly.
"""

from typing import TYPE_CHECKING

from polyhead.spec.lazy import lazy

if TYPE_CHECKING:
    from polyhead.train.evaluation import evaluate
    from polyhead.train.products import Products, fast_products
    from polyhead.train.stop import Interrupted
    from polyhead.train.store.bad_batch import read_batch
    from polyhead.train.store.checkpoint import load_model
    from polyhead.train.store.files import Damaged
    from polyhead.train.store.folder import Result, read_config, read_result
    from polyhead.train.trainer import run

_HOMES = {
    "load_model": "store.checkpoint",
    "read_batch": "store.bad_batch",
    "evaluate": "evaluation",
    "Damaged": "store.files",
    "Result": "store.folder",
    "read_config": "store.folder",
    "read_result": "store.folder",
    "Products": "products",
    "fast_products": "products",
    "Interrupted": "stop",
    "run": "trainer",
    **dict.fromkeys(("sweep",), ""),  # names of 0.1.0: these modules are in polyhead.scale now
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

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy(__name__, __all__, _HOMES)
