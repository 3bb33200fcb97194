"""Figures of the latent code: 2B, 2D, A2 (fuzzy logic), 5A, 5B, 5E, 5F, A6, A7, A8 (SRAVEN).

The code is that of the last query token attending to itself, as in the paper ("self").  Probes also use the pairs of
the original code ("last_row").  Numbers and verdicts use every model trained at the figure's setting; maps use the
first seed.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from torch import nn

from polyhead.analysis import clusters, embed, figures, query_codes, similarity
from polyhead.analysis.claims import Estimate, Verdict, above, mean
from polyhead.analysis.geometry import means
from polyhead.analysis.labels import targets, with_field
from polyhead.config import Run
from polyhead.papers.hyla.probes import FIT, TERMS, TRAINED, UNTRAINED, models, probes, selected, untrained
from polyhead.papers.hyla.rows import HYLA, label
from polyhead.papers.hyla.runs import FUZZY, FUZZY_GPU, SRAVEN, SRAVEN_GPU, fuzzy_task, grid, sraven_task, three
from polyhead.papers.hyla.scaling import DEPTHS
from polyhead.papers.outcome import Cells, Draw, Figure, FigureOutcome, Picture, estimates
from polyhead.papers.sizes import one_setting, size
from polyhead.papers.study import FinishedRun, Study
from polyhead.tasks.base import Batch, Task
from polyhead.tasks.sraven.task import DIFFERENCE, SUM, Sraven
from polyhead.train import load_model

Array = np.ndarray


# ---------------------------------------------------------------------------------------------------------------- runs
def fig_codes(scale: str = "small") -> tuple[Run, ...]:
    """Fuzzy logic at the setting of Table A1, three models: the latent codes of Fig. 2B, 2D and A2.

    polyhead reproduce fig-2b.
    """
    return three(scale, size(FUZZY, scale), partial(fuzzy_task, scale))


def fig_5_codes(scale: str = "small") -> tuple[Run, ...]:
    """SRAVEN, three models: the latent codes of Fig. 5A, 5B, 5E, 5F, A6 and A8.

    polyhead reproduce fig-5f.  Paper: 40 M instances.  Small: the runs of Table A1 at the higher rate.
    """
    shape = size(SRAVEN, scale)
    if scale == "paper":
        shape = replace(shape, steps=2 * shape.steps)
    return three(scale, shape, partial(sraven_task, scale))


def fig_a7(scale: str = "small") -> tuple[Run, ...]:
    """SRAVEN, the latent codes of a deep softmax transformer: 16 layers on 40 M instances.

    polyhead reproduce fig-a7.  Small: 4 layers, three models, for the claim on early and late layers.
    """
    shape = replace(size(SRAVEN, scale), layers=DEPTHS[scale][-1])
    if scale == "paper":
        shape = replace(shape, steps=2 * shape.steps)
        return grid(partial(sraven_task, scale), ("softmax",), shape, one_setting(shape, scale))
    return three(scale, shape, partial(sraven_task, scale))


# ---------------------------------------------------------------------------------------------------------------- maps
# The label of section 4.4: how large is what the query must attend to. Captions colour by the target value.
INPUTS = "size of inputs"
# Points of a map; 800 at other scales.
MAP = {"smoke": 64}


def maps(study: Study, colours: tuple[str, ...], *, layers: str = "last") -> FigureOutcome:
    """Fig. 2D, A2, 5A, 5B, A6, A7: t-SNE of the codes of the last token attending to itself, for the first seed."""
    count = MAP.get(study.scale, 800)
    pictures = []
    for model, (first, *_) in selected(study).items():
        unseen = study.split_name("compositional")
        caption = f"{label(model)}: t-SNE of {count} codes on {unseen}, seed {first.run.seed}."
        pictures.append(Picture(f"{study.figure}-{model}", caption, draw_map(first, count, colours, layers)))
    outcome = purity_of_neighbours(study) if "rule" in colours else FigureOutcome()
    return replace(outcome, pictures=pictures)


def draw_map(point: FinishedRun, count: int, colours: tuple[str, ...], layers: str) -> Any:
    """Draw a panel per layer and colour."""
    task = with_field(point.run.task, "inputs", "fixed_context")
    codes, batch = query_codes(load_model(point.result.folder)[1], task, "compositional", count, purpose="maps")
    labels = labels_of(point.run.task, batch)
    panels = []
    class_names = {}
    drawn = range(len(codes))
    if layers == "last":
        drawn = drawn[-1:]
    for layer in drawn:
        embedded = embed(codes[layer])
        for colour in colours:
            title = f"layer {layer + 1}, by {colour}"
            panels.append((title, embedded, labels[colour]))
            class_names[title] = names_of_classes(point.run.task, colour, labels[colour])
    return figures.code_maps(panels, columns=max(len(colours), 2), names=class_names)


def labels_of(task: Task, batch: Batch) -> dict[str, Array]:
    """Return the labels of a map's points, by name."""
    labels = targets(batch)
    labels["target"] = batch.targets[:, -1].reshape(len(batch.targets), -1)[:, 0].numpy()
    if "term 1" in labels:
        # One number for each pair of terms.
        labels["function"] = labels["term 1"] * 2**task.variables + labels["term 2"]  # type: ignore[attr-defined]
    if isinstance(task, Sraven):
        labels[INPUTS] = task.input_sizes(batch).numpy()
    return labels


def names_of_classes(task: Task, name: str, values: Array) -> dict[int, str]:
    """Return the names of the classes of a label; empty for numbers."""
    if np.issubdtype(values.dtype, np.floating) or name == "function":
        return {}
    return {value: task.class_name(name, value) for value in np.unique(values).tolist()}


def classes_of(task: Task, batch: Batch) -> dict[str, Array]:
    """Return the labels of a map's points as classes: numbers fall into eight classes of about equal size."""
    import pandas

    classes = {}
    for name, values in labels_of(task, batch).items():
        if np.issubdtype(values.dtype, np.floating):
            values = pandas.qcut(values, 8, labels=False, duplicates="drop")
        classes[name] = values
    return classes


def purity_over_chance(study: Study, labels: Collection[str]) -> Cells:
    """Return the purity of neighbours by label, layer, model and kind of network, trained and before its first step.

    Codes are those of the last token attending to itself, on unseen combinations, in one context of fuzzy logic.
    """
    count = MAP.get(study.scale, 800)
    values: dict[tuple[Any, ...], dict[int, float]] = {}
    for model, point, network in models(study):
        task = with_field(point.run.task, "inputs", "fixed_context")
        for kind, network_of_kind in ((TRAINED, network), (UNTRAINED, untrained(point.run))):
            for row in clusters(network_of_kind, task, sequences=count, labels=partial(classes_of, task)):
                if row["pairs"] == "self" and row["target"] in labels:
                    by_seed = values.setdefault((row["target"], row["layer"], model, kind), {})
                    by_seed[point.run.seed] = row["purity"] - row["chance"]
    return estimates(values, ["target", "layer", "model", "kind"])


def purity_of_neighbours(study: Study) -> FigureOutcome:
    """Tabulate the purity of neighbours by size and by rule, and judge how it changes from early to late layers."""
    title = "purity of neighbours over chance"
    purity = purity_over_chance(study, _VALUES)
    rows: dict[str, dict[str, str]] = {}
    numbers = {}
    for (target, layer, model, kind), estimate in purity.sort_index(level="target", sort_remaining=False).items():
        name = f"{target}, layer {layer + 1}"
        rows.setdefault(name, {title: name})[label(model) + kind] = str(estimate)
        numbers[f"{model}{kind}, {name}"] = estimate.as_json()
    return FigureOutcome(table=list(rows.values()), verdicts=by_layers(purity), numbers={title: numbers})


def by_layers(purity: Cells) -> list[Verdict]:
    """Return the claim that purity by rule rises over the layers and purity by the size of the inputs falls.

    The query of SRAVEN is zero, so in the first layer of HYLA and of linear heads its code for itself is one constant,
    whose purity is exactly that of chance.  Such a layer is left out, and a model needs two others.
    """
    rule, size_of_inputs = [], []
    names = []
    for model in purity.index.unique("model"):
        by_rule, by_size = purity["rule"][:, model, TRAINED], purity[INPUTS][:, model, TRAINED]  # by layer
        layers = [layer for layer in by_rule.index if abs(by_rule[layer].mean) > 1e-9]
        if len(layers) > 1:
            first, last = layers[0], layers[-1]
            rule.append(by_rule[last] - by_rule[first])
            size_of_inputs.append(by_size[first] - by_size[last])
            names.append(label(model))
    if not names:
        return []
    of_models = f"mean of {', '.join(names)}"
    parts = {
        f"rule, last layer − first with several codes, {of_models}": mean(rule),
        f"{INPUTS}, first layer with several codes − last, {of_models}": mean(size_of_inputs),
    }
    return [above("early layers cluster by the size of the inputs, late ones by rule", parts)]


# ---------------------------------------------------------------------------------------------------------- similarity
# Name of a cosine -> whether the mean over the rules is subtracted first.
COSINES = {"plain": False, "centred": True}


def similar(study: Study, model: str, *, samples: bool = False) -> FigureOutcome:
    """Fig. 5E (HYLA) and A8 (softmax, with sampled and mean codes): cosine of the mean codes per rule, last layer.

    The verdict uses the paper's plain cosine.  The centred cosine, after subtracting the mean over rules, is also
    shown, because the common part of all rules brings every plain cosine near 1.
    """
    count = FIT.get(study.scale, 2048)
    pictures: list[Picture] = []
    differences: dict[str, dict[int, float]] = {}
    matrices: dict[str, Any] = {}
    for point in selected(study).get(model, []):
        task, seed = point.run.task, point.run.seed
        network = load_model(point.result.folder)[1]
        codes, rules = codes_by_rule(network, task, count)
        before, _ = codes_by_rule(untrained(point.run), task, count)
        cosines = {}
        for name, is_centred in COSINES.items():
            classes, cosines[name] = similarity(codes, rules, centred=is_centred)
            _, cosines_before = similarity(before, rules, centred=is_centred)
            if {SUM, DIFFERENCE} <= set(classes.tolist()):
                for kind, matrix in ((TRAINED, cosines[name]), (UNTRAINED, cosines_before)):
                    by_seed = differences.setdefault(name + kind, {})
                    by_seed[seed] = _over_others(classes.tolist(), matrix)
        names = [task.class_name("rule", int(value)) for value in classes]
        matrices[str(seed)] = {"rules": names}
        for name, matrix in cosines.items():
            matrices[str(seed)][name] = matrix.round(6).tolist()
        if len(matrices) == 1 and samples:
            pictures.append(picture_of_codes(f"{study.figure}-codes", codes, rules, names))
        if len(matrices) == 1:
            pictures.append(picture_of_similarity(study.figure, cosines, names))
    return similar_outcome(pictures, differences, matrices)


def codes_by_rule(network: nn.Module, task: Task, count: int) -> tuple[Array, Array]:
    """Return codes of the last layer (n h) and the rule of each (n), over known and unseen combinations alike."""
    codes, rules = [], []
    for split in ("iid", "compositional"):
        layers, batch = query_codes(network, task, split, count // 2, purpose="similarity")
        codes.append(layers[-1])
        rules.append(targets(batch)["rule"])
    return np.concatenate(codes), np.concatenate(rules)


def similar_outcome(
    pictures: list[Picture], differences: Mapping[str, dict[int, float]], matrices: dict[str, Any]
) -> FigureOutcome:
    """Return the verdict on sum and difference, and what the centred cosine and the untrained networks give."""
    if not differences:
        note = "Sum and difference do not both occur in the held-out combinations."
        return FigureOutcome(pictures, numbers={"by seed": matrices}, notes=[note])
    by_name, numbers = {}, {}
    for name, by_seed in differences.items():
        by_name[name] = Estimate.of(by_seed)
        numbers[name] = by_name[name].as_json()
    before, before_centred = by_name[f"plain{UNTRAINED}"], by_name[f"centred{UNTRAINED}"]
    notes = (
        f"Centred, the cosine of sum and difference is {by_name['centred']} above the mean of the other pairs.",
        f"Before training it is {before} above that mean, centred {before_centred}.",
    )
    part = {"cosine of sum and difference over the mean of other pairs": by_name["plain"]}
    return FigureOutcome(
        pictures,
        verdicts=[above("sum and difference share a code", part)],
        numbers={"sum and difference over other pairs": numbers, "by seed": matrices},
        notes=notes,
    )


def _over_others(classes: list[int], matrix: Array) -> float:
    """Return the cosine of the mean codes of sum and difference, minus the mean over all other pairs of rules."""
    row, column = sorted((classes.index(SUM), classes.index(DIFFERENCE)))
    is_other = np.triu(np.ones_like(matrix, dtype=bool), k=1)  # each pair once
    is_other[row, column] = False
    return float(matrix[row, column] - matrix[is_other].mean())


def picture_of_similarity(stem: str, matrices: Mapping[str, Array], names: list[str]) -> Picture:
    """Draw the cosines between the mean codes of the rules, plain and centred."""
    caption = (
        "Cosine similarity between the mean codes of the rules, last layer; right: after their mean is taken away."
    )
    panels = [(name, matrix, names, names) for name, matrix in matrices.items()]
    return Picture(stem, caption, figures.heat(panels, label="cosine similarity", limits=(-1, 1)))


def picture_of_codes(stem: str, codes: Array, rules: Array, names: list[str]) -> Picture:
    """Draw six sampled codes of each rule, and the mean code of each."""
    heads = list(map(str, range(1, codes.shape[1] + 1)))
    classes, mean_codes = means(codes, rules)
    sampled: list[int] = []
    sampled_names: list[str] = []
    for value, name in zip(classes, names, strict=True):
        of_class = np.flatnonzero(rules == value)[:6].tolist()
        sampled += of_class
        sampled_names += [name, *[""] * (len(of_class) - 1)]
    panels = [
        ("A: sampled codes", codes[np.array(sampled)], sampled_names, heads),
        ("B: mean codes", mean_codes, names, heads),
    ]
    caption = "A: codes of random instances by rule, a column per head.  B: their means."
    return Picture(stem, caption, figures.heat(panels, label="code", columns=2))


# -------------------------------------------------------------------------------------------------------------- figures
def _fuzzy(title: str, draw: Draw) -> Figure:
    return Figure(title, HYLA, draw, fig_codes, 8.4, FUZZY_GPU, short=True)


def _sraven(title: str, draw: Draw) -> Figure:
    return Figure(title, HYLA, draw, fig_5_codes, 5.5, SRAVEN_GPU)


_VALUES = ("target value", INPUTS, "rule")
_TERMS = ("target", "function", *TERMS)
FIGURES = {
    "fig-2b": _fuzzy("Fig. 2B: terms decoded from the latent code", partial(probes, subject="terms", targets=TERMS)),
    "fig-2d": _fuzzy("Fig. 2D: latent codes on fuzzy logic", partial(maps, colours=("target", "term 1"))),
    "fig-5a": _sraven("Fig. 5A: SRAVEN codes by the value to predict", partial(maps, colours=("target value", INPUTS))),
    "fig-5b": _sraven("Fig. 5B: SRAVEN codes by rule", partial(maps, colours=("rule",))),
    "fig-5e": _sraven("Fig. 5E: similarity of the rules' codes, HYLA", partial(similar, model="hyla")),
    "fig-5f": _sraven(
        "Fig. 5F: rules decoded from the latent code", partial(probes, subject="rule", targets=("rule", "target value"))
    ),
    "fig-a2": _fuzzy("Fig. A2: latent codes on fuzzy logic, all layers", partial(maps, colours=_TERMS, layers="all")),
    "fig-a6": _sraven("Fig. A6: SRAVEN codes, all layers", partial(maps, colours=_VALUES, layers="all")),
    "fig-a7": replace(
        _sraven("Fig. A7: codes of deep models", partial(maps, colours=_VALUES, layers="all")),
        runs=fig_a7,
        minutes=11.0,
    ),
    "fig-a8": _sraven("Fig. A8: SRAVEN codes, softmax", partial(similar, model="softmax", samples=True)),
}
