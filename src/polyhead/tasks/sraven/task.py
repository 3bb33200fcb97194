"""SRAVEN: symbolic Raven matrices with hidden correspondences between the features of panels (Schug et al. 2024, §4).

A grid has `grid` x `grid` panels; a panel has `features` symbols out of `values`.  All panels but the last are shown,
and the last is the target.  Each feature obeys one of eight rules along every row, modulo `values`:

    0 constant          a a a                       5 sum           the last is the sum of the others
    1, 2 progression    a a+1 a+2;  a a+2 a+4       6 difference    the last is the first minus the others
    3, 4 progression    a a-1 a-2;  a a-2 a-4       7 distribute    `grid` distinct symbols, in some order in every row

A task is a *multiset* of rules.  Every column permutes the features of its panels, in the same way in all rows, so a
solver must infer which symbols belong to one feature.  In this example of two features and 8 values, feature 0 is
constant, feature 1 counts up, and the second column swaps them:

    features     (4, 1) (4, 2) (4, 3)        panels     (4, 1) (2, 4) (4, 3)
                 (0, 6) (0, 7) (0, 0)                   (0, 6) (7, 0) (0, 0)
                 (5, 2) (5, 3) (5, 4)                   (5, 2) (3, 5)  ?  ?       the answer: (5, 4)

A sequence has one token per feature: a one-hot vector for each symbol of the panels in reading order, and `features`
zero vectors for the last panel.  ambiguity.py finds instances with more than one explanation.
"""

import functools
import itertools
import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from jaxtyping import Float, Int
from msgspec import Meta
from torch import Tensor
from torch.nn import functional as F

from polyhead.config import Logits, Vectors
from polyhead.spec.checked import Count, choice
from polyhead.spec.shapes import shaped
from polyhead.tasks.base import (
    SPLITS,
    Baseline,
    Batch,
    Fraction,
    Task,
    Words,
    advance,
    check_draw,
    check_split,
    covering_order,
    fork,
    held_out_count,
    original_order,
    shuffled,
    stream,
)
from polyhead.tasks.classification import CHANCE
from polyhead.tasks.examples import unranked
from polyhead.tasks.scores import Score, check_logits, right_tokens

RULES = (
    *("constant", "progression +1", "progression +2", "progression -1", "progression -2"),
    *("sum", "difference", "distribute"),
)
STEPS = (0, 1, 2, -1, -2)  # added per column, for rules 0 to 4
SUM, DIFFERENCE, DISTRIBUTE = 5, 6, 7
LISTED_MULTISETS = 1_500_000  # 21 features; most multisets to enumerate
TRIES = 1000  # most random splits to find a covering one
BITS = 31  # of a random number; a die with n sides is fair up to n / 2^31

Multiset = tuple[int, ...]

WORDS = Words(
    metric=("Accuracy", "The share of sequences in which every symbol of the last panel is right."),
    baselines={
        "chance": CHANCE,
        "copy_left": Baseline("Copy", "copies the panel to the left of the last one"),
        "same_slot": Baseline("Same slot", "knows the rules, but not that columns permute their features"),
        "known_combinations": Baseline(
            "Known combinations only", "knows no combination of rules beyond the training ones", drawn=True
        ),
        "ceiling": Baseline("Exact ceiling", "knows all rules and gives the most probable answer", drawn=True),
    },
    part="rule",
)


@dataclass(frozen=True)
class Sraven(Task):
    """Symbolic Raven matrices, with multisets of rules held out.

        train           the training tasks, 248 of 330 multisets by default
        validation      fresh samples of training tasks, to select hyper-parameters
        iid             fresh samples of training tasks, for reported scores
        compositional   the held-out multisets: every rule occurs in training, the combination does not
        novel           with a single feature, instead of compositional: the held-out rules

    >>> Sraven().batch("compositional", 16, seed=0, step=0).inputs.shape
    torch.Size([16, 36, 8])

    Attributes:
        features: Features of a panel, each with a rule.
        values: Values that a feature can have.
        grid: Rows and columns of panels, 3 in the paper.
        held_out: Fraction of the multisets that are held out.
        split: "covered" is random, with every rule in training.  "legacy" and "partitionable" are
            the splits of the original code under JAX before 0.5 (the paper's) and since 0.5.  These two exist for 4
            features and the seeds (0, 1, 2, 2024).
        split_seed: Seed of the division into known and unseen multisets.
        permuted: Whether columns permute their features.  If not, features are in the order of their rules.
    """

    features: Count = 4
    values: Annotated[int, Meta(ge=2)] = 8
    grid: Annotated[int, Meta(ge=2)] = 3
    held_out: Fraction = 0.25
    split: Annotated[str, choice(SPLITS)] = "covered"
    split_seed: int = 0
    permuted: bool = True

    name: ClassVar[str] = "sraven"
    metric: ClassVar[str] = "accuracy"
    words: ClassVar[Words] = WORDS

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.values < self.grid:
            raise ValueError(
                f"Sraven: distribute needs {self.grid} distinct symbols, so values must be at least {self.grid}, the "
                f"grid, but is {self.values}"
            )
        count = math.comb(len(RULES) + self.features - 1, self.features)
        if count > LISTED_MULTISETS:
            raise ValueError(
                f"Sraven: {count} multisets of {self.features} rules, but at most {LISTED_MULTISETS} can be "
                "listed; use fewer features"
            )
        if self.split != "covered" and self.features != 4:
            raise ValueError(f"Sraven: split={self.split!r} exists for 4 features, not for {self.features}")
        _split(self.features, self.held_out, self.split, self.split_seed)

    @property
    def splits(self) -> tuple[str, ...]:
        held_out = "novel" if self.features == 1 else "compositional"  # a single feature has no combination of rules
        return ("train", "validation", "iid", held_out)

    @property
    def ends(self) -> tuple[Vectors, Logits]:
        return Vectors(self.values), Logits(self.values, bias=True)

    @property
    def length(self) -> int:
        return self.grid**2 * self.features

    @property
    def tail(self) -> int:
        return self.features

    @property
    def pairs(self) -> dict[str, tuple[tuple[int, int], ...]]:
        """The last token attending to itself (paper), and to the last feature of the panels to its left (its code)."""
        panels = range(self.grid * (self.grid - 1), self.grid**2 - 1)
        return {"self": ((-1, -1),), "last_row": tuple((-1, (panel + 1) * self.features - 1) for panel in panels)}

    def token_names(self, batch: Batch, *, source: bool = False) -> tuple[str, ...]:
        """Panel and feature."""
        names = itertools.product(range(1, self.grid**2 + 1), range(1, self.features + 1))
        return tuple(f"{panel}.{feature}" for panel, feature in names)

    def class_name(self, target: str, label: int) -> str:
        """A short name of a rule, or the symbol.

        >>> [Sraven().class_name("rule", i) for i in (0, 1, 3, 5, 7)]
        ['constant', '+1', '−1', 'sum', 'distribute-three']
        """
        if target != "rule":
            return str(label)
        rule = RULES[label].removeprefix("progression ").replace("-", "−")
        return "distribute-three" if rule == "distribute" and self.grid == 3 else rule

    def rules(self, split: str) -> Int[Tensor, "n m"]:
        """The multisets of rules of `split` (n features), as ascending indices into `RULES`."""
        check_split(self, split)
        return _multisets(self, split, torch.device("cpu")).clone()

    def sample(self, split: str, batch_size: int, generator: torch.Generator) -> Batch:
        """A batch on the generator's device: inputs (b t values), targets (b t): the symbols of all tokens, including
        the hidden ones, and latents

            rules (b features)                      ascending
            permutations (b grid features)          token j of a column shows feature permutations[., column, j]
            panels (b grid grid features)           all panels, including the answer
            query_rules (b features)                the rule of each query token
        """
        check_draw(self, split, batch_size)
        multisets = _multisets(self, split, generator.device)
        rule_draws = fork(generator, f"{self.name}/{split}/rules")
        rows = torch.randint(len(multisets), (batch_size,), generator=rule_draws, device=generator.device)
        grid_draws = fork(generator, f"{self.name}/{split}/grids")
        rules, order, panels = draw_instances(self, multisets[rows], grid_draws)
        advance(generator)
        targets = panels.flatten(1)  # (b t)
        inputs = F.one_hot(targets, self.values).float()  # (b t values)
        inputs[:, -self.features :] = 0  # the answer is hidden
        scored = torch.zeros(targets.shape, dtype=torch.bool, device=targets.device)
        scored[:, -self.features :] = True
        latents = {
            "rules": rules,
            "permutations": order,
            "panels": panels,
            "query_rules": rules.gather(1, order[:, -1]),
        }
        return Batch(inputs, targets, None, scored, latents)

    def input_sizes(self, batch: Batch) -> Float[Tensor, "b"]:
        """The sum of the symbols (b) of the last token's feature in the panels to the left, to which it must attend."""
        left_panels = batch.latents["panels"][:, -1, :-1]  # (b g-1 m)
        order = batch.latents["permutations"]  # (b g m)
        shows_feature = order[:, :-1] == order[:, -1, -1, None, None]  # (b g-1 m)
        return (left_panels * shows_feature).sum((1, 2)).to(torch.get_default_dtype())

    @shaped
    def loss(self, outputs: Float[Tensor, "b t c"], batch: Batch) -> Float[Tensor, ""]:
        """Mean cross-entropy over the query tokens."""
        logits, targets = self._queries(outputs, batch)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    @shaped
    def metrics(self, outputs: Float[Tensor, "b t c"], batch: Batch) -> dict[str, Float[Tensor, "b"]]:
        """For each sequence (b): `accuracy`, 1 if all features of the last panel are right, and `feature_accuracy`."""
        return right_tokens(*self._queries(outputs, batch), "feature_accuracy")

    def baselines(self, split: str, *, sequences: int = 2000, seed: int = 0) -> dict[str, Score]:
        """Accuracy of baselines that do not combine rules, and of the Bayes-optimal solver: see baselines.py."""
        from polyhead.tasks.sraven.baselines import baselines  # it imports this file

        return baselines(self, split, sequences=sequences, seed=seed)

    def _queries(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Logits (b features values) in at least float32 and targets (b features) of the query tokens."""
        logits = check_logits(self, outputs, batch, self.values)
        return logits[:, -self.features :], batch.targets[:, -self.features :]


@shaped
def permute(features: Int[Tensor, "b g g m"], permutations: Int[Tensor, "b g m"]) -> Int[Tensor, "b g g m"]:
    """panels[b, row, column, j] = features[b, row, column, permutations[b, column, j]]"""
    return features.gather(-1, permutations[:, None].expand_as(features))


# ------------------------------------------------------------------------------------------------------------ generator
def draw_instances(task: Sraven, rules: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """The given rules (b m), ascending, with permutations (b g m) and panels (b g g m)."""
    count, m = rules.shape
    g, device = task.grid, generator.device
    # One call draws all numbers, so a smaller batch is a prefix of a larger one.
    sizes = (m * g * (g - 1), m * g, g * (m - 1))
    numbers = torch.randint(2**BITS, (count, sum(sizes)), generator=generator, device=device)
    cells, symbols, permutations = numbers.split(sizes, dim=1)
    grids = _grids(rules, cells.view(count, g, g - 1, m), symbols.view(count, g, m), task.values)
    if not task.permuted:
        return rules, torch.arange(m, device=device).expand(count, g, m).contiguous(), grids
    order = _arrange(permutations.view(count, g, m - 1), m, m)  # (b g m)
    return rules, order, permute(grids, order)


def _grids(rules: Tensor, cells: Tensor, symbols: Tensor, values: int) -> Tensor:
    """The symbols (b g g m) of every feature under its rule.

    Random numbers: cells (b g g-1 m), for each row; symbols (b g m).  A feature has one rule, so all rules can share
    the same random numbers.
    """
    g = symbols.shape[1]
    free = _die(cells, values)  # (b g g-1 m)
    steps = torch.tensor((*STEPS, 0, 0, 0), device=rules.device)[rules][:, None, None]  # 0 for rules 5 to 7
    columns = torch.arange(g, device=rules.device)[:, None]  # (g 1)
    progression = (free[:, :, :1] + columns * steps) % values  # (b g g m)
    # Sum and difference: the last symbol follows from the others.
    total = free.sum(dim=2, keepdim=True)  # (b g 1 m)
    last = torch.where((rules == SUM)[:, None, None], total, 2 * free[:, :, :1] - total) % values
    computed = torch.cat((free, last), dim=2)  # (b g g m)
    # Distribute: every row has the same symbols in an order of its own.
    distinct = _arrange(symbols.transpose(1, 2), values, g).transpose(1, 2)  # (b g m)
    orders = _arrange(cells.transpose(2, 3), g, g).transpose(2, 3)  # (b g g m)
    distributed = distinct[:, None].expand_as(orders).gather(2, orders)
    rule = rules[:, None, None]  # (b 1 1 m)
    return torch.where(rule < SUM, progression, torch.where(rule < DISTRIBUTE, computed, distributed))


def _die(random: Tensor, sides: int | Tensor) -> Tensor:
    """Numbers of `BITS` random bits as throws of a die: 0 to sides - 1."""
    return (random * sides) >> BITS


def _arrange(random: Tensor, items: int, size: int) -> Tensor:
    """`size` distinct numbers below `items`, in random order, from random numbers (... size).

    Of a whole permutation the last number is determined and may be missing.
    """
    if random.shape[-1] < size:
        random = F.pad(random, (0, 1))
    sides = torch.arange(items, items - size, -1, device=random.device)
    return unranked(_die(random, sides))


# --------------------------------------------------------------------------------------------------------------- splits
@functools.lru_cache(maxsize=64)
def _multisets(task: Sraven, split: str, device: torch.device) -> Tensor:
    train, held_out = _split(task.features, task.held_out, task.split, task.split_seed)
    return torch.tensor(held_out if split in ("compositional", "novel") else train, device=device)


@functools.lru_cache(maxsize=64)
def _split(features: int, held_out: float, split: str, seed: int) -> tuple[tuple[Multiset, ...], tuple[Multiset, ...]]:
    """Training and held-out multisets of rules."""
    rows = list(itertools.combinations_with_replacement(range(len(RULES)), features))
    num_held_out = held_out_count("Sraven", held_out, len(rows), "multisets of rules")
    num_train = len(rows) - num_held_out
    order = []
    if split != "covered":
        order = original_order("Sraven", __package__, rows, split, seed)
    elif features == 1:  # the held-out rules are new
        order = shuffled(rows, stream(seed, "sraven/split", 0))
    elif num_train * features >= len(RULES):
        order = covering_order(rows, num_held_out, len(RULES), "sraven/split", seed, TRIES)
    if not order:
        reason = "too few to cover"
        if num_train * features >= len(RULES):
            reason = f"and with split_seed={seed} no division was found that covers"
        raise ValueError(
            f"Sraven: held_out={held_out} leaves {num_train} training multisets of {features} rules, {reason} all "
            f"{len(RULES)} rules"
        )
    return tuple(order[num_held_out:]), tuple(order[:num_held_out])
