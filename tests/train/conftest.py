from tiny_runs import _tiny, at_step, stopped_run, uninterrupted  # noqa: F401
