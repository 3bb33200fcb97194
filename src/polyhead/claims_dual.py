"""What Altabaa and Lafferty 2024 (dual attention) and Altabaa et al. 2024 (Abstractors) claim, as tests on measured
scores, and the numbers they print.

See `claims` for when a claim holds.  A claim about learning curves is one about their means over the sizes of the
training set, seed by seed.  The papers print the games' numbers without standard errors, so no test can be put to them.
"""

from collections.abc import Mapping, Sequence

from polyhead.claims import Estimate, Scores, Verdict, above, mean
from polyhead.recipes.dual_models import ROWS

Curve = Mapping[int, Scores]
"""Size of the training set -> the scores there, by model (a name of `recipes.dual_models`)."""

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


def game(name: str, curve: Curve) -> list[Verdict]:
    """Dual attention beside softmax heads on one game: with learned positions, as in the paper, and with relative
    ones.  Claims whose models were not run are left out."""
    words, sizes = name.replace("_", " "), " and ".join(map(str, curve))
    verdicts = []
    for others, what in ((("softmax",), ""), (("softmax-rope", "softmax-t5"), " that know relative positions")):
        if not all({"dual", *others} <= set(scores) for scores in curve.values()):
            continue
        parts = {f"over {ROWS[other].label}, mean of n {sizes}": gap(curve, "dual", other) for other in others}
        claim = f"dual attention learns {words} from fewer examples than softmax heads{what}"
        verdicts.append(above(claim, parts))
    return verdicts


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
