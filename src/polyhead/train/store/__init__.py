"""What a run keeps on the disk: its folder, checkpoints (whole and sharded), when they are saved, and damaged files."""
