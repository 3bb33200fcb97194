"""Image classification: the task, and its sources of images (data.py)."""
