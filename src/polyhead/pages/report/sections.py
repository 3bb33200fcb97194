"""The report's sections on the latent code: probes, clusters, maps, rules that share a code, zeroed heads."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from polyhead.analysis.geometry import means, similarity
from polyhead.analysis.labels import class_name
from polyhead.config import Task
from polyhead.config.words import Parts
from polyhead.pages import document
from polyhead.pages.document import escape, paragraphs
from polyhead.pages.report import code_figures as figures, headline as text
from polyhead.pages.report.code_figures import Cells
from polyhead.pages.report.codes import CheckpointAnalysis, CodeMap, class_names, head_names, samples
from polyhead.pages.report.figures import category
from polyhead.pages.report.page import Page, swatch
from polyhead.pages.report.runs import SeedGroup, summary

Row = dict[str, Any]
Pick = Callable[[Sequence[Row], int | None], Row | None]
"""Chooses one of the rows of a layer."""
Panel = tuple[str, np.ndarray, list[str], list[str]]
"""A matrix with its title, and the names of its rows and columns."""
QUERIES = {
    "fixed": "one query for all sequences",
    "alone": "one context for all sequences",
    "varies": "every sequence its own",
}


def sections(out: Page, found: Sequence[SeedGroup], analysed: Sequence[CheckpointAnalysis]) -> None:
    """All sections that the checkpoints allow."""
    shown = [one for one in analysed if one.maps]
    if not shown:
        return
    parts = found[0].task.words.parts or text.PARTS
    _probes(out, found, shown, parts)
    _clusters(out, found, shown, parts)
    _zeroed(out, shown)
    if any("rule" in layer.labels for one in shown for layer in one.maps):
        _alike(out, shown)
    _maps(out, shown, parts)


# -------------------------------------------------------------------------------------------------------------- probes
def _probes(out: Page, found: Sequence[SeedGroup], shown: Sequence[CheckpointAnalysis], parts: Parts) -> None:
    out.section("probes", f"Can the {parts.name}s be read off the latent code?", "Probes")
    count = next(row["n"] for one in shown for row in one.rows)
    kinds = list(dict.fromkeys((row["pairs"], row["query"]) for one in shown for row in one.rows))
    out.add(paragraphs(text.probing(parts, count, several_queries=len({query for _, query in kinds}) > 1)))
    _view_notes(out, found[0].task, [view for view, _ in kinds])
    cells = {_words(view, query, kinds): figures.probe_cells(shown, view, query) for view, query in kinds}
    _over_layers(out, found, cells, "macro F1", f"macro F1 by layer and {parts.name}")


def _words(view: str, query: str, kinds: Sequence[tuple[str, str]]) -> str:
    """The description of one kind of probe."""
    several = len({view for view, _ in kinds}) > 1
    own = len({query for _, query in kinds}) > 1
    return ", ".join([f"pairs “{view}”"] * several + [QUERIES[query]] * (own or not several))


def _view_notes(out: Page, task: Task, views: Sequence[str]) -> None:
    known = {"self": text.SELF, **task.words.views}
    if len(set(views)) > 1:
        out.add(document.bullets([f"“{view}”: {known.get(view, view)}" for view in dict.fromkeys(views)]))


def _clusters(out: Page, found: Sequence[SeedGroup], shown: Sequence[CheckpointAnalysis], parts: Parts) -> None:
    out.section("clusters", "What do the clusters of codes follow?", "Clusters")
    count = len(shown[0].maps[0].number)
    out.add(paragraphs(text.clustering(parts, count)))
    views = shown[0].views
    cells = {
        f"pairs “{view}”" if len(views) > 1 else "the query attending to itself": figures.purity_cells(shown, view)
        for view in views
    }
    _over_layers(out, found, cells, "purity", "share of the nearest codes that have the same label")


def _over_layers(out: Page, found: Sequence[SeedGroup], several: dict[str, Cells], what: str, words: str) -> None:
    """A figure and table rows for each kind."""
    top = figures.ceiling_of(list(several.values()))
    plots = [
        out.plot(figures.over_layers(cells, found, what, top), f"{kind[0].upper()}{kind[1:]}: {words}. Dashed: chance.")
        for kind, cells in several.items()
    ]
    out.add(f'<div class="row">{"".join(plots)}</div>')
    rows = []
    labels = list(dict.fromkeys(label for cells in several.values() for label, _ in cells))
    for kind, cells in several.items():
        for place in dict.fromkeys(place for _, place in cells):
            mine = [cells.get((label, place)) for label in labels]
            chance = [cell[1] for cell in mine if cell]
            each = [text.with_error(cell[0]) if cell else "–" for cell in mine]
            name = f'layer {place[0] + 1}, {escape(place[1])}<span class="small">{escape(kind)}</span>'
            rows.append(("", [name, *each, text.number(sum(chance) / len(chance))]))
    numbers = document.table([what, *labels, "chance"], rows)
    numbers += paragraphs(["± is the standard error over seeds, where there are several."], "note")
    out.add(numbers if len(rows) <= 8 else document.details(f"{what[0].upper()}{what[1:]} in figures", numbers))


# -------------------------------------------------------------------------------------------------------- heads zeroed
def _zeroed(out: Page, shown: Sequence[CheckpointAnalysis]) -> None:
    out.section("heads", "How much does each head matter?", "Heads")
    metric = text.metric_name(shown[0].group.task.metric)
    out.add(paragraphs(text.zeroing(metric, shown[0].zeroed[0]["n"])))
    out.add(document.table(["zeroed", *dict.fromkeys(one.group.label for one in shown)], _zeroed_rows(shown, metric)))
    note = "± is the standard error over seeds where there are several, else over sequences."
    out.add(paragraphs([note], "note"))
    limit = max(abs(row["drop"]) for one in shown for row in one.zeroed if row["head"] is not None) or 1.0
    for one, first in _first_of_each(shown):
        values, words, layers, heads = drops(one.zeroed)
        figure = figures.matrix(values, layers, heads, limit=limit, text=words)
        figure.update_xaxes(title={"text": "head", "standoff": 4})
        plot = out.plot(figure, f"{one.name}: fall of {metric} without each head.")
        out.add(plot if first else document.details(one.name, plot))


def _zeroed_rows(shown: Sequence[CheckpointAnalysis], metric: str) -> list[tuple[str, Sequence[str]]]:
    runs: dict[str, list[Sequence[Row]]] = {}
    for one in shown:
        runs.setdefault(one.group.label, []).append(one.zeroed)

    def cells(pick: Pick, layer: int | None, figure: str, error: str) -> list[str]:
        """A figure of the row that `pick` chooses in each run, over the seeds of each mechanism."""
        picked = [[row for rows in members if (row := pick(rows, layer))] for members in runs.values()]
        return [text.with_error(summary([r[figure] for r in rows], rows[0][error])) if rows else "–" for rows in picked]

    rows: list[tuple[str, Sequence[str]]] = []
    rows.append(("", [f"nothing: {escape(metric)}", *cells(_all_heads, None, "score", "se")]))
    for layer in range(max(row["layer"] for one in shown for row in one.zeroed if row["layer"] is not None) + 1):
        whole, most = (cells(pick, layer, "drop", "drop_se") for pick in (_all_heads, _heaviest))
        rows.append(("", [f"layer {layer + 1}, all heads: fall", *whole]))
        rows.append(("", [f"layer {layer + 1}, the head that matters most: fall", *most]))
    return rows


def _all_heads(rows: Sequence[Row], layer: int | None) -> Row | None:
    """The row of a layer with all heads zeroed; for layer None, the row with nothing zeroed."""
    return next((row for row in rows if row["layer"] == layer and row["head"] is None), None)


def _heaviest(rows: Sequence[Row], layer: int | None) -> Row | None:
    """The row of the head that matters most in a layer."""
    heads = [row for row in rows if row["layer"] == layer and row["head"] is not None]
    return max(heads, key=lambda row: row["drop"], default=None)


def drops(zeroed: Sequence[Row]) -> tuple[np.ndarray, list[list[str]], list[str], list[str]]:
    """The drop of the score by layer and head, as numbers and as text, and the names of layers and heads.

    NaN for heads that a layer does not have.
    """
    rows = [row for row in zeroed if row["head"] is not None]
    layers, heads = max(row["layer"] for row in rows) + 1, max(row["head"] for row in rows) + 1
    values = np.full((layers, heads), np.nan)
    words = [[""] * heads for _ in range(layers)]
    for row in rows:
        values[row["layer"], row["head"]] = row["drop"]
        fall = f"{text.number(row['drop'])} ± {text.number(row['drop_se'])}"
        words[row["layer"]][row["head"]] = f"layer {row['layer'] + 1}, head {row['head'] + 1}: fall {fall}"
    names = [f"layer {i + 1}" for i in range(layers)], [str(i + 1) for i in range(heads)]
    return values, words, *names


# -------------------------------------------------------------------------------------------- rules that share a code
def _alike(out: Page, shown: Sequence[CheckpointAnalysis]) -> None:
    out.section("alike", "Which rules share a code?", "Similar rules")
    out.add(paragraphs(text.ALIKE))
    for one, first in _first_of_each(shown):
        body = ""
        for view in one.views:
            body += f"<h4>Cosine similarity of mean codes, pairs “{escape(view)}”</h4>"
            for panels in alike(one, view):
                plots = [out.plot(_matrix(panel, 1.0, 330), panel[0].capitalize()) for panel in panels]
                body += f'<div class="row">{"".join(plots)}</div>'
            caption = f"Codes of layer {one.layers(view)[-1].layer + 1}, pairs “{view}”: "
            words = "sequences drawn at random, rule by rule.", "the mean of each rule."
            for panel, about in zip(by_rule(one, view), words, strict=True):
                limit = float(np.abs(panel[1]).max()) or 1.0
                body += out.plot(_matrix(panel, limit, 90 + 16 * len(panel[2])), caption + about)
        out.add(f"<h3>{escape(one.name)}</h3>{body}" if first else document.details(one.name, body))


def _matrix(panel: Panel, limit: float, height: int) -> figures.go.Figure:
    _, values, rows, columns = panel
    return figures.matrix(values, rows, columns, limit=limit, height=height)


def alike(one: CheckpointAnalysis, view: str) -> tuple[list[Panel], list[Panel]]:
    """The similarity of the mean codes of rules in every layer, plain and centred (Schug et al., figure 5E)."""
    plain: list[Panel] = []
    centred: list[Panel] = []
    for layer in one.layers(view):
        for panels, title in ((plain, ""), (centred, ", centred")):
            classes, values = similarity(layer.codes, layer.labels["rule"], centred=bool(title))
            names = _rule_names(one, classes)
            panels.append((f"layer {layer.layer + 1}{title}", values, names, names))
    return plain, centred


def by_rule(one: CheckpointAnalysis, view: str) -> list[Panel]:
    """Sampled and mean codes of the last layer, rule by rule (Schug et al., figure A8)."""
    layer = one.layers(view)[-1]
    sampled, labels = samples(layer, "rule")
    classes, mean = means(layer.codes, layer.labels["rule"])
    heads = head_names(one.entry, layer)
    return [
        (f"layer {layer.layer + 1}, {kind} codes", codes.T, heads, _rule_names(one, rules))
        for kind, codes, rules in (("sampled", sampled, labels), ("mean", mean, classes))
    ]


def _rule_names(one: CheckpointAnalysis, labels: np.ndarray) -> list[str]:
    return [class_name(one.entry.run.task, "rule", int(label)) for label in labels]


# ---------------------------------------------------------------------------------------------------------------- maps
def _maps(out: Page, shown: Sequence[CheckpointAnalysis], parts: Parts) -> None:
    out.section("maps", "Maps of the latent code", "Code maps")
    out.add(paragraphs([parts.maps.format(count=len(shown[0].maps[0].number))]))
    radios = [("tsne", "t-SNE", " checked"), ("pca", "PCA", "")]
    boxes = "".join(f'<label><input type="radio" name="method" value="{v}"{c}> {n}</label>' for v, n, c in radios)
    out.add(f'<div class="switch" role="radiogroup" aria-label="Kind of map">{boxes}</div>')
    out.add(legend(shown[0], parts))
    for one, first in _first_of_each(shown):
        body = "".join(layer_maps(out, one, layer) for layer in one.maps)
        out.add(f"<h3>{escape(one.name)}</h3>{body}" if first else document.details(one.name, body))


def layer_maps(out: Page, one: CheckpointAnalysis, layer: CodeMap) -> str:
    """The maps of one layer, coloured by the target and by each label."""
    plots, maps = [], {method: figures.coordinates(layer, method) for method in layer.points}
    for name in ("target", *layer.labels):
        names = {} if name == "target" else class_names(one.entry.run.task, layer, name)
        plots.append(out.plot(figures.code_map(layer, name, names), f"by {name}", maps=maps))
    heading = f"Layer {layer.layer + 1}" + (f", pairs “{escape(layer.view)}”" if len(one.views) > 1 else "")
    return f'<h4>{heading}</h4><div class="maps">{"".join(plots)}</div>'


def legend(one: CheckpointAnalysis, parts: Parts) -> str:
    """The marks of terms or rules, shared by all maps; "" where maps show the target alone."""
    labels = [(name, values) for layer in one.maps for name, values in layer.labels.items() if name != "function"]
    if not labels:
        return ""
    items = []
    for i in np.unique(np.concatenate([values for _, values in labels])).tolist():
        colour, _, glyph = category(i)
        names = dict.fromkeys(class_name(one.entry.run.task, name, i) for name, values in labels if i in values)
        items.append(f"<span>{swatch(colour, glyph)}{escape(' or '.join(names))}</span>")
    return f'<p class="legend"><span>{parts.name.capitalize()}s:</span>{"".join(items)}</p>'


def _first_of_each(shown: Sequence[CheckpointAnalysis]) -> list[tuple[CheckpointAnalysis, bool]]:
    """Each checkpoint, and whether it is the first of its mechanism: only the first is open in the page."""
    firsts = {one.group.label: one for one in reversed(shown)}
    return [(one, firsts[one.group.label] is one) for one in shown]
