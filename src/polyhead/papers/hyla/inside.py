"""Inside the networks of 50,000 steps: codes swapped between sequences, probes of codes, and their neighbours.

The tests are in docs/results/protocol.md: "causal evidence", and among its additions whether training puts terms into
the code, and whether codes of one function become neighbours.  `draw` uses all finished runs; a claim is a test from
five seeds on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from polyhead.analysis import figures, mix_codes, swap_codes
from polyhead.analysis.claims import Estimate, Verdict, above
from polyhead.analysis.probe import draws
from polyhead.models.transformer import Transformer
from polyhead.papers.hyla.codes import purity_over_chance
from polyhead.papers.hyla.long import AGAIN, SEEDS
from polyhead.papers.hyla.probes import (
    PERMUTED,
    TERMS,
    TRAINED,
    UNTRAINED,
    decodable,
    last_layer,
    learned,
    models,
    probed,
)
from polyhead.papers.hyla.rows import label
from polyhead.papers.outcome import Cells, Curves, FigureOutcome, Panel, Picture, Rows, Table
from polyhead.papers.study import Study
from polyhead.train.network import predict

PAIRS = 2000
# The models whose probes are a test, by label.
PROBED = (label("hyla"), label("softmax"))
# Sequences whose R² is also pooled.
SEQUENCES = 2048
# What neighbours are compared by: the function, and the value that the network has to predict.
COMPARED = {"function": "function", "target": "value (one of eight classes)"}
# The code of the query after a swap.
CODES = {
    "own": "its own",
    "donor": "the donor's",
    "other": "a third sequence's",
    "permuted": "the donor's, heads in another order",
    "zero": "none (zero)",
}
RULES = {"own": "against its own function", "donor": "against the donor's function"}


def swapped(study: Study) -> tuple[Table, Table]:
    """Return R² after swaps and after mixtures in the last layer of every finished model.

    A row per seed.  The columns of swaps are by model, code and rule; those of mixtures by model, share and rule.
    """
    import pandas

    swaps: dict[tuple[str, str, str], dict[int, float]] = {}
    mixtures: dict[tuple[str, float, str], dict[int, float]] = {}
    for model, point, network in models(study):
        assert isinstance(network, Transformer)
        task, seed = point.run.task, point.run.seed
        for swap in swap_codes(network, task, pairs=PAIRS, seed=seed):
            for rule in RULES:
                swaps.setdefault((model, str(swap["code"]), rule), {})[seed] = float(swap[rule])
        for mixture in mix_codes(network, task, pairs=PAIRS, seed=seed):
            for rule in RULES:
                mixtures.setdefault((model, mixture["share"], rule), {})[seed] = mixture[rule]
    return pandas.DataFrame(swaps), pandas.DataFrame(mixtures)


def verdicts(swaps: Table, seeds: Sequence[int] = SEEDS) -> list[Verdict]:
    """The test of the swap, for HYLA alone, as in the protocol."""
    if "hyla" not in swaps:
        return []
    # R² against the donor's function: with the donor's code less with a third sequence's.
    gain = swaps["hyla", "donor", "donor"] - swaps["hyla", "other", "donor"]
    by_seed = gain.reindex(seeds).dropna().to_dict()
    claim = "the code carries the function: the output is nearer to the donor's with its code than with a third one's"
    return [above(claim, {label("hyla"): Estimate.of(by_seed)}, family="swap")]


def clustered(study: Study) -> Cells:
    """Return the purity of neighbours over chance, last layer, by what is compared, model and kind of network."""
    purity = purity_over_chance(study, COMPARED)
    return purity.xs(max(purity.index.unique("layer")), level="layer")


def cluster_verdicts(purity: Cells) -> list[Verdict]:
    """The test of clusters, for HYLA: codes of one function are neighbours more often than before training."""
    if "hyla" not in purity.index.unique("model"):
        return []
    gain = purity["function", "hyla", TRAINED] - purity["function", "hyla", UNTRAINED]
    claim = "clusters follow the function: its codes are neighbours more often than before training"
    return [above(claim, {label("hyla"): gain}, family="clusters")]


def pooled(study: Study) -> dict[str, dict[str, Estimate]]:
    """Return R² on unseen combinations by model: as the mean over sequences, and over the queries of all sequences.

    The first is the score of all pages, as in the released code; the paper's text may mean the second.
    """
    by_sequence: dict[str, dict[int, float]] = {}
    by_query: dict[str, dict[int, float]] = {}
    for model, point, network in models(study):
        r2, errors, targets = [], [], []
        for batch in draws(point.run.task, "compositional", SEQUENCES, seed=point.run.seed, purpose="pooled"):
            with torch.no_grad():
                scores = point.run.task.metrics(predict(network, point.run.task, batch), batch)
            r2.append(scores["r2"])
            errors.append(scores["mse"])
            targets.append(batch.targets[:, -1, 0])
        by_sequence.setdefault(label(model), {})[point.run.seed] = float(torch.cat(r2).mean())
        explained = 1 - torch.cat(errors).mean() / torch.cat(targets).var(correction=0)
        by_query.setdefault(label(model), {})[point.run.seed] = float(explained)
    estimates: dict[str, dict[str, Estimate]] = {}
    for rule, by_model in (("the mean over sequences", by_sequence), ("over all queries together", by_query)):
        for model, by_seed in by_model.items():
            estimates.setdefault(rule, {})[model] = Estimate.of(by_seed)
    return estimates


def repeated(swaps: Table) -> list[Verdict]:
    """The test of the swap over the seeds of `AGAIN`; empty unless HYLA has runs of all of them."""
    if "hyla" not in swaps or not set(AGAIN) <= set(swaps["hyla"].dropna().index):
        return []
    return verdicts(swaps, AGAIN)


def draw(study: Study) -> FigureOutcome:
    """Draw R² against both functions while one code turns into another; tabulate the swaps, the probes, their tests."""
    all_swaps, all_mixtures = swapped(study)
    points = tuple(point for point in study.points if point.run.seed in SEEDS)
    seeds = all_swaps.index.intersection(SEEDS)
    swaps, mixtures = all_swaps.loc[seeds], all_mixtures.loc[seeds]

    main = replace(study, points=points)
    probes = last_layer(probed(main, TERMS, "alone"))
    purity = clustered(main)
    tested: dict[str, dict[str, Estimate]] = {}
    for kind, by_name in probes.items():
        tested[kind] = {}
        for name, score in by_name.items():  # a name is "TERM, MODEL"
            if name.rpartition(", ")[2] in PROBED:
                tested[kind][name] = score
    subject = "the terms of the function"
    probe_verdicts = decodable(subject, tested[TRAINED], tested[PERMUTED])
    probe_verdicts += learned(subject, tested[TRAINED], tested[UNTRAINED])
    unseen = study.split_name("compositional")
    notes = [
        f"Swaps: the last layer, {PAIRS:,} pairs of {unseen} a run, two sequences with the same inputs and "
        f"different functions. Probes: macro F1 on {unseen}, last layer, one context for all sequences as in "
        "the paper's Fig. 2B.",
        f"Neighbours: ten of 800 codes of {unseen}, last layer, one context. R²: {SEQUENCES:,} sequences of {unseen}.",
        "The tests are those of docs/results/protocol.md: swap and clusters for HYLA, probes for HYLA and softmax.",
    ]
    notes += [f"With seed 6 in place of seed 1: {verdict}" for verdict in repeated(all_swaps)]
    judged = verdicts(swaps)
    for verdict in probe_verdicts:
        judged.append(replace(verdict, family="probes"))
    judged += cluster_verdicts(purity)
    rows, numbers = tabulated(swaps, mixtures, probes, purity, pooled(main))
    return FigureOutcome(
        pictures=[picture_of_mixtures(study.figure, swaps, mixtures)],
        table=rows,
        verdicts=judged,
        numbers=numbers,
        notes=notes,
    )


def picture_of_mixtures(stem: str, swaps: Table, mixtures: Table) -> Picture:
    """Draw a panel per model: R² against both functions by share of the donor's code."""
    panels: list[Panel] = []
    counts = []
    for model in mixtures.columns.unique(0):
        curves: Curves = {}
        for (share, rule), by_seed in mixtures[model].items():
            curves.setdefault(RULES[rule], {})[share] = by_seed.dropna().to_list()
        third = swaps[model, "other", "donor"].dropna()
        level = Estimate.of(third.to_dict()).mean
        panels.append((label(model), curves, {"donor's function, a third sequence's code": level}))
        counts.append(f"{label(model)} n = {len(third)}")
    caption = (
        "Two sequences with the same inputs and different functions. In the last layer the code of the query turns "
        "from its own (left) into that of the other sequence, the donor (right); nothing else changes. If the code "
        f"alone specified the function, the lines would cross and end where the other began. {'; '.join(counts)}."
    )
    return Picture(stem, caption, figures.lines(panels, x_label="share of the donor's code", y_label="R²"))


def tabulated(
    swaps: Table,
    mixtures: Table,
    probes: Mapping[str, Mapping[str, Estimate]],
    purity: Cells,
    r2: Mapping[str, Mapping[str, Estimate]],
) -> Rows:
    """Return a row for each code and rule, each term, each kind of neighbours, and each way to pool R²."""
    rows: dict[tuple[str, str], dict[str, str]] = {}
    numbers: dict[str, dict[str, Any]] = {}
    for (model, code, rule), by_seed in swaps.items():
        estimate = Estimate.of(by_seed.dropna().to_dict())
        key = (f"code: {CODES[code]}", f"R² {RULES[rule]}")
        rows.setdefault(key, {})[label(model)] = str(estimate).replace("-", "−")
        numbers.setdefault(label(model), {})[f"{CODES[code]}, {RULES[rule]}"] = estimate.as_json()
    for (model, share, rule), by_seed in mixtures.items():
        estimate = Estimate.of(by_seed.dropna().to_dict())
        numbers[label(model)][f"share {share:g}, {RULES[rule]}"] = estimate.as_json()

    words = {TRAINED: "trained", UNTRAINED: "before its first step", PERMUTED: "permuted labels"}
    numbers["probes"] = {}
    for kind, by_name in probes.items():
        for name, estimate in by_name.items():
            term, _, model_label = name.partition(", ")
            rows.setdefault((f"probe of {term}", words[kind]), {})[model_label] = str(estimate)
            numbers["probes"][f"{name}{kind}"] = estimate.as_json()

    numbers["neighbours, over chance"] = {}
    for (compared, model, kind), estimate in purity.items():
        key = (f"neighbours with the same {COMPARED[compared]}, over chance", words[kind])
        rows.setdefault(key, {})[label(model)] = str(estimate).replace("-", "−")
        numbers["neighbours, over chance"][f"{compared}, {label(model)}{kind}"] = estimate.as_json()
    for rule, by_model in r2.items():
        for model_label, estimate in by_model.items():
            rows.setdefault(("R² on unseen combinations", rule), {})[model_label] = str(estimate)
            numbers.setdefault("R² on unseen combinations", {})[f"{rule}, {model_label}"] = estimate.as_json()
    return [{"subject": subject, "score": score, **row} for (subject, score), row in rows.items()], numbers
