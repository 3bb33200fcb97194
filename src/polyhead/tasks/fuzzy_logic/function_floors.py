"""Two floors of in-context regression that are made of whole training functions and know no term.

With training functions f_1 ... f_F, a context (x_s, y_s) and a query x:

    recall    the posterior mean over the training functions, all equally likely beforehand,

                  Σ_i w_i f_i(x) / Σ_i w_i          w_i = exp(-Σ_s (y_s - f_i(x_s))² / (2 width²))

              A function of the training set leaves no doubt; one that was never seen agrees with none of them, so that
              errors need a likelihood: a Gaussian, independent from example to example.
    mix       ridge regression of the context on the values of all training functions, without an intercept,

                  Σ_i c_i f_i(x)                    c = argmin Σ_s (y_s - Σ_i c_i f_i(x_s))² + penalty |c|²

              With Φ (s F) the values at the context and φ (F) those at the query this is φ' Φ' (Φ Φ' + penalty I)⁻¹ y.

`width` and `penalty` are those of the grids below with the least squared error where a training function takes the part
of one never seen: on sequences of the validation split, each without the very function that made it.  That width is
too wide for functions of the training set, so that `recall` does not reach 1 on them.  A score above `recall` is no
memory of training functions; one that is not above `mix` may be a linear mixture of them.
"""

import functools

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from polyhead.config import Batch
from polyhead.spec.shapes import shaped
from polyhead.tasks.fuzzy_logic.task import FuzzyLogic, zadeh

WIDTHS = tuple(0.05 * 2 ** (i / 2) for i in range(11))  # 0.05 to 1.6
PENALTIES = tuple(10 ** (i / 2) for i in range(-8, 3))  # 0.0001 to 10
CHOSEN_ON = 500  # sequences of the validation split
LARGEST = 2**23  # numbers held at once
LISTED_FUNCTIONS = 200_000  # training functions


def predictions(task: FuzzyLogic, batch: Batch) -> dict[str, Float[Tensor, "b"]]:
    """What `recall` and `mix` answer to the queries of `batch`; {} beyond `LISTED_FUNCTIONS` training functions."""
    rows = task.functions("train")
    if len(rows) > LISTED_FUNCTIONS:
        return {}
    width, penalty = settings(task)
    parts: dict[str, list[Tensor]] = {"recall": [], "mix": []}
    for tokens in batch.inputs.split(_at_once(task, len(rows))):
        known, y = values(tokens[..., :-1], rows), tokens[:, :-1, -1].double()
        parts["recall"].append(recall(known, y, width))
        parts["mix"].append(mix(known, y, penalty))
    return {name: torch.cat(answers) for name, answers in parts.items()}


@shaped
def values(x: Float[Tensor, "b t c"], rows: Int[Tensor, "n k"]) -> Float[Tensor, "b t n"]:
    """f_i(x) of the functions whose terms are `rows`, at every input, the query last; in float64."""
    used, places = rows.to(x.device).unique(return_inverse=True)
    terms = torch.stack([zadeh(x, term.expand(len(x), 1)) for term in used], dim=-1)
    found = terms[..., places[:, 0]]
    for place in places.T[1:]:
        found = torch.maximum(found, terms[..., place])
    return found.double()


@shaped
def recall(
    known: Float[Tensor, "b t n"], y: Float[Tensor, "b s"], width: float, without: Bool[Tensor, "b n"] | None = None
) -> Float[Tensor, "b"]:
    """Σ_i w_i f_i(query); `without`: functions that are left out."""
    distance = (known[:, :-1] - y[..., None]).square().sum(dim=1)
    if without is not None:
        distance = distance.masked_fill(without, torch.inf)
    return (torch.softmax(-distance / (2 * width**2), dim=-1) * known[:, -1]).sum(dim=-1)


@shaped
def mix(
    known: Float[Tensor, "b t n"], y: Float[Tensor, "b s"], penalty: float, without: Bool[Tensor, "b n"] | None = None
) -> Float[Tensor, "b"]:
    """φ' Φ' (Φ Φ' + penalty I)⁻¹ y; `without`: functions that are left out."""
    if without is not None:
        known = known.masked_fill(without[:, None], 0.0)
    context, query = known[:, :-1], known[:, -1:]
    gram = context @ context.mT + penalty * torch.eye(context.shape[1], dtype=known.dtype, device=known.device)
    weights = torch.cholesky_solve(y[..., None], torch.linalg.cholesky(gram))
    return (query @ context.mT @ weights)[:, 0, 0]


@functools.lru_cache(maxsize=256)
def settings(task: FuzzyLogic) -> tuple[float, float]:
    """The width of `recall` and the penalty of `mix`, by leaving one training function out."""
    rows = task.functions("train")
    if len(rows) == 1:  # nothing is left
        return WIDTHS[0], PENALTIES[0]
    batch = task.batch("validation", CHOSEN_ON, seed=0, step=0)
    errors = torch.zeros(2, len(WIDTHS), dtype=torch.float64)
    size = _at_once(task, len(rows))
    parts = (array.split(size) for array in (batch.inputs, batch.targets, batch.latents["terms"]))
    for tokens, target, own in zip(*parts, strict=True):
        known, y, wanted = values(tokens[..., :-1], rows), tokens[:, :-1, -1].double(), target[:, -1, 0].double()
        without = (own[:, None] == rows).all(dim=-1)
        for i, (width, penalty) in enumerate(zip(WIDTHS, PENALTIES, strict=True)):
            errors[0, i] += (recall(known, y, width, without) - wanted).square().sum()
            errors[1, i] += (mix(known, y, penalty, without) - wanted).square().sum()
    best = errors.argmin(dim=1)
    return WIDTHS[best[0]], PENALTIES[best[1]]


def _at_once(task: FuzzyLogic, functions: int) -> int:
    """Sequences."""
    return max(1, LARGEST // (task.length * functions))
