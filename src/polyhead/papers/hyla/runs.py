"""The runs of Schug, Kobayashi, Akram, Sacramento, Pascanu (2024), "Attention as a hypernetwork", and their scales.

short   the paper's network, batch and rate, with fewer steps: minutes of one core for a run of fuzzy logic.
small   wider heads (8 instead of 2) and gradient clipping: without it some HYLA seeds stall at few steps and high
        rates.  Fuzzy logic with 16 tokens.  SRAVEN with 2 features of 5 values, two layers, columns without
        permutation, and learned positions instead of T5's relative bias: with permuted columns or the bias, no model
        of this size gets far above chance within minutes.

As in the original code, the seed determines all randomness: initial weights, data and the held-out combinations.
Where text and code differ, some settings of the paper's scale are the code's.  Heads on fuzzy logic have width 2; the
text implies 16.  Heads on SRAVEN have width 4; the text implies 8.  Every token attends to all tokens; the text says
"decoder-only".  Four settings are the text's: no dropout (the original code drops 10 % of the code), no weight decay
on biases and norms, a cosine that ends with training, and every part of a held-out combination occurs in training.
docs/results/deviations.md has the others.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from polyhead.config import Decay, Experts, FeedForward, Learned, Mlp, Run, Train, TransformerConfig
from polyhead.papers.hyla.rows import EXPERTS, OURS, ROWS, TOP_K, TableRow
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
    if length is None:
        length = {"paper": 32, "short": 32}.get(scale, 16)
    return FuzzyLogic(variables=4, terms=2, length=length, held_out=held_out, split_seed=seed)


def sraven_task(scale: str, seed: int, *, features: int | None = None, held_out: float = 0.25) -> Sraven:
    """The paper's family: 4 features of 8 values on a 3 x 3 grid; at the smaller scales 2 features of 5 values."""
    is_paper = scale == "paper"
    default, values = (4, 8) if is_paper else (2, 5)
    return Sraven(features or default, values, held_out=held_out, split_seed=seed, permuted=is_paper)


# ----------------------------------------------------------------------------------------------- the runs of figures
def network(task: Task, row: TableRow, shape: Scale) -> TransformerConfig:
    """The paper's network: pre-norm layers, T5 relative bias per layer, biases, tanh GELU, LayerNorm eps 1e-6."""
    inputs, outputs = task.ends
    feedforward: FeedForward = Mlp(shape.hidden, act="gelu_tanh")
    if row.experts:
        feedforward = Experts(EXPERTS, TOP_K, hidden=shape.hidden, act="gelu_tanh")
    return TransformerConfig(
        inputs=inputs,
        outputs=outputs,
        dim=shape.dim,
        layers=shape.layers,
        heads=(replace(row.heads, heads=shape.heads, dim=shape.head_dim, value_dim=shape.head_dim),),
        feedforward=feedforward,
        positions=shape.positions,
        max_length=task.length,
        norm_eps=1e-6,
        bias=True,
        init="hyla",
    )


def make(task: Task, row: str, shape: Scale, setting: Setting, seed: int) -> Run:
    """The run that trains the model `row` of Table A1 on `task`."""
    rows = ROWS | OURS
    model = network(task, rows[one_of("recipes", "model", row, rows)], shape)
    splits = FUZZY_SPLITS if isinstance(task, FuzzyLogic) else SRAVEN_SPLITS
    train = training(shape, setting, splits)
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
    if settings is None:
        settings = shape.grid()
    points = itertools.product(range(shape.seeds), rows, settings)
    return tuple(make(task(seed), row, shape, setting, seed) for seed, row, setting in points)


def three(scale: str, shape: Scale, task: Callable[[int], Task]) -> tuple[Run, ...]:
    """The runs of the paper's three models at the settings of `scale` (see `one_setting`)."""
    return grid(task, THREE, shape, one_setting(shape, scale))


# --------------------------------------------------------------------------------------------------------- single runs
# Scales of a single run of fuzzy logic; `original`: as `paper`, with the details of the paper's code.
LONG = ("short", "paper", "original")
MODELS = ("softmax", "linear", "hyla")


def fuzzy(row: str) -> Callable[..., Run]:
    """The recipe of a model of Table A1 on fuzzy logic, by `polyhead train`.

    The scale `short` has fewer steps, with more frequent evaluation on fewer sequences.  The scale `original` has
    dropout 0.1 on the code with one mask for batch and heads; weight decay on q/k/v biases and relative-bias tables; a
    cosine that ends `warmup` steps early; and the splits of the original code's random generator.
    """

    def recipe(scale: str = "short") -> Run:
        one_of("recipes", "scale", scale, LONG)
        size, eval_every = "paper", 10_000
        if scale == "short":
            size, eval_every = "short", 2500
        shape, task = FUZZY[size], fuzzy_task(size, 0)
        model = network(task, ROWS[row], shape)
        train = Train(
            steps=shape.steps,
            evaluate=("iid", "compositional", "novel"),
            eval_batches=shape.eval_batches,
            eval_every=eval_every,
            save_every=1000,
        )
        if scale == "original":
            task = replace(task, split="legacy")
            model = replace(model, dropout=0.1, dropout_shared=True)
            train = replace(train, decay=Decay(qkv_biases=True, relative_bias=True), early_floor=True)
        return Run(name=f"fuzzy-{row}", task=task, model=model, train=train)

    recipe.__doc__ = f"""{ROWS[row].label} on fuzzy logic: the network of Table A1, a shorter training.

    polyhead train fuzzy-{row}: 15,000 steps.  --scale paper: 50,000 steps; its compositional R² in the paper:
    {ROWS[row].printed("fuzzy")}.
    """
    return recipe


def sraven(row: str) -> Callable[[], Run]:
    """The recipe of a model of Table A1 on SRAVEN."""

    def recipe() -> Run:
        run = make(Sraven(), row, SRAVEN["paper"], Setting(1e-3, 0.1, 1000), 0)
        return replace(run, name=f"sraven-{row}", threads=None)

    recipe.__doc__ = f"""{ROWS[row].label} on SRAVEN: four layers, 20 M instances, as in Table A1.

    polyhead train sraven-{row}.  156,250 steps.  Its compositional accuracy in the paper: {ROWS[row].printed("sraven")}
    (Bayes-optimal: 0.92).
    """
    return recipe
