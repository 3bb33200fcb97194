from tiny_runs import _tiny, at_step, uninterrupted  # noqa: F401
