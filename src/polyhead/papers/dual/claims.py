"""What Altabaa and Lafferty 2024 (dual attention) and Altabaa et al. 2024 (Abstractors) claim, as tests on measured
scores, and the numbers they print.

See `claims` for when a claim holds.  A claim about learning curves is one about their means over the sizes of the
training set, seed by seed.  The papers print the games' numbers without standard errors, so no test can be put to them.
"""

import math
from collections.abc import Mapping, Sequence

from polyhead.papers.dual.models import ROWS
from polyhead.papers.hyla.claims import Estimate, Scores, Verdict, above, mean

Curve = Mapping[int, Scores]
"""Size of the training set -> the scores there, by model (a name of `recipes.dual_models`)."""

RELATIVE = ("softmax-rope", "softmax-t5")
"""Our controls."""

_SIZES, _LARGE = (250, 500, 1000, 1500, 2000, 2500), (5000, 10_000, 15_000, 20_000, 25_000)


def _curve(sizes: Sequence[int], values: str) -> dict[int, float]:
    return dict(zip(sizes, map(float, values.split()), strict=True))


GAMES: dict[str, dict[str, dict[int, float]]] = {
    "same": {
        "dual": _curve(_SIZES, ".639 .744 .880 .902 .929 .940"),
        "relational": _curve(_SIZES, ".652 .744 .863 .898 .914 .926"),
        "softmax": _curve(_SIZES, ".671 .750 .898 .924 .938 .946"),
        "corelnet": {2500: 0.969},
        "predinet": {2500: 0.981},
        "abstractor": {2500: 0.979},
    },
    "occurs": {
        "dual": _curve(_SIZES, ".619 .775 .895 .913 .928 .929"),
        "relational": _curve(_SIZES, ".632 .787 .886 .910 .916 .931"),
        "softmax": _curve(_SIZES, ".533 .525 .646 .752 .825 .885"),
        "corelnet": {2500: 0.957},
        "predinet": {2500: 0.948},
        "abstractor": {2500: 0.962},
    },
    "xoccurs": {
        "dual": _curve(_SIZES, ".522 .543 .634 .723 .852 .873"),
        "relational": _curve(_SIZES, ".520 .556 .666 .772 .860 .886"),
        "softmax": _curve(_SIZES, ".508 .504 .546 .584 .598 .653"),
        "corelnet": {2500: 0.931},
        "predinet": {2500: 0.680},
        "abstractor": {2500: 0.861},
    },
    "between": {
        "dual": _curve(_SIZES, ".640 .711 .869 .911 .929 .938"),
        "relational": _curve(_SIZES, ".614 .750 .881 .908 .929 .931"),
        "softmax": _curve(_SIZES, ".596 .618 .774 .845 .886 .911"),
        "corelnet": {250: 0.742, 2500: 0.967},
        "predinet": {2500: 0.909},
        "abstractor": {2500: 0.815},
    },
    "match_pattern": {
        "dual": _curve(_LARGE, ".546 .639 .740 .832 .855"),
        "relational": _curve(_LARGE, ".528 .773 .888 .930 .928"),
        "softmax": _curve(_LARGE, ".511 .521 .534 .564 .565"),
        "corelnet": {25_000: 0.983},
        "predinet": {25_000: 0.667},
        "abstractor": {25_000: 0.973},
    },
}
"""Game -> model -> number of images -> accuracy on pentominoes: the authors' page and logs, of models with 421,474
parameters (CoRelNet: 215,522)."""


MATHS: dict[str, dict[str, tuple[float, float]]] = {
    "algebra__linear_1d": {"softmax": (64.0, 1.5), "dual": (66.3, 1.7), "abstractor": (64.1, math.nan)},
    "algebra__sequence_next_term": {"softmax": (91.4, 0.2), "dual": (92.1, 0.4), "abstractor": (94.9, math.nan)},
    "calculus__differentiate": {"softmax": (99.9, math.nan), "dual": (100.0, math.nan), "abstractor": (99.9, math.nan)},
    "polynomials__add": {"softmax": (84.5, 0.3), "dual": (85.9, math.nan), "abstractor": (86.9, math.nan)},
    "polynomials__expand": {"softmax": (74.1, 0.6), "dual": (77.9, 0.1), "abstractor": (73.4, math.nan)},
}
"""Module -> model -> percentage of characters, interpolation, and its standard error where there is one: two layers
each, softmax heads of 871 thousand parameters (width 144), dual attention 4 + 4 of 832 thousand; the authors' logs."""

IMAGES: dict[str, dict[str, tuple[float, float]]] = {
    "cifar10": {"softmax": (89.5, 0.1), "dual": (91.7, 0.1)},
    "cifar100": {"softmax": (68.2, 0.1), "dual": (71.1, 0.1)},
}
"""Data -> model -> accuracy in per cent with AutoAugment: 7.1 million parameters, and 7.2 with ungrouped keys."""


def game(name: str, curve: Curve) -> list[Verdict]:
    """Dual attention beside softmax heads on one game."""
    return learns(name.replace("_", " "), curve)


def learns(what: str, curve: Curve) -> list[Verdict]:
    """Dual attention beside softmax heads, over the size of the training set: with learned positions, as in the paper,
    and with relative ones.  Claims whose models were not run are left out."""
    sizes = " and ".join(map(str, curve))
    verdicts = []
    for others, words in ((("softmax",), ""), (RELATIVE, " that know relative positions")):
        found = [other for other in others if all({"dual", other} <= set(scores) for scores in curve.values())]
        parts = {f"over {ROWS[other].label}, mean of n {sizes}": gap(curve, "dual", other) for other in found}
        if parts:
            claim = f"dual attention learns {what} from fewer examples than softmax heads{words}"
            verdicts.append(above(claim, parts))
    return verdicts


def better(what: str, one: str, others: Sequence[str], scores: Mapping[str, Scores]) -> list[Verdict]:
    """`one` is better than each of `others` at what was scored, `scores[place]`, as the mean over the places that have
    both.  Nothing where none has."""
    parts = {}
    for other in others:
        those = [place for place, by in scores.items() if {one, other} <= set(by)]
        if those:
            of = f", mean of {', '.join(those)}" if len(scores) > 1 else ""
            parts[f"over {ROWS[other].label}{of}"] = mean(
                [scores[place][one] - scores[place][other] for place in those]
            )
    claim = f"{ROWS[one].label} is better than {' and '.join(ROWS[other].label for other in others)} at {what}"
    return [above(claim, parts)] if parts else []


def all_games(curves: Mapping[str, Curve], novel: Mapping[str, Mapping[str, Scores]]) -> list[Verdict]:
    """Claims about means over the games that have the models.  `novel[split][game]`: scores on unseen shapes at the
    most examples."""
    verdicts = []
    for other in ("dual-package", "corelnet", "predinet", "abstractor", "softmax"):
        those = [name for name, curve in curves.items() if all({"dual", other} <= set(s) for s in curve.values())]
        if not those:
            continue
        of = f"mean of {', '.join(name.replace('_', ' ') for name in those)}"
        if other == "dual-package":
            claim = (
                "relation weights that start balanced learn more from as many examples than with the package's start"
            )
            parts = {of: mean([gap(curves[name], "dual", other) for name in those])}
        elif other == "softmax":
            claim = "on unseen shapes, too, dual attention is better than softmax heads"
            parts = {
                f"{split.removeprefix('novel_')}, {of}": mean([by[name]["dual"] - by[name][other] for name in those])
                for split, by in novel.items()
            }
        else:
            claim = f"{ROWS[other].label}, a model made for relations alone, is better than dual attention"
            most = [curves[name][max(curves[name])] for name in those]
            parts = {f"at the most images, {of}": mean([scores[other] - scores["dual"] for scores in most])}
        verdicts.append(above(claim, parts))
    return verdicts


def gap(curve: Curve, one: str, other: str) -> Estimate:
    """How far `one` is above `other`, as the mean over the sizes."""
    return mean([scores[one] - scores[other] for scores in curve.values()])


# ---------------------------------------------------------------------------------------------------- what to choose
Choice = tuple[str, str, bool, int]
"""Symbols, positions, symmetric, relations."""


def choices(scores: Mapping[Choice, Estimate]) -> list[Verdict]:
    """`scores`: of each choice, the mean over the games.  Differences are means over all else that was varied."""
    plain = {place[:1] + place[2:]: e for place, e in scores.items() if place[1] == "learned"}
    verdicts = []
    if pairs := [
        (e, plain[s, False, n]) for (s, symmetric, n), e in plain.items() if symmetric and (s, False, n) in plain
    ]:
        parts = {"symmetric over not, mean of symbols and relations": mean([a - b for a, b in pairs])}
        verdicts.append(above("symmetric relations learn faster", parts))
    fewest, most = (pick({n for _, _, n in plain}, default=0) for pick in (min, max))
    if pairs := [
        (plain[s, y, most], e) for (s, y, n), e in plain.items() if n == fewest < most and (s, y, most) in plain
    ]:
        parts = {f"{most} over {fewest}, mean of symbols, symmetric or not": mean([a - b for a, b in pairs])}
        verdicts.append(above("more relations than one per head help", parts))
    others = [s for s in dict.fromkeys(s for s, _, _ in plain) if s != "by place"]
    parts = {}
    for other in others:
        pairs = [
            (e, plain[other, y, n]) for (s, y, n), e in plain.items() if s == "by place" and (other, y, n) in plain
        ]
        if pairs:
            parts[f"over symbols {other}"] = mean([a - b for a, b in pairs])
    return verdicts + ([above("symbols by place are the best on games", parts)] if parts else [])


def splits(scores: Mapping[tuple[int, int], Estimate]) -> list[Verdict]:
    """`scores[softmax, relational]`: by numbers of heads, the mean over the games."""
    softmax = sorted(n for n, relational in scores if not relational)
    halves = sorted(n for n, relational in scores if n == relational)
    verdicts = []
    if len(softmax) > 1:
        few, many = softmax[0], softmax[-1]
        parts = {f"{many} softmax heads over {few}": scores[many, 0] - scores[few, 0]}
        verdicts.append(above("more softmax heads help", parts))
    if softmax and halves:
        least, many = halves[0], softmax[-1]
        parts = {f"{least} + {least} heads over {many} softmax heads": scores[least, least] - scores[many, 0]}
        verdicts.append(above("a few heads of both kinds are better than the most softmax heads", parts))
    if len(halves) > 1:
        few, many = halves[0], halves[-1]
        parts = {f"{many} + {many} heads over {few} + {few}": scores[many, many] - scores[few, few]}
        verdicts.append(above("more heads of both kinds keep helping", parts))
    return verdicts
