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
    parts: dict[str, list[Tensor]] = {"code": [], "text": [], "text_distinct": [], "bayes": []}
    counts = []
    for step, start in enumerate(range(0, instances, AT_ONCE)):
        panels = task.batch(split, min(AT_ONCE, instances - start), seed=seed, step=step).latents["panels"]
        parts["code"].append(ambiguous(panels, task, "code"))
        parts["text"].append(ambiguous(panels, task, "text"))
        parts["text_distinct"].append(ambiguous(panels, task, "text", distinct=True))
        accuracy, count = bayes(panels, task)
        parts["bayes"].append(accuracy)
        counts.append(count)
    scores = {name: Score.of(torch.cat(values)) for name, values in parts.items()}
    identified = (torch.cat(counts) == 1).double().mean().item()
    scores["bayes"] = Score.of(torch.cat(parts["bayes"]), identified)
    return scores


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
        # The true answer (b 1 s 1) at slot s of the last column.
        truth = part[:, -1, -1].repeat(1, task.features ** (task.grid - 2))[:, None, :, None]
        wrong = (fits & (answers != truth)).any(dim=-1, keepdim=True)
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
    accuracies, counts = [], []
    for part in panels.split(_at_once(task)):
        accuracy, count = _bayes(part, task, rules)
        accuracies.append(accuracy)
        counts.append(count)
    return torch.cat(accuracies), torch.cat(counts)


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
    possible = torch.ones_like(instance, dtype=torch.bool)
    if not task.permuted:
        possible &= (chosen.diff(dim=1) >= 0).all(dim=1)  # the rules are ascending
    if rules is not None:
        possible &= torch.isin(_code(chosen.sort(dim=1).values), _code(rules.to(panels.device)))
    instance, slots, chosen = instance[possible], slots[possible], chosen[possible]
    features = torch.arange(task.features, device=panels.device)
    chance = chances(task, panels.device)[chosen].prod(dim=1)
    if task.permuted:
        earlier = (chosen[:, :, None] == chosen[:, None]).tril().sum(dim=2)  # counts 1, 2, ... among equal rules
        chance = chance * earlier.prod(dim=1)
    # The last digit of a pick is its slot in the last column: the answer's slot.
    answers = torch.empty_like(slots).scatter_(
        1, slots % task.features, predicted[instance[:, None], features, slots, chosen]
    )
    # Number the pairs of an instance and an answer, and add the probabilities of equal pairs.
    digits = task.values ** torch.arange(task.features, device=panels.device)
    number = instance * task.values**task.features + (answers * digits).sum(dim=1)
    numbers, group = number.unique(return_inverse=True)
    mass = torch.zeros(len(numbers), dtype=chance.dtype, device=panels.device).index_add_(0, group, chance)
    return numbers // task.values**task.features, numbers[:, None] // digits % task.values, mass


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
    distribute = 1 / (math.comb(task.values, g) * float(math.factorial(g)) ** g)
    values = [k**-g] * 5 + [k ** -(g * (g - 1))] * 2 + [distribute]
    return torch.tensor(values, dtype=torch.float64, device=device)


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
    slots_of_pick = _slots(task.features, task.grid, possible.device)
    if not task.permuted:
        every_pick = torch.arange(s, device=possible.device)
        possible = possible & (every_pick == straight(task, possible.device)[:, None])[..., None]
    instance = torch.arange(b, device=possible.device)
    used = torch.zeros_like(instance)
    picks = torch.empty(b, 0, dtype=torch.long, device=possible.device)
    for feature in range(m):
        free = (used[:, None] & slots_of_pick) == 0  # (n s)
        row, pick, option = (possible[instance, feature] & free[..., None]).nonzero().unbind(dim=1)
        instance = instance[row]
        used = used[row] | slots_of_pick[pick]
        picks = torch.cat((picks[row], (pick * r + option)[:, None]), dim=1)
    return instance, picks // r, picks % r


def straight(task: Sraven, device: torch.device) -> Int[Tensor, "m"]:
    """For each feature, the pick s of the same slot in all columns."""
    return torch.arange(task.features, device=device) * sum(task.features**c for c in range(task.grid - 1))


@functools.lru_cache(maxsize=16)
def _slots(features: int, grid: int, device: torch.device) -> Tensor:
    """The slots that each pick s takes, as a bit mask over columns and slots."""
    masks = []
    for pick in itertools.product(range(features), repeat=grid - 1):
        mask = 0
        for column, slot in enumerate(pick):
            mask |= 1 << (column * features + slot)
        masks.append(mask)
    return torch.tensor(masks, device=device)


def hypotheses(
    panels: Int[Tensor, "b g g m"], task: Sraven, *, distinct: bool
) -> tuple[Bool[Tensor, "b m s r"], Int[Tensor, "b m s r"]]:
    """For slot m of the first column and slots s of the others: does rule r fit the shown symbols, and its answer."""
    b, g, _, m = panels.shape
    # Each column's slot has its own axis, so most tests broadcast over two columns only, not over whole features.
    columns = []
    for c in range(g):
        axes = [1] * g
        axes[c] = m
        columns.append(panels[:, :, c].view(b, g, *axes))
    shown = (*columns[:-1], columns[-1][:, :-1])  # the last column lacks its last row
    fits, answers = [], []
    for step in STEPS:
        fit = torch.ones((), dtype=torch.bool, device=panels.device)
        for before, after in itertools.pairwise(shown):
            change = after - before[:, : after.shape[1]]
            fit = fit & ((change - step) % task.values == 0).all(dim=1)
        fits.append(fit)
        answers.append((columns[-2][:, -1] + step) % task.values)
    total = functools.reduce(torch.add, columns[:-1])
    for result in (total, 2 * columns[0] - total):
        fits.append(((result[:, :-1] - shown[-1]) % task.values == 0).all(dim=1))
        answers.append(result[:, -1] % task.values)
    fit, answer = _distribute(columns, task.values, distinct)
    fits.append(fit)
    answers.append(answer)
    full_shape = (b, *(m,) * g)
    return (
        torch.stack([part.expand(full_shape).reshape(b, m, -1) for part in fits], dim=-1),
        torch.stack([part.expand(full_shape).reshape(b, m, -1) for part in answers], dim=-1),
    )


def _distribute(columns: list[Tensor], values: int, distinct: bool) -> tuple[Tensor, Tensor]:
    """All complete rows hold the same symbols, the last row holds some of them; the answer is the missing one."""
    g = len(columns)
    first = [column[:, 0] for column in columns]
    last = [column[:, -1] for column in columns[:-1]]
    fit = torch.ones((), dtype=torch.bool, device=columns[0].device)
    for row in range(1, g - 1):
        cells = [column[:, row] for column in columns]
        for symbol in first:
            fit = fit & (_count(symbol, cells) == _count(symbol, first))
    for cell in last:
        fit = fit & (_count(cell, first) > 0)
    if distinct:
        for cells in (first, last):
            for a, b in itertools.combinations(cells, 2):
                fit = fit & (a != b)
    # Without distinct symbols, as in the original code: the least used symbol, and of these the smallest.
    usage = [_count(symbol, last) * values + symbol for symbol in first]
    return fit, functools.reduce(torch.minimum, usage) % values


def _count(symbol: Tensor, cells: list[Tensor]) -> Tensor:
    """The number of cells that hold the symbol."""
    return functools.reduce(torch.add, [(cell == symbol).long() for cell in cells])
