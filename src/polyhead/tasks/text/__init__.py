"""Language: the task, its sources, tokens, files on the disk, and compressors as floors."""

from polyhead.tasks.text.task import Text

__all__ = ["Text"]
