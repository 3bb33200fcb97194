"""Language: the task, its sources, tokens, files on the disk, and compressors as floors."""

from polyhead.tasks.text.task import Text

__all__ = ["Text"]


def __dir__() -> list[str]:
    return sorted(__all__)
