"""Image classification: the task, and its sources of images (data.py)."""

from polyhead.tasks.images.task import Images

__all__ = ["Images"]
