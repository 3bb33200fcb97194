"""Symbolic Raven: the independent checker, the original code's instances, and the generator's under every rule."""

import itertools
import math

import numpy as np
import pytest
import torch
from sraven_rules import obeys, violations

from polyhead.tasks import Sraven
from polyhead.tasks.sraven.counts import feature_grids
from polyhead.tasks.sraven.task import RULES, draw_instances


def draw(rules, count, **fields):
    """Permutations and panels."""
    task = Sraven(features=len(rules), **fields)
    return draw_instances(task, torch.tensor([rules]).expand(count, -1), torch.Generator().manual_seed(0))[1:]


def test_the_original_codes_instances_obey_the_checker(fixtures):
    data = np.load(fixtures / "hyla_gen_raven.npz")
    for rule, grids in enumerate(data["rule_instances"].tolist()):
        assert all(obeys(grid, rule, values=8) for grid in grids), RULES[rule]
    assert violations(data["instances"], data["latents"], data["perms"], values=8) == []
    straight = np.broadcast_to(np.arange(4), data["perms"].shape)
    assert violations(data["instances_unpermuted"], data["latents_unpermuted"], straight, values=8) == []
    assert violations(data["instances"], data["latents"], straight, values=8) != []


SETTINGS = [{}, {"permuted": False}, {"features": 2, "grid": 2}, {"features": 2, "grid": 5, "values": 11}]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_instances_of_other_sizes_obey_the_checker(setting):
    task = Sraven(**setting)
    for split in ("iid", "compositional"):
        latents = task.batch(split, 1000, seed=0, step=0).latents
        assert violations(latents["panels"], latents["rules"], latents["permutations"], values=task.values) == []


def every_grid(rule, values):
    """All grids of a rule, by trying all."""
    rows = list(itertools.product(range(values), repeat=3))
    if rule == 7:
        return {grid for grid in itertools.product(rows, repeat=3) if obeys(grid, rule, values=values)}
    fitting = [row for row in rows if obeys([row] * 3, rule, values=values)]
    return set(itertools.product(fitting, repeat=3))


@pytest.mark.parametrize(("rule", "values"), [(3, 3), (5, 3), (6, 3), (7, 4)])
def test_all_grids_of_a_rule_are_equally_likely(rule, values):
    """Each as often as chance has it: of two features, so that neither is made of the other."""
    _, panels = draw((rule, rule), 45_000, values=values, permuted=False)
    grids = panels.permute(0, 3, 1, 2).flatten(0, 1).flatten(1)
    expected = {tuple(itertools.chain(*grid)) for grid in every_grid(rule, values)}
    actual, counts = grids.unique(dim=0, return_counts=True)
    assert set(map(tuple, actual.tolist())) == expected
    assert feature_grids(rule, values) == len(expected)
    mean = len(grids) / len(expected)
    assert mean > 100
    assert (counts - mean).abs().max() < 5 * math.sqrt(mean)
    assert abs(((counts - mean) ** 2 / mean).mean() - 1) < 5 * (2 / len(expected)) ** 0.5
