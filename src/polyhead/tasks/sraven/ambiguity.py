"""SRAVEN: alternative explanations of the shown panels, ambiguous instances, and the Bayes-optimal accuracy.

An explanation has two parts: which slots of the columns belong to one feature, and the rule of each feature.  A feature
is named by its slot in the first column, so there are (features!)^(grid - 1) correspondences: 576 for 4 features.  They
are not enumerated.  Each of the features^grid ways to pick one slot per column is tested once against the eight rules.
`explanations` combines the picks that fit and share no slot, for all instances at once.

There are two definitions of an ambiguous instance:

    code        the original code's: some explanation contradicts the true answer in *every* feature
    text        the paper text's: some explanation contradicts the true answer in at least one feature

Both use the code's tests of the rules.  Its test of `distribute` does not require distinct symbols, although the
generator draws only distinct ones; `distinct=True` requires them.  At 4 features and 8 values, 0.2 % of instances are
ambiguous by the code's definition (the paper's "negligible"), and 25 % by the text's.  `bayes` gives the best accuracy.
"""

import functools
import itertools
import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from polyhead.spec.shapes import one_of, shaped
from polyhead.tasks.sraven.task import DEFINITIONS, RULES, STEPS, Sraven
from polyhead.tasks.task import Score, check_split

SEARCHED_CORRESPONDENCES = 1_000_000  # most correspondences to search
AT_ONCE = 512  # instances searched together


def ambiguity(task: Sraven, instances: int = 4096, *, split: str = "train", seed: int = 0) -> dict[str, Score]:
    """Fractions of ambiguous instances of `split` (Table A2), and the accuracy of the Bayes-optimal solver.

    Returns `code`, `text` and `text_distinct` (see above), and `bayes`, `identified` if only one answer is possible.

    Raises ValueError for an unknown split, no instances, or too many correspondences to search.
    """
    check_split(task, split)
    check_size(task)
    if instances < 1:
        raise ValueError(f"ambiguity: instances must be at least 1 but is {instances}")
    found: dict[str, list[Tensor]] = {name: [] for name in ("code", "text", "text_distinct", "bayes", "identified")}
    for step, start in enumerate(range(0, instances, AT_ONCE)):
        panels = task.batch(split, min(AT_ONCE, instances - start), seed=seed, step=step).latents["panels"]
        found["code"].append(ambiguous(panels, task, "code"))
        found["text"].append(ambiguous(panels, task, "text"))
        found["text_distinct"].append(ambiguous(panels, task, "text", distinct=True))
        accuracy, answers = bayes(panels, task)
        found["bayes"].append(accuracy)
        found["identified"].append(answers == 1)
    whole = {name: torch.cat(parts) for name, parts in found.items()}
    identified = whole.pop("identified").double().mean().item()
    scores = {name: Score.of(values) for name, values in whole.items()}
    return {**scores, "bayes": Score.of(whole["bayes"], identified)}


def _truth(panels: Tensor, task: Sraven) -> Tensor:
    """The true answer (b 1 s 1) at slot s of the last column."""
    return panels[:, -1, -1].repeat(1, task.features ** (task.grid - 2))[:, None, :, None]


def searchable(task: Sraven) -> bool:
    """Whether the number of correspondences is small enough to search."""
    return correspondences(task) <= SEARCHED_CORRESPONDENCES


def correspondences(task: Sraven) -> int:
    """The number of correspondences between columns: (features!)^(grid - 1), or 1 if columns are not permuted."""
    return math.factorial(task.features) ** (task.grid - 1) if task.permuted else 1


def check_size(task: Sraven) -> None:
    """Raise a ValueError if there are too many correspondences to search."""
    if not searchable(task):
        raise ValueError(
            f"Sraven: {task.features} features on a grid of {task.grid} have {correspondences(task)} correspondences, "
            f"but at most {SEARCHED_CORRESPONDENCES} can be searched"
        )


@shaped
def ambiguous(
    panels: Int[Tensor, "b g g m"], task: Sraven, definition: str = "text", *, distinct: bool = False
) -> Bool[Tensor, "b"]:
    """The instances (panels with the answer) for which another explanation gives a different answer."""
    one_of("ambiguous", "definition", definition, DEFINITIONS)
    check_size(task)
    flags = []
    for part in panels.split(_at_once(task)):
        fits, answers = hypotheses(part, task, distinct=distinct)
        wrong = (fits & (answers != _truth(part, task))).any(dim=-1, keepdim=True)
        flag = torch.zeros(len(part), dtype=torch.bool, device=part.device)
        if definition == "code":
            flag[explanations(wrong, task)[0]] = True
        else:
            instance, slots, _ = explanations(fits.any(dim=-1, keepdim=True), task)
            features = torch.arange(task.features, device=part.device)
            flag[instance[wrong[instance[:, None], features, slots, 0].any(dim=-1)]] = True
        flags.append(flag)
    return torch.cat(flags)


@shaped
def bayes(
    panels: Int[Tensor, "b g g m"], task: Sraven, *, rules: Int[Tensor, "n m"] | None = None
) -> tuple[Float[Tensor, "b"], Int[Tensor, "b"]]:
    """For each instance, the accuracy of the Bayes-optimal solver, and the number of answers it considers possible.

    The solver weights all explanations of the shown panels by their exact probability under the generator, with all
    multisets (or those of `rules`) equally likely.  It gives the most probable answer; a guess among k equally probable
    answers counts as 1 / k.  It does not know which multisets belong to the split, nor which instances
    `reject_ambiguous` rejects.

    The probability of the panels under one explanation is a product over features: values^-grid for constant and
    progressions, values^-(grid (grid - 1)) for sum and difference, 1 / (C(values, grid) grid!^grid) for distribute.  A
    multiset with c_r copies of rule r can be assigned to the features in features! / (c_1! c_2! ...) ways.
    """
    pairs = [_bayes(part, task, rules) for part in panels.split(_at_once(task))]
    return torch.cat([accuracy for accuracy, _ in pairs]), torch.cat([count for _, count in pairs])


def _bayes(panels: Tensor, task: Sraven, rules: Tensor | None) -> tuple[Tensor, Tensor]:
    instance, answers, mass = posterior(panels, task, rules=rules)
    best = torch.zeros(len(panels), dtype=mass.dtype, device=mass.device)
    best = best.scatter_reduce(0, instance, mass, "amax")
    top = mass >= best[instance] * (1 - 1e-9)  # equal sums may differ by rounding
    true = (answers == panels[instance, -1, -1]).all(dim=-1)
    ties = torch.bincount(instance[top], minlength=len(panels))
    hits = torch.bincount(instance[top & true], minlength=len(panels))
    return hits / ties.clamp(min=1), torch.bincount(instance, minlength=len(panels))


def posterior(
    panels: Tensor, task: Sraven, *, rules: Tensor | None = None
) -> tuple[Int[Tensor, "n"], Int[Tensor, "n m"], Float[Tensor, "n"]]:
    """All possible answers: the instance of each, the answer, and its probability up to a factor per instance."""
    check_size(task)
    _check_answers(task)
    fits, predicted = hypotheses(panels, task, distinct=True)
    instance, slots, chosen = explanations(fits, task)
    if not task.permuted:
        instance, slots, chosen = _those((chosen.diff(dim=1) >= 0).all(dim=1), instance, slots, chosen)
    if rules is not None:
        known = torch.isin(_code(chosen.sort(dim=1).values), _code(rules.to(panels.device)))
        instance, slots, chosen = _those(known, instance, slots, chosen)
    features = torch.arange(task.features, device=panels.device)
    chance = chances(task, panels.device)[chosen].prod(dim=1)
    if task.permuted:
        earlier = (chosen[:, :, None] == chosen[:, None]).tril().sum(dim=2)  # counts 1, 2, ... among equal rules
        chance = chance * earlier.prod(dim=1)
    # The last digit of a pick is its slot in the last column: the answer's slot.
    answers = torch.empty_like(slots).scatter_(
        1, slots % task.features, predicted[instance[:, None], features, slots, chosen]
    )
    places = task.values ** torch.arange(task.features, device=panels.device)
    key = instance * task.values**task.features + (answers * places).sum(dim=1)
    kinds, group = key.unique(return_inverse=True)
    mass = torch.zeros(len(kinds), dtype=chance.dtype, device=panels.device).index_add_(0, group, chance)
    return kinds // task.values**task.features, kinds[:, None] // places % task.values, mass


@shaped
def causes(panels: Int[Tensor, "b g g m"], task: Sraven) -> Int[Tensor, "b"]:
    """The number of tasks (rules and correspondences) that can generate the panels, including the answer."""
    check_size(task)
    counts = []
    for part in panels.split(_at_once(task)):
        fits, answers = hypotheses(part, task, distinct=True)
        instance, _, _ = explanations(fits & (answers == _truth(part, task)), task)
        counts.append(torch.bincount(instance, minlength=len(part)))
    return torch.cat(counts)


def _those(which: Tensor, instance: Tensor, slots: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return instance[which], slots[which], chosen[which]


def _check_answers(task: Sraven) -> None:
    if task.values**task.features * AT_ONCE >= 2**63:
        raise ValueError(
            f"Sraven: {task.features} features of {task.values} values have {task.values**task.features} answers, too "
            "many to number; use fewer values"
        )


def _code(rules: Tensor) -> Tensor:
    return (rules * len(RULES) ** torch.arange(rules.shape[1], device=rules.device)).sum(dim=1)


def chances(task: Sraven, device: torch.device) -> Tensor:
    """For each rule, the probability of a feature's shown symbols, if they fit the rule."""
    k, g = float(task.values), task.grid
    dealt = 1 / (math.comb(task.values, g) * float(math.factorial(g)) ** g)
    return torch.tensor([k**-g] * 5 + [k ** -(g * (g - 1))] * 2 + [dealt], dtype=torch.float64, device=device)


def _at_once(task: Sraven) -> int:
    return max(1, min(AT_ONCE, 8 * SEARCHED_CORRESPONDENCES // correspondences(task)))


# --------------------------------------------------------------------------------------------------------------- search
def explanations(
    possible: Bool[Tensor, "b m s r"], task: Sraven
) -> tuple[Int[Tensor, "n"], Int[Tensor, "n m"], Int[Tensor, "n m"]]:
    """All assignments of one possible pick s and option r to every feature m, such that no two features share a slot.

    Returns the instance of each explanation, and for each feature its s and r.  s is a number in base `features`: its
    digits are the slots in the second to the last column, the last column fastest.  Features are assigned one after
    another, for all instances together.
    """
    b, m, s, r = possible.shape
    taken = _slots(task.features, task.grid, possible.device)
    if not task.permuted:
        ways = torch.arange(s, device=possible.device)
        possible = possible & (ways == straight(task, possible.device)[:, None])[..., None]
    instance = torch.arange(b, device=possible.device)
    used = torch.zeros_like(instance)
    picks = torch.empty(b, 0, dtype=torch.long, device=possible.device)
    for feature in range(m):
        free = (used[:, None] & taken) == 0  # (n s)
        row, slots, option = (possible[instance, feature] & free[..., None]).nonzero().unbind(dim=1)
        instance, used = instance[row], used[row] | taken[slots]
        picks = torch.cat((picks[row], (slots * r + option)[:, None]), dim=1)
    return instance, picks // r, picks % r


def straight(task: Sraven, device: torch.device) -> Int[Tensor, "m"]:
    """For each feature, the pick s of the same slot in all columns."""
    return torch.arange(task.features, device=device) * sum(task.features**c for c in range(task.grid - 1))


@functools.lru_cache(maxsize=16)
def _slots(features: int, grid: int, device: torch.device) -> Tensor:
    """The slots that each pick s takes, as a bit mask over columns and slots."""
    ways = itertools.product(range(features), repeat=grid - 1)
    return torch.tensor([sum(1 << (c * features + j) for c, j in enumerate(way)) for way in ways], device=device)


def hypotheses(
    panels: Int[Tensor, "b g g m"], task: Sraven, *, distinct: bool
) -> tuple[Bool[Tensor, "b m s r"], Int[Tensor, "b m s r"]]:
    """For slot m of the first column and slots s of the others: does rule r fit the shown symbols, and its answer."""
    b, g, _, m = panels.shape
    # Each column's slot has its own axis, so most tests broadcast over two columns only, not over whole features.
    columns = [panels[:, :, c].view(b, g, *(m if c == axis else 1 for axis in range(g))) for c in range(g)]
    shown = (*columns[:-1], columns[-1][:, :-1])  # the last column lacks its last row
    fits, answers = [], []
    for step in STEPS:
        jumps = [
            ((after - before[:, : after.shape[1]] - step) % task.values == 0).all(dim=1)
            for before, after in itertools.pairwise(shown)
        ]
        fits.append(_all(jumps))
        answers.append((columns[-2][:, -1] + step) % task.values)
    total = functools.reduce(torch.add, columns[:-1])
    for result in (total, 2 * columns[0] - total):
        fits.append(((result[:, :-1] - shown[-1]) % task.values == 0).all(dim=1))
        answers.append(result[:, -1] % task.values)
    fit, answer = _distribute(columns, task.values, distinct)
    whole = (b, *(m,) * g)
    fits, answers = (
        [part.expand(whole).reshape(b, m, -1) for part in parts] for parts in ((*fits, fit), (*answers, answer))
    )
    return torch.stack(fits, dim=-1), torch.stack(answers, dim=-1)


def _distribute(columns: list[Tensor], values: int, distinct: bool) -> tuple[Tensor, Tensor]:
    """All complete rows hold the same symbols, the last row holds some of them; the answer is the missing one."""
    first, g = [column[:, 0] for column in columns], len(columns)
    own = [_count(a, first) for a in first]
    same = [
        _count(a, [column[:, row] for column in columns]) == count
        for row in range(1, g - 1)
        for a, count in zip(first, own, strict=True)
    ]
    last = [column[:, -1] for column in columns[:-1]]
    known = [functools.reduce(torch.logical_or, [cell == a for a in first]) for cell in last]
    fit = _all([*same, *known])
    # Without distinct symbols, as in the original code: the least used symbol, and of these the smallest.
    used = [_count(a, last) * values + a for a in first]
    answer = functools.reduce(torch.minimum, used) % values
    if distinct:
        differ = [a != b for cells in (first, last) for a, b in itertools.combinations(cells, 2)]
        fit = _all([fit, *differ])
    return fit, answer


def _count(symbol: Tensor, cells: list[Tensor]) -> Tensor:
    """The number of cells that hold the symbol."""
    return functools.reduce(torch.add, [(cell == symbol).long() for cell in cells])


def _all(parts: list[Tensor]) -> Tensor:
    return functools.reduce(torch.logical_and, parts)
