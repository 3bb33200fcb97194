"""Inside the networks of 50,000 steps: codes swapped between sequences, and probes of codes.

Both tests are in docs/results/protocol.md: "causal evidence", and among its additions whether training puts terms into
the code.  `draw` uses all finished runs; a claim is a test from five seeds on.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from polyhead.analysis import figures, mix_codes, swap_codes
from polyhead.models.transformer import Transformer
from polyhead.papers.claims import Estimate, Verdict, above
from polyhead.papers.hyla.long import AGAIN, SEEDS
from polyhead.papers.hyla.probes import PERMUTED, TRAINED, UNTRAINED, decodable, last_layer, learned, models, probed
from polyhead.papers.hyla.rows import ROWS
from polyhead.papers.outcome import FigureOutcome, Picture
from polyhead.papers.study import Study

PAIRS = 2000
PROBED = ("hyla", "softmax")
"""The models whose probes are a test."""
GIVEN = {
    "own": "its own",
    "donor": "the donor's",
    "other": "a third sequence's",
    "permuted": "the donor's, heads in another order",
    "zero": "none (zero)",
}
"""The code of the query after a swap."""
RULES = {"own": "against its own function", "donor": "against the donor's function"}


@dataclass(frozen=True)
class SwapScores:
    """R² of one model by seed: `codes[code, rule]` of whole swaps, `shares[share, rule]` of mixtures."""

    codes: dict[tuple[str, str], dict[int, float]]
    shares: dict[tuple[float, str], dict[int, float]]

    def moved(self) -> Estimate:
        """R² against the donor's function, with the donor's code less with a third sequence's."""
        donor, other = self.codes["donor", "donor"], self.codes["other", "donor"]
        return Estimate.of({seed: donor[seed] - other[seed] for seed in donor})


def swapped(study: Study, pairs: int) -> dict[str, SwapScores]:
    """Swaps and mixtures in the last layer of every finished model, on pairs of unseen combinations."""
    found: dict[str, SwapScores] = {}
    for name, point, network in models(study):
        assert isinstance(network, Transformer)
        one = found.setdefault(name, SwapScores({}, {}))
        task, seed = point.run.task, point.run.seed
        for row in swap_codes(network, task, pairs=pairs, seed=seed):
            for rule in RULES:
                one.codes.setdefault((str(row["code"]), rule), {})[seed] = float(row[rule])
        for mixed in mix_codes(network, task, pairs=pairs, seed=seed):
            for rule in RULES:
                one.shares.setdefault((mixed["share"], rule), {})[seed] = mixed[rule]
    return found


def verdicts(swaps: Mapping[str, SwapScores]) -> list[Verdict]:
    """The test of the swap, for HYLA alone, as in the protocol."""
    if "hyla" not in swaps:
        return []
    claim = "the code carries the function: the output is nearer to the donor's with its code than with a third one's"
    return [above(claim, {ROWS["hyla"].label: swaps["hyla"].moved()}, family="swap")]


def repeated(swaps: Mapping[str, SwapScores], more: Mapping[str, SwapScores]) -> list[Verdict]:
    """The test of the swap over the seeds of `AGAIN`; empty unless HYLA has runs of all of them."""
    if "hyla" not in swaps or "hyla" not in more:
        return []
    codes = {
        key: {seed: value for seed, value in {**by, **more["hyla"].codes[key]}.items() if seed in AGAIN}
        for key, by in swaps["hyla"].codes.items()
    }
    tested = SwapScores(codes, {})
    return verdicts({"hyla": tested}) if set(tested.moved().values) == set(AGAIN) else []


def draw(study: Study) -> FigureOutcome:
    """Draw R² against both functions while one code turns into another; tabulate the swaps, the probes, their tests."""
    points = tuple(point for point in study.points if point.run.seed in SEEDS)
    others = tuple(point for point in study.points if point.run.seed not in SEEDS)
    again = swapped(replace(study, points=others), PAIRS)
    study = replace(study, points=points)
    swaps = swapped(study, PAIRS)
    panels = [(ROWS[name].label, *curves_of(scores)) for name, scores in swaps.items()]
    figure = figures.lines(panels, x_label="share of the donor's code", y_label="R²")

    probes = last_layer(probed(study, lambda row: str(row["target"]).startswith("term") and row["query"] == "alone"))
    tested: dict[str, dict[str, Estimate]] = {}
    for kind, by_place in probes.items():
        tested[kind] = {condition: score for condition, score in by_place.items() if is_tested(condition)}
    subject = "the terms of the function"
    probe_verdicts = decodable(subject, tested[TRAINED], tested[PERMUTED])
    probe_verdicts += learned(subject, tested[TRAINED], tested[UNTRAINED])
    notes = [
        f"Swaps: the last layer, {PAIRS:,} pairs of unseen combinations a run, two sequences with the same inputs and "
        "different functions. Probes: macro F1 on unseen combinations, last layer, one context for all sequences as in "
        "the paper's Fig. 2B.",
        "The tests are those of docs/results/protocol.md: the swap for HYLA, the probes for HYLA and softmax.",
    ]
    notes += [f"With seed 6 in place of seed 1: {verdict}" for verdict in repeated(swaps, again)]
    return FigureOutcome(
        pictures=(Picture(study.figure, _caption(swaps), figure),),
        head=("", "", *(ROWS[name].label for name in swaps)),
        rows=(*swap_rows(swaps), *probe_rows(swaps, probes)),
        verdicts=(*verdicts(swaps), *(replace(verdict, family="probes") for verdict in probe_verdicts)),
        numbers=numbers_of(swaps, probes),
        notes=tuple(notes),
    )


def is_tested(condition: str) -> bool:
    """Return whether the probe's model is one of those of the protocol."""
    return condition.rpartition(", ")[2] in {ROWS[name].label for name in PROBED}


def curves_of(scores: SwapScores) -> tuple[dict[str, dict[float, list[float]]], dict[str, float]]:
    """Return a panel's lines, and the level of a third sequence's code."""
    curves: dict[str, dict[float, list[float]]] = {}
    for (share, rule), by_seed in scores.shares.items():
        curves.setdefault(RULES[rule], {})[share] = list(by_seed.values())
    return curves, {"donor's function, a third sequence's code": Estimate.of(scores.codes["other", "donor"]).mean}


def _caption(swaps: Mapping[str, SwapScores]) -> str:
    seeds = "; ".join(f"{ROWS[name].label} n = {len(one.codes['own', 'own'])}" for name, one in swaps.items())
    return (
        "Two sequences with the same inputs and different functions. In the last layer the code of the query turns "
        "from its own (left) into that of the other sequence, the donor (right); nothing else changes. If the code "
        f"alone specified the function, the lines would cross and end where the other began. {seeds}."
    )


def swap_rows(swaps: Mapping[str, SwapScores]) -> list[tuple[str, ...]]:
    """Return a row for each code after the swap and each function."""
    rows = []
    for code, words in GIVEN.items():
        for rule, rule_words in RULES.items():
            texts = [str(Estimate.of(scores.codes[code, rule])).replace("-", "−") for scores in swaps.values()]
            rows.append((f"code: {words}", f"R² {rule_words}", *texts))
    return rows


def probe_rows(swaps: Mapping[str, SwapScores], probes: Mapping[str, Mapping[str, Estimate]]) -> list[tuple[str, ...]]:
    """Return a row for each term and kind of network."""
    words = {TRAINED: "trained", UNTRAINED: "before its first step", PERMUTED: "permuted labels"}
    rows = []
    for term in dict.fromkeys(condition.rpartition(", ")[0] for condition in probes[TRAINED]):
        for kind, by_place in probes.items():
            texts = [str(by_place[f"{term}, {ROWS[name].label}"]) for name in swaps]
            rows.append((f"probe of {term}", words[kind], *texts))
    return rows


def numbers_of(
    swaps: Mapping[str, SwapScores], probes: Mapping[str, Mapping[str, Estimate]]
) -> dict[str, dict[str, dict[str, object]]]:
    """Return all scores as JSON values."""
    numbers: dict[str, dict[str, dict[str, object]]] = {}
    for name, scores in swaps.items():
        by_place = numbers.setdefault(ROWS[name].label, {})
        for (code, rule), by_seed in scores.codes.items():
            by_place[f"{GIVEN[code]}, {RULES[rule]}"] = Estimate.of(by_seed).as_json()
        for (share, rule), by_seed in scores.shares.items():
            by_place[f"share {share:g}, {RULES[rule]}"] = Estimate.of(by_seed).as_json()
    numbers["probes"] = {}
    for kind, by_target in probes.items():
        for condition, estimate in by_target.items():
            numbers["probes"][f"{condition}{kind}"] = estimate.as_json()
    return numbers
