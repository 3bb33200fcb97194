"""The files of a run: its folder, checkpoints (whole and sharded), when they are saved, and damaged files."""
