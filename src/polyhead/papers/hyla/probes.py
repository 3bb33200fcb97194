"""Figures 2B and 5F: linear probes of the latent code of every finished model.

Each probe is compared with two others.  One is fitted on permuted labels: its score is that of a code without
information about the task.  The other is of the network before its first step: an untrained code depends on the
examples, too, so it has information about the task before anything is learned.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from polyhead.analysis import figures, probe_model
from polyhead.config import Run
from polyhead.papers.claims import Estimate, Scores, Verdict, above, mean
from polyhead.papers.hyla.rows import label
from polyhead.papers.outcome import FigureOutcome, Panel, Picture
from polyhead.papers.study import FinishedRun, Study
from polyhead.train import load_model
from polyhead.train.network import initial

FIT = {"smoke": 128}
"""Sequences to fit a probe, and equally many to score it; 2048 at other scales."""
Draw = Callable[[Study], FigureOutcome]

TRAINED, UNTRAINED, PERMUTED = "", figures.UNTRAINED, ", permuted labels"
"""The kinds of probed networks and labels, as suffixes of names in tables."""
KINDS = (TRAINED, UNTRAINED, PERMUTED)

Place = tuple[str, str, str]
"""Target, pairs and query of a probe: see `probe_run`."""
Found = Mapping[tuple[Place, int], Mapping[tuple[str, str], Mapping[int, float]]]
"""Place and layer (from 1) -> model and one of `KINDS` -> macro F1 by seed."""


# --------------------------------------------------------------------------------------------------------------- models
def selected(study: Study) -> dict[str, list[FinishedRun]]:
    """The runs of the selected setting of every model, by seed."""
    return {model: list(cell.points) for (model,), cell in study.cells("model").items()}


def models(study: Study) -> Iterator[tuple[str, FinishedRun, nn.Module]]:
    """Load every selected model."""
    for name, points in selected(study).items():
        for point in points:
            yield name, point, load_model(point.result.folder)[1]


def untrained(run: Run) -> nn.Module:
    """The network of a run before its first step."""
    with torch.random.fork_rng(devices=[]):
        return initial(run).eval()


# --------------------------------------------------------------------------------------------------------------- claims
def decodable(subject: str, scores: Scores, chance: Scores) -> list[Verdict]:
    """Return the claim that a probe beats the same probe fitted on permuted labels.

    `scores[model]`, `chance[model]`: macro F1 of the last layer on unseen tasks.  An uninformative code scores as
    permuted labels do, so no true difference is negative.
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


# -------------------------------------------------------------------------------------------------------------- drawing
def probes(subject: str, is_wanted: Callable[[dict[str, Any]], bool]) -> Draw:
    """Scores of logistic regressions on the code, on unseen tasks, by layer."""

    def draw(study: Study) -> FigureOutcome:
        size = FIT.get(study.scale, 2048)
        scores = probed(study, is_wanted)
        seed_count = max(len(points) for points in selected(study).values())
        seeds = "1 seed" if seed_count == 1 else f"{seed_count} seeds"
        caption = (
            f"Macro F1 on unseen tasks of a probe for the {subject}, by layer, {seeds}. Dashed lines with hollow "
            "marks: the same networks before their first step. Horizontal: permuted labels, mean of the models."
        )
        figure = figures.lines(panels_of(scores), x_label="layer", y_label="macro F1", limits=(0.0, None))
        rows = []
        numbers: dict[str, dict[str, Any]] = {}
        for (condition, layer), by_model in scores.items():
            name = f"{panel_title(condition)}, layer {layer}"
            estimates = {model + kind: Estimate.of(by_seed) for (model, kind), by_seed in by_model.items()}
            rows.append((name, *map(str, estimates.values())))
            numbers[name] = {model: estimate.as_json() for model, estimate in estimates.items()}
        head = ["probe"]
        for model in selected(study):
            head += [label(model) + kind for kind in KINDS]
        ends = last_layer(scores)
        verdicts = decodable(f"the {subject}", ends[TRAINED], ends[PERMUTED])
        verdicts += learned(f"the {subject}", ends[TRAINED], ends[UNTRAINED])
        return FigureOutcome(
            pictures=(Picture(study.figure, caption, figure),),
            head=tuple(head),
            rows=tuple(rows),
            verdicts=tuple(verdicts),
            notes=(f"Fitted on {size} sequences of training tasks, scored on as many of unseen combinations.",),
            numbers=numbers,
        )

    return draw


def probed(study: Study, is_wanted: Callable[[dict[str, Any]], bool]) -> Found:
    """Return the scores of every selected model, of the network before training, and on permuted labels."""
    size = FIT.get(study.scale, 2048)
    scores: dict[tuple[Place, int], dict[tuple[str, str], dict[int, float]]] = {}
    for model, point, network in models(study):
        for kind, probed_network in ((TRAINED, network), (UNTRAINED, untrained(point.run))):
            for row in filter(is_wanted, probe_model(probed_network, point.run.task, sequences=size, queries=1)):
                condition = (row["target"], row["pairs"], row["query"]), row["layer"] + 1
                if condition not in scores:  # the columns of the table, in the order of the models
                    scores[condition] = {(name, kind_): {} for name in selected(study) for kind_ in KINDS}
                scores[condition][model, kind][point.run.seed] = row["f1"]
                if kind == TRAINED:
                    scores[condition][model, PERMUTED][point.run.seed] = row["chance"]
    return {
        condition: scores[condition]
        for condition in sorted(scores, key=lambda condition: not is_of_paper(condition[0]))
    }


def is_of_paper(condition: Place) -> bool:
    """Return whether these are the paper's pairs and queries."""
    target, pairs, query = condition
    return pairs == "self" and target != "target value" and (query == "alone" or not target.startswith("term"))


def panels_of(scores: Found) -> list[Panel]:
    """Return a panel per place: a line per model and kind of network, and the level of permuted labels."""
    panels: list[Panel] = []
    for condition in dict.fromkeys(condition for condition, _ in scores):
        curves: dict[str, dict[int, list[float]]] = {}
        levels = {}
        for layer, by_model in layers_at(scores, condition).items():
            permuted = []
            for (model, kind), by_seed in by_model.items():
                if kind == PERMUTED:
                    permuted.append(Estimate.of(by_seed))
                else:
                    curves.setdefault(label(model) + kind, {})[layer] = list(by_seed.values())
            levels[layer] = mean(permuted).mean
        panels.append((panel_title(condition), curves, {"Permuted labels": levels}))
    return panels


def layers_at(scores: Found, condition: Place) -> dict[int, Mapping[tuple[str, str], Mapping[int, float]]]:
    """Return the scores at a place by layer."""
    return {layer: by_model for (where, layer), by_model in scores.items() if where == condition}


def panel_title(condition: Place) -> str:
    target, pairs, query = condition
    parts = [target]
    if target.startswith("term"):
        parts.append({"varies": "own contexts and queries", "alone": "one context", "fixed": "one query"}[query])
    if pairs != "self":
        parts.append(pairs.replace("_", " "))
    return ", ".join(parts)


def last_layer(scores: Found) -> dict[str, dict[str, Estimate]]:
    """Return the scores in the last layer by kind, target and model, on the paper's pairs and queries."""
    ends: dict[str, dict[str, Estimate]] = {kind: {} for kind in KINDS}
    for condition in dict.fromkeys(condition for condition, _ in scores):
        if is_of_paper(condition):
            layers = layers_at(scores, condition)
            for (model, kind), by_seed in layers[max(layers)].items():
                ends[kind][f"{condition[0]}, {label(model)}"] = Estimate.of(by_seed)
    return ends
