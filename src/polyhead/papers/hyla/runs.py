"""Every figure and table of Schug et al. 2024 that needs trained networks, as a function that returns its runs.

Each takes a scale, `small` (two CPU cores, minutes) or `paper`, and what is about fuzzy logic `short` (hours), too;
`polyhead reproduce FIGURE --scale small` trains the runs, or goes on with them, and writes figure, table and verdicts
beside the paper's numbers.  Figures share runs: the
folder of a run follows from its content.  `papers/sizes.py` has the sizes, `rows.py` the models.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from polyhead.config import Run
from polyhead.papers import sizes as scales
from polyhead.papers.hyla.rows import OURS, ROWS
from polyhead.papers.sizes import Scale, Setting, fuzzy_task, grid, sraven_task

THREE = ("hyla", "softmax", "linear")
LENGTHS = {"paper": (16, 32, 64, 96), "short": (16, 32), "small": (16, 32), "smoke": (8, 16)}
HELD_OUT = {"paper": (0.3, 0.5, 0.7), "short": (0.5, 0.7), "small": (0.3, 0.5, 0.7), "smoke": (0.3, 0.7)}
DATA = {"paper": (0.5, 1.0, 2.0), "small": (0.5, 1.0, 2.0), "smoke": (0.5, 1.0)}
WIDTHS = {"paper": (1.0, 2.0, 4.0), "small": (0.5, 1.0, 2.0), "smoke": (1.0, 2.0)}
DEPTHS = {"paper": (4, 8, 16), "small": (1, 2, 4), "smoke": (1, 2)}
HEADS = {"paper": (1, 2, 4, 8, 16), "small": (1, 2, 4, 8), "smoke": (1, 2)}
FEATURES = {"paper": (2, 3, 4), "small": (2, 3), "smoke": (2, 3)}
FRACTIONS = {"paper": (0.1, 0.25, 0.5, 0.75), "small": (0.1, 0.25, 0.5, 0.75), "smoke": (0.25, 0.5)}


def _one(shape: Scale, scale: str) -> Sequence[Setting] | None:
    """The whole grid at paper scale; elsewhere the highest rate alone, named in the docstrings as a subset."""
    if scale == "paper":
        return None
    return (Setting(max(shape.lrs), shape.decays[0], shape.warmups[0]),)


def _seeds(shape: Scale, scale: str, seeds: int) -> Scale:
    return shape if scale == "paper" else replace(shape, seeds=min(seeds, shape.seeds))


def table_a1(scale: str = "small") -> tuple[Run, ...]:
    """Model ablations on both tasks: fourteen models and one of ours, the grid of settings, three seeds.

    polyhead reproduce table-a1.  Small: two rates.  Short: fuzzy logic, one rate.  Paper: warm-up 1000 on SRAVEN, as
    in the original ablation.

    Where the paper is silent (the alternative in brackets): the nonlinear value of linear attention is a ReLU on each
    head's values before the sum over keys [on each head's sum]; the deep value network has no bias in its second
    matrix [one per head]; HYLA + softmax takes the softmax over keys, then RMSHead [RMSHead first]; mixture of experts
    is 4 experts of the MLP's width, 2 per token, load-balance loss 0.01, no gate noise [experts of half the width].
    """
    rows = tuple(ROWS | OURS)
    fuzzy = grid(partial(fuzzy_task, scale), rows, scales.size(scale, "fuzzy"))
    if scale == "short":
        return fuzzy
    sraven = scales.size(scale, "sraven")
    return fuzzy + grid(partial(sraven_task, scale), rows, replace(sraven, warmups=sraven.warmups[:1]))


def table_a3(scale: str = "small") -> tuple[Run, ...]:
    """The grid search of Table A3, warm-up included, for the three models of the text on both tasks.

    polyhead reproduce table-a3.  Short: fuzzy logic, the paper's rates and decays.
    """
    fuzzy = scales.size(scale, "fuzzy")
    if scale == "short":
        paper = scales.size("paper", "fuzzy")
        return grid(partial(fuzzy_task, scale), THREE, replace(fuzzy, lrs=paper.lrs, decays=paper.decays))
    sraven = scales.size(scale, "sraven")
    if scale != "paper":
        sraven = replace(sraven, warmups=(*sraven.warmups, 3 * sraven.warmups[0]))
    return (
        *grid(partial(fuzzy_task, scale), THREE, fuzzy),
        *grid(partial(sraven_task, scale), THREE, sraven),
    )


def fig_2c(scale: str = "small") -> tuple[Run, ...]:
    """Fuzzy logic, compositional R² by examples in the context and fraction held out; and Fig. A3 with train-task and
    novel R² and the training error.

    polyhead reproduce fig-2c.  Small: contexts of 16 and 32 tokens (not 64 and 96), the one rate 5e-3.  Short: those
    contexts, 50 and 70 % held out, the one rate 1e-3.
    """
    shape = scales.size(scale, "fuzzy")
    runs: tuple[Run, ...] = ()
    for length in LENGTHS[scale]:
        for held in HELD_OUT[scale]:
            task = partial(fuzzy_task, scale, held_out=held, length=length)
            runs += grid(task, THREE, shape, _one(shape, scale))
    return runs


def fig_codes(scale: str = "small") -> tuple[Run, ...]:
    """Fuzzy logic at the setting of Table A1, three models: the latent codes of Fig. 2B, 2D and A2.

    polyhead reproduce fig-2b.
    """
    shape = scales.size(scale, "fuzzy")
    return grid(partial(fuzzy_task, scale), THREE, shape, _one(shape, scale))


def fig_4a(scale: str = "small") -> tuple[Run, ...]:
    """SRAVEN, compositional accuracy by training instances and width, the paper's reading of width: the model, the
    query-key-value and the MLP width grow, the number of heads stays.

    polyhead reproduce fig-4a (and fig-a4 for the loss).  Small: one rate, one seed less.
    """
    return _scaling(scale, "width")


def fig_4a_heads(scale: str = "small") -> tuple[Run, ...]:
    """Fig. 4A as the original code has it: the number of heads grows with the width, a head keeps its own.

    polyhead reproduce fig-4a-heads.
    """
    return _scaling(scale, "heads")


def fig_4b(scale: str = "small") -> tuple[Run, ...]:
    """SRAVEN, compositional accuracy by training instances and depth.

    polyhead reproduce fig-4b (and fig-a4 for the loss).
    """
    return _scaling(scale, "depth")


def fig_a4(scale: str = "small") -> tuple[Run, ...]:
    """The training loss of the runs of Fig. 4A and 4B.

    polyhead reproduce fig-a4.
    """
    return tuple(dict.fromkeys((*fig_4a(scale), *fig_4b(scale))))


def _scaling(scale: str, what: str) -> tuple[Run, ...]:
    base = _seeds(scales.size(scale, "sraven"), scale, 2)
    runs: tuple[Run, ...] = ()
    for share in DATA[scale]:
        for value in DEPTHS[scale] if what == "depth" else WIDTHS[scale]:
            shape = replace(base, steps=max(round(base.steps * share), 1))
            if what == "depth":
                shape = replace(shape, layers=int(value))
            else:
                shape = shape.widened(value, heads=what == "heads")
            runs += grid(partial(sraven_task, scale), THREE, shape, _one(shape, scale))
    return runs


def fig_5_codes(scale: str = "small") -> tuple[Run, ...]:
    """SRAVEN, three models: the latent codes of Fig. 5A, 5B, 5E, 5F, A6 and A8.

    polyhead reproduce fig-5f.  Paper: 40 M instances.  Small: the runs of Table A1 at the higher rate.
    """
    shape = scales.size(scale, "sraven")
    shape = replace(shape, steps=2 * shape.steps) if scale == "paper" else shape
    return grid(partial(sraven_task, scale), THREE, shape, _one(shape, scale))


def fig_5c(scale: str = "small") -> tuple[Run, ...]:
    """SRAVEN, compositional accuracy by number of heads, down to one; the total query-key-value width stays.

    polyhead reproduce fig-5c.
    """
    base = _seeds(scales.size(scale, "sraven"), scale, 2)
    runs: tuple[Run, ...] = ()
    for heads in HEADS[scale]:
        shape = replace(base, heads=heads, head_dim=base.heads * base.head_dim // heads)
        runs += grid(partial(sraven_task, scale), THREE, shape, _one(shape, scale))
    return runs


def fig_5d(scale: str = "small") -> tuple[Run, ...]:
    """SRAVEN, compositional accuracy by number of features.

    polyhead reproduce fig-5d.
    """
    shape = _seeds(scales.size(scale, "sraven"), scale, 2)
    runs: tuple[Run, ...] = ()
    for m in FEATURES[scale]:
        runs += grid(partial(sraven_task, scale, features=m), THREE, shape, _one(shape, scale))
    return runs


def fig_a5(scale: str = "small") -> tuple[Run, ...]:
    """SRAVEN, compositional accuracy by fraction of rule combinations held out.

    polyhead reproduce fig-a5.  The paper's fractions can only be read off its plot.
    """
    shape = _seeds(scales.size(scale, "sraven"), scale, 2)
    runs: tuple[Run, ...] = ()
    for held in FRACTIONS[scale]:
        runs += grid(partial(sraven_task, scale, held_out=held), THREE, shape, _one(shape, scale))
    return runs


def fig_a7(scale: str = "small") -> tuple[Run, ...]:
    """SRAVEN, the codes of a deep softmax transformer: 16 layers on 40 M instances; small: 4 layers.

    polyhead reproduce fig-a7.
    """
    shape = replace(scales.size(scale, "sraven"), layers=DEPTHS[scale][-1])
    shape = replace(shape, steps=2 * shape.steps) if scale == "paper" else _seeds(shape, scale, 1)
    return grid(partial(sraven_task, scale), ("softmax",), shape, _one(shape, scale))
