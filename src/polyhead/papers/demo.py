"""The runs of `make demo`: a race of a minute, then fuzzy logic with the paper's network and settings.

Steps, rate and seeds were fixed before the first run with them.  Seed 0 of fuzzy logic is excluded, because a pilot run
used it.  The rate is the one of the paper's two that was better on sequences of training functions, for softmax and for
HYLA (docs/results/protocol.md).
"""

import itertools
from dataclasses import replace

import torch

from polyhead.config import Hyla, Run, Softmax, Train
from polyhead.papers.dual.games import SHAPES, game_run
from polyhead.papers.hyla.singles import fuzzy_model
from polyhead.papers.hyla.sizes import fuzzy_task
from polyhead.spec.lazy import own_names
from polyhead.tasks import RelationalGames
from polyhead.train.store import shipped

__dir__ = own_names(__name__)

FUZZY_STEPS, FUZZY_RATE, FUZZY_SEED = 12_500, 3e-3, 1
FEWER_STEPS = 6500
"""Where the processor has no AVX-512: a step takes twice as long there, and the demo ten minutes either way."""
RACE_IMAGES, RACE_SEEDS = 1000, (1, 2)
RACERS = ("dual", "corelnet", "softmax")
RACE_SPLITS = ("iid", "novel_hexominoes", "novel_stripes")


def demo() -> tuple[Run, ...]:
    """The demo: dual attention and CoRelNet against softmax on a relational game, HYLA against softmax on fuzzy logic.

    polyhead demo.  Minutes on two cores; `race` and `fuzzy` describe its parts.
    """
    return (*race(), *fuzzy())


def race() -> tuple[Run, ...]:
    """The game `between`: 1,000 images of pentominoes, 600 steps with batches of 64, two seeds per model."""
    shape, runs = SHAPES["small"], []
    for seed, row in itertools.product(RACE_SEEDS, RACERS):
        task = RelationalGames("between", examples=RACE_IMAGES, split_seed=seed)
        run = game_run(task, row, shape, shape.grid()[0], seed)
        runs.append(replace(run, train=replace(run.train, evaluate=RACE_SPLITS, eval_batches=8, eval_every=50)))
    return tuple(runs)


def steps_on(device: torch.device) -> int:
    """How many steps of fuzzy logic fit into ten minutes.  The number depends on the kind of processor only."""
    slow = device.type == "cpu" and torch.backends.cpu.get_cpu_capability() != "AVX512"
    return FEWER_STEPS if slow else FUZZY_STEPS


def fuzzy(steps: int = FUZZY_STEPS) -> tuple[Run, ...]:
    """The paper's network, batch and one of its rates, 12,500 of its 50,000 steps; 70 % of combinations held out."""
    task = fuzzy_task("paper", FUZZY_SEED)
    groups = {"hyla": Hyla(8, dim=2, value_dim=2), "softmax": Softmax(8, dim=2, value_dim=2)}  # the slower first
    train = Train(
        steps=steps,
        lr=FUZZY_RATE,
        evaluate=("iid", "compositional"),
        eval_batches=16,
        eval_every=500,
        log_every=50,
        save_every=1000,
    )
    return tuple(
        Run(
            name=f"{name}-{FUZZY_SEED}",
            task=task,
            model=fuzzy_model(task, group, dim=128, hidden=256),
            train=train,
            seed=FUZZY_SEED,
            threads=1,
        )
        for name, group in groups.items()
    )


def full() -> tuple[str, ...]:
    """Local trained models that come with polyhead: the networks of `fuzzy` after all of the paper's steps.

    Only seeds of which both networks are there: means over other seeds could not be compared.
    """
    there = {name for name in shipped.models() if shipped.at_hand(name)}
    pairs = ((f"fuzzy-hyla-{seed}", f"fuzzy-softmax-{seed}") for seed in range(1, 6))
    return tuple(name for pair in pairs if there.issuperset(pair) for name in pair)
