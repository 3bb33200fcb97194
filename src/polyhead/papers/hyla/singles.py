"""Schug, Kobayashi, Akram, Sacramento, Pascanu (2024), "Attention as a hypernetwork": single runs.

`polyhead list recipes` lists them; `polyhead train fuzzy-hyla --seed 1 --train.lr 3e-3` runs one with changed fields.
"""

from collections.abc import Callable
from dataclasses import replace

from polyhead.config import Decay, Run, Train
from polyhead.papers.hyla.rows import ROWS
from polyhead.papers.hyla.sizes import FUZZY, SRAVEN, fuzzy_task, make
from polyhead.papers.sizes import Setting
from polyhead.spec.shapes import one_of
from polyhead.tasks import Sraven

# The scales of single runs of fuzzy logic; `original`: as `paper`, with the details of the paper's code.
LONG = ("short", "paper", "original")
SPLITS = ("iid", "compositional", "novel")
MODELS = ("softmax", "linear", "hyla")


def fuzzy(row: str) -> Callable[..., Run]:
    """The recipe of a model of Table A1 on fuzzy logic."""

    def recipe(scale: str = "short") -> Run:
        return fuzzy_run(row, scale)

    recipe.__doc__ = f"""{ROWS[row].label} on fuzzy logic: the network of Table A1, a shorter training.

    polyhead train fuzzy-{row}: 15,000 steps.  --scale paper: 50,000 steps; its compositional R² in the paper:
    {ROWS[row].printed("fuzzy")}.
    """
    return recipe


def fuzzy_run(row: str, scale: str) -> Run:
    """One of the paper's runs on fuzzy logic.

    `short`: fewer steps, with more frequent evaluation on fewer sequences.  `original`: dropout 0.1 on the code with
    one mask for batch and heads, weight decay on q/k/v biases and relative-bias tables, a cosine that ends `warmup`
    steps early, and the splits of its random generator.
    """
    one_of("recipes", "scale", scale, LONG)
    base_scale = "short" if scale == "short" else "paper"
    shape, task = FUZZY[base_scale], fuzzy_task(base_scale, 0)
    train = Train(
        steps=shape.steps,
        evaluate=SPLITS,
        eval_batches=shape.eval_batches,
        eval_every=2500 if scale == "short" else 10_000,
        save_every=1000,
    )
    run = replace(make(task, row, shape, shape.grid()[0], 0), name=f"fuzzy-{row}", train=train, threads=None)
    if scale != "original":
        return run
    train = replace(train, decay=Decay(qkv_biases=True, relative_bias=True), early_floor=True)
    model = replace(run.transformer, dropout=0.1, dropout_shared=True)
    return replace(run, task=replace(task, split="legacy"), model=model, train=train)


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
