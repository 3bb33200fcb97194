"""Baselines and ceiling of in-context regression: the score to beat as evidence of composition, and the maximum.

No baseline knows the terms.  Four baselines predict the query from the context alone, with hyper-parameters fixed in
advance.
On fuzzy logic a Gaussian process still scores an R² of 0.79 at length 32 and 0.94 at 96, above some trained attention
models.  Two baselines use the training functions; each has one hyper-parameter, chosen on these functions:

    context_mean        mean of the context's targets
    nearest_neighbour   the target of the nearest context input (Euclidean)
    ridge               linear least squares with an intercept and penalty 1 (scikit-learn's default) on the slopes
    gaussian_process    kernel exp(-|x - x'|² / (2 · 0.5²)), noise variance 0.01, prior mean = mean of the context.  A
                        length scale of half the cube suits functions with one or two kinks along each axis.  The data
                        have no noise; the variance 0.01 accounts for the kinks, which a smooth kernel cannot follow.
                        With the family's mean, 0.27, as prior mean, R² rises by 0.002 at length 32 and 0.01 at 16.
    recall, mix         the training functions weighted by how well they fit, and their best linear combination:
                        see function_baselines.py
    ceiling             mean answer of all functions of the family that agree with the whole context exactly: the Bayes
                        estimate of a solver that knows the family, but not which combinations belong to the split

The baselines are batched closed forms in float64.  `library="sklearn"` fits scikit-learn's estimators (for the first
four baselines) one sequence at a time, and gives the same numbers.
"""

import functools
import itertools
import math
from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polyhead.config import Batch
from polyhead.spec.optional import optional
from polyhead.spec.shapes import one_of, shaped
from polyhead.tasks.fuzzy_logic import function_baselines
from polyhead.tasks.fuzzy_logic.task import FuzzyLogic, zadeh
from polyhead.tasks.task import Score, check_baselines

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
    library: str = "torch",
    batch_size: int = CHUNK,
) -> dict[str, Score]:
    """R² of every baseline and of the ceiling on `split`, over `sequences` sequences of stream `seed`.

    `batch_size`: the batch size of the evaluation, to score the same sequences.

    Raises ValueError for an unknown split or library, and if a short context leaves too many functions to enumerate.
    """
    check_baselines(task, split, sequences)
    one_of("baselines", "library", library, ("torch", "sklearn"))
    scores: dict[str, list[Tensor]] = {}
    counts = []
    for step, start in enumerate(range(0, sequences, batch_size)):
        batch = task.batch(split, min(batch_size, sequences - start), seed=seed, step=step)
        exact, count = ceiling(task, batch)
        counts.append(count)
        guesses = predictions(batch, library=library) | function_baselines.predictions(task, batch) | {"ceiling": exact}
        for name, guess in guesses.items():
            scores.setdefault(name, []).append(_score(task, guess, batch))
    table = {name: Score.of(torch.cat(parts)) for name, parts in scores.items()}
    identified = (torch.cat(counts) == 1).double().mean().item()
    return {**table, "ceiling": Score.of(torch.cat(scores["ceiling"]), identified)}


def predictions(batch: Batch, *, library: str = "torch") -> dict[str, Float[Tensor, "b"]]:
    """Predictions at the queries of `batch` of each baseline that uses the context alone."""
    tokens = batch.inputs.double()
    x, y, query = tokens[:, :-1, :-1], tokens[:, :-1, -1], tokens[:, -1, :-1]
    guesses = {}
    for name, baseline in BASELINES.items():
        if library == "sklearn":
            baseline = _sklearn(name)
        guesses[name] = baseline(x, y, query)
    return guesses


def _score(task: FuzzyLogic, guess: Tensor, batch: Batch) -> Tensor:
    outputs = batch.targets.double().clone()
    outputs[:, -1, 0] = guess
    return task.metrics(outputs, batch)["r2"]


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
    centre, level = x.mean(dim=1, keepdim=True), y.mean(dim=1, keepdim=True)
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


Predictor = Callable[[Tensor, Tensor, Tensor], Tensor]
BASELINES: dict[str, Predictor] = {
    "context_mean": context_mean,
    "nearest_neighbour": nearest_neighbour,
    "ridge": ridge,
    "gaussian_process": gaussian_process,
}


def _sklearn(name: str) -> Predictor:
    """The baseline `name` by scikit-learn, with one fit per sequence."""
    with optional("baselines", "polyhead[report]"):
        from sklearn.dummy import DummyRegressor
        from sklearn.gaussian_process import GaussianProcessRegressor
        from sklearn.gaussian_process.kernels import RBF
        from sklearn.linear_model import Ridge
        from sklearn.neighbors import KNeighborsRegressor

    makers = {
        "context_mean": DummyRegressor,
        "nearest_neighbour": lambda: KNeighborsRegressor(n_neighbors=1),
        "ridge": lambda: Ridge(alpha=PENALTY),
        "gaussian_process": lambda: GaussianProcessRegressor(RBF(LENGTH_SCALE), alpha=NOISE, optimizer=None),
    }

    def predict(x: Tensor, y: Tensor, query: Tensor) -> Tensor:
        guesses = []
        for one, values, point in zip(x.cpu().numpy(), y.cpu().numpy(), query.cpu().numpy(), strict=True):
            level = values.mean()  # scikit-learn's process has prior mean 0; the other baselines do not depend on it
            guesses.append(makers[name]().fit(one, values - level).predict(point[None])[0] + level)
        return torch.tensor(guesses, dtype=x.dtype, device=x.device)

    return predict


# -------------------------------------------------------------------------------------------------------------- ceiling
def ceiling(task: FuzzyLogic, batch: Batch) -> tuple[Float[Tensor, "b"], Int[Tensor, "b"]]:
    """The posterior mean (b) at the query, and the number (b) of functions that agree with the context."""
    inputs = batch.inputs.cpu()
    x, y = inputs[..., :-1], inputs[:, :-1, -1]
    terms = torch.arange(2**task.variables)
    values = torch.stack([zadeh(x, term.expand(len(x), 1)) for term in terms], dim=-1)  # (b t terms)
    scores = [_consistent(*one, task.terms) for one in zip(values, y, strict=True)]
    guesses = torch.stack([answers.double().mean() for answers in scores])
    device = batch.inputs.device
    return guesses.to(device), torch.tensor([len(answers) for answers in scores], device=device)


def _consistent(values: Tensor, y: Tensor, terms: int) -> Tensor:
    """The answer at the query of each function that agrees with the context.

    values (t, all terms): of every term at every input; y (t - 1).  A maximum of terms equals y if no term exceeds y at
    any example, and if at every example some term attains y.  The first condition rules out most terms.  The comparison
    is exact, because y holds the same floating-point numbers.
    """
    viable = (values[:-1] <= y[:, None]).all(dim=0).nonzero()[:, 0]
    if math.comb(len(viable), terms) > LISTED_CANDIDATES:
        raise ValueError(
            f"baselines: {len(y)} examples leave {math.comb(len(viable), terms)} functions of {terms} terms possible, "
            f"but the ceiling can enumerate at most {LISTED_CANDIDATES}; use a longer context"
        )
    candidates = _combinations(len(viable), terms)
    attained = values[:-1, viable] == y[:, None]
    agree = attained[:, candidates].any(dim=-1).all(dim=0)
    return values[-1, viable][candidates[agree]].amax(dim=-1)


@functools.lru_cache(maxsize=64)
def _combinations(count: int, size: int) -> Tensor:
    return torch.tensor(list(itertools.combinations(range(count), size)))
