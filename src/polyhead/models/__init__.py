"""The transformer, its inputs and outputs, its initialisation and its size."""

from polyhead.models import build, generate, initialise, inputs_outputs, rivals, size, transformer

__all__ = ["build", "generate", "initialise", "inputs_outputs", "rivals", "size", "transformer"]
