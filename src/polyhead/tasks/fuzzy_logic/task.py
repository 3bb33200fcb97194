"""Fuzzy logic: infer a fuzzy function from examples in the context and apply it to a query (Schug et al. 2024, §3).

A task is a disjunction of `terms` conjunctions over `variables` fuzzy variables in [0, 1], under the Zadeh operators

    term_i(x) = min_v (x_v if bit v of i else 1 - x_v)        f(x) = max_k term_{i_k}(x)

Term i is written as its `variables` bits, the first variable first: of 4 variables, term 2 = 0010 is
(not x1) and (not x2) and x3 and (not x4).  With terms 2 and 7 = 0111 at x = (.1, .3, .8, .4):

    term 2: min(.9, .7, .8, .6) = .6        term 7: min(.9, .3, .8, .4) = .3        f(x) = max(.6, .3) = .6

>>> zadeh(torch.tensor([[[0.1, 0.3, 0.8, 0.4]]]), torch.tensor([[2, 7]]))
tensor([[0.6000]])

A sequence is `length` tokens (x, f(x)).  The last is the query: it carries 0 in place of f(x), the target.
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

from polyhead.config import Values, Vectors
from polyhead.spec.checked import choice
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
    portion,
    seeded,
    shuffled,
    stream,
)
from polyhead.tasks.scores import Score

INPUTS = ("uniform", "fixed_context")
LISTED_COMBINATIONS = 2_000_000  # most combinations to enumerate
TRIES = 100  # random splits to try before a covering one is constructed

Combination = tuple[int, ...]

WORDS = Words(
    metric=(
        "R², per sequence",
        "1 − (prediction − target)² / v, averaged over sequences; v is the population variance of all targets of the "
        "same sequence. 1 is perfect; predicting the mean of the examples scores slightly below 0.",
    ),
    baselines={
        "context_mean": Baseline("Context mean", "predicts the mean target of the examples"),
        "nearest_neighbour": Baseline("Nearest neighbour", "copies the target of the closest example"),
        "ridge": Baseline("Ridge regression", "fits a line to the examples"),
        "gaussian_process": Baseline("Gaussian process", "interpolates smoothly between the examples", drawn=True),
        "recall": Baseline("Recall", "weights the training functions by how well each fits the examples", drawn=True),
        "mix": Baseline("Mixture", "fits a linear combination of the training functions to the examples", drawn=True),
        "ceiling": Baseline("Exact ceiling", "averages all functions of the family that fit the examples", drawn=True),
    },
    part="term",
)


@dataclass(frozen=True)
class FuzzyLogic(Task):
    """In-context regression of fuzzy functions, with combinations of terms held out.

    The last floor(unknown 2^variables) terms are reserved.  Combinations of the other, known, terms are split:

        train           the training tasks, 33 of 66 by default
        validation      fresh samples of training tasks, to select hyper-parameters
        iid             fresh samples of training tasks, for reported scores
        compositional   the held-out combinations: every term occurs in training, the combination does not
        novel           combinations of reserved terms only (mixed combinations belong to no split)

    >>> FuzzyLogic().batch("compositional", 8, seed=0, step=0).inputs.shape
    torch.Size([8, 32, 5])

    Attributes:
        variables: Fuzzy variables of a function.
        terms: Terms of a function.
        length: Tokens of a sequence, the query included.
        held_out: Fraction of the combinations of known terms that are held out.
        unknown: Fraction of the terms that are reserved.
        split: "covered" is random, with every known term in training, for any `split_seed`.  "legacy" and
            "partitionable" are the splits of the original code under JAX before 0.5 (the paper's) and since 0.5.  These
            two exist for 4 variables, 2 terms and the seeds (0, 1, 2, 2024), and need not cover every term.
        split_seed: Seed of the division into known and unseen combinations.
        inputs: "uniform" in [0, 1).  For analysis, "fixed_context" uses the same context inputs in all sequences, with
            targets that follow each function.
    """

    variables: Annotated[int, Meta(ge=1, le=12)] = 4
    terms: Annotated[int, Meta(ge=1, le=64)] = 2
    length: Annotated[int, Meta(ge=2)] = 32
    held_out: Fraction = 0.5
    unknown: Fraction = 0.25
    split: Annotated[str, choice(SPLITS)] = "covered"
    split_seed: int = 0
    inputs: Annotated[str, choice(INPUTS)] = "uniform"

    name: ClassVar[str] = "fuzzy_logic"
    splits: ClassVar[tuple[str, ...]] = ("train", "validation", "iid", "compositional", "novel")
    tail: ClassVar[int] = 1
    metric: ClassVar[str] = "r2"
    words: ClassVar[Words] = WORDS

    def __post_init__(self) -> None:
        super().__post_init__()
        reserved, known = 2**self.variables - self.known, self.known
        if min(reserved, known) < self.terms:
            raise ValueError(
                f"FuzzyLogic: {self.terms} terms a function need as many known and unknown ones, but {self.variables} "
                f"variables with unknown={self.unknown} give {known} known and {reserved} unknown"
            )
        largest = max(known, reserved)
        if math.comb(largest, self.terms) > LISTED_COMBINATIONS:
            raise ValueError(
                f"FuzzyLogic: {math.comb(largest, self.terms)} combinations of {self.terms} in {largest} terms, but at "
                f"most {LISTED_COMBINATIONS} can be listed; use fewer variables or terms"
            )
        if self.split != "covered" and (self.variables, self.terms, self.known) != (4, 2, 12):
            raise ValueError(
                f"FuzzyLogic: split={self.split!r} exists for 4 variables, 2 terms and unknown=0.25, "
                f"not for {self.variables}, {self.terms} and {self.unknown}"
            )
        _split(self.known, self.terms, self.held_out, self.split, self.split_seed)

    @property
    def ends(self) -> tuple[Vectors, Values]:
        return Vectors(self.variables + 1), Values(1)

    @property
    def known(self) -> int:
        """The number of known terms: 0 to known - 1."""
        return 2**self.variables - portion(self.unknown, 2**self.variables)

    def functions(self, split: str) -> Int[Tensor, "_ _"]:
        """All term combinations (n terms) of `split`, ascending within a row."""
        check_split(self, split)
        return _functions(self, split, torch.device("cpu")).clone()

    def sample(self, split: str, batch_size: int, generator: torch.Generator) -> Batch:
        """A batch on the generator's device: inputs (b t variables+1), targets (b t 1), latents terms (b terms)."""
        check_draw(self, split, batch_size)
        ranks, x = self._draw(split, batch_size, generator)
        advance(generator)
        return self._batch(split, ranks, x)

    def contrasts(self, split: str, batch_size: int, generator: torch.Generator) -> tuple[Batch, Batch]:
        """Two batches with the same inputs; each sequence has two different functions of `split`."""
        check_draw(self, split, batch_size)
        count = len(_functions(self, split, generator.device))
        if count < 2:
            raise ValueError(f"FuzzyLogic: contrasts need two functions but {split} has {count}")
        ranks, x = self._draw(split, batch_size, generator)
        advance(generator)
        steps = torch.randint(1, count, (batch_size,), generator=generator, device=generator.device)
        return self._batch(split, ranks, x), self._batch(split, (ranks + steps) % count, x)

    def _draw(self, split: str, batch_size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """The random part of a batch: the index (b) of the function in the split, and the inputs (b t variables)."""
        device = generator.device
        function_draws = fork(generator, f"{self.name}/{split}/functions")
        input_draws = fork(generator, f"{self.name}/{split}/inputs")
        count = len(_functions(self, split, device))
        ranks = torch.randint(count, (batch_size,), generator=function_draws, device=device)
        shape = (batch_size, self.length, self.variables)
        return ranks, torch.rand(shape, generator=input_draws, device=device, dtype=torch.float32)

    def _batch(self, split: str, ranks: Tensor, x: Tensor) -> Batch:
        terms = _functions(self, split, x.device)[ranks]
        if self.inputs == "fixed_context":
            x[:, :-1] = _fixed(self, x.device)[:-1]
        y = zadeh(x, terms)[..., None]
        inputs = torch.cat((x, y), dim=-1)
        inputs[:, -1, -1] = 0.0
        scored = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
        scored[:, -1] = True
        return Batch(inputs, y, None, scored, {"terms": terms})

    @shaped
    def loss(self, outputs: Float[Tensor, "b t c"], batch: Batch) -> Float[Tensor, ""]:
        """Mean squared error at the query."""
        return self._square(outputs, batch).sum() / batch.scored.sum().clamp(min=1)

    @shaped
    def metrics(self, outputs: Float[Tensor, "b t c"], batch: Batch) -> dict[str, Float[Tensor, "b"]]:
        """For each sequence (b): `mse` at the query, and `r2` = 1 - mse / population variance of its targets.

        The variance is over all targets, including the hidden one, as in the paper's released code: predicting the mean
        of the context gives a little less than 0.
        """
        mse = self._square(outputs, batch).sum(dim=-1) / batch.scored.sum(dim=-1)
        variance = batch.targets.var(dim=(1, 2), correction=0)
        return {"r2": 1 - mse / variance, "mse": mse}

    def _square(self, outputs: Tensor, batch: Batch) -> Tensor:
        """The squared errors (b t), 0 where nothing is scored.  Other outputs would be broadcast."""
        expected = tuple(batch.targets.shape)
        if outputs.shape != expected:
            raise ValueError(
                f"FuzzyLogic: outputs must have the targets' shape {expected} but have {tuple(outputs.shape)}"
            )
        return (outputs - batch.targets).square()[..., 0].masked_fill(~batch.scored, 0)

    def token_names(self, batch: Batch, *, source: bool = False) -> tuple[str, ...]:
        return (*map(str, range(1, self.length)), "query")

    def class_name(self, target: str, label: int) -> str:
        """A term as a formula of its variables.

        >>> FuzzyLogic(variables=3).class_name("term 1", 0b011)
        '¬x₁x₂x₃'
        """
        if not target.startswith("term"):
            return str(label)
        literals = []
        for v in range(self.variables):
            bit = (label >> (self.variables - 1 - v)) & 1
            subscript = chr(ord("₁") + v)
            literals.append(f"x{subscript}" if bit else f"¬x{subscript}")
        return "".join(literals)

    def baselines(self, split: str, *, sequences: int = 2000, seed: int = 0) -> dict[str, Score]:
        """R² of baselines that do not compose, and the exact ceiling: see `polyhead.tasks.fuzzy_logic.baselines`."""
        from polyhead.tasks.fuzzy_logic.baselines import baselines  # it imports this file

        return baselines(self, split, sequences=sequences, seed=seed)


@shaped
def zadeh(x: Float[Tensor, "b t c"], terms: Int[Tensor, "b _"]) -> Float[Tensor, "b t"]:
    """f(x) = max over the terms (b k) of each sequence's function; x (b t variables)."""
    return conjunctions(x, terms).amax(dim=-1)


def conjunctions(x: Tensor, terms: Tensor) -> Float[Tensor, "b t k"]:
    """The value of each term (b k), or of terms (1 k) for all sequences: min over the variables of x_v or 1 - x_v."""
    shifts = torch.arange(x.shape[-1] - 1, -1, -1, device=x.device)
    positive = (terms[:, None, :, None] >> shifts) & 1 == 1  # (b 1 k variables)
    return torch.where(positive, x[:, :, None], 1 - x[:, :, None]).amin(dim=-1)


@functools.lru_cache(maxsize=64)
def _functions(task: FuzzyLogic, split: str, device: torch.device) -> Tensor:
    train, held_out = _split(task.known, task.terms, task.held_out, task.split, task.split_seed)
    rows = train
    if split == "compositional":
        rows = held_out
    elif split == "novel":
        rows = tuple(itertools.combinations(range(task.known, 2**task.variables), task.terms))
    return torch.tensor(rows, device=device)


@functools.lru_cache(maxsize=64)
def _fixed(task: FuzzyLogic, device: torch.device) -> Tensor:
    """The inputs (t variables) that all sequences of all splits share, so that a probe fitted on one applies to all."""
    generator = seeded(task.split_seed, f"{task.name}/{task.inputs}")
    return torch.rand(task.length, task.variables, generator=generator, dtype=torch.float32, device="cpu").to(device)


@functools.lru_cache(maxsize=64)
def _split(
    known: int, terms: int, held_out: float, split: str, seed: int
) -> tuple[tuple[Combination, ...], tuple[Combination, ...]]:
    """Training and held-out combinations of `known` terms."""
    rows: list[Combination] = list(itertools.combinations(range(known), terms))
    num_held_out = held_out_count("FuzzyLogic", held_out, len(rows), "combinations")
    num_train = len(rows) - num_held_out
    if split != "covered":
        order = original_order("FuzzyLogic", __package__, rows, split, seed)
    elif num_train * terms < known:
        raise ValueError(
            f"FuzzyLogic: held_out={held_out} leaves {num_train} training functions of {terms} terms, too few to cover "
            f"{known} known terms"
        )
    else:
        order = covering_order(rows, num_held_out, known, "fuzzy_logic/split", seed, TRIES)
    if not order:
        # Random splits that cover all terms are too rare: put a cover at the end, which is trained on.
        cover = _cover(known, terms, stream(seed, "fuzzy_logic/cover"))
        order = [row for row in shuffled(rows, stream(seed, "fuzzy_logic/split", TRIES)) if row not in cover]
        order += sorted(cover)
    return tuple(order[num_held_out:]), tuple(order[:num_held_out])


def _cover(known: int, terms: int, seed: int) -> set[Combination]:
    """As few combinations as contain every known term: a shuffled list cut into groups, the last one filled up."""
    deck = shuffled(list(range(known)), seed)
    deck += deck[: -known % terms]
    return {tuple(sorted(deck[i : i + terms])) for i in range(0, len(deck), terms)}
