"""Many runs of one architecture in one process: training.py, member.py (one run's own), stacked.py (their networks as
rows of one matrix)."""

from polyhead.scale.population.training import train

__all__ = ["train"]


def __dir__() -> list[str]:
    return sorted(__all__)
