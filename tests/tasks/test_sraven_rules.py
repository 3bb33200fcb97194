"""Symbolic Raven: the independent checker, the original code's instances, and the generator's under every rule."""

import itertools
import math

import numpy as np
import pytest
import torch
from sraven_rules import obeys, violations

from polyhead.tasks import Sraven
from polyhead.tasks.sraven.task import RULES, permute

RULE_SETS = [(0, 1, 2, 3), (4, 5, 6, 7), (5, 5, 6, 6), (7, 7, 7, 7)]


def draw(rules, count, seed=0, **fields):
    task = Sraven(features=len(rules), **fields)
    return task, task.of_rules(torch.tensor([rules]).expand(count, -1), torch.Generator().manual_seed(seed))


def check(task, batch):
    names = ("panels", "rules", "permutations")
    return violations(*(batch.latents[name] for name in names), values=task.values)


# ------------------------------------------------------------------------------------------ checker
GOOD = {
    0: [[4, 4, 4], [0, 0, 0], [7, 7, 7]],
    1: [[6, 7, 0], [1, 2, 3], [7, 0, 1]],
    2: [[6, 0, 2], [1, 3, 5], [7, 1, 3]],
    3: [[1, 0, 7], [5, 4, 3], [0, 7, 6]],
    4: [[1, 7, 5], [5, 3, 1], [0, 6, 4]],
    5: [[3, 4, 7], [6, 6, 4], [0, 0, 0]],
    6: [[3, 4, 7], [6, 6, 0], [0, 1, 7]],
    7: [[1, 5, 6], [6, 1, 5], [5, 6, 1]],
}


@pytest.mark.parametrize("rule", range(8))
def test_the_checker_knows_a_rule_and_any_one_wrong_symbol(rule):
    grid = GOOD[rule]
    assert obeys(grid, rule, values=8)
    for row, column, symbol in itertools.product(range(3), range(3), range(8)):
        changed = [list(cells) for cells in grid]
        changed[row][column] = symbol
        assert obeys(changed, rule, values=8) == (symbol == grid[row][column])
    assert not obeys(grid, rule, values=max(max(cells) for cells in grid))  # a symbol beyond the values
    assert not any(obeys(grid, other, values=8) for other in range(8) if other != rule)


# ------------------------------------------------------------------------------------------ the original code
def test_the_original_codes_instances_obey_the_checker(fixtures):
    data = np.load(fixtures / "hyla_gen_raven.npz")
    for rule, grids in enumerate(data["rule_instances"].tolist()):
        assert all(obeys(grid, rule, values=8) for grid in grids), RULES[rule]
    assert violations(data["instances"], data["latents"], data["perms"], values=8) == []
    straight = np.broadcast_to(np.arange(4), data["perms"].shape)
    assert violations(data["instances_unpermuted"], data["latents_unpermuted"], straight, values=8) == []
    assert violations(data["instances"], data["latents"], straight, values=8) != []


def test_the_original_codes_permutations_read_as_ours(fixtures):
    data = {name: torch.from_numpy(array).long() for name, array in np.load(fixtures / "hyla_gen_raven.npz").items()}
    features = permute(data["instances"], data["perms"].argsort(dim=-1))
    assert (permute(features, data["perms"]) == data["instances"]).all()
    constant = data["latents"] == 0
    assert (features[:, :, 0] == features[:, :, 1]).all(dim=1)[constant].all()


# ------------------------------------------------------------------------------------------ the generator
@pytest.mark.parametrize(
    "rules", [pytest.param(rules, marks=[pytest.mark.campaign] * (n > 1)) for n, rules in enumerate(RULE_SETS)], ids=str
)
def test_ten_thousand_instances_of_a_rule_set_obey_the_checker(rules):
    task, batch = draw(rules, 10_000)
    assert check(task, batch) == []
    assert batch.latents["rules"].unique(dim=0).tolist() == [list(rules)]


@pytest.mark.parametrize(
    "setting",
    [
        {},
        {"values": 3},
        {"permuted": False},
        {"features": 2, "grid": 2},
        {"features": 3, "grid": 4, "values": 5},
        {"features": 2, "grid": 5, "values": 11},
        {"values": 4, "reject_ambiguous": "text"},
    ],
    ids=str,
)
def test_instances_of_other_sizes_obey_the_checker(setting):
    task = Sraven(**setting)
    for split in ("iid", "compositional"):
        assert check(task, task.batch(split, 1000, seed=0, step=0)) == []


def every_grid(rule, values):
    """All grids of a rule, by trying all."""
    rows = list(itertools.product(range(values), repeat=3))
    if rule == 7:
        return {t for t in itertools.product(rows, repeat=3) if obeys(t, rule, values=values)}
    fitting = [row for row in rows if obeys([row] * 3, rule, values=values)]
    return set(itertools.product(fitting, repeat=3))


@pytest.mark.parametrize("rule", range(8))
def test_all_grids_of_a_rule_are_equally_likely(rule):
    _, batch = draw((rule, rule), 40_000, values=3, permuted=False)
    grids = batch.latents["panels"].permute(0, 3, 1, 2).flatten(0, 1).flatten(1)
    wanted = {tuple(itertools.chain(*grid)) for grid in every_grid(rule, 3)}
    kinds, counts = grids.unique(dim=0, return_counts=True)
    assert set(map(tuple, kinds.tolist())) == wanted
    mean = len(grids) / len(wanted)
    assert mean > 100
    assert (counts - mean).abs().max() < 5 * math.sqrt(mean)
    assert abs(((counts - mean) ** 2 / mean).mean() - 1) < 5 * (2 / len(wanted)) ** 0.5


def test_distribute_draws_all_symbols_equally_from_many():
    _, batch = draw((7, 7), 20_000, values=11, permuted=False)
    first = batch.latents["panels"][:, 0].permute(0, 2, 1).flatten(0, 1)  # (n 3)
    counts = torch.bincount(first @ torch.tensor([121, 11, 1]), minlength=1331)
    counts = counts[counts > 0]
    mean = 40_000 / (11 * 10 * 9)
    assert len(counts) == 990
    assert abs(((counts - mean) ** 2 / mean).mean() - 1) < 5 * (2 / 990) ** 0.5


def test_features_of_one_instance_are_independent():
    _, batch = draw((5, 5), 40_000, permuted=False)
    starts = batch.latents["panels"][:, 0, 0]  # (b 2)
    pairs = torch.bincount(starts @ torch.tensor([8, 1]), minlength=64)
    assert (pairs - 625).abs().max() < 5 * 25


@pytest.mark.parametrize("rule", [5, 7])
def test_symbols_do_not_depend_on_the_permutations(rule):
    _, batch = draw((rule,) * 3, 20_000)
    order = batch.latents["permutations"]
    symbols = permute(batch.latents["panels"], order.argsort(dim=-1))
    columns = torch.cat((order.flatten(1), symbols.flatten(1)), dim=1).double()
    between = torch.corrcoef(columns.T)[: order[0].numel(), order[0].numel() :]
    assert between.abs().max() < 5 / 20_000**0.5
