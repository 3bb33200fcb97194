"""The small runs of `tests/support/tiny_runs.py` as fixtures, and actions in the middle of a population."""

import pytest
from tiny_runs import _tiny, at_step, members, whole

from polyhead.scale.population.stacked import Stack

__all__ = ["_tiny", "at_step", "members", "whole"]


@pytest.fixture
def at_update(monkeypatch):
    """Call an action, once, before update number `step` (from 0) of a population."""

    def at(step, action):
        plain, waiting = Stack.step, [action]

        def stepped(stack, number, **options):
            if number == step and waiting:
                waiting.pop()()
            return plain(stack, number, **options)

        monkeypatch.setattr(Stack, "step", stepped)

    return at
