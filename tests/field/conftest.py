from tiny_runs import _tiny, at_step, whole  # noqa: F401
