"""The transformer, its inputs and outputs, its initialisation and its size."""

from typing import TYPE_CHECKING

from polyhead.spec.lazy import lazy

if TYPE_CHECKING:
    from polyhead.models import build, generate, initialise, inputs_outputs, rivals, size, transformer

__all__ = ["build", "generate", "initialise", "inputs_outputs", "rivals", "size", "transformer"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy(__name__, __all__)
