"""The transformer, its inputs and outputs, initialisation and size, generation, and rival models."""

from polyhead.models import build, generate, initialise, inputs_outputs, rivals, size, transformer

__all__ = ["build", "generate", "initialise", "inputs_outputs", "rivals", "size", "transformer"]
