"""Two baselines of in-context regression that use whole training functions and do not know the terms.

With training functions f_1 ... f_F, a context (x_s, y_s) and a query x:

    recall    the posterior mean over the training functions, all equally likely beforehand,

                  Σ_i w_i f_i(x) / Σ_i w_i          w_i = exp(-Σ_s (y_s - f_i(x_s))² / (2 width²))

              If the function is in the training set, it fits exactly.  An unseen function agrees with none of them, so
              errors need a likelihood: a Gaussian, independent for each example.
    mix       ridge regression of the context on the values of all training functions, without an intercept,

                  Σ_i c_i f_i(x)                    c = argmin Σ_s (y_s - Σ_i c_i f_i(x_s))² + penalty |c|²

              With Φ (s F) the values at the context and φ (F) those at the query this is φ' Φ' (Φ Φ' + penalty I)⁻¹ y.

`width` and `penalty` are chosen from the grids below by squared error on the validation split, where the training
function that made a sequence is left out for it.  A score above `recall` is more than memory of training functions.  A
score that is not above `mix` may come from a linear combination of them.
"""

import functools

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from polyhead.config import Batch
from polyhead.spec.shapes import shaped
from polyhead.tasks.fuzzy_logic.task import FuzzyLogic, conjunctions

WIDTHS = tuple(0.05 * 2 ** (i / 2) for i in range(11))  # 0.05 to 1.6
PENALTIES = tuple(10 ** (i / 2) for i in range(-8, 3))  # 0.0001 to 10
CHOSEN_ON = 500  # sequences of the validation split that choose width and penalty
LARGEST = 2**23  # most numbers in memory at once
LISTED_FUNCTIONS = 200_000  # most training functions to enumerate


def predictions(task: FuzzyLogic, batch: Batch) -> dict[str, Float[Tensor, "b"]]:
    """Predictions of `recall` and `mix` at the queries of `batch`; {} beyond `LISTED_FUNCTIONS` training functions."""
    rows = task.functions("train")
    if len(rows) > LISTED_FUNCTIONS:
        return {}
    width, penalty = settings(task)
    recalled, mixed = [], []
    for tokens in batch.inputs.split(_at_once(task, len(rows))):
        functions = values(tokens[..., :-1], rows)
        y = tokens[:, :-1, -1].double()
        recalled.append(recall(functions, y, width))
        mixed.append(mix(functions, y, penalty))
    return {"recall": torch.cat(recalled), "mix": torch.cat(mixed)}


@shaped
def values(x: Float[Tensor, "b t c"], rows: Int[Tensor, "n k"]) -> Float[Tensor, "b t n"]:
    """f_i(x) in float64 of the functions with terms `rows`, at every input; the query is last."""
    # Each term is computed once, and a function is the maximum of its terms.
    used, columns = rows.to(x.device).unique(return_inverse=True)
    terms = conjunctions(x, used[None])
    maximum = terms[..., columns[:, 0]]
    for column in columns.T[1:]:
        maximum = torch.maximum(maximum, terms[..., column])
    return maximum.double()


@shaped
def recall(
    functions: Float[Tensor, "b t n"],
    y: Float[Tensor, "b s"],
    width: float,
    without: Bool[Tensor, "b n"] | None = None,
) -> Float[Tensor, "b"]:
    """Σ_i w_i f_i(query); `without`: functions to leave out."""
    distance = (functions[:, :-1] - y[..., None]).square().sum(dim=1)
    if without is not None:
        distance = distance.masked_fill(without, torch.inf)
    return (torch.softmax(-distance / (2 * width**2), dim=-1) * functions[:, -1]).sum(dim=-1)


@shaped
def mix(
    functions: Float[Tensor, "b t n"],
    y: Float[Tensor, "b s"],
    penalty: float,
    without: Bool[Tensor, "b n"] | None = None,
) -> Float[Tensor, "b"]:
    """φ' Φ' (Φ Φ' + penalty I)⁻¹ y; `without`: functions to leave out."""
    if without is not None:
        functions = functions.masked_fill(without[:, None], 0.0)
    context, query = functions[:, :-1], functions[:, -1:]
    identity = torch.eye(context.shape[1], dtype=functions.dtype, device=functions.device)
    gram = context @ context.mT + penalty * identity
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
        functions = values(tokens[..., :-1], rows)
        y = tokens[:, :-1, -1].double()
        answer = batch.targets[indices, -1, 0].double()
        # Leave out the function that made the sequence.
        without = (batch.latents["terms"][indices, None] == rows).all(dim=-1)
        for i, (width, penalty) in enumerate(zip(WIDTHS, PENALTIES, strict=True)):
            errors[0, i] += (recall(functions, y, width, without) - answer).square().sum()
            errors[1, i] += (mix(functions, y, penalty, without) - answer).square().sum()
    best = errors.argmin(dim=1)
    return WIDTHS[best[0]], PENALTIES[best[1]]


def _at_once(task: FuzzyLogic, functions: int) -> int:
    """How many sequences fit into `LARGEST` numbers."""
    return max(1, LARGEST // (task.length * functions))
