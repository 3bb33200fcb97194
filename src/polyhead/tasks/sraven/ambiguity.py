"""SRAVEN: what else explains the panels shown, which instances it makes ambiguous, and the best accuracy there is.

An explanation says which slots of the columns belong together, and which rule each of these features obeys.  The
features are named by their slots in the first column, so that (features!)^(grid - 1) correspondences remain; 576 of 4
features.  They are not listed one by one: each of the features^grid ways to pick a slot per column is tested against
the eight rules, once, and `explanations` puts those together that fit and share no slot, for all instances at once.

An instance is ambiguous by the definition of

    code        of the original code: an explanation contradicts the true answer in *every* feature
    text        of the paper's text: an explanation contradicts the true answer in any feature

Both take the code's tests of the rules, where `distribute` does not ask for distinct symbols, though the generator
draws no others; `distinct=True` does ask.  At 4 features and 8 values, 0.2 % of instances are ambiguous by the code's
definition, which is the paper's "negligible", and 25 % by the text's.  `bayes` says what that costs.
"""

import functools
import itertools
import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from polyhead.spec.shapes import one_of, shaped
from polyhead.tasks.sraven.task import RULES, STEPS, Sraven
from polyhead.tasks.task import Score, check_split

DEFINITIONS = ("code", "text")
SEARCHED_CORRESPONDENCES = 1_000_000  # correspondences that are still searched
AT_ONCE = 512  # instances


def ambiguity(task: Sraven, instances: int = 4096, *, split: str = "train", seed: int = 0) -> dict[str, Score]:
    """Fractions of ambiguous instances of `split` (Table A2), and the accuracy of the Bayes-optimal solver.

    `code`, `text` and `text_distinct` (see above), and `bayes`, identified where one answer only is possible.

    Raises ValueError for an unknown split, no instances, or too many correspondences to search.
    """
    check_split(task, split)
    check_size(task)
    if instances < 1:
        raise ValueError(f"ambiguity: instances must be at least 1 but is {instances}")
    found: dict[str, list[Tensor]] = {name: [] for name in ("code", "text", "text_distinct", "bayes", "identified")}
    for step, start in enumerate(range(0, instances, AT_ONCE)):
        panels = task.batch(split, min(AT_ONCE, instances - start), seed=seed, step=step).latents["panels"]
        for name, definition, distinct in (
            ("code",) * 2 + (False,),
            ("text",) * 2 + (False,),
            ("text_distinct", "text", True),
        ):
            found[name].append(ambiguous(panels, task, definition, distinct=distinct))
        accuracy, answers = bayes(panels, task)
        found["bayes"].append(accuracy)
        found["identified"].append(answers == 1)
    whole = {name: torch.cat(parts) for name, parts in found.items()}
    identified = whole.pop("identified").double().mean().item()
    scores = {name: Score.of(values) for name, values in whole.items()}
    return {**scores, "bayes": Score.of(whole["bayes"], identified)}


def _truth(panels: Tensor, task: Sraven) -> Tensor:
    """The answer (b 1 s 1) at the slot of the last column that s names."""
    return panels[:, -1, -1].repeat(1, task.features ** (task.grid - 2))[:, None, :, None]


def searchable(task: Sraven) -> bool:
    """Whether there are few enough correspondences to search."""
    return correspondences(task) <= SEARCHED_CORRESPONDENCES


def correspondences(task: Sraven) -> int:
    """In how many ways the slots of all columns may belong together: (features!)^(grid - 1), or 1 unpermuted."""
    return math.factorial(task.features) ** (task.grid - 1) if task.permuted else 1


def check_size(task: Sraven) -> None:
    """Raise a ValueError where there are too many correspondences to search."""
    if not searchable(task):
        raise ValueError(
            f"Sraven: {task.features} features on a grid of {task.grid} have {correspondences(task)} correspondences, "
            f"but at most {SEARCHED_CORRESPONDENCES} can be searched"
        )


@shaped
def ambiguous(
    panels: Int[Tensor, "b g g m"], task: Sraven, definition: str = "text", *, distinct: bool = False
) -> Bool[Tensor, "b"]:
    """Which instances, answer included, another explanation of the panels shown answers differently."""
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
    """Accuracy on each instance of the solver that knows the family, and how many answers it considers possible.

    It weighs all explanations of the panels shown by their exact probability under the generator, with all multisets
    equally likely (or those of `rules` only), and gives the most probable answer; among k equally probable ones it
    guesses, which counts as 1 / k.  It does not know which multisets belong to the split, nor what `reject_ambiguous`
    would reject.

    The probability of the panels under one explanation is a product over features: values^-grid for constant and
    progressions, values^-(grid (grid - 1)) for sum and difference, 1 / (C(values, grid) grid!^grid) for distribute.  A
    multiset of rules falls on named features in features! / (c_1! c_2! ...) ways, where rule r occurs c_r times.
    """
    pairs = [_bayes(part, task, rules) for part in panels.split(_at_once(task))]
    return torch.cat([accuracy for accuracy, _ in pairs]), torch.cat([count for _, count in pairs])


def _bayes(panels: Tensor, task: Sraven, rules: Tensor | None) -> tuple[Tensor, Tensor]:
    instance, answers, mass = posterior(panels, task, rules=rules)
    best = torch.zeros(len(panels), dtype=mass.dtype, device=mass.device)
    best = best.scatter_reduce(0, instance, mass, "amax")
    top = mass >= best[instance] * (1 - 1e-9)  # sums of equal numbers may differ in the last digit
    true = (answers == panels[instance, -1, -1]).all(dim=-1)
    ties = torch.bincount(instance[top], minlength=len(panels))
    hits = torch.bincount(instance[top & true], minlength=len(panels))
    return hits / ties.clamp(min=1), torch.bincount(instance, minlength=len(panels))


def posterior(
    panels: Tensor, task: Sraven, *, rules: Tensor | None = None
) -> tuple[Int[Tensor, "n"], Int[Tensor, "n m"], Float[Tensor, "n"]]:
    """All possible answers: of which instance, the answer itself, and the probability of the panels shown with it, up
    to a factor of the instance."""
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
    # The last column's slot is the last digit of a way to pick slots: there stands the answer.
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
    """How many tasks (rules and correspondences) may have drawn the panels, the answer included."""
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
    """The probability of a feature's symbols on the panels shown, given its rule and that they fit."""
    k, g = float(task.values), task.grid
    dealt = 1 / (math.comb(task.values, g) * float(math.factorial(g)) ** g)
    return torch.tensor([k**-g] * 5 + [k ** -(g * (g - 1))] * 2 + [dealt], dtype=torch.float64, device=device)


def _at_once(task: Sraven) -> int:
    return max(1, min(AT_ONCE, 8 * SEARCHED_CORRESPONDENCES // correspondences(task)))


# --------------------------------------------------------------------------------------------------------------- search
def explanations(
    possible: Bool[Tensor, "b m s r"], task: Sraven
) -> tuple[Int[Tensor, "n"], Int[Tensor, "n m"], Int[Tensor, "n m"]]:
    """All ways to give every feature m one of its possible (s, r), such that no two features share a slot: the
    instance, and by feature the slots s in the other columns and the option r.

    s counts in base `features`: the slots in the columns from the second to the last, the last the fastest.  Features
    are placed one after another, for all instances together.
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
    """By feature, the way s to pick the same slot in all columns."""
    return torch.arange(task.features, device=device) * sum(task.features**c for c in range(task.grid - 1))


@functools.lru_cache(maxsize=16)
def _slots(features: int, grid: int, device: torch.device) -> Tensor:
    """Which slots of which columns a way s to pick them takes, as bits."""
    ways = itertools.product(range(features), repeat=grid - 1)
    return torch.tensor([sum(1 << (c * features + j) for c, j in enumerate(way)) for way in ways], device=device)


def hypotheses(
    panels: Int[Tensor, "b g g m"], task: Sraven, *, distinct: bool
) -> tuple[Bool[Tensor, "b m s r"], Int[Tensor, "b m s r"]]:
    """For a feature made of slot m of the first column and the slots s of the others: does rule r fit what is shown of
    it, and what would it answer?"""
    b, g, _, m = panels.shape
    # Column c varies along an axis of its own, so that most tests are of pairs of columns, not of whole features.
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
    """The rows shown whole hold the same symbols, and the last row only such; the answer is the one it lacks."""
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
    # The original code's choice where symbols are not distinct: the least used, the smallest first.
    used = [_count(a, last) * values + a for a in first]
    answer = functools.reduce(torch.minimum, used) % values
    if distinct:
        differ = [a != b for cells in (first, last) for a, b in itertools.combinations(cells, 2)]
        fit = _all([fit, *differ])
    return fit, answer


def _count(symbol: Tensor, cells: list[Tensor]) -> Tensor:
    """How many of the cells hold the symbol."""
    return functools.reduce(torch.add, [(cell == symbol).long() for cell in cells])


def _all(parts: list[Tensor]) -> Tensor:
    return functools.reduce(torch.logical_and, parts)
