"""The files of a run: its folder, checkpoints (whole and sharded), and damaged files."""
