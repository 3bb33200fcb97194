"""Language modelling: the task, sources of text, tokenizers, token files, and compressors as baselines."""

from polyhead.tasks.text.task import Text

__all__ = ["Text"]
