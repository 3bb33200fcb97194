"""How many SRAVEN tasks and instances there are (Schug et al. 2024, figure A9), by the paper's formula and exactly.

The paper multiplies the multisets of M rules out of R = 8 by "unique permutations" of the G columns:

    C(R + M - 1, M) · ((M!)^(G-1) - M)

Its "- M" has no reading that we know: it gives no task of one feature and two permutations, not four, of two features.
Without it the product counts multisets and relative permutations of the columns separately, as if the latter did not
care which feature has which rule.  Exactly,

    R^M · (M!)^(G-1)

tasks can be told apart by what they draw: call the features by their slots in the first column; each has one of R
rules, and every other column its own order.  (Where values < 5, some rules coincide: +2 and -2 modulo 4.)

Instances are panels with the task that drew them.  One feature has N_r grids under rule r: K^G under constant and each
progression, K^(G(G-1)) under sum and difference, C(K, G) (G!)^G under distribute.  The paper's figure has no formula;
`paper` is the sum over multisets of the products of N_r, times its number of permutations.  Exactly, it is
(sum_r N_r)^M · (M!)^(G-1).  Panels that several tasks may draw count once for each; `distinct` estimates what is left
when they count once: a share of about 0.94 of four features with 8 values, 0.60 with 4.
"""

import math
from dataclasses import dataclass
from itertools import combinations_with_replacement

import torch

from polyhead.tasks.sraven.ambiguity import causes
from polyhead.tasks.sraven.task import RULES, Sraven
from polyhead.tasks.task import Score


@dataclass(frozen=True)
class Count:
    """One quantity, counted twice."""

    paper: int
    exact: int


def tasks(features: int, grid: int = 3) -> Count:
    """Number of tasks: of four features the paper has 188 760, and there are 2 359 296.

    >>> tasks(4)
    Count(paper=188760, exact=2359296)
    """
    _check(features, grid)
    orders = math.factorial(features) ** (grid - 1)
    multisets = math.comb(len(RULES) + features - 1, features)
    return Count(multisets * (orders - features), len(RULES) ** features * orders)


def instances(features: int, values: int, grid: int = 3) -> Count:
    """Number of instances: of one feature with three values 1 809 by rule, 0 with the paper's permutations.

    >>> instances(1, 3)
    Count(paper=0, exact=1809)
    """
    _check(features, grid)
    if values < grid:
        raise ValueError(f"instances: values must be at least {grid}, the grid, but is {values}")
    orders = math.factorial(features) ** (grid - 1)
    grids = [feature_grids(rule, values, grid) for rule in range(len(RULES))]
    products = sum(
        math.prod(grids[rule] for rule in rules) for rules in combinations_with_replacement(range(len(RULES)), features)
    )
    return Count(products * (orders - features), sum(grids) ** features * orders)


def feature_grids(rule: int, values: int, grid: int = 3) -> int:
    """In how many ways the symbols of one feature can obey rule number `rule`."""
    if rule < 5:
        return values**grid
    if rule < 7:
        return values ** (grid * (grid - 1))
    return math.comb(values, grid) * math.factorial(grid) ** grid


def distinct(features: int, values: int, grid: int = 3, *, samples: int = 4096, seed: int = 0) -> Score:
    """The share of `instances(...).exact` that is left when panels count once, however many tasks may draw them.

    Estimated without bias as the mean of 1 / (number of tasks that may draw the panels), over instances drawn uniformly
    from all: rule r with probability proportional to N_r.
    """
    task = Sraven(features, values, grid)
    generator = torch.Generator().manual_seed(seed)
    weights = torch.tensor([float(feature_grids(rule, values, grid)) for rule in range(len(RULES))])
    rules = torch.multinomial(weights, samples * features, replacement=True, generator=generator).view(
        samples, features
    )
    panels = task.of_rules(rules, generator).latents["panels"]
    return Score.of(1 / causes(panels, task))


def _check(features: int, grid: int) -> None:
    for name, value, least in (("features", features, 1), ("grid", grid, 2)):
        if value < least:
            raise ValueError(f"counts: {name} must be at least {least} but is {value}")
