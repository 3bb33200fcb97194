"""The sizes at which a study is run: `paper`, `short` (fuzzy logic alone), `small` (two CPU cores), `smoke` (does
everything run?), and one run of the HYLA study at each; `dual/runs.py` says what its own sizes mean.

paper   the setting of Table A3: fuzzy logic 2 layers, 50,000 steps; SRAVEN 4 layers, 10 to 40 M instances.
short   the paper's network, batch and rate, trained for 15,000 steps and not 50,000: minutes of a core a run of fuzzy
        logic.
small   smaller networks, wider heads (8 instead of 2), fewer steps, gradients clipped at 1 (with few steps and high
        rates some HYLA seeds stall otherwise).  Fuzzy logic with 16 tokens.  SRAVEN with 2 features of 5 values, in
        two layers, with columns that do not permute the features, and learned positions in place of T5's relative
        bias: at this size neither permuted columns nor the bias let any model far above chance within minutes.
smoke   a few steps.  Its numbers mean nothing.

As in the original code a seed changes everything random: initial weights, data and which combinations are held out.
Elsewhere the paper's text counts: no dropout (the original code drops 10 % of the code), weight decay exempts biases
and norms, the cosine ends with training, every part of a held-out combination occurs in training.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from polyhead.config import Learned, Position, RelativeBias, Run, Sinusoidal, Task, Train, TransformerConfig
from polyhead.papers.hyla.rows import OURS, ROWS
from polyhead.spec.shapes import one_of
from polyhead.tasks import FuzzyLogic, Sraven

FUZZY_SPLITS = ("validation", "iid", "compositional", "novel")
SRAVEN_SPLITS = ("validation", "iid", "compositional")


@dataclass(frozen=True)
class Setting:
    """Lr, weight decay, warm-up: what is searched."""

    lr: float
    weight_decay: float
    warmup: int


@dataclass(frozen=True)
class Scale:
    """A network, its training, and the grid of settings that is searched."""

    dim: int
    hidden: int
    layers: int
    heads: int
    head_dim: int
    steps: int
    batch_size: int
    lrs: tuple[float, ...]
    decays: tuple[float, ...]
    warmups: tuple[int, ...]
    clip: float | None
    eval_batches: int
    seeds: int
    positions: Position = RelativeBias()  # noqa: RUF009 (frozen)
    betas: tuple[float, float] = (0.9, 0.999)
    final: float = 0.1
    dropout: float = 0.0
    act: str = "swiglu"
    """Of the feed-forward layers of the dual-attention study; `norm_order`: of its transformers."""
    norm_order: str = "pre"

    def grid(self) -> tuple[Setting, ...]:
        """All settings."""
        return tuple(Setting(*point) for point in itertools.product(self.lrs, self.decays, self.warmups))

    def widened(self, factor: float, *, heads: bool = False) -> "Scale":
        """`factor` times as wide.  The paper multiplies the model, the query-key-value and the MLP width; its code also
        the number of heads (`heads`), so that a head keeps its width."""
        many = round(self.heads * factor) if heads else self.heads
        total = round(self.heads * self.head_dim * factor)
        wide = replace(self, dim=round(self.dim * factor), hidden=round(self.hidden * factor))
        return replace(wide, heads=many, head_dim=total // many)


SCALES: dict[str, dict[str, Scale]] = {
    "paper": {
        "fuzzy": Scale(128, 256, 2, 8, 2, 50_000, 128, (1e-3, 3e-3), (0.1, 0.03), (100,), None, 125, 3),
        "sraven": Scale(128, 256, 4, 16, 4, 156_250, 128, (1e-3, 3e-4), (0.1, 0.3), (1000, 3000), None, 400, 3),
        "games": Scale(
            *(128, 256, 2, 2, 64, 250, 512, (1e-3,), (0.0,), (0,), None, 20, 5, Learned()),
            betas=(0.9, 0.99),
            final=1.0,
            dropout=0.1,
        ),
        "objects": Scale(
            *(64, 128, 2, 2, 32, 1600, 512, (1e-3,), (0.0,), (0,), None, 20, 10, Learned()),
            final=1.0,
            act="relu",
        ),
        "maths": Scale(
            *(128, 256, 2, 8, 16, 390_600, 512, (6e-4,), (0.0,), (0,), None, 20, 5, Sinusoidal()),
            betas=(0.9, 0.995),
            final=1.0,
            dropout=0.1,
            act="relu",
            norm_order="post",
        ),
        "images": Scale(
            *(384, 384, 8, 12, 32, 35_200, 128, (1e-3,), (5e-5,), (1760,), None, 79, 10, Learned()),
            final=0.01,
            act="gelu",
        ),
    },
    "short": {
        "fuzzy": Scale(128, 256, 2, 8, 2, 15_000, 128, (1e-3,), (0.1,), (100,), None, 32, 3),
    },
    "small": {
        "fuzzy": Scale(64, 128, 2, 8, 8, 2000, 64, (2e-3, 5e-3), (0.1,), (100,), 1.0, 32, 3),
        "sraven": Scale(64, 128, 2, 8, 8, 1500, 64, (1e-3, 3e-3), (0.1,), (100,), 1.0, 32, 3, Learned()),
        "games": Scale(64, 128, 2, 2, 32, 600, 64, (2e-3,), (0.0,), (50,), 1.0, 16, 3, Learned()),
        "objects": Scale(64, 128, 2, 4, 16, 1200, 64, (2e-3,), (0.0,), (100,), 1.0, 16, 3, Learned(), act="relu"),
        "maths": Scale(64, 128, 2, 4, 16, 800, 32, (3e-3,), (0.0,), (100,), 1.0, 16, 3, Sinusoidal(), act="relu"),
        "images": Scale(
            *(64, 128, 2, 4, 16, 3000, 64, (3e-3,), (0.1,), (100,), 1.0, 6, 3, Learned()),
            dropout=0.1,
            act="gelu",
        ),
    },
    "smoke": {
        "fuzzy": Scale(16, 32, 1, 4, 4, 4, 8, (1e-3, 3e-3), (0.1,), (1,), 1.0, 2, 2),
        "sraven": Scale(16, 32, 1, 4, 4, 4, 8, (1e-3, 3e-3), (0.1,), (1,), 1.0, 2, 2, Learned()),
        "games": Scale(16, 96, 2, 2, 8, 4, 8, (2e-3,), (0.0,), (1,), 1.0, 2, 2, Learned()),
        "objects": Scale(16, 32, 2, 2, 8, 4, 8, (2e-3,), (0.0,), (1,), 1.0, 2, 2, Learned(), act="relu"),
        "maths": Scale(16, 32, 1, 2, 8, 4, 4, (2e-3,), (0.0,), (1,), 1.0, 2, 2, Sinusoidal(), act="relu"),
        "images": Scale(16, 32, 2, 2, 8, 4, 8, (2e-3,), (0.0,), (1,), 1.0, 2, 2, Learned(), act="gelu"),
    },
}


def size(scale: str, task: str) -> Scale:
    """The size named `scale` for a task such as `fuzzy` or `games`.  ValueError: there is none."""
    sizes = SCALES[one_of("recipes", "scale", scale, SCALES)]
    if task not in sizes:
        others = ", ".join(name for name, of in SCALES.items() if task in of)
        raise ValueError(
            f"recipes: scale {scale!r} is of {', '.join(sizes)} alone, not of {task}; choose from {others}"
        )
    return sizes[task]


def fuzzy_task(scale: str, seed: int, *, held_out: float = 0.7, length: int | None = None) -> FuzzyLogic:
    """The paper's family: 4 variables, 2 terms.  32 tokens, 16 where the network is smaller, too."""
    length = length or (32 if scale in ("paper", "short") else 16)
    return FuzzyLogic(variables=4, terms=2, length=length, held_out=held_out, split_seed=seed)


def sraven_task(scale: str, seed: int, *, features: int | None = None, held_out: float = 0.25) -> Sraven:
    """The paper's family: 4 features of 8 values on a 3 x 3 grid; at the smaller scales 2 features of 5 values."""
    features = features or (4 if scale == "paper" else 2)
    values = 8 if scale == "paper" else 5
    return Sraven(features=features, values=values, held_out=held_out, split_seed=seed, permuted=scale == "paper")


def make(task: Task, row: str, shape: Scale, setting: Setting, seed: int) -> Run:
    """The run that trains the model `row` of Table A1 on `task`.

    The paper's network: pre-norm layers, T5 relative bias per layer, biases, tanh GELU, LayerNorm eps 1e-6.
    """
    chosen = (ROWS | OURS)[one_of("recipes", "model", row, ROWS | OURS)]
    inputs, outputs = task.ends
    model = TransformerConfig(
        *(inputs, outputs),
        dim=shape.dim,
        layers=shape.layers,
        heads=(chosen.sized(shape.heads, shape.head_dim),),
        feedforward=chosen.feedforward(shape.hidden),
        positions=shape.positions,
        max_length=task.length,
        norm_eps=1e-6,
        bias=True,
        init="hyla",
    )
    train = training(shape, setting, FUZZY_SPLITS if isinstance(task, FuzzyLogic) else SRAVEN_SPLITS)
    name = f"{_kind(task)}-{row}-{seed}"
    return Run(name=name, task=task, model=model, train=train, seed=seed, threads=1)


def training(shape: Scale, setting: Setting, splits: tuple[str, ...]) -> Train:
    """How a run of that size is trained and on which splits it is scored."""
    return Train(
        steps=shape.steps,
        batch_size=shape.batch_size,
        lr=setting.lr,
        weight_decay=setting.weight_decay,
        betas=shape.betas,
        warmup=setting.warmup,
        final=shape.final,
        clip=shape.clip,
        evaluate=splits,
        eval_batches=shape.eval_batches,
        eval_every=max(shape.steps // 4, 1),
        log_every=max(shape.steps // 60, 1),
        save_every=max(shape.steps // 4, 1),
    )


def _kind(task: Task) -> str:
    """Of the content alone, so that two figures that share a run share its folder."""
    if isinstance(task, FuzzyLogic):
        return f"fuzzy-{task.length}-{100 * task.held_out:.0f}"
    if isinstance(task, Sraven):
        return f"sraven-{task.features}-{task.values}-{100 * task.held_out:.0f}"
    return task.name


def grid(
    task: Callable[[int], Task], rows: Iterable[str], shape: Scale, settings: Sequence[Setting] | None = None
) -> tuple[Run, ...]:
    """Every model with every setting (default: the whole grid of `shape`) and seed; `task` is made from the seed."""
    points = itertools.product(range(shape.seeds), rows, shape.grid() if settings is None else settings)
    return tuple(make(task(seed), row, shape, setting, seed) for seed, row, setting in points)
