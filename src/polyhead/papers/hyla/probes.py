"""Figures 2B and 5F: linear probes of the latent code of every finished model.

Each probe is compared with two others.  One is fitted on permuted labels: its score is that of a code without
information about the task.  The other is of the network before its first step: an untrained code depends on the
examples, too, so it has information about the task before anything is learned.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from polyhead.analysis import figures, probe_model
from polyhead.analysis.claims import Estimate, Scores, Verdict, above, mean
from polyhead.config import Run
from polyhead.papers.hyla.rows import label
from polyhead.papers.outcome import Cells, Curves, FigureOutcome, Panel, Picture, estimates
from polyhead.papers.study import FinishedRun, Study
from polyhead.train import load_model
from polyhead.train.network import initial

# Sequences to fit a probe, and equally many to score it; 2048 at other scales.
FIT = {"smoke": 128}

# The labels of fuzzy logic: the two terms of the function.
TERMS = ("term 1", "term 2")

# The kinds of probed networks and labels, as suffixes of names in tables.
TRAINED, UNTRAINED, PERMUTED = "", figures.UNTRAINED, ", permuted labels"
KINDS = (TRAINED, UNTRAINED, PERMUTED)

# What tells the probes of a layer apart: see `probe_model`.
PROBE = ["target", "pairs", "query"]
# The levels of the index of the scores; a layer is counted from 1.
LEVELS = [*PROBE, "layer", "model", "kind"]


# -------------------------------------------------------------------------------------------------------------- models
def selected(study: Study) -> dict[str, list[FinishedRun]]:
    """The runs of the selected setting of every model, by seed."""
    return {model: list(cell.points) for model, cell in study.cells("model").items()}


def models(study: Study) -> Iterator[tuple[str, FinishedRun, nn.Module]]:
    """Load every selected model."""
    for name, points in selected(study).items():
        for point in points:
            yield name, point, load_model(point.result.folder)[1]


def untrained(run: Run) -> nn.Module:
    """The network of a run before its first step."""
    with torch.random.fork_rng(devices=[]):
        return initial(run).eval()


# -------------------------------------------------------------------------------------------------------------- claims
def decodable(subject: str, scores: Scores, chance: Scores) -> list[Verdict]:
    """Return the claim that a probe beats the same probe fitted on permuted labels.

    An uninformative code scores as permuted labels do, so no true difference is negative.

    Args:
        scores: Model -> macro F1 of the last layer on unseen tasks.
        chance: The same, with permuted labels.
    """
    parts = {}
    for name, score in scores.items():
        parts[f"{name} (permuted labels {chance[name].mean:.3f})"] = score - chance[name]
    return [above(f"{subject} can be decoded from the latent code on unseen tasks", parts, can_refute=False)]


def learned(subject: str, scores: Scores, before: Scores) -> list[Verdict]:
    """Return the claim that a probe of the trained network beats that of the network before its first step."""
    parts = {}
    for name, score in scores.items():
        parts[f"{name} (untrained {before[name].mean:.3f})"] = score - before[name]
    return [above(f"training puts {subject} into the latent code: more is read on unseen tasks than before it", parts)]


# ------------------------------------------------------------------------------------------------------------- drawing
def probes(study: Study, subject: str, targets: tuple[str, ...]) -> FigureOutcome:
    """Scores of logistic regressions on the code, on unseen tasks, by layer."""
    scores = probed(study, targets)
    rows = []
    numbers: dict[str, dict[str, Any]] = {}
    for (*probe, layer), by_model in scores.groupby(level=[*PROBE, "layer"], sort=False):
        name = f"{probe_title(*probe)}, layer {layer}"
        row = {"probe": name}
        numbers[name] = {}
        for (model, kind), estimate in by_model.droplevel([*PROBE, "layer"]).items():
            row[label(model) + kind] = str(estimate)
            numbers[name][model + kind] = estimate.as_json()
        rows.append(row)

    last = last_layer(scores)
    verdicts = decodable(f"the {subject}", last[TRAINED], last[PERMUTED])
    verdicts += learned(f"the {subject}", last[TRAINED], last[UNTRAINED])
    seed_count = max(map(len, selected(study).values()))
    seeds = "1 seed" if seed_count == 1 else f"{seed_count} seeds"
    caption = (
        f"Macro F1 on unseen tasks of a probe for the {subject}, by layer, {seeds}. Dashed lines with hollow "
        "marks: the same networks before their first step. Horizontal: permuted labels, mean of the models."
    )
    figure = figures.lines(panels_of(scores), x_label="layer", y_label="macro F1", limits=(0.0, None))
    size = FIT.get(study.scale, 2048)
    note = f"Fitted on {size} sequences of training tasks, scored on as many of {study.split_name('compositional')}."
    return FigureOutcome([Picture(study.figure, caption, figure)], rows, verdicts, [note], numbers)


def probed(study: Study, targets: tuple[str, ...], query: str | None = None) -> Cells:
    """Return macro F1 of every selected model, of the network before training, and on permuted labels; see `LEVELS`.

    Args:
        targets: Only probes of these targets.
        query: Only probes of this kind of query; by default all.
    """
    size = FIT.get(study.scale, 2048)
    values: dict[tuple[Any, ...], dict[int, float]] = {}
    diverged = {model: cell.diverged for model, cell in study.cells("model").items()}
    for model, point, network in models(study):
        for kind, probed_network in ((TRAINED, network), (UNTRAINED, untrained(point.run))):
            for row in probe_model(probed_network, point.run.task, sequences=size, queries=1):
                if row["target"] not in targets or query not in (None, row["query"]):
                    continue
                condition = (row["target"], row["pairs"], row["query"], row["layer"] + 1, model)
                for any_kind in KINDS:  # fixes the order of the columns
                    values.setdefault((*condition, any_kind), dict.fromkeys(diverged[model], math.nan))
                values[*condition, kind][point.run.seed] = row["f1"]
                if kind == TRAINED:
                    values[*condition, PERMUTED][point.run.seed] = row["chance"]
    # The paper's probes first; among them, and among the others, the order stays.
    conditions = sorted(values, key=lambda condition: is_of_paper(*condition[: len(PROBE)]), reverse=True)
    return estimates({condition: values[condition] for condition in conditions}, LEVELS)


def is_of_paper(target: str, pairs: str, query: str) -> bool:
    """Return whether these are the paper's pairs and queries."""
    if pairs != "self" or target == "target value":
        return False
    return query == "alone" or not target.startswith("term")


def panels_of(scores: Cells) -> list[Panel]:
    """Return a panel per probe: a line per model and kind of network, and the level of permuted labels."""
    panels: list[Panel] = []
    for probe, in_panel in scores.groupby(level=PROBE, sort=False):
        curves: Curves = {}
        permuted: dict[int, list[Estimate]] = {}
        for (layer, model, kind), estimate in in_panel.droplevel(PROBE).items():
            if kind == PERMUTED:
                permuted.setdefault(layer, []).append(estimate)
            else:
                curves.setdefault(label(model) + kind, {})[layer] = estimate.by_seed
        levels = {layer: mean(of_models).mean for layer, of_models in permuted.items()}
        panels.append((probe_title(*probe), curves, {"Permuted labels": levels}))
    return panels


def probe_title(target: str, pairs: str, query: str) -> str:
    """Return the name of a probe in figures and tables."""
    parts = [target]
    if target.startswith("term"):
        parts.append({"varies": "own contexts and queries", "alone": "one context", "fixed": "one query"}[query])
    if pairs != "self":
        parts.append(pairs.replace("_", " "))
    return ", ".join(parts)


def last_layer(scores: Cells) -> dict[str, dict[str, Estimate]]:
    """Return the scores in the last layer by kind, then by target and model, on the paper's pairs and queries."""
    by_kind: dict[str, dict[str, Estimate]] = {kind: {} for kind in KINDS}
    last = max(scores.index.unique("layer"))
    for (target, pairs, query), of_probe in scores.groupby(level=PROBE, sort=False):
        if is_of_paper(target, pairs, query):
            for (model, kind), estimate in of_probe.xs(last, level="layer").droplevel(PROBE).items():
                by_kind[kind][f"{target}, {label(model)}"] = estimate
    return by_kind
