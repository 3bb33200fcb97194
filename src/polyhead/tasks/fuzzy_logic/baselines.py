"""Baselines and ceiling of in-context regression: the score to beat as evidence of composition, and the maximum.

No baseline knows the terms.  Four predict the query from the context (x_s, y_s) alone, two use the training functions:

    context_mean        mean of the context's targets
    nearest_neighbour   the target of the nearest context input (Euclidean)
    ridge               linear least squares with an intercept and penalty 1 (scikit-learn's default) on the slopes
    gaussian_process    kernel exp(-|x - x'|² / (2 · 0.5²)), noise variance 0.01, prior mean = mean of the context.  The
                        data have no noise; the variance accounts for kinks, which a smooth kernel cannot follow.
    recall              the posterior mean over the training functions f_i, all equally likely beforehand,
                        Σ_i w_i f_i(x) / Σ_i w_i with w_i = exp(-Σ_s (y_s - f_i(x_s))² / (2 width²)).  An unseen
                        function agrees with none of them, so errors need a likelihood.
    mix                 ridge regression of the context on the values of all training functions, without an intercept:
                        φ' Φ' (Φ Φ' + penalty I)⁻¹ y with their values Φ (s F) at the context and φ (F) at the query
    ceiling             mean answer of all functions of the family that agree with the whole context exactly: the Bayes
                        estimate of a solver that knows the family, but not which combinations belong to the split

`width` and `penalty` are chosen from the grids below by squared error on the validation split, where the training
function that made a sequence is left out for it.  A score above `recall` is more than memory of training functions.  A
score that is not above `mix` may come from a linear combination of them.  All are batched closed forms in float64.
"""

import functools
import itertools
import math
from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polyhead.spec.shapes import shaped
from polyhead.tasks.base import Batch
from polyhead.tasks.fuzzy_logic.task import FuzzyLogic, conjunctions
from polyhead.tasks.scores import Score, scores_in_parts

PENALTY = 1.0
LENGTH_SCALE = 0.5
NOISE = 0.01
CHUNK = 500  # sequences at once
LISTED_CANDIDATES = 200_000  # most candidate functions of one sequence to enumerate
WIDTHS = tuple(0.05 * 2 ** (i / 2) for i in range(11))  # 0.05 to 1.6
PENALTIES = tuple(10 ** (i / 2) for i in range(-8, 3))  # 0.0001 to 10
CHOSEN_ON = 500  # sequences of the validation split that choose width and penalty
LARGEST = 2**23  # most numbers in memory at once
LISTED_FUNCTIONS = 200_000  # most training functions to enumerate


def baselines(
    task: FuzzyLogic, split: str, *, sequences: int = 2000, seed: int = 0, batch_size: int = CHUNK
) -> dict[str, Score]:
    """R² of every baseline and of the ceiling on `split`, over `sequences` sequences of stream `seed`.

    Args:
        batch_size: That of the evaluation, to score the same sequences.

    Raises:
        ValueError: If a short context leaves too many functions to enumerate.
    """

    def score(batch: Batch) -> dict[str, Tensor]:
        guesses = from_context(batch) | from_functions(task, batch)
        guesses["ceiling"] = ceiling(task, batch)
        values = {}
        for name, guess in guesses.items():
            outputs = batch.targets.double().clone()
            outputs[:, -1, 0] = guess
            values[name] = task.metrics(outputs, batch)["r2"]
        return values

    return scores_in_parts(score, task, split, sequences, seed, size=batch_size)


def from_context(batch: Batch) -> dict[str, Float[Tensor, "b"]]:
    """Predictions at the queries of `batch` of each baseline that uses the context alone."""
    tokens = batch.inputs.double()
    x, y, query = tokens[:, :-1, :-1], tokens[:, :-1, -1], tokens[:, -1, :-1]
    return {name: predict(x, y, query) for name, predict in BASELINES.items()}


# ------------------------------------------------------------------------------------------------------------ baselines
# From contexts x (b s c) and y (b s), the answers (b) at queries (b c).
def context_mean(x: Tensor, y: Tensor, query: Tensor) -> Tensor:
    """mean_s y_s"""
    return y.mean(dim=1)


def nearest_neighbour(x: Tensor, y: Tensor, query: Tensor) -> Tensor:
    """y_s of the s that minimises |x_s - query|"""
    nearest = (x - query[:, None]).square().sum(dim=-1).argmin(dim=1, keepdim=True)  # (b 1)
    return y.gather(1, nearest)[:, 0]


def ridge(x: Tensor, y: Tensor, query: Tensor) -> Tensor:
    """w · (query - x̄) + ȳ with w = (X'X + penalty I)⁻¹ X'y of the centred context"""
    centre = x.mean(dim=1, keepdim=True)  # (b 1 c)
    level = y.mean(dim=1, keepdim=True)  # (b 1)
    x = x - centre
    gram = x.mT @ x + PENALTY * torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)  # (b c c)
    slopes = torch.linalg.solve(gram, x.mT @ (y - level)[..., None])[..., 0]  # (b c)
    return ((query - centre[:, 0]) * slopes).sum(dim=-1) + level[:, 0]


def gaussian_process(x: Tensor, y: Tensor, query: Tensor) -> Tensor:
    """k(query, X) (K + noise I)⁻¹ (y - ȳ) + ȳ"""
    level = y.mean(dim=1, keepdim=True)  # (b 1)
    noisy = _kernel(x, x) + NOISE * torch.eye(x.shape[1], dtype=x.dtype, device=x.device)  # (b s s)
    weights = torch.cholesky_solve((y - level)[..., None], torch.linalg.cholesky(noisy))  # (b s 1)
    return (_kernel(query[:, None], x) @ weights)[:, 0, 0] + level[:, 0]


def _kernel(a: Tensor, b: Tensor) -> Tensor:
    # Distances by matrix multiplication would lose the digits that tell close points apart.
    distance = torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist")
    return torch.exp(-distance.square() / (2 * LENGTH_SCALE**2))


BASELINES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "context_mean": context_mean,
    "nearest_neighbour": nearest_neighbour,
    "ridge": ridge,
    "gaussian_process": gaussian_process,
}


# --------------------------------------------------------------------------------------------------- training functions
def from_functions(task: FuzzyLogic, batch: Batch) -> dict[str, Float[Tensor, "b"]]:
    """Predictions of `recall` and `mix` at the queries of `batch`; {} beyond `LISTED_FUNCTIONS` training functions."""
    rows = task.functions("train")
    if len(rows) > LISTED_FUNCTIONS:
        return {}
    width, penalty = settings(task)
    recalled, mixed = [], []
    for tokens in batch.inputs.split(_at_once(task, len(rows))):
        functions = values(tokens[..., :-1], rows)  # (b t n)
        y = tokens[:, :-1, -1].double()
        recalled.append(recall(functions, y, width))
        mixed.append(mix(functions, y, penalty))
    return {"recall": torch.cat(recalled), "mix": torch.cat(mixed)}


@shaped
def values(x: Float[Tensor, "b t c"], rows: Int[Tensor, "n k"]) -> Float[Tensor, "b t n"]:
    """f_i(x) in float64 of the functions with terms `rows`, at every input; the query is last."""
    # Each term is computed once, and a function is the maximum of its terms.
    used, columns = rows.to(x.device).unique(return_inverse=True)
    terms = conjunctions(x, used[None])  # (b t terms)
    maximum = terms[..., columns[:, 0]]
    for column in columns.T[1:]:
        maximum = torch.maximum(maximum, terms[..., column])
    return maximum.double()


# From values of training functions (b t n) and of the context y (b s), the answers (b); `without` (b n) are left out.
def recall(functions: Tensor, y: Tensor, width: float, without: Tensor | None = None) -> Tensor:
    """Σ_i w_i f_i(query)"""
    distance = (functions[:, :-1] - y[..., None]).square().sum(dim=1)  # (b n)
    if without is not None:
        distance = distance.masked_fill(without, torch.inf)
    return (torch.softmax(-distance / (2 * width**2), dim=-1) * functions[:, -1]).sum(dim=-1)


def mix(functions: Tensor, y: Tensor, penalty: float, without: Tensor | None = None) -> Tensor:
    """φ' Φ' (Φ Φ' + penalty I)⁻¹ y"""
    if without is not None:
        functions = functions.masked_fill(without[:, None], 0.0)
    context, query = functions[:, :-1], functions[:, -1:]  # (b s n), (b 1 n)
    identity = torch.eye(context.shape[1], dtype=functions.dtype, device=functions.device)
    gram = context @ context.mT + penalty * identity  # (b s s)
    weights = torch.cholesky_solve(y[..., None], torch.linalg.cholesky(gram))
    return (query @ context.mT @ weights)[:, 0, 0]


@functools.lru_cache(maxsize=256)
def settings(task: FuzzyLogic) -> tuple[float, float]:
    """The width of `recall` and the penalty of `mix`, chosen by leaving one training function out."""
    rows = task.functions("train")
    if len(rows) == 1:  # leaving one out would leave none
        return WIDTHS[0], PENALTIES[0]
    batch = task.batch("validation", CHOSEN_ON, seed=0, step=0)
    errors = torch.zeros(2, len(WIDTHS), dtype=torch.float64)
    for indices in torch.arange(CHOSEN_ON).split(_at_once(task, len(rows))):
        tokens = batch.inputs[indices]
        functions = values(tokens[..., :-1], rows)  # (b t n)
        y = tokens[:, :-1, -1].double()
        answer = batch.targets[indices, -1, 0].double()
        # Leave out the function that made the sequence.
        without = (batch.latents["terms"][indices, None] == rows).all(dim=-1)  # (b n)
        for i, (width, penalty) in enumerate(zip(WIDTHS, PENALTIES, strict=True)):
            errors[0, i] += (recall(functions, y, width, without) - answer).square().sum()
            errors[1, i] += (mix(functions, y, penalty, without) - answer).square().sum()
    best = errors.argmin(dim=1)
    return WIDTHS[best[0]], PENALTIES[best[1]]


def _at_once(task: FuzzyLogic, functions: int) -> int:
    """How many sequences fit into `LARGEST` numbers."""
    return max(1, LARGEST // (task.length * functions))


# -------------------------------------------------------------------------------------------------------------- ceiling
def ceiling(task: FuzzyLogic, batch: Batch) -> Float[Tensor, "b"]:
    """The posterior mean (b) at the query: over all functions that agree with the context."""
    terms = torch.arange(2**task.variables)[None]
    means = []
    for tokens in batch.inputs.cpu():
        values_of_terms = conjunctions(tokens[None, :, :-1], terms)[0]  # (t terms)
        means.append(_consistent(values_of_terms, tokens[:-1, -1], task.terms).double().mean())
    return torch.stack(means).to(batch.inputs.device)


def _consistent(values: Tensor, y: Tensor, terms: int) -> Tensor:
    """The answer at the query of each function that agrees with the context.

    values (t, all terms): of every term at every input; y (t - 1).  A maximum of terms equals y if no term exceeds y at
    any example, and if at every example some term attains y.  The first condition rules out most terms.
    """
    # The comparisons are exact, because y holds the same floating-point numbers.
    viable = (values[:-1] <= y[:, None]).all(dim=0).nonzero()[:, 0]  # the terms that never exceed y
    count = math.comb(len(viable), terms)
    if count > LISTED_CANDIDATES:
        raise ValueError(
            f"baselines: {len(y)} examples leave {count} functions of {terms} terms possible, "
            f"but the ceiling can enumerate at most {LISTED_CANDIDATES}; use a longer context"
        )
    candidates = _combinations(len(viable), terms)  # (functions terms)
    attained = values[:-1, viable] == y[:, None]  # (t-1 viable)
    agree = attained[:, candidates].any(dim=-1).all(dim=0)  # (functions)
    return values[-1, viable][candidates[agree]].amax(dim=-1)


@functools.lru_cache(maxsize=64)
def _combinations(count: int, size: int) -> Tensor:
    return torch.tensor(list(itertools.combinations(range(count), size)))
