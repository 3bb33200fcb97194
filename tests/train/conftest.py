from tiny_runs import _tiny, at_step, uninterrupted

__all__ = ["_tiny", "at_step", "uninterrupted"]
