"""SRAVEN: do panels obey their rules?  In plain Python, cell by cell, independent of the generator."""

from collections.abc import Sequence
from typing import Any

Grid = Sequence[Sequence[int]]
"""The symbols of one feature, by row and column."""


def obeys(grid: Grid, rule: int, *, values: int) -> bool:
    """Whether one feature obeys rule number `rule` in all rows."""
    if min(map(min, grid)) < 0 or max(map(max, grid)) >= values:
        return False
    if rule == 0:
        return all(symbol == row[0] for row in grid for symbol in row)
    if rule in (1, 2, 3, 4):
        step = {1: 1, 2: 2, 3: -1, 4: -2}[rule]
        return all(row[i] == (row[0] + i * step) % values for row in grid for i in range(len(row)))
    if rule == 5:
        return all(row[-1] == sum(row[:-1]) % values for row in grid)
    if rule == 6:
        return all(row[-1] == (row[0] - sum(row[1:-1])) % values for row in grid)
    assert rule == 7
    symbols = set(grid[0])
    return len(symbols) == len(grid[0]) and all(sorted(row) == sorted(symbols) for row in grid)


def violations(panels: Any, rules: Any, permutations: Any, *, values: int) -> list[str]:
    """What is wrong with instances, in words; [] if nothing is.

    panels (b g g m), the answer included, rules (b m), permutations (b g m), as `Batch.latents` of `Sraven` has them:
    slot j of column c shows feature permutations[b, c, j], and feature i obeys rules[b, i].  Nested lists will do.
    """
    found = []
    for number, (panel, rule, order) in enumerate(zip(*map(_list, (panels, rules, permutations)), strict=True)):
        size, count = len(panel), len(rule)
        if any(sorted(column) != list(range(count)) for column in order):
            found.append(f"instance {number}: {order} are no permutations")
            continue
        for feature in range(count):
            slots = [column.index(feature) for column in order]
            grid = [[panel[row][column][slots[column]] for column in range(size)] for row in range(size)]
            if not obeys(grid, rule[feature], values=values):
                found.append(f"instance {number}: feature {feature} breaks rule {rule[feature]}: {grid}")
    return found


def _list(array: Any) -> Any:
    return array.tolist() if hasattr(array, "tolist") else array
