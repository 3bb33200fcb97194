"""Figures of the latent code: 2B, 2D, A2 (fuzzy logic), 5A, 5B, 5E, 5F, A6, A7, A8 (SRAVEN).

The code is that of the last query token attending to itself, as in the paper ("self").  Probes also use the pairs of
the original code ("last_row").  Numbers and verdicts use every model trained at the figure's setting; maps use the
first seed.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from polyhead.analysis import clusters, embed, figures, query_codes, similarity
from polyhead.analysis.geometry import means
from polyhead.analysis.labels import class_name, targets, with_field
from polyhead.config import Run, Task
from polyhead.papers.claims import Estimate, Verdict, above, mean
from polyhead.papers.figure import Figure
from polyhead.papers.hyla.probes import FIT, TRAINED, UNTRAINED, Draw, models, probes, selected, untrained
from polyhead.papers.hyla.rows import label
from polyhead.papers.hyla.scaling import DEPTHS
from polyhead.papers.hyla.sizes import FUZZY, FUZZY_GPU, HYLA, SRAVEN, SRAVEN_GPU, THREE, fuzzy_task, grid, sraven_task
from polyhead.papers.outcome import FigureOutcome, Picture
from polyhead.papers.sizes import one_setting, size, with_seeds
from polyhead.papers.study import Study
from polyhead.tasks.sraven.task import DIFFERENCE, SUM
from polyhead.train import load_model

COSINES = ("plain", "centred")
MAP = {"smoke": 64}
"""Points of a map; 800 at other scales."""


def fig_codes(scale: str = "small") -> tuple[Run, ...]:
    """Fuzzy logic at the setting of Table A1, three models: the latent codes of Fig. 2B, 2D and A2.

    polyhead reproduce fig-2b.
    """
    shape = size(FUZZY, scale)
    return grid(partial(fuzzy_task, scale), THREE, shape, one_setting(shape, scale))


def fig_5_codes(scale: str = "small") -> tuple[Run, ...]:
    """SRAVEN, three models: the latent codes of Fig. 5A, 5B, 5E, 5F, A6 and A8.

    polyhead reproduce fig-5f.  Paper: 40 M instances.  Small: the runs of Table A1 at the higher rate.
    """
    shape = size(SRAVEN, scale)
    shape = replace(shape, steps=2 * shape.steps) if scale == "paper" else shape
    return grid(partial(sraven_task, scale), THREE, shape, one_setting(shape, scale))


def fig_a7(scale: str = "small") -> tuple[Run, ...]:
    """SRAVEN, the latent codes of a deep softmax transformer: 16 layers on 40 M instances; small: 4 layers.

    polyhead reproduce fig-a7.
    """
    shape = replace(size(SRAVEN, scale), layers=DEPTHS[scale][-1])
    shape = replace(shape, steps=2 * shape.steps) if scale == "paper" else with_seeds(shape, scale, 1)
    return grid(partial(sraven_task, scale), ("softmax",), shape, one_setting(shape, scale))


# --------------------------------------------------------------------------------------------------------------- claims
def order_of_layers(rule: Mapping[str, Estimate], magnitude: Mapping[str, Estimate]) -> list[Verdict]:
    """The claim that early layers cluster by magnitude and late layers by rule.

    `rule[model]`: purity by rule in the last layer minus the first.  `magnitude[model]`: purity by magnitude in the
    first layer minus the last.
    """
    of = f"mean of {', '.join(rule)}"
    parts = {
        f"rule, last layer − first, {of}": mean([*rule.values()]),
        f"magnitude, first layer − last, {of}": mean([*magnitude.values()]),
    }
    return [above("early layers cluster by magnitude, late ones by rule", parts)]


def shared_code(difference: Estimate) -> list[Verdict]:
    """The claim that sum and difference share a code.  `difference`: see `_over_others`."""
    part = {"cosine of sum and difference over the mean of other pairs": difference}
    return [above("sum and difference share a code", part)]


# ---------------------------------------------------------------------------------------------------------------- maps
def maps(colours: tuple[str, ...], *, layers: str = "last") -> Draw:
    """Fig. 2D, A2, 5A, 5B, A6, A7: t-SNE of the codes of the last token attending to itself, for the first seed."""

    def draw(study: Study) -> FigureOutcome:
        count = MAP.get(study.scale, 800)
        pictures: list[Picture] = []
        clustered = FigureOutcome()
        for model, points in selected(study).items():
            network, task = load_model(points[0].result.folder)[1], points[0].run.task
            drawn = with_field(task, "inputs", "fixed_context")
            codes, batch = query_codes(network, drawn, "compositional", count, purpose="maps")
            those = range(len(codes)) if layers == "all" else range(len(codes) - 1, len(codes))
            labels = targets(batch) | {"target": batch.targets[:, -1].reshape(count, -1)[:, 0].numpy()}
            if "term 1" in labels:
                labels["function"] = labels["term 1"] * 2**task.variables + labels["term 2"]  # type: ignore[attr-defined]
            panels = [
                (f"layer {i + 1}, by {name}", points_of, labels[name], _names(task, name, labels[name]))
                for i in those
                for points_of in [embed(codes[i])]
                for name in colours
            ]
            named = {title: names for title, *_, names in panels if names}
            shown = [panel[:3] for panel in panels]
            figure = figures.code_maps(shown, columns=max(len(colours), 2), names=named)
            caption = f"{label(model)}: t-SNE of {count} codes on unseen combinations, seed {points[0].run.seed}."
            pictures.append(Picture(f"{study.figure}-{model}", caption, figure))
        if "rule" in colours:
            clustered = _clusters(study)
        return replace(clustered, pictures=tuple(pictures))

    return draw


def _names(task: Task, name: str, values: np.ndarray) -> dict[int, str]:
    if np.issubdtype(values.dtype, np.floating) or name == "function":
        return {}
    return {int(v): class_name(task, name, int(v)) for v in np.unique(values)}


def _clusters(study: Study) -> FigureOutcome:
    """The purity of neighbours by magnitude and by rule, of every model and of the networks before their first step."""
    purity: dict[tuple[str, str, int], dict[int, float]] = defaultdict(dict)
    count = MAP.get(study.scale, 800)
    for model, point, network in models(study):
        for kind, one in ((TRAINED, network), (UNTRAINED, untrained(point.run))):
            for row in clusters(one, point.run.task, sequences=count):
                if row["pairs"] == "self":
                    place = model + kind, row["target"], row["layer"]
                    purity[place][point.run.seed] = row["purity"] - row["chance"]
    values = {place: Estimate.of(by_seed) for place, by_seed in purity.items()}
    last = max(layer for _, _, layer in values)
    rule = {label(m): values[m, "rule", last] - values[m, "rule", 0] for m in selected(study)}
    magnitude = {label(m): values[m, "target value", 0] - values[m, "target value", last] for m in selected(study)}
    names = [(m + kind, label(m) + kind) for m in selected(study) for kind in (TRAINED, UNTRAINED)]
    shown = {f"{m}, {target}, layer {i + 1}": e.as_json() for (m, target, i), e in values.items()}
    return FigureOutcome(
        head=("purity of neighbours over chance", *(name for _, name in names)),
        rows=tuple(
            (f"{target}, layer {i + 1}", *(str(values[m, target, i]) for m, _ in names))
            for target in dict.fromkeys(target for _, target, _ in values)
            for i in range(last + 1)
        ),
        verdicts=tuple(order_of_layers(rule, magnitude)),
        numbers={"purity of neighbours over chance": shown},
    )


# ---------------------------------------------------------------------------------------------------------- similarity
def similar(model: str, *, samples: bool = False) -> Draw:
    """Fig. 5E (HYLA) and A8 (softmax, with sampled and mean codes): cosine of the mean codes per rule, last layer.

    The verdict uses the paper's plain cosine.  The centred cosine, after subtracting the mean over rules, is also
    shown, because the common part of all rules brings every plain cosine near 1.
    """

    def draw(study: Study) -> FigureOutcome:
        count = FIT.get(study.scale, 2048)
        pictures: list[Picture] = []
        over: dict[str, dict[int, float]] = {name + kind: {} for kind in (TRAINED, UNTRAINED) for name in COSINES}
        matrices: dict[str, Any] = {}
        for point in selected(study).get(model, []):
            network, task, seed = load_model(point.result.folder)[1], point.run.task, point.run.seed
            codes, batch = query_codes(network, task, "compositional", count, purpose="similarity")
            before, _ = query_codes(untrained(point.run), task, "compositional", count, purpose="similarity")
            rules = targets(batch)["rule"]
            found = {
                name + kind: similarity(of[-1], rules, centred=name == "centred")
                for kind, of in ((TRAINED, codes), (UNTRAINED, before))
                for name in COSINES
            }
            for name, (classes, matrix) in found.items():
                if {SUM, DIFFERENCE} <= set(classes.tolist()):
                    over[name][seed] = _over_others(classes.tolist(), matrix)
            names = [class_name(task, "rule", int(c)) for c in found["plain"][0]]
            shown = {name: found[name][1] for name in COSINES}
            matrices[str(seed)] = {"rules": names, **{name: x.round(6).tolist() for name, x in shown.items()}}
            if not pictures:  # only for the first seed
                panels = [(name, matrix, names, names) for name, matrix in shown.items()]
                pictures = _pictures(study.figure, panels, (codes[-1], rules, names) if samples else None)
        return _similar_outcome(pictures, over, matrices)

    return draw


def _similar_outcome(
    pictures: list[Picture], over: Mapping[str, dict[int, float]], matrices: dict[str, Any]
) -> FigureOutcome:
    if not over["plain"]:
        none = ("Sum and difference do not both occur in the held-out combinations.",)
        return FigureOutcome(pictures=tuple(pictures), numbers={"by seed": matrices}, notes=none)
    centred, *before = (Estimate.of(over[name]) for name in ("centred", *(n + UNTRAINED for n in COSINES)))
    notes = (
        f"Centred, the cosine of sum and difference is {centred} above the mean of the other pairs.",
        f"Before training it is {before[0]} above that mean, centred {before[1]}.",
    )
    found = {name: Estimate.of(values).as_json() for name, values in over.items()}
    verdicts = shared_code(Estimate.of(over["plain"]))
    numbers_ = {"sum and difference over other pairs": found, "by seed": matrices}
    return FigureOutcome(pictures=tuple(pictures), verdicts=tuple(verdicts), numbers=numbers_, notes=notes)


def _over_others(classes: list[int], matrix: np.ndarray) -> float:
    """The cosine of the mean codes of sum and difference, minus the mean over all other pairs of rules."""
    i, j = classes.index(SUM), classes.index(DIFFERENCE)
    rest = [matrix[a, b] for a in range(len(classes)) for b in range(a) if {a, b} != {i, j}]
    return float(matrix[i, j] - np.mean(rest))


def _pictures(stem: str, panels: list[Any], samples: Any) -> list[Picture]:
    words = "Cosine similarity between the mean codes of the rules, last layer; right: after their mean is taken away."
    pictures = [Picture(stem, words, figures.heat(panels, label="cosine similarity", limits=(-1, 1)))]
    if samples is not None:
        codes, rules, names = samples
        heads = [str(i + 1) for i in range(codes.shape[1])]
        classes, middle = means(codes, rules)
        order = np.concatenate([np.flatnonzero(rules == c)[:6] for c in classes])
        named = [names[classes.tolist().index(c)] for c in rules[order]]
        shown = [("A: sampled codes", codes[order], named, heads), ("B: mean codes", middle, names, heads)]
        caption = "A: codes of random instances by rule, a column per head.  B: their means."
        pictures.insert(0, Picture(f"{stem}-codes", caption, figures.heat(shown, label="code", columns=2)))
    return pictures


# -------------------------------------------------------------------------------------------------------------- listing
def _rule(row: dict[str, Any]) -> bool:
    return row["target"] in ("rule", "target value")


def _term(row: dict[str, Any]) -> bool:
    return str(row["target"]).startswith("term")


def _fuzzy(title: str, draw: Draw) -> Figure:
    return Figure(title, HYLA, draw, fig_codes, 8.4, FUZZY_GPU, short=True)


def _sraven(title: str, draw: Draw) -> Figure:
    return Figure(title, HYLA, draw, fig_5_codes, 5.5, SRAVEN_GPU)


_VALUES = ("target value", "rule")
_TERMS = ("target", "function", "term 1", "term 2")
FIGURES = {
    "fig-2b": _fuzzy("Fig. 2B: terms decoded from the latent code", probes("terms", _term)),
    "fig-2d": _fuzzy("Fig. 2D: latent codes on fuzzy logic", maps(("target", "term 1"))),
    "fig-5a": _sraven("Fig. 5A: SRAVEN codes by the value to predict", maps(("target value",))),
    "fig-5b": _sraven("Fig. 5B: SRAVEN codes by rule", maps(("rule",))),
    "fig-5e": _sraven("Fig. 5E: similarity of the rules' codes, HYLA", similar("hyla")),
    "fig-5f": _sraven("Fig. 5F: rules decoded from the latent code", probes("rule", _rule)),
    "fig-a2": _fuzzy("Fig. A2: latent codes on fuzzy logic, all layers", maps(_TERMS, layers="all")),
    "fig-a6": _sraven("Fig. A6: SRAVEN codes, all layers", maps(_VALUES, layers="all")),
    "fig-a7": replace(
        _sraven("Fig. A7: codes of a deep softmax model", maps(_VALUES, layers="all")), runs=fig_a7, minutes=1.2
    ),
    "fig-a8": _sraven("Fig. A8: SRAVEN codes, softmax", similar("softmax", samples=True)),
}
