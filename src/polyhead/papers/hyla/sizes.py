"""Fuzzy logic and SRAVEN at several scales (study of Schug et al. 2024), and how one run is made.

short   the paper's network, batch and rate, with fewer steps: minutes of one core for a run of fuzzy logic.
small   wider heads (8 instead of 2) and gradient clipping: without it some HYLA seeds stall at few steps and high
        rates.  Fuzzy logic with 16 tokens.  SRAVEN with 2 features of 5 values, two layers, columns without
        permutation, and learned positions instead of T5's relative bias: with permuted columns or the bias, no model
        of this size gets far above chance within minutes.

As in the original code, the seed determines all randomness: initial weights, data and the held-out combinations.
Three settings of the paper's scale are also the code's.  Heads on fuzzy logic have width 2; the text implies 16.  Heads
on SRAVEN have width 4; the text implies 8.  Every token attends to all tokens; the text says "decoder-only".
Four settings are the text's: no dropout (the original code drops 10 % of the code), no weight decay on biases and
norms, a cosine that ends with training, and every part of a held-out combination occurs in training.
docs/results/deviations.md has the others.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from polyhead.config import FeedForward, Learned, Mechanism, Run, TransformerConfig
from polyhead.papers.hyla.rows import OURS, ROWS
from polyhead.papers.sizes import SMOKE, Scale, Setting, one_setting, training
from polyhead.spec.shapes import one_of
from polyhead.tasks import FuzzyLogic, Sraven
from polyhead.tasks.base import Task

FUZZY_SPLITS = ("validation", "iid", "compositional", "novel")
SRAVEN_SPLITS = ("validation", "iid", "compositional")
# GPU minutes of one run on an RTX 3090 or 4090, from the paper's appendix D.1.
FUZZY_GPU, SRAVEN_GPU = "2-3", "20-200"
# The models in the paper's main text.
THREE = ("hyla", "softmax", "linear")

# fmt: off
PAPER = Scale(
    dim=128, hidden=256, layers=2, heads=8, head_dim=2,
    steps=50_000, batch_size=128, clip=None,
    lrs=(1e-3, 3e-3), decays=(0.1, 0.03), warmups=(100,), seeds=3, eval_batches=125,
)
SMALL = Scale(
    dim=64, hidden=128, layers=2, heads=8, head_dim=8,
    steps=2000, batch_size=64, clip=1.0,
    lrs=(2e-3, 5e-3), decays=(0.1,), warmups=(100,), seeds=3, eval_batches=32,
)
SMALLEST = replace(SMOKE, layers=1, heads=4, head_dim=4, lrs=(1e-3, 3e-3), decays=(0.1,))
FUZZY: dict[str, Scale] = {
    "paper": PAPER,
    "short": replace(PAPER, steps=15_000, lrs=(1e-3,), decays=(0.1,), eval_batches=32),
    "small": SMALL,
    "smoke": SMALLEST,
}
SRAVEN: dict[str, Scale] = {
    "paper": Scale(
        dim=128, hidden=256, layers=4, heads=16, head_dim=4,
        steps=156_250, batch_size=128, clip=None,
        lrs=(1e-3, 3e-4), decays=(0.1, 0.3), warmups=(1000, 3000), seeds=3, eval_batches=400,
    ),
    "small": replace(SMALL, steps=1500, lrs=(1e-3, 3e-3), positions=Learned()),
    "smoke": replace(SMALLEST, positions=Learned()),
}
# fmt: on


def fuzzy_task(scale: str, seed: int, *, held_out: float = 0.7, length: int | None = None) -> FuzzyLogic:
    """The paper's family: 4 variables, 2 terms.  32 tokens, or 16 at scales with a smaller network."""
    length = length or (32 if scale in ("paper", "short") else 16)
    return FuzzyLogic(variables=4, terms=2, length=length, held_out=held_out, split_seed=seed)


def sraven_task(scale: str, seed: int, *, features: int | None = None, held_out: float = 0.25) -> Sraven:
    """The paper's family: 4 features of 8 values on a 3 x 3 grid; at the smaller scales 2 features of 5 values."""
    features = features or (4 if scale == "paper" else 2)
    values = 8 if scale == "paper" else 5
    return Sraven(features=features, values=values, held_out=held_out, split_seed=seed, permuted=scale == "paper")


def network(task: Task, group: Mechanism, feedforward: FeedForward, shape: Scale) -> TransformerConfig:
    """The paper's network: pre-norm layers, T5 relative bias per layer, biases, tanh GELU, LayerNorm eps 1e-6."""
    inputs, outputs = task.ends
    return TransformerConfig(
        inputs=inputs,
        outputs=outputs,
        dim=shape.dim,
        layers=shape.layers,
        heads=(group,),
        feedforward=feedforward,
        positions=shape.positions,
        max_length=task.length,
        norm_eps=1e-6,
        bias=True,
        init="hyla",
    )


def make(task: Task, row: str, shape: Scale, setting: Setting, seed: int) -> Run:
    """The run that trains the model `row` of Table A1 on `task`."""
    chosen = (ROWS | OURS)[one_of("recipes", "model", row, ROWS | OURS)]
    group, feedforward = chosen.sized(shape.heads, shape.head_dim), chosen.feedforward(shape.hidden)
    model = network(task, group, feedforward, shape)
    train = training(shape, setting, FUZZY_SPLITS if isinstance(task, FuzzyLogic) else SRAVEN_SPLITS)
    name = f"{_kind(task)}-{row}-{seed}"
    return Run(name=name, task=task, model=model, train=train, seed=seed, threads=1)


def _kind(task: Task) -> str:
    """A name that depends only on the content, so that figures with the same run share its folder."""
    if isinstance(task, FuzzyLogic):
        return f"fuzzy-{task.length}-{100 * task.held_out:.0f}"
    if isinstance(task, Sraven):
        return f"sraven-{task.features}-{task.values}-{100 * task.held_out:.0f}"
    return task.name


def grid(
    task: Callable[[int], Task], rows: Iterable[str], shape: Scale, settings: Sequence[Setting] | None = None
) -> tuple[Run, ...]:
    """The runs of every model, setting (default: the whole grid of `shape`) and seed; `task` maps a seed to a task."""
    points = itertools.product(range(shape.seeds), rows, shape.grid() if settings is None else settings)
    return tuple(make(task(seed), row, shape, setting, seed) for seed, row, setting in points)


def three(scale: str, shape: Scale, task: Callable[[int], Task]) -> tuple[Run, ...]:
    """The runs of the paper's three models at the settings of `scale` (see `one_setting`)."""
    return grid(task, THREE, shape, one_setting(shape, scale))
