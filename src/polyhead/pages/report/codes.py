"""The latent codes of a report's runs on unseen tasks: probes, clusters, zeroed heads, similar rules, maps."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
from markupsafe import Markup
from torch import nn

from polyhead.analysis import figures
from polyhead.analysis.ablate import zero_heads
from polyhead.analysis.claims import Estimate
from polyhead.analysis.geometry import embed, means, similarity
from polyhead.analysis.labels import distinct, targets, unreadable, views, with_field
from polyhead.analysis.probe import Row, cluster_rows, probe_model, query_codes
from polyhead.analysis.swap import swap_codes
from polyhead.config import TransformerConfig
from polyhead.pages.report.results import OPEN_TEST, TEST_COLUMNS, comparison_rows, metric_name
from polyhead.pages.report.runs import Entry, SeedGroup, over_seeds
from polyhead.pages.report.section import Draft, Section, Table, cells_over_seeds, slug, with_error
from polyhead.tasks.base import Task
from polyhead.train import load_model

Array = np.ndarray
POINTS = 500  # codes of a map: enough to see clusters
PROBED = 2048  # sequences to fit a probe, and equally many to score it
ZEROED = 512  # sequences per zeroed head
PAIRS = 1000  # pairs of sequences whose codes are swapped
NEIGHBOURS = 10
# The latent code that the query gets in a swap.
CODE_NAMES = {
    "own": "its own",
    "donor": "the donor's",
    "other": "a third one's",
    "permuted": "the donor's, heads permuted",
    "zero": "zero",
}


@dataclass(frozen=True)
class CodeMap:
    """The codes (b n) of one layer in one view, their map (b 2), and the target and labels (b) of their sequences."""

    view: str
    layer: int
    codes: Array
    points: Array
    target: Array
    labels: dict[str, Array]


@dataclass(frozen=True)
class Analysis:
    """What a checkpoint's codes say: rows of `probe_model`, of clusters, `zero_heads` and `swap_codes`, and maps."""

    entry: Entry
    group: SeedGroup
    probes: list[Row]
    clusters: list[Row]
    zeroed: list[Row]
    swaps: list[Row]
    maps: list[CodeMap]

    @property
    def name(self) -> str:
        return f"{self.group.label}, seed {self.entry.run.seed}"


# ------------------------------------------------------------------------------------------------------------ analyses
def analyse(groups: Sequence[SeedGroup], draft: Draft) -> list[Analysis]:
    """Analyse every finished run; the notes get a line for each that cannot be analysed."""
    analyses = []
    for group in groups:
        for entry in group.finished:
            draft.tell(f"codes of {entry.folder.name}: probes, maps, heads zeroed")
            try:
                analyses.append(_analyse_run(entry, group))
            except (ValueError, OSError) as error:
                draft.notes.append(f"{entry.folder.name}: no code maps and probes ({' '.join(str(error).split())})")
    return analyses


def _analyse_run(entry: Entry, group: SeedGroup) -> Analysis:
    run, model = load_model(entry.folder)
    reason = unreadable(run.task)
    if reason or not isinstance(run.model, TransformerConfig):
        raise ValueError(reason or f"{type(run.model).__name__} has no latent code")
    probes = probe_model(model, run.task, sequences=PROBED, seed=run.seed)
    if not probes:
        raise ValueError("its batches have no labels: integer latents, or an integer target")
    maps, clusters = code_maps(model, run.task, seed=run.seed)
    zeroed = zero_heads(model, run.task, sequences=ZEROED, seed=run.seed)
    try:
        swaps = swap_codes(model, run.task, pairs=PAIRS)
    except ValueError:  # the task has no such pairs, or the heads no code that sets their output
        swaps = []
    return Analysis(entry, group, probes, clusters, zeroed, swaps, maps)


def code_maps(model: nn.Module, task: Task, *, seed: int) -> tuple[list[CodeMap], list[Row]]:
    """Maps of the last token's codes on unseen tasks by view and layer, and the purity of their clusters.

    Schug et al., figures 5A, 5B, A2.  If the task offers `inputs="fixed_context"`, all sequences have the same context,
    so points differ only by function and query.
    """
    maps = []
    rows: list[Row] = []
    for view, (drawn, pairs) in views(task).items():
        fixed = with_field(drawn, "inputs", "fixed_context")
        layers, batch = query_codes(model, fixed, "compositional", POINTS, pairs=pairs, seed=seed, purpose="maps")
        neighbours = min(NEIGHBOURS, len(distinct(batch)) - 1)
        if neighbours > 0:  # a single input has none
            rows += cluster_rows(layers, batch, view, neighbours)
        labels = targets(batch)
        labels.pop("target value", None)
        numbers = batch.targets[:, -1].reshape(POINTS, -1)[:, 0].double().cpu().numpy()
        for layer, codes in enumerate(layers):
            maps.append(CodeMap(view, layer, codes, embed(codes, "tsne", seed), numbers, labels))
    return maps, rows


# ------------------------------------------------------------------------------------------------------------ sections
def code_sections(analyses: Sequence[Analysis], draft: Draft) -> list[Section]:
    """All sections on latent codes that the checkpoints allow."""
    if not analyses:
        return []
    part = analyses[0].group.task.words.part
    # Of several seeds the first one is drawn.
    firsts: dict[str, Analysis] = {}
    for analysis in analyses:
        firsts.setdefault(analysis.group.label, analysis)
    probes = Section(
        "probes",
        f"Can the {part}s be read off the latent code?",
        f"A logistic regression reads each {part} off the latent code of the last token. It is fitted on {PROBED:,} "
        f"sequences of training tasks and scored on {PROBED:,} of unseen combinations.",
        note="fixed: all sequences share one query; alone: one context; varies: every sequence has its own. "
        "Chance is the score of the same regression, fitted on permuted labels.",
    )
    clusters = Section(
        "clusters",
        "What do the clusters of codes follow?",
        f"The share of each code's {NEIGHBOURS} nearest codes that have the same label.",
        note="Chance is the share among all pairs of sequences.",
    )
    sections = [
        _over_layers(probes, analyses, "probes", "f1", "macro F1", draft),
        _over_layers(clusters, analyses, "clusters", "purity", "purity", draft),
        _heads_section(analyses, firsts, draft),
    ]
    if any(analysis.swaps for analysis in analyses):
        sections.append(_swaps_section(analyses, draft))
    if any("rule" in code_map.labels for analysis in firsts.values() for code_map in analysis.maps):
        sections.append(_rules_section(firsts, draft))
    explanation = (
        f"Each point is the code of the last token attending to itself, in one of {POINTS:,} sequences of unseen "
        f"combinations. Clusters that follow the {part} rather than the target mean that the code says what to compute."
    )
    sections.append(Section("maps", "Maps of the latent code", explanation))
    sections[-1].details = map_details(firsts.values(), draft)
    return sections


def _over_layers(
    section: Section,
    analyses: Sequence[Analysis],
    field_name: str,
    column: str,
    label: str,
    draft: Draft,
) -> Section:
    """Fill the section with a number by layer and target: a panel for each target, and a table."""
    # Panel -> layer -> mechanism -> seed -> score; and what chance gives each network.
    scores: dict[str, dict[int, dict[str, dict[int, float]]]] = {}
    chances: dict[tuple[str, int], list[float]] = {}
    mechanisms: dict[str, None] = {}
    for analysis in analyses:
        mechanism = analysis.group.label
        for row in getattr(analysis, field_name):
            panel = f"{row['target']}, pairs {row['pairs']}"
            if "query" in row:
                panel += f", {row['query']}"
            layer = row["layer"] + 1
            by_mechanism = scores.setdefault(panel, {}).setdefault(layer, {})
            by_mechanism.setdefault(mechanism, {})[analysis.entry.run.seed] = row[column]
            chances.setdefault((panel, layer), []).append(row["chance"])
            mechanisms[mechanism] = None

    panels = []
    table: Table = ([label, *mechanisms, "chance"], [])
    for panel, by_layer in scores.items():
        series: dict[str, dict[figures.Number, list[float]]] = {}
        levels: dict[figures.Number, float] = {}
        for layer, by_mechanism in by_layer.items():
            levels[layer] = fmean(chances[panel, layer])
            for mechanism, by_seed in by_mechanism.items():
                series.setdefault(mechanism, {})[layer] = list(by_seed.values())
            cells = cells_over_seeds(by_mechanism, mechanisms)
            table[1].append([f"{panel}, layer {layer}", *cells, f"{levels[layer]:.3f}"])
        panels.append((panel, series, {"chance": levels}))
    if panels:
        figure = figures.lines(panels, x_label="layer", y_label=label, limits=(0.0, None))
        caption = f"{label[0].upper()}{label[1:]} by layer, mean over networks."
        section.figures.append(draft.add(section.anchor, figure, caption))
        section.tables.append(table)
    return section


def _heads_section(analyses: Sequence[Analysis], firsts: dict[str, Analysis], draft: Draft) -> Section:
    """The fall of the score without each head: a matrix per mechanism, and a table of the strongest heads."""
    import pandas

    metric = metric_name(analyses[0].group.task)
    section = Section(
        "heads",
        "How much does each head matter?",
        f"The fall of {metric} when the latent code of a head is zeroed. The model is not retrained. "
        f"{ZEROED:,} sequences of unseen combinations.",
        note="The head that matters most is chosen by these numbers, so its fall is overstated.",
    )

    # Name of a row -> mechanism -> seed -> number, and the error of a single run over its sequences.
    table: dict[str, dict[str, dict[int, float]]] = {}
    errors: dict[tuple[str, str], float] = {}
    for analysis in analyses:
        label = analysis.group.label
        for name, (value, error) in _strongest(analysis.zeroed, metric).items():
            table.setdefault(name, {}).setdefault(label, {})[analysis.entry.run.seed] = value
            errors[name, label] = error
    rows = []
    for name, by_mechanism in table.items():
        cells = []
        for label in firsts:
            cells.append(with_error(over_seeds(by_mechanism.get(label, {}), errors.get((name, label)))))
        rows.append([name, *cells])
    section.tables.append((["zeroed", *firsts], rows))

    panels = []
    for analysis in firsts.values():
        heads = pandas.DataFrame(analysis.zeroed).dropna(subset="head").astype({"layer": int, "head": int})
        falls = heads.pivot(index="layer", columns="head", values="drop")  # NaN where a layer has fewer heads
        names = map(str, falls.index + 1), map(str, falls.columns + 1)
        panels.append((analysis.name, falls.to_numpy(float), *map(list, names)))
    figure = figures.heat(panels, label=f"fall of {metric}", columns=2)
    section.figures.append(draft.add("heads", figure, f"Fall of {metric} without each head (column) by layer (row)."))
    return section


def _strongest(rows: Sequence[Row], metric: str) -> dict[str, tuple[float, float]]:
    """The score without zeroing, and of each layer the fall without all its heads and without the strongest one.

    By their names in the table: the number and its standard error.
    """
    numbers = {f"nothing zeroed: {metric}": (rows[0]["score"], rows[0]["se"])}
    for row in rows[1:]:
        fall = row["drop"], row["drop_se"]
        layer = row["layer"] + 1
        if row["head"] is None:
            numbers[f"layer {layer}, all heads: fall"] = fall
            continue
        strongest = f"layer {layer}, strongest head: fall"
        numbers[strongest] = max(fall, numbers.get(strongest, fall))
    return numbers


def _swaps_section(analyses: Sequence[Analysis], draft: Draft) -> Section:
    """The scores against the donor's function by code, and the protocol's test of the swap.

    The test: against the donor's function, the score with the donor's code is above that with a third sequence's;
    one-sided t over networks.
    """
    metric = metric_name(analyses[0].group.task)
    section = Section(
        "swaps",
        "Does the output follow the latent code?",
        "Two sequences have the same inputs and different functions. In the last layer the latent code of the query is "
        f"replaced; the output is scored against the donor's function. {PAIRS:,} pairs of unseen combinations.",
        note=OPEN_TEST,
    )
    scores: dict[str, dict[str, dict[int, float]]] = {}  # code -> mechanism -> seed -> score
    for analysis in analyses:
        for row in analysis.swaps:
            by_mechanism = scores.setdefault(row["code"], {})
            by_mechanism.setdefault(analysis.group.label, {})[analysis.entry.run.seed] = row["donor"]
    rows = []
    for code, name in CODE_NAMES.items():
        rows.append([name, *cells_over_seeds(scores[code], scores[code])])
    mechanisms = list(scores["donor"])
    section.tables.append((["latent code of the query", *mechanisms], rows))
    differences = {}
    for mechanism in mechanisms:
        other = Estimate.of(scores["other"][mechanism])
        differences[mechanism] = Estimate.of(scores["donor"][mechanism]) - other
    columns = ["Does it follow the donor's code?", "verdict", "donor's less a third one's", *TEST_COLUMNS]
    section.tables.append((columns, comparison_rows(differences)))
    # The two codes of the test, beside one another.
    measured = {}
    for mechanism in mechanisms:
        for code in ("donor", "other"):
            measured[f"{mechanism} · {CODE_NAMES[code]} code"] = list(scores[code][mechanism].values())
    figure = figures.results(measured, score=f"{metric} against the donor's function")
    section.figures.append(draft.add("swaps", figure, f"{metric} against the donor's function, by code."))
    return section


def _rules_section(firsts: dict[str, Analysis], draft: Draft) -> Section:
    """The similarity of the mean codes of rules, and these codes (Schug et al., figures 5E, A8)."""
    section = Section(
        "rules",
        "Which rules share a code?",
        "The cosine similarity of the mean codes of two rules, on unseen combinations. Rules with the same code are "
        "computed by the same value network. Centred: the mean code of all rules is subtracted first.",
        note="Plain similarities are near 1 if the codes of all rules share a large component.",
    )
    for analysis in firsts.values():
        similarities: list[Any] = []
        codes: list[Any] = []
        for code_map in analysis.maps:
            view = f"layer {code_map.layer + 1}, {code_map.view}"
            rules = code_map.labels["rule"]
            classes, mean = means(code_map.codes, rules)
            names = [analysis.group.task.class_name("rule", int(label)) for label in classes]
            similarities.append((view, similarity(code_map.codes, rules)[1], names, names))
            _, centred = similarity(code_map.codes, rules, centred=True)
            similarities.append((f"{view}, centred", centred, names, names))
            codes.append((view, mean, names, list(map(str, range(1, mean.shape[1] + 1)))))
        matrices = figures.heat(similarities, label="cosine similarity", limits=(-1, 1), columns=2)
        averages = figures.heat(codes, label="latent code", columns=2)
        drawings = [
            draft.add(slug("rules", analysis.name), matrices, f"{analysis.name}: similarity of mean codes."),
            draft.add(slug("rule-codes", analysis.name), averages, f"{analysis.name}: mean code (row) of each rule."),
        ]
        section.details.append((analysis.name, drawings))
    return section


def map_details(analyses: Iterable[Analysis], draft: Draft) -> list[tuple[str, list[Markup]]]:
    """The t-SNE maps of each analysis: a panel for each layer and each label that colours it."""
    details = []
    for analysis in analyses:
        panels: list[Any] = []
        names: dict[str, dict[int, str]] = {}
        for code_map in analysis.maps:
            view = f"layer {code_map.layer + 1}, {code_map.view}"
            panels.append((f"{view}: target", code_map.points, code_map.target))
            for label, values in code_map.labels.items():
                panels.append((f"{view}: {label}", code_map.points, values))
                classes = np.unique(values).tolist()
                if len(classes) <= 16:
                    names[panels[-1][0]] = {value: analysis.group.task.class_name(label, value) for value in classes}
        columns = 1 + len(analysis.maps[0].labels)
        figure = figures.code_maps(panels, columns=columns, names=names)
        caption = f"{analysis.name}: t-SNE of codes, by layer (row) and by what colours it (column)."
        details.append((analysis.name, [draft.add(slug("map", analysis.name), figure, caption)]))
    return details
