"""Many runs of one architecture in one process: training.py, and stacked.py (their networks as rows of one matrix)."""

from polyhead.scale.population.training import train

__all__ = ["train"]


def __dir__() -> list[str]:
    return sorted(__all__)
