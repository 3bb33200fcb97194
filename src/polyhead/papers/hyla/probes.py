"""Figures 2B and 5F: linear probes of the latent code of every finished model.

Each probe is compared with two others.  One is fitted on permuted labels: its score is that of a code without
information about the task.  The other is of the network before its first step: an untrained code depends on the
examples, too, so it has information about the task before anything is learned.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
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
def decodable(what: str, scores: Scores, chance: Scores) -> list[Verdict]:
    """The claim that a probe beats the same probe fitted on permuted labels.

    `scores[model]`, `chance[model]`: macro F1 of the last layer on unseen tasks.  An uninformative code scores as
    permuted labels do, so no true difference is negative.
    """
    parts = {f"{name} (permuted labels {chance[name].mean:.3f})": e - chance[name] for name, e in scores.items()}
    return [above(f"{what} can be decoded from the latent code on unseen tasks", parts, can_refute=False)]


def learned(what: str, scores: Scores, before: Scores) -> list[Verdict]:
    """The claim that a probe of the trained network beats that of the same network before its first step."""
    parts = {f"{name} (untrained {before[name].mean:.3f})": e - before[name] for name, e in scores.items()}
    return [above(f"training puts {what} into the latent code: more is read on unseen tasks than before it", parts)]


# -------------------------------------------------------------------------------------------------------------- drawing
def probes(what: str, wanted: Callable[[dict[str, Any]], bool]) -> Draw:
    """Scores of logistic regressions on the code, on unseen tasks, by layer."""

    def draw(study: Study) -> FigureOutcome:
        size = FIT.get(study.scale, 2048)
        found = probed(study, wanted)
        names = [label(model) + kind for model in selected(study) for kind in KINDS]
        caption = (
            f"Macro F1 on unseen tasks of a probe for the {what}, by layer, {_seeds(study)}. Dashed lines with hollow "
            "marks: the same networks before their first step. Horizontal: permuted labels, mean of the models."
        )
        figure = figures.lines(_panels(found), x_label="layer", y_label="macro F1", limits=(0.0, None))
        ends = last_layer(found)
        return FigureOutcome(
            pictures=(Picture(study.figure, caption, figure),),
            head=("probe", *names),
            rows=tuple(
                (f"{_panel(place)}, layer {layer}", *(str(Estimate.of(by_seed)) for by_seed in by.values()))
                for (place, layer), by in found.items()
            ),
            verdicts=(
                *decodable(f"the {what}", ends[TRAINED], ends[PERMUTED]),
                *learned(f"the {what}", ends[TRAINED], ends[UNTRAINED]),
            ),
            notes=(f"Fitted on {size} sequences of training tasks, scored on as many of unseen combinations.",),
            numbers={
                f"{_panel(place)}, layer {layer}": {m + kind: Estimate.of(x).as_json() for (m, kind), x in by.items()}
                for (place, layer), by in found.items()
            },
        )

    return draw


def probed(study: Study, wanted: Callable[[dict[str, Any]], bool]) -> Found:
    """The scores of every selected model, of the network that it was before training, and on permuted labels."""
    size = FIT.get(study.scale, 2048)
    found: dict[Any, dict[Any, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for model, point, network in models(study):
        for kind, one in ((TRAINED, network), (UNTRAINED, untrained(point.run))):
            for row in filter(wanted, probe_model(one, point.run.task, sequences=size, queries=1)):
                by = found[(row["target"], row["pairs"], row["query"]), row["layer"] + 1]
                by[model, kind][point.run.seed] = row["f1"]
                if kind == TRAINED:
                    by[model, PERMUTED][point.run.seed] = row["chance"]
    ordered = sorted(found, key=lambda place: not _papers(place[0]))
    return {place: {(m, k): found[place][m, k] for m in selected(study) for k in KINDS} for place in ordered}


def _seeds(study: Study) -> str:
    count = max(len(points) for points in selected(study).values())
    return f"{count} seed{'s' * (count > 1)}"


def _papers(place: Place) -> bool:
    """Whether these are the paper's pairs and queries."""
    target, pairs, query = place
    return pairs == "self" and target != "target value" and (query == "alone" or not target.startswith("term"))


def _panels(found: Found) -> list[Panel]:
    panels: list[Panel] = []
    for place in dict.fromkeys(place for place, _ in found):
        lines: dict[str, dict[int, list[float]]] = defaultdict(dict)
        level = {}
        for (_, layer), by in _at(found, place):
            for (model, kind), by_seed in by.items():
                if kind != PERMUTED:
                    lines[label(model) + kind][layer] = list(by_seed.values())
            level[layer] = mean([Estimate.of(x) for (_, kind), x in by.items() if kind == PERMUTED]).mean
        panels.append((_panel(place), dict(lines), {"Permuted labels": level}))
    return panels


def _at(found: Found, place: Place) -> Iterable[tuple[tuple[Place, int], Mapping[tuple[str, str], Any]]]:
    return [(where, by) for where, by in found.items() if where[0] == place]


def _panel(place: Place) -> str:
    target, pairs, query = place
    kind = (
        {"varies": "own contexts and queries", "alone": "one context", "fixed": "one query"}[query]
        if target.startswith("term")
        else ""
    )
    return ", ".join(part for part in (target, kind, "" if pairs == "self" else pairs.replace("_", " ")) if part)


def last_layer(found: Found) -> dict[str, dict[str, Estimate]]:
    """By kind, target and model: the scores in the last layer, on the paper's pairs and queries (fixed beforehand)."""
    scores: dict[str, dict[str, Estimate]] = {kind: {} for kind in KINDS}
    for place in dict.fromkeys(place for place, _ in found if _papers(place)):
        _, by = max(_at(found, place), key=lambda one: one[0][1])
        for (model, kind), by_seed in by.items():
            scores[kind][f"{place[0]}, {label(model)}"] = Estimate.of(by_seed)
    return scores
