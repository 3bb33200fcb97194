"""Language modelling: the task, sources of text, tokenizers, token files, and compressors as floors."""

from polyhead.tasks.text.task import Text

__all__ = ["Text"]


def __dir__() -> list[str]:
    return sorted(__all__)
