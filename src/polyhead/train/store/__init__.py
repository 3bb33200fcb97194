"""The files of a run: its folder, checkpoints (whole and sharded), damaged files, and trained models (shipped.py)."""
