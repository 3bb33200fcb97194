"""One family of multi-head attention: softmax, linear, hypernetwork (HYLA), relational heads and any mixture of them.

    import polyhead as ph
    ph.ops.hyla(q, k, v)                                                    one op
    ph.MultiHeadAttention(64, [ph.Softmax(4), ph.Hyla(4)])                   one layer
    ph.Transformer(ph.TransformerConfig(ph.Vectors(5), ph.Values(1)))        one model
    ph.train.run(ph.recipes.RECIPES["fuzzy-hyla"]())                         one recipe

A name is imported when it is first used, so importing the package loads nothing else.
"""

import importlib
from typing import TYPE_CHECKING, Any

# isort: off
if TYPE_CHECKING:  # for type checkers and editors: the names of the tables below
    from polyhead import analysis as analysis, compat as compat, config as config, layers as layers, models as models
    from polyhead import ops as ops, scale as scale, spec as spec, tasks as tasks, train as train
    from polyhead.config.components import *  # noqa: F403
    from polyhead.config.mechanisms import *  # noqa: F403
    from polyhead.config.rivals import *  # noqa: F403
    from polyhead.config.run import Decay as Decay, Run as Run, Train as Train
    from polyhead.config.run import TransformerConfig as TransformerConfig, digest as digest
    from polyhead.extensions import register as register
    from polyhead.layers import testing as testing
    from polyhead.layers.attention import MultiHeadAttention as MultiHeadAttention
    from polyhead.layers.block import TransformerBlock as TransformerBlock
    from polyhead.layers.cache import Cache as Cache
    from polyhead.layers.feedforward import *  # noqa: F403
    from polyhead.layers.heads.groups import *  # noqa: F403
    from polyhead.layers.norms import *  # noqa: F403
    from polyhead.layers.positions import *  # noqa: F403
    from polyhead.layers.taps import Taps as Taps
    from polyhead.models.generate.tokens import generate as generate
    from polyhead.models.transformer import Transformer as Transformer
    from polyhead.pages import report as report
    from polyhead.pages.explore.writer import explore as explore
    from polyhead.papers import recipes as recipes, reproduce as reproduce
    from polyhead.scale.records import records as records
    from polyhead.scale.sweep.jobs import sweep as sweep
    from polyhead.tasks.base import Batch as Batch, Task as Task, stream as stream
    from polyhead.train.store.checkpoint import load_model as _load_model

    load = _load_model
# isort: on

__version__ = "0.1.0"

_FOLDERS = ("analysis", "compat", "config", "layers", "models", "ops", "scale", "spec", "tasks", "train")
_MODULES = {folder: f"polyhead.{folder}" for folder in _FOLDERS}
_MODULES |= {"recipes": "polyhead.papers.recipes", "reproduce": "polyhead.papers.reproduce"}
_MODULES |= {"report": "polyhead.pages.report", "testing": "polyhead.layers.testing"}

_NAMES = {
    "config.rivals": "AbstractorConfig CoRelNetConfig PrediNetConfig",
    "config.run": "Decay Run Train TransformerConfig digest",
    "extensions": "register",
    "layers.attention": "MultiHeadAttention",
    "layers.block": "TransformerBlock",
    "layers.cache": "Cache",
    "layers.feedforward": "MixtureOfExperts MlpLayer SwigluLayer",
    "layers.heads.groups": "HylaHeads LinearHeads SoftmaxHeads",
    "layers.norms": "LayerNorm RMSNorm",
    "layers.positions": "AlibiBias LearnedPositions RelativePositionBias RotaryEmbedding SinusoidalPositions",
    "layers.taps": "Taps",
    "models.generate.tokens": "generate",
    "models.transformer": "Transformer",
    "pages.explore.writer": "explore",
    "scale.records": "records",
    "scale.sweep.jobs": "sweep",
    "tasks.base": "Batch Task stream",
    "train.store.checkpoint": "load",
}
"""A module -> its public names.  Besides these, the package has the parts of models in `config`."""


def _modules() -> dict[str, str]:
    """The module of each public name; a public module is its own."""
    from polyhead.config import components, mechanisms

    names = dict(_MODULES)
    for path, listed in _NAMES.items():
        names |= dict.fromkeys(listed.split(), f"polyhead.{path}")
    for module in (components, mechanisms):
        names |= dict.fromkeys(module.__all__, module.__name__)
    return names


def _value_of(name: str) -> Any:
    """The module, class or function of a public name.  Raises AttributeError for any other name."""
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    module = _modules().get(name)
    if module is None:
        raise AttributeError(f"module 'polyhead' has no attribute {name!r}", name=name)
    if name == "load":
        name = "load_model"
    return getattr(importlib.import_module(module), name)


if not TYPE_CHECKING:  # for a type checker, a package with this function would have every name

    def __getattr__(name: str) -> Any:
        if name == "__all__":
            return sorted(_modules())
        from polyhead.spec.optional import optional

        with optional(f"polyhead.{name}", "polyhead"):  # torch is missing where polyhead-jax is installed
            value = _value_of(name)
        globals()[name] = value  # from now on, Python finds the name by itself
        return value


def __dir__() -> list[str]:
    return sorted(_modules())
