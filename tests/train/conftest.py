from tiny_runs import _tiny, at_step, whole

__all__ = ["_tiny", "at_step", "whole"]
