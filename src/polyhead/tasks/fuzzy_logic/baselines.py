"""Baselines and ceiling of in-context regression: the score to beat as evidence of composition, and the maximum.

No baseline knows the terms.  Four baselines predict the query from the context alone, with fixed hyper-parameters.  Two
baselines use the training functions; each has one hyper-parameter, chosen on these functions:

    context_mean        mean of the context's targets
    nearest_neighbour   the target of the nearest context input (Euclidean)
    ridge               linear least squares with an intercept and penalty 1 (scikit-learn's default) on the slopes
    gaussian_process    kernel exp(-|x - x'|² / (2 · 0.5²)), noise variance 0.01, prior mean = mean of the context.  A
                        length scale of half the cube suits functions with one or two kinks along each axis.  The data
                        have no noise; the variance accounts for the kinks, which a smooth kernel cannot follow.
    recall, mix         the training functions weighted by how well they fit, and their best linear combination:
                        see function_baselines.py
    ceiling             mean answer of all functions of the family that agree with the whole context exactly: the Bayes
                        estimate of a solver that knows the family, but not which combinations belong to the split

A Gaussian process has an R² of 0.79 at length 32, above some trained attention models.
All baselines are batched closed forms in float64.
"""

import functools
import itertools
import math
from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polyhead.config import Batch
from polyhead.spec.shapes import shaped
from polyhead.tasks.fuzzy_logic import function_baselines
from polyhead.tasks.fuzzy_logic.task import FuzzyLogic, conjunctions
from polyhead.tasks.task import Score, scores_in_parts

PENALTY = 1.0
LENGTH_SCALE = 0.5
NOISE = 0.01
CHUNK = 500  # sequences at once
LISTED_CANDIDATES = 200_000  # most candidate functions of one sequence to enumerate


def baselines(
    task: FuzzyLogic,
    split: str,
    *,
    sequences: int = 2000,
    seed: int = 0,
    batch_size: int = CHUNK,
) -> dict[str, Score]:
    """R² of every baseline and of the ceiling on `split`, over `sequences` sequences of stream `seed`.

    `batch_size`: the batch size of the evaluation, to score the same sequences.
    Raises ValueError for an unknown split, and if a short context leaves too many functions to enumerate.
    """

    def score(batch: Batch) -> dict[str, Tensor]:
        guesses = predictions(batch) | function_baselines.predictions(task, batch)
        guesses["ceiling"], count = ceiling(task, batch)
        values = {"answers": count}
        for name, guess in guesses.items():
            outputs = batch.targets.double().clone()
            outputs[:, -1, 0] = guess
            values[name] = task.metrics(outputs, batch)["r2"]
        return values

    return scores_in_parts(score, task, split, sequences, seed, size=batch_size)


def predictions(batch: Batch) -> dict[str, Float[Tensor, "b"]]:
    """Predictions at the queries of `batch` of each baseline that uses the context alone."""
    tokens = batch.inputs.double()
    x, y, query = tokens[:, :-1, :-1], tokens[:, :-1, -1], tokens[:, -1, :-1]
    return {name: predict(x, y, query) for name, predict in BASELINES.items()}


# ------------------------------------------------------------------------------------------------------------ baselines
@shaped
def context_mean(x: Float[Tensor, "b s c"], y: Float[Tensor, "b s"], query: Float[Tensor, "b c"]) -> Float[Tensor, "b"]:
    """mean_s y_s"""
    return y.mean(dim=1)


@shaped
def nearest_neighbour(
    x: Float[Tensor, "b s c"], y: Float[Tensor, "b s"], query: Float[Tensor, "b c"]
) -> Float[Tensor, "b"]:
    """y_s of the s that minimises |x_s - query|"""
    nearest = (x - query[:, None]).square().sum(dim=-1).argmin(dim=1, keepdim=True)
    return y.gather(1, nearest)[:, 0]


@shaped
def ridge(x: Float[Tensor, "b s c"], y: Float[Tensor, "b s"], query: Float[Tensor, "b c"]) -> Float[Tensor, "b"]:
    """w · (query - x̄) + ȳ with w = (X'X + penalty I)⁻¹ X'y of the centred context"""
    centre = x.mean(dim=1, keepdim=True)
    level = y.mean(dim=1, keepdim=True)
    x = x - centre
    gram = x.mT @ x + PENALTY * torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    slopes = torch.linalg.solve(gram, x.mT @ (y - level)[..., None])[..., 0]
    return ((query - centre[:, 0]) * slopes).sum(dim=-1) + level[:, 0]


@shaped
def gaussian_process(
    x: Float[Tensor, "b s c"], y: Float[Tensor, "b s"], query: Float[Tensor, "b c"]
) -> Float[Tensor, "b"]:
    """k(query, X) (K + noise I)⁻¹ (y - ȳ) + ȳ"""
    level = y.mean(dim=1, keepdim=True)
    noisy = _kernel(x, x) + NOISE * torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
    weights = torch.cholesky_solve((y - level)[..., None], torch.linalg.cholesky(noisy))
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


# -------------------------------------------------------------------------------------------------------------- ceiling
def ceiling(task: FuzzyLogic, batch: Batch) -> tuple[Float[Tensor, "b"], Int[Tensor, "b"]]:
    """The posterior mean (b) at the query, and the number (b) of functions that agree with the context."""
    terms = torch.arange(2**task.variables)[None]
    means, counts = [], []
    for tokens in batch.inputs.cpu():
        values = conjunctions(tokens[None, :, :-1], terms)[0]  # (t terms)
        answers = _consistent(values, tokens[:-1, -1], task.terms)
        means.append(answers.double().mean())
        counts.append(len(answers))
    device = batch.inputs.device
    return torch.stack(means).to(device), torch.tensor(counts, device=device)


def _consistent(values: Tensor, y: Tensor, terms: int) -> Tensor:
    """The answer at the query of each function that agrees with the context.

    values (t, all terms): of every term at every input; y (t - 1).  A maximum of terms equals y if no term exceeds y at
    any example, and if at every example some term attains y.  The first condition rules out most terms.
    """
    # The comparisons are exact, because y holds the same floating-point numbers.
    viable = (values[:-1] <= y[:, None]).all(dim=0).nonzero()[:, 0]
    count = math.comb(len(viable), terms)
    if count > LISTED_CANDIDATES:
        raise ValueError(
            f"baselines: {len(y)} examples leave {count} functions of {terms} terms possible, "
            f"but the ceiling can enumerate at most {LISTED_CANDIDATES}; use a longer context"
        )
    candidates = _combinations(len(viable), terms)
    attained = values[:-1, viable] == y[:, None]
    agree = attained[:, candidates].any(dim=-1).all(dim=0)
    return values[-1, viable][candidates[agree]].amax(dim=-1)


@functools.lru_cache(maxsize=64)
def _combinations(count: int, size: int) -> Tensor:
    return torch.tensor(list(itertools.combinations(range(count), size)))
