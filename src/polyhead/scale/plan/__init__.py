"""Memory, time and the largest batch on hardware you do not have: estimate.py, count.py (operations), cards.py."""

from polyhead.scale.plan.estimate import Plan, plan

__all__ = ["Plan", "plan"]


def __dir__() -> list[str]:
    return sorted(__all__)
