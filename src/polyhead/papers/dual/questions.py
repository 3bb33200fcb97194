"""What the draft of dual attention asks: which symbols, positions and relations work best, and whether more softmax
heads saturate where a split of softmax and relational heads keeps helping.

Both ask it of two relational games that dual attention learns within minutes and softmax heads do not: `occurs` and
`between`, with 1000 training images.
"""

import itertools
from dataclasses import replace

from polyhead.config import Learned, Position, Rotary, Run, Swiglu
from polyhead.papers import sizes as scales
from polyhead.papers.dual.models import BY_PLACE, SYMBOLS, Relations
from polyhead.papers.dual.runs import game_run
from polyhead.papers.sizes import Scale
from polyhead.tasks import RelationalGames

ASKED = ("occurs", "between")
IMAGES = {"paper": 1000, "small": 1000, "smoke": 32}
RELATIONS = {"paper": (1, 2, 4, 8), "small": (1, 4, 16), "smoke": (1, 4)}
TOTALS = {"paper": (2, 4, 8, 16), "small": (2, 4, 8), "smoke": (2, 4)}
"""Numbers of heads, of one width."""


def symbols(scale: str = "small") -> tuple[Run, ...]:
    """Which symbols, positions, symmetric or not, how many relations: dual attention on two games.

    polyhead reproduce symbols.  All models have as many parameters as with symbols by place, symmetric, one relation.
    Small: every symbol with symmetric relations or not and 1, 4 or 16 of them, with learned positions; and with RoPE
    in their place, symmetric, one relation.  Paper scale: width 128, 1, 2, 4 and 8 relations.

    The papers' plots: symmetric relations learn faster on games; they use symbols by place there, by offset on maths
    and images, from a library in language.
    """
    shape = _shape(scale)
    runs = []
    for seed, game in itertools.product(range(shape.seeds), ASKED):
        task = RelationalGames(game, examples=IMAGES[scale], split_seed=seed)
        grid = itertools.product(SYMBOLS, (True, False), RELATIONS[scale])
        choices: list[tuple[str, Relations, Position]] = [
            (name, Relations(SYMBOLS[name], symmetric, None if count == 1 else count), Learned())
            for name, symmetric, count in grid
        ]
        choices += [(name, Relations(SYMBOLS[name]), Rotary()) for name in SYMBOLS]
        for name, relations, positions in choices:
            run = game_run(task, "dual", replace(shape, positions=positions), shape.grid()[0], seed, relations)
            if (relations, positions) != (BY_PLACE, Learned()):  # those of `games` have their name
                run = replace(run, name=f"{game}-{task.examples}-{_name(name, relations, positions)}-{seed}")
            runs.append(run)
    return tuple(runs)


def split(scale: str = "small") -> tuple[Run, ...]:
    """More softmax heads, or relational ones among them: every head as wide, the model as wide, two games.

    polyhead reproduce split.  Small: 2, 4 and 8 heads of width 16, all softmax or half of them relational; and 4 heads
    in every split.  Numbers of parameters differ: that is what more heads are.
    """
    shape = _shape(scale)
    dim = shape.dim // 4
    runs = []
    for seed, game in itertools.product(range(shape.seeds), ASKED):
        task = RelationalGames(game, examples=IMAGES[scale], split_seed=seed)
        splits = [(total, 0) for total in TOTALS[scale]] + [(n // 2, n // 2) for n in TOTALS[scale]]
        splits += [(4 - relational, relational) for relational in range(5)]
        for softmax, relational in dict.fromkeys(splits):
            one = game_run(task, "softmax", shape, shape.grid()[0], seed)
            heads = BY_PLACE.heads(softmax, relational, dim)
            model = replace(one.transformer, heads=heads, feedforward=Swiglu(shape.hidden))
            runs.append(replace(one, model=model, name=f"{game}-{task.examples}-{softmax}+{relational}x{dim}-{seed}"))
    return tuple(runs)


def _shape(scale: str) -> Scale:
    shape = scales.size(scale, "games")
    return replace(shape, steps=100, seeds=3) if scale == "paper" else shape


def _name(what: str, relations: Relations, positions: Position) -> str:
    parts = [what.replace(" ", "-"), "" if relations.symmetric else "asymmetric", f"{relations.relations or 1}"]
    return "-".join(filter(None, [*parts, type(positions).__name__.lower()]))
