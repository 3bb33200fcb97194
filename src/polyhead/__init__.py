"""One family of multi-head attention: softmax, linear, hypernetwork (HYLA), relational heads and any mixture of them.

    import polyhead as ph
    ph.ops.hyla(q, k, v)                                                    one op
    ph.MultiHeadAttention(64, [ph.Softmax(4), ph.Hyla(4)])                   one layer
    ph.Transformer(ph.TransformerConfig(ph.Vectors(5), ph.Values(1)))        one model
    ph.train.run(ph.recipes.RECIPES["fuzzy-hyla"]())                         one recipe

Names are found when first used, so importing the package loads nothing else.  The names of heads are those of the table
of mechanisms.
"""

import importlib
import importlib.machinery
import sys
import types
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what a type checker and an editor see: the names of _MODULES and _NAMES below
    from polyhead import (
        analysis as analysis,
        compat as compat,
        config as config,
        layers as layers,
        models as models,
        ops as ops,
        scale as scale,
        spec as spec,
        tasks as tasks,
        train as train,
    )
    from polyhead.config import (
        AbstractorConfig as AbstractorConfig,
        Alibi as Alibi,
        Batch as Batch,
        Classes as Classes,
        CoRelNetConfig as CoRelNetConfig,
        Decay as Decay,
        Experts as Experts,
        FeedForward as FeedForward,
        Learned as Learned,
        Logits as Logits,
        Mlp as Mlp,
        Patches as Patches,
        Position as Position,
        PrediNetConfig as PrediNetConfig,
        RelativeBias as RelativeBias,
        Rotary as Rotary,
        Run as Run,
        Sinusoidal as Sinusoidal,
        Swiglu as Swiglu,
        Task as Task,
        Tokens as Tokens,
        Train as Train,
        TransformerConfig as TransformerConfig,
        Values as Values,
        Vectors as Vectors,
        digest as digest,
        stream as stream,
    )
    from polyhead.config.extensions import register as register
    from polyhead.config.mechanisms import *  # noqa: F403  (heads and sources of symbols)
    from polyhead.layers import testing as testing
    from polyhead.layers.attention import MultiHeadAttention as MultiHeadAttention
    from polyhead.layers.block import TransformerBlock as TransformerBlock
    from polyhead.layers.feedforward import (
        MixtureOfExperts as MixtureOfExperts,
        MlpLayer as MlpLayer,
        SwigluLayer as SwigluLayer,
    )
    from polyhead.layers.heads.groups import (
        HylaHeads as HylaHeads,
        LinearHeads as LinearHeads,
        SoftmaxHeads as SoftmaxHeads,
    )
    from polyhead.layers.norms import (
        LayerNorm as LayerNorm,
        RMSNorm as RMSNorm,
    )
    from polyhead.layers.positions import (
        AlibiBias as AlibiBias,
        LearnedPositions as LearnedPositions,
        RelativePositionBias as RelativePositionBias,
        RotaryEmbedding as RotaryEmbedding,
        SinusoidalPositions as SinusoidalPositions,
    )
    from polyhead.layers.taps import Taps as Taps
    from polyhead.models.generate.tokens import generate as generate
    from polyhead.models.transformer import Transformer as Transformer
    from polyhead.pages import report as report
    from polyhead.pages.explore.writer import explore as explore
    from polyhead.papers import (
        recipes as recipes,
        reproduce as reproduce,
    )
    from polyhead.scale.records import records as records
    from polyhead.scale.sweep.jobs import sweep as sweep
    from polyhead.train.store.checkpoint import load_model as _load_model

    load = _load_model

__version__ = "0.1.0"

_FOLDERS = ("analysis", "compat", "config", "layers", "models", "ops", "scale", "spec", "tasks", "train")
_MODULES = {
    **{name: f"polyhead.{name}" for name in _FOLDERS},
    "recipes": "polyhead.papers.recipes",
    "report": "polyhead.pages.report",
    "reproduce": "polyhead.papers.reproduce",
    "testing": "polyhead.layers.testing",
}

_NAMES = {
    "config": "Position Rotary RelativeBias Alibi Learned Sinusoidal FeedForward Mlp Swiglu Experts "
    "Tokens Vectors Patches Logits Values Classes CoRelNetConfig PrediNetConfig AbstractorConfig "
    "TransformerConfig Batch Task Decay Train Run stream digest",
    "config.extensions": "register",
    "config.mechanisms": "Mechanism SymbolicAttention RelationalSymbols PositionSymbols RelativeSymbols",
    "layers.attention": "MultiHeadAttention",
    "layers.heads.groups": "SoftmaxHeads LinearHeads HylaHeads",
    "layers.norms": "RMSNorm LayerNorm",
    "layers.feedforward": "MlpLayer SwigluLayer MixtureOfExperts",
    "layers.positions": "RotaryEmbedding RelativePositionBias AlibiBias LearnedPositions SinusoidalPositions",
    "layers.block": "TransformerBlock",
    "layers.taps": "Taps",
    "models.transformer": "Transformer",
    "models.generate.tokens": "generate",
    "scale.records": "records",
    "scale.sweep.jobs": "sweep",
    "pages.explore.writer": "explore",
}
_HOME = {name: (f"polyhead.{module}", name) for module, names in _NAMES.items() for name in names.split()}
_HOME |= {"load": ("polyhead.train.store.checkpoint", "load_model")}

_MOVED = {
    "polyhead.claims": "polyhead.papers.estimates",
    "polyhead.compat.huggingface_model": "polyhead.compat.huggingface.model",
    "polyhead.models.ends": "polyhead.models.inputs_outputs",
    "polyhead.models.generate_text": "polyhead.models.generate.text",
    "polyhead.ops.code": "polyhead.ops.latent_code",
    "polyhead.shapes": "polyhead.spec.shapes",
    "polyhead.train.engine": "polyhead.scale.sweep.engines",
    "polyhead.train.engine_ray": "polyhead.scale.sweep.engines.ray",
    "polyhead.train.engine_slurm": "polyhead.scale.sweep.engines.slurm",
    "polyhead.train.sweep": "polyhead.scale.sweep",
    **{f"polyhead.{name}": f"polyhead.pages.{name}" for name in ("explore", "report")},
    **{f"polyhead.{name}": f"polyhead.papers.{name}" for name in ("recipes", "reproduce")},
}
"""Modules of 0.1.0 and where they are now: the old names work, with a warning, for one version."""

_SPLIT = {
    "polyhead.claims": "polyhead.papers.claims",
    "polyhead.report": "polyhead.pages.report.writer",
    "polyhead.train.sweep": "polyhead.scale.sweep.jobs",
}
"""Where the other names of a module of `_MOVED` are now."""

_RENAMED = {"MLP": "MlpLayer", "SwiGLU": "SwigluLayer"}
"""Names of 0.1.0, which differed from a configuration's in case alone: they work, with a warning, for one version."""


def _heads() -> list[str]:
    from polyhead.spec.table import MECHANISMS  # takes longer than all of this module

    return [row.config for row in MECHANISMS]


if not TYPE_CHECKING:  # to a type checker a module with this function would have every name

    def __getattr__(name: str) -> Any:
        if name == "__all__":
            return [*_MODULES, *_HOME, *_heads()]
        module, attribute = _HOME.get(name, (_MODULES.get(name), ""))
        if module is None and name[:1].isupper() and name in _heads():
            module, attribute = "polyhead.config.mechanisms", name
        if module is not None:
            from polyhead.spec.optional import optional

            with optional(f"polyhead.{name}", "polyhead"):  # torch is missing where polyhead-jax is installed
                found = importlib.import_module(module)
            return getattr(found, attribute) if attribute else found
        if name in _RENAMED:
            warnings.warn(f"polyhead.{name} is polyhead.{_RENAMED[name]} now", DeprecationWarning, stacklevel=2)
            return __getattr__(_RENAMED[name])
        if f"{__name__}.{name}" in _MOVED:
            return importlib.import_module(f"{__name__}.{name}")
        here = sys.modules[__name__]  # with it a traceback says: Did you mean
        raise AttributeError(f"module 'polyhead' has no attribute {name!r}", name=name, obj=here)


def __dir__() -> list[str]:
    return sorted([*_MODULES, *_HOME, *_heads()])


class _Old(types.ModuleType):
    """A module under its old name; called, it is the function of that name that `polyhead` has now."""

    def __getattr__(self, name: str) -> Any:
        new = importlib.import_module(_MOVED[self.__name__])
        split = self.__name__ in _SPLIT and not hasattr(new, name)
        return getattr(importlib.import_module(_SPLIT[self.__name__]) if split else new, name)

    @property
    def __call__(self) -> Any:
        return getattr(self, self.__name__.rpartition(".")[2])


class _Finder:
    """Finds the modules of `_MOVED`."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self) if name in _MOVED else None  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        warnings.warn(f"{spec.name} is {_MOVED[spec.name]} now", DeprecationWarning, stacklevel=2)
        return _Old(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


sys.meta_path.append(_Finder())
