"""The number of SRAVEN tasks and instances (Schug et al. 2024, figure A9), by the paper's formula and exact.

    tasks         C(R + M - 1, M) · ((M!)^(G-1) - M)          M features, R = 8 rules, G columns
    tasks         R^M · (M!)^(G-1)                            exact
    instances     (sum_r N_r)^M · (M!)^(G-1)                  exact; rule r has N_r grids of one feature

The paper's "- M" has no explanation: one feature would have 0 tasks.  It also counts multisets and permutations
independently, but a permutation decides which feature has which rule.  Name the features by their slots in the first
column: each has one of R rules, and every other column has its own order.  For instances the paper gives no formula;
`paper` is the sum over multisets of the products of N_r, times its number of permutations.  An instance is counted with
its task: panels that two rules explain count twice.
"""

import math
from dataclasses import dataclass
from itertools import combinations_with_replacement

from polyhead.tasks.sraven.task import RULES


@dataclass(frozen=True)
class PaperAndExactCount:
    """One quantity, by the paper's formula and exact."""

    paper: int
    exact: int


def tasks(features: int, grid: int = 3) -> PaperAndExactCount:
    """Number of tasks: for four features the paper gives 188 760; the exact number is 2 359 296.

    >>> tasks(4)
    PaperAndExactCount(paper=188760, exact=2359296)
    """
    orders = math.factorial(features) ** (grid - 1)
    multisets = math.comb(len(RULES) + features - 1, features)
    return PaperAndExactCount(multisets * (orders - features), len(RULES) ** features * orders)


def instances(features: int, values: int, grid: int = 3) -> PaperAndExactCount:
    """Number of instances: for one feature with three values 1 809; the paper's formula gives 0.

    >>> instances(1, 3)
    PaperAndExactCount(paper=0, exact=1809)
    """
    orders = math.factorial(features) ** (grid - 1)
    grids = [feature_grids(rule, values, grid) for rule in range(len(RULES))]
    products = 0
    for grids_of_rules in combinations_with_replacement(grids, features):
        products += math.prod(grids_of_rules)
    return PaperAndExactCount(products * (orders - features), sum(grids) ** features * orders)


def feature_grids(rule: int, values: int, grid: int = 3) -> int:
    """The number of grids of one feature that obey rule number `rule`."""
    if rule < 5:
        return values**grid
    if rule < 7:
        return values ** (grid * (grid - 1))
    return math.comb(values, grid) * math.factorial(grid) ** grid
