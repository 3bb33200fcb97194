"""The latent codes of a report's runs on unseen tasks: probes, zeroed heads, swapped codes, maps."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup
from torch import nn

from polyhead.analysis import figures
from polyhead.analysis.ablate import zero_heads
from polyhead.analysis.claims import Estimate
from polyhead.analysis.geometry import embed
from polyhead.analysis.labels import targets, unreadable, views, with_field
from polyhead.analysis.probe import Row, probe_model, query_codes
from polyhead.analysis.swap import swap_codes
from polyhead.config import TransformerConfig
from polyhead.pages.report.results import OPEN_TEST, TEST_COLUMNS, comparison_rows, metric_name
from polyhead.pages.report.runs import Entry, SeedGroup, Seeds, over_seeds, seeds_of
from polyhead.pages.report.section import Draft, Section, slug, with_error
from polyhead.spec.values import one_line
from polyhead.tasks.base import Task
from polyhead.train import load_model

Array = np.ndarray
POINTS = 500  # codes of a map: enough to see clusters
PROBED = 2048  # sequences to fit a probe, and equally many to score it
ZEROED = 512  # sequences per zeroed head
PAIRS = 1000  # pairs of sequences whose codes are swapped
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
    """The map (b 2) of the codes of one layer in one view, and the target and labels (b) of their sequences."""

    name: str
    points: Array
    target: Array
    labels: dict[str, Array]


@dataclass(frozen=True)
class Analysis:
    """What a checkpoint's codes say: rows of `probe_model`, `zero_heads` and `swap_codes`, and maps."""

    entry: Entry
    group: SeedGroup
    probes: list[Row]
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
                draft.notes.append(f"{entry.folder.name}: no code maps and probes ({one_line(error)})")
    return analyses


def _analyse_run(entry: Entry, group: SeedGroup) -> Analysis:
    run, model = load_model(entry.folder)
    reason = unreadable(run.task)
    if reason or not isinstance(run.model, TransformerConfig):
        raise ValueError(reason or f"{type(run.model).__name__} has no latent code")
    probes = probe_model(model, run.task, sequences=PROBED, seed=run.seed)
    if not probes:
        raise ValueError("its batches have no labels: integer latents, or an integer target")
    zeroed = zero_heads(model, run.task, sequences=ZEROED, seed=run.seed)
    try:
        swaps = swap_codes(model, run.task, pairs=PAIRS, seed=run.seed)
    except ValueError:  # the task has no such pairs, or the heads no code that sets their output
        swaps = []
    return Analysis(entry, group, probes, zeroed, swaps, code_maps(model, run.task, seed=run.seed))


def code_maps(model: nn.Module, task: Task, *, seed: int) -> list[CodeMap]:
    """Maps of the last token's codes on unseen tasks by view and layer.

    Schug et al., figures 5A, 5B, A2.  If the task offers `inputs="fixed_context"`, all sequences have the same context,
    so points differ only by function and query.
    """
    maps = []
    for view, (drawn, pairs) in views(task).items():
        fixed = with_field(drawn, "inputs", "fixed_context")
        layers, batch = query_codes(model, fixed, "compositional", POINTS, pairs=pairs, seed=seed, purpose="maps")
        labels = targets(batch)
        labels.pop("target value", None)
        numbers = batch.targets[:, -1].reshape(POINTS, -1)[:, 0].double().cpu().numpy()  # the last token's target (b)
        for layer, codes in enumerate(layers):  # codes (b h)
            maps.append(CodeMap(f"layer {layer + 1}, {view}", embed(codes, seed), numbers, labels))
    return maps


# ------------------------------------------------------------------------------------------------------------ sections
def code_sections(analyses: Sequence[Analysis], draft: Draft) -> list[Section]:
    """All sections on latent codes that the checkpoints allow."""
    if not analyses:
        return []
    task = analyses[0].group.task
    part, unseen = task.words.part, task.split_name("compositional")
    # Of several seeds the first one is drawn.
    firsts: dict[str, Analysis] = {}
    for analysis in analyses:
        firsts.setdefault(analysis.group.label, analysis)
    probes = Section(
        "probes",
        f"Can the {part}s be read off the latent code?",
        f"A logistic regression reads each {part} off the latent code of the last token. It is fitted on {PROBED:,} "
        f"sequences of training tasks and scored on {PROBED:,} of {unseen}. Fixed: all sequences share one query; "
        "alone: one context; varies: every sequence has its own.",
        note="Chance is the score of the same regression, fitted on permuted labels.",
    )
    _fill_probes(probes, analyses, draft)
    sections = [probes, _heads_section(analyses, firsts, draft)]
    if any(analysis.swaps for analysis in analyses):
        sections.append(_swaps_section(analyses))
    keys = "attending to itself"
    if "last_row" in views(task):
        keys += " or, as last_row, to its row of panels, columns not permuted"
    context = ""
    if hasattr(task, "inputs"):
        context = "All sequences share one context. "
    explanation = (
        f"Each point is the code of the last token in one of {POINTS:,} sequences of {unseen}, {keys}. {context}"
        f"Clusters that follow the {part} rather than the target mean that the code says what to compute."
    )
    details = map_details(firsts.values(), draft)
    sections.append(Section("maps", "Maps of the latent code", explanation, details=details))
    return sections


def _fill_probes(section: Section, analyses: Sequence[Analysis], draft: Draft) -> None:
    """Macro F1 by layer and target: a panel for each target, and a table."""
    import pandas

    frames = []
    for analysis in analyses:
        frames.append(pandas.DataFrame(analysis.probes).assign(mechanism=analysis.group.label))
    scores = pandas.concat(frames)
    scores["layer"] += 1  # readers count layers from 1
    mechanisms = list(scores["mechanism"].unique())
    panels = []
    rows = []
    for (target, pairs, query), of_panel in scores.groupby(["target", "pairs", "query"], sort=False):
        panel = f"{target}, {query}"
        if pairs != "self":
            panel = f"{target}, pairs {pairs}, {query}"
        levels = of_panel.groupby("layer")["chance"].mean().to_dict()
        series: dict[str, dict[figures.Number, list[float]]] = {}
        for (mechanism, layer), f1 in of_panel.groupby(["mechanism", "layer"], sort=False)["f1"]:
            series.setdefault(mechanism, {})[layer] = f1.to_list()
        for layer, chance in levels.items():
            cells = []
            for mechanism in mechanisms:
                of_networks = series.get(mechanism, {}).get(layer, [])
                cells.append(with_error(over_seeds(dict(enumerate(of_networks)))))
            rows.append([f"{panel}, layer {layer}", *cells, f"{chance:.3f}"])
        panels.append((panel, series, {"chance": levels}))
    figure = figures.lines(panels, x_label="layer", y_label="macro F1", limits=(0.0, None))
    section.figures.append(draft.add(section.anchor, figure, "Macro F1 by layer, mean over networks."))
    section.tables.append((["macro F1", *mechanisms, "chance"], rows))


def _heads_section(analyses: Sequence[Analysis], firsts: dict[str, Analysis], draft: Draft) -> Section:
    """The fall of the score without each head: a matrix per mechanism, and a table of whole layers."""
    import pandas

    task = analyses[0].group.task
    metric = metric_name(task)
    section = Section(
        "heads",
        "How much does each head matter?",
        f"The fall of {metric} when the latent code of a head is zeroed. The model is not retrained. "
        f"{ZEROED:,} sequences of {task.split_name('compositional')}.",
    )

    # Name of a row -> mechanism -> seeds -> number, and the error of a single run over its sequences.
    table: dict[str, dict[str, dict[Seeds, float]]] = {}
    errors: dict[tuple[str, str], float] = {}
    for analysis in analyses:
        label = analysis.group.label
        for row in analysis.zeroed:
            if row["layer"] is None:
                name, value, error = f"nothing zeroed: {metric}", row["score"], row["se"]
            elif row["head"] is None:
                name, value, error = f"layer {row['layer'] + 1}, all heads: fall", row["drop"], row["drop_se"]
            else:
                continue
            table.setdefault(name, {}).setdefault(label, {})[seeds_of(analysis.entry.run)] = value
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
        layer_names, head_names = list(map(str, falls.index + 1)), list(map(str, falls.columns + 1))
        panels.append((analysis.name, falls.to_numpy(float), layer_names, head_names))
    figure = figures.heat(panels, label=f"fall of {metric}", columns=2)
    section.figures.append(draft.add("heads", figure, f"Fall of {metric} without each head (column) by layer (row)."))
    return section


def _swaps_section(analyses: Sequence[Analysis]) -> Section:
    """The scores against the donor's function by code, and the protocol's test of the swap.

    The test: against the donor's function, the score with the donor's code is above that with a third sequence's;
    one-sided t over networks.
    """
    task = analyses[0].group.task
    metric, unseen = metric_name(task), task.split_name("compositional")
    section = Section(
        "swaps",
        "Does the output follow the latent code?",
        "Two sequences have the same inputs and different functions. In the last layer the latent code of the query is "
        f"replaced; {metric} is against the donor's function. {PAIRS:,} pairs of {unseen}.",
        note=OPEN_TEST,
    )
    scores: dict[str, dict[str, dict[Seeds, float]]] = {}  # code -> mechanism -> seeds -> score
    for analysis in analyses:
        for row in analysis.swaps:
            by_mechanism = scores.setdefault(row["code"], {})
            by_mechanism.setdefault(analysis.group.label, {})[seeds_of(analysis.entry.run)] = row["donor"]
    rows = []
    for code, name in CODE_NAMES.items():
        rows.append([name, *map(with_error, map(Estimate.of, scores[code].values()))])
    mechanisms = list(scores["donor"])
    section.tables.append((["latent code of the query", *mechanisms], rows))
    differences = {}
    for mechanism in mechanisms:
        other = Estimate.of(scores["other"][mechanism])
        differences[mechanism] = Estimate.of(scores["donor"][mechanism]) - other
    columns = ["Does it follow the donor's code?", "verdict", "donor's less a third one's", *TEST_COLUMNS]
    section.tables.append((columns, comparison_rows(differences)))
    return section


def map_details(analyses: Iterable[Analysis], draft: Draft) -> list[tuple[str, list[Markup]]]:
    """The t-SNE maps of each analysis: a panel for each layer and each label that colours it."""
    details = []
    for analysis in analyses:
        panels: list[Any] = []
        names: dict[str, dict[int, str]] = {}
        for code_map in analysis.maps:
            panels.append((f"{code_map.name}: target", code_map.points, code_map.target))
            for label, values in code_map.labels.items():
                title = f"{code_map.name}: {label}"
                panels.append((title, code_map.points, values))
                classes = np.unique(values).tolist()
                if len(classes) <= 16:  # more names would not fit beside the panel
                    names[title] = {value: analysis.group.task.class_name(label, value) for value in classes}
        columns = 1 + len(analysis.maps[0].labels)
        figure = figures.code_maps(panels, columns=columns, names=names)
        caption = f"{analysis.name}: t-SNE of codes, by layer (row) and by what colours it (column)."
        details.append((analysis.name, [draft.add(slug("map", analysis.name), figure, caption)]))
    return details
