"""SRAVEN: do panels obey their rules?  In plain Python, cell by cell, independent of the generator."""

import numpy as np


def obeys(grid, rule, *, values):
    """Whether one feature, its symbols by row and column, obeys rule number `rule` in all rows."""
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


def violations(panels, rules, permutations, *, values):
    """What is wrong with instances, in words; [] if nothing is.  Arrays are as in `Batch.latents` of `Sraven`.

    Args:
        panels: The panels (b g g m), the answer included.
        rules: Feature i obeys rules[b, i] (b m).
        permutations: Slot j of column c shows feature permutations[b, c, j] (b g m).
    """
    messages = []
    lists = (np.asarray(array).tolist() for array in (panels, rules, permutations))
    for number, (panel, rule, order) in enumerate(zip(*lists, strict=True)):
        size, count = len(panel), len(rule)
        if any(sorted(column) != list(range(count)) for column in order):
            messages.append(f"instance {number}: {order} are no permutations")
            continue
        for feature in range(count):
            slots = [column.index(feature) for column in order]
            grid = [[panel[row][column][slots[column]] for column in range(size)] for row in range(size)]
            if not obeys(grid, rule[feature], values=values):
                messages.append(f"instance {number}: feature {feature} breaks rule {rule[feature]}: {grid}")
    return messages
