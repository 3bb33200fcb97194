"""Hyper-parameter search: search.py (Optuna proposes, workers train), space.py (the search space), trial.py,
screen.py."""

from polyhead.scale.tune.search import status, tune
from polyhead.scale.tune.trial import Outcome, Trial

__all__ = ["Outcome", "Trial", "status", "tune"]


def __dir__() -> list[str]:
    return sorted(__all__)
