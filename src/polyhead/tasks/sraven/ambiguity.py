"""SRAVEN: alternative explanations of the shown panels, ambiguous instances, and the Bayes-optimal accuracy.

An explanation has two parts: which slots of the columns belong to one feature, and the rule of each feature.  A feature
is named by its slot in the first column, so there are (features!)^(grid - 1) correspondences: 576 for 4 features.  They
are not enumerated.  Each of the features^grid ways to pick one slot per column is tested once against the eight rules.
`explanations` combines the picks that fit and share no slot, for all instances at once.

There are two definitions of an ambiguous instance:

    code        the original code's: some explanation contradicts the true answer in *every* feature
    text        the paper text's: some explanation contradicts the true answer in at least one feature

Both use the code's tests of the rules.  Its test of `distribute` does not require distinct symbols, although the
generator draws only distinct ones.  At 4 features and 8 values, 0.2 % of instances are ambiguous by the code's
definition (the paper's "negligible"), and 25 % by the text's.  `bayes` gives the best accuracy.
"""

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from polyhead.spec.shapes import one_of, shaped
from polyhead.tasks.base import Batch, check_split
from polyhead.tasks.scores import Score, scores_in_parts
from polyhead.tasks.sraven.task import RULES, STEPS, Sraven

DEFINITIONS = ("code", "text")
SEARCHED_CORRESPONDENCES = 1_000_000  # most correspondences to search
AT_ONCE = 512  # instances searched together


def ambiguity(task: Sraven, instances: int = 4096, *, split: str = "train", seed: int = 0) -> dict[str, Score]:
    """Fractions of ambiguous instances of `split` (Table A2), and the accuracy of the Bayes-optimal solver.

    Returns `code` and `text` (see above), and `bayes`.
    """
    check_split(task, split)
    check_size(task)
    if instances < 1:
        raise ValueError(f"ambiguity: instances must be at least 1 but is {instances}")

    def score(batch: Batch) -> dict[str, Tensor]:
        panels = batch.latents["panels"]
        return {
            "code": ambiguous(panels, task, "code"),
            "text": ambiguous(panels, task, "text"),
            "bayes": bayes(panels, task)[0],
        }

    return scores_in_parts(score, task, split, instances, seed, size=AT_ONCE)


def correspondences(task: Sraven) -> int:
    """The number of correspondences between columns: (features!)^(grid - 1), or 1 if columns are not permuted."""
    return math.factorial(task.features) ** (task.grid - 1) if task.permuted else 1


def check_size(task: Sraven) -> None:
    """Raise a ValueError if there are too many correspondences to search."""
    if correspondences(task) > SEARCHED_CORRESPONDENCES:
        raise ValueError(
            f"Sraven: {task.features} features on a grid of {task.grid} have {correspondences(task)} correspondences, "
            f"but at most {SEARCHED_CORRESPONDENCES} can be searched"
        )


@shaped
def ambiguous(panels: Int[Tensor, "b g g m"], task: Sraven, definition: str = "text") -> Bool[Tensor, "b"]:
    """The instances (panels with the answer) for which another explanation gives a different answer."""
    one_of("ambiguous", "definition", definition, DEFINITIONS)
    check_size(task)
    features = torch.arange(task.features, device=panels.device)
    last_slots = picks(task, panels.device)[..., -1]  # (m s): the slot of each pick in the last column
    flags = []
    for part in panels.split(_at_once(task)):
        fits, answers = hypotheses(part, task, distinct=False)  # (b m s r)
        truth = part[:, -1, -1][:, last_slots]  # (b m s): what the last panel shows there
        wrong = (fits & (answers != truth[..., None])).any(dim=-1, keepdim=True)  # (b m s 1): a rule that fits errs
        if definition == "code":  # every feature of an explanation is wrong
            instance, _, _ = explanations(wrong, task)
        else:  # some feature is
            instance, pick, _ = explanations(fits.any(dim=-1, keepdim=True), task)
            is_wrong = wrong[instance[:, None], features, pick, 0].any(dim=-1)  # (n)
            instance = instance[is_wrong]
        is_ambiguous = torch.zeros(len(part), dtype=torch.bool, device=part.device)
        is_ambiguous[instance] = True
        flags.append(is_ambiguous)
    return torch.cat(flags)


@shaped
def bayes(
    panels: Int[Tensor, "b g g m"], task: Sraven, *, rules: Int[Tensor, "n m"] | None = None
) -> tuple[Float[Tensor, "b"], Int[Tensor, "b"]]:
    """For each instance, the accuracy of the Bayes-optimal solver, and the number of answers it considers possible.

    The solver weights all explanations of the shown panels by their exact probability under the generator, with all
    multisets (or those of `rules`) equally likely.  It gives the most probable answer; a guess among k equally probable
    answers counts as 1 / k.  It does not know which multisets belong to the split.

    The probability of the panels under one explanation is a product over features: values^-grid for constant and
    progressions, values^-(grid (grid - 1)) for sum and difference, 1 / (C(values, grid) grid!^grid) for distribute.  A
    multiset with c_r copies of rule r can be assigned to the features in features! / (c_1! c_2! ...) ways.
    """
    accuracies, counts = [], []
    for part in panels.split(_at_once(task)):
        instance, answers, mass = posterior(part, task, rules)
        best = torch.zeros(len(part), dtype=mass.dtype, device=mass.device)
        best = best.scatter_reduce(0, instance, mass, "amax")  # of each instance (b)
        top = mass >= best[instance] * (1 - 1e-9)  # equal sums may differ by rounding
        true = (answers == part[instance, -1, -1]).all(dim=-1)
        ties = torch.bincount(instance[top], minlength=len(part))
        hits = torch.bincount(instance[top & true], minlength=len(part))
        accuracies.append(hits.double() / ties.clamp(min=1))
        counts.append(torch.bincount(instance, minlength=len(part)))
    return torch.cat(accuracies), torch.cat(counts)


def posterior(
    panels: Tensor, task: Sraven, rules: Tensor | None
) -> tuple[Int[Tensor, "n"], Int[Tensor, "n m"], Float[Tensor, "n"]]:
    """All possible answers: the instance of each, the answer, and its probability up to a factor per instance."""
    check_size(task)
    fits, predicted = hypotheses(panels, task, distinct=True)
    instance, pick, rule = explanations(fits, task)  # (n), (n m), (n m)
    possible = torch.ones_like(instance, dtype=torch.bool)
    if not task.permuted:
        possible &= (rule.diff(dim=1) >= 0).all(dim=1)  # the rules are ascending
    if rules is not None:
        possible &= torch.isin(_code(rule.sort(dim=1).values), _code(rules.to(panels.device)))
    instance, pick, rule = instance[possible], pick[possible], rule[possible]
    features = torch.arange(task.features, device=panels.device)
    chance = chances(task, panels.device)[rule].prod(dim=1)  # (n)
    if task.permuted:
        # A multiset with c_r copies of rule r has features! / (c_1! c_2! ...) assignments, of which this is one.  The
        # product over the features of 1, 2, ... among equal rules is c_1! c_2! ...
        copies = (rule[:, :, None] == rule[:, None]).tril().sum(dim=2)  # (n m)
        chance = chance * copies.prod(dim=1)
    answer_slots = picks(task, panels.device)[features, pick, -1]  # (n m): where the last panel shows each feature
    answers = torch.empty_like(pick).scatter_(1, answer_slots, predicted[instance[:, None], features, pick, rule])
    # Add the probabilities of explanations of the same instance with the same answer.
    pairs, group = torch.cat((instance[:, None], answers), dim=1).unique(dim=0, return_inverse=True)
    mass = torch.zeros(len(pairs), dtype=chance.dtype, device=panels.device).index_add_(0, group, chance)
    return pairs[:, 0], pairs[:, 1:], mass


def _code(rules: Tensor) -> Tensor:
    return (rules * len(RULES) ** torch.arange(rules.shape[1], device=rules.device)).sum(dim=1)


def chances(task: Sraven, device: torch.device) -> Tensor:
    """For each rule, the probability of a feature's shown symbols, if they fit the rule."""
    k, g = float(task.values), task.grid
    distribute = math.exp(-math.log(math.comb(task.values, g)) - g * math.lgamma(g + 1))
    values = [k**-g] * 5 + [k ** -(g * (g - 1))] * 2 + [distribute]
    return torch.tensor(values, dtype=torch.float64, device=device)


def _at_once(task: Sraven) -> int:
    """How many instances are searched together, so that their explanations and their picks fit into memory."""
    num_picks = task.features
    if task.permuted:
        num_picks = task.features**task.grid
    symbols = num_picks * task.grid**2
    return max(1, min(AT_ONCE, 8 * SEARCHED_CORRESPONDENCES // correspondences(task), 2**24 // symbols))


# --------------------------------------------------------------------------------------------------------------- search
def explanations(
    possible: Bool[Tensor, "b m s r"], task: Sraven
) -> tuple[Int[Tensor, "n"], Int[Tensor, "n m"], Int[Tensor, "n m"]]:
    """All assignments of one possible pick s and option r to every feature m, such that no two features share a slot.

    Returns the instance of each explanation, and for each feature its s and r.  Features are assigned one by one, for
    all instances together.
    """
    b, m, _, r = possible.shape
    # The slots that each pick takes (m s), as a bit mask over columns and slots.
    columns = torch.arange(task.grid - 1, device=possible.device)
    slots_of_pick = (2 ** (columns * m + picks(task, possible.device))).sum(dim=-1)
    instance = torch.arange(b, device=possible.device)
    used = torch.zeros_like(instance)  # the slots that are taken, as a bit mask (n)
    picked = torch.empty(b, 0, dtype=torch.long, device=possible.device)  # of the features so far
    for feature in range(m):
        free = (used[:, None] & slots_of_pick[feature]) == 0  # (n s)
        row, pick, option = (possible[instance, feature] & free[..., None]).nonzero().unbind(dim=1)
        instance = instance[row]
        used = used[row] | slots_of_pick[feature, pick]
        picked = torch.cat((picked[row], (pick * r + option)[:, None]), dim=1)
    return instance, picked // r, picked % r


def picks(task: Sraven, device: torch.device) -> Int[Tensor, "m s c"]:
    """For slot m of the first column, all ways s to pick one slot in each of the other columns."""
    slots = torch.arange(task.features, device=device)
    if not task.permuted:  # the same slot in all columns
        return slots[:, None, None].expand(-1, 1, task.grid - 1)
    others = torch.cartesian_prod(*[slots] * (task.grid - 1)).view(-1, task.grid - 1)  # (s c)
    return others.expand(task.features, -1, -1)


def hypotheses(
    panels: Int[Tensor, "b g g m"], task: Sraven, *, distinct: bool
) -> tuple[Bool[Tensor, "b m s r"], Int[Tensor, "b m s r"]]:
    """For slot m of the first column and pick s in the others: does rule r fit the shown symbols, and its answer."""
    columns = torch.arange(task.grid, device=panels.device)
    others = picks(task, panels.device)  # (m s g-1)
    first = torch.arange(task.features, device=panels.device)[:, None, None].expand(*others.shape[:2], 1)
    slots = torch.cat((first, others), dim=2).flatten(0, 1).T  # (g m*s)
    fits, answers = rules_that_fit(panels[:, :, columns[:, None], slots], task, distinct=distinct)
    shape = (len(panels), *others.shape[:2], len(RULES))
    return fits.view(shape), answers.view(shape)


def rules_that_fit(
    cells: Int[Tensor, "b g g n"], task: Sraven, *, distinct: bool
) -> tuple[Bool[Tensor, "b n r"], Int[Tensor, "b n r"]]:
    """For each of n features with the symbols `cells`: does rule r fit those that are shown, and its answer."""
    fits, answers = [], []
    last = cells[:, -1, :-1]  # what the last row shows (b g-1 n)
    changes = cells.diff(dim=2) % task.values  # (b g g-1 n); the very last one leads to the answer
    for step in STEPS:
        steady = changes == step % task.values
        fits.append(steady[:, :-1].flatten(1, 2).all(dim=1) & steady[:, -1, :-1].all(dim=1))
        answers.append((last[:, -1] + step) % task.values)
    total = cells[:, :, :-1].sum(dim=2)  # (b g n)
    for result in (total, 2 * cells[:, :, 0] - total):
        result = result % task.values
        fits.append((result[:, :-1] == cells[:, :-1, -1]).all(dim=1))
        answers.append(result[:, -1])
    # Distribute: all whole rows hold the same symbols, the last row some of them; the answer is the missing one.
    rows = cells[:, :-1].sort(dim=2).values  # (b g-1 g n)
    symbols = rows[:, 0]  # (b g n), ascending
    is_shown = symbols[:, :, None] == last[:, None]  # (b g g-1 n): does a panel of the last row show a symbol
    fit = (rows == symbols[:, None]).flatten(1, 2).all(dim=1) & is_shown.any(dim=1).all(dim=1)
    if distinct:
        for ordered in (symbols, last.sort(dim=1).values):
            fit = fit & (ordered.diff(dim=1) != 0).all(dim=1)
    fits.append(fit)
    # Without distinct symbols, as in the original code: the symbol shown least, and of several the smallest.  Both are
    # in one number, count * values + symbol, of which the smallest is taken.
    answers.append((is_shown.sum(dim=2) * task.values + symbols).amin(dim=1) % task.values)
    return torch.stack(fits, dim=-1), torch.stack(answers, dim=-1)
