"""What is claimed of language models, as tests on measured scores: Fig. 6 of Schug et al. 2024 (HYLA), the dual
attention of Altabaa and Lafferty 2024 with the numbers it prints, and two choices that courses teach.

See `claims` for when a claim holds.  Scores are bits per byte: lower is better.  Both papers trained each model once
and print no errors, so that no test can be put to their own numbers.
"""

import math
from collections.abc import Mapping

from polyhead.papers.hyla.claims import Estimate, Scores, Verdict, above, constant
from polyhead.papers.language.models import ROWS

PERPLEXITY: dict[int, dict[str, float]] = {
    1024: {"dual": 16.09, "softmax": 16.94},
    1536: {"dual": 14.31, "softmax": 14.65},
    2048: {"dual": 13.43, "softmax": 13.63},
}
"""Width -> model -> perplexity on FineWeb-Edu after 10 B tokens: 343, 734 and 1270 M parameters, 353, 757 and 1310 M of
softmax heads."""

_LEVELS = (30.0, 27.0, 24.0, 21.0, 18.0, 15.0)


def _reached(values: str) -> dict[float, float]:
    return {level: float(value) for level, value in zip(_LEVELS, values.split(), strict=True) if value != "-"}


TOKENS: dict[int, dict[str, dict[float, float]]] = {
    1024: {
        "dual": _reached("1.05 1.31 1.84 3.01 5.77 -"),
        "softmax": _reached("1.18 1.57 2.23 3.67 7.08 -"),
    },
    1536: {
        "dual": _reached(".79 1.05 1.44 2.10 3.80 7.73"),
        "softmax": _reached(".92 1.18 1.57 2.36 4.19 8.78"),
    },
    2048: {
        "dual": _reached(".79 .92 1.18 1.70 3.01 6.03"),
        "softmax": _reached(".92 1.05 1.31 1.97 3.28 6.55"),
    },
}
"""Width -> model -> perplexity -> billions of tokens until it was reached: the authors' page."""


def _lower(scores: Scores, one: str, others: tuple[str, ...]) -> dict[str, Estimate]:
    """How far `one` is below each of `others` that was run."""
    return {f"{ROWS[o].label} − {ROWS[one].label}": scores[o] - scores[one] for o in others if o in scores}


def reaches(scores: Scores, level: float) -> list[Verdict]:
    """Every model gets to `level` bits per byte.  `scores` with their errors over sequences, where runs are single."""
    parts = {f"{level} − {ROWS[model].label}": constant(level) - e for model, e in scores.items()}
    return [above(f"every model reaches {level} bits per byte on held-out files", parts)] if parts else []


def below(scores: Scores, levels: Mapping[str, float]) -> list[Verdict]:
    """Every model is below every level of zlib, `levels` by the text that it compressed."""
    parts = {
        f"zlib on {text}, {level:.3f} − {ROWS[model].label}": constant(level) - e
        for text, level in levels.items()
        for model, e in scores.items()
    }
    return [above("fewer bits per byte of held-out files than zlib takes", parts)] if parts else []


def kinds(scores: Scores) -> list[Verdict]:
    """HYLA beside linear heads, dual attention beside softmax heads."""
    verdicts = []
    if parts := _lower(scores, "hyla", ("linear",)) if "hyla" in scores else {}:
        verdicts.append(above("HYLA is better than linear attention", parts))
    if parts := _lower(scores, "dual", ("softmax",)) if "dual" in scores else {}:
        verdicts.append(above("dual attention is better than softmax heads", parts))
    return verdicts


def fig_6(scores: Scores) -> list[Verdict]:
    """HYLA is better than linear attention, and nearer to softmax heads than that is."""
    if not {"hyla", "linear", "softmax"} <= set(scores):
        return []
    linear, hyla, softmax = (scores[name] for name in ("linear", "hyla", "softmax"))
    behind = hyla - softmax if hyla.mean >= softmax.mean else softmax - hyla
    return [
        above("HYLA is better than linear attention", _lower(scores, "hyla", ("linear",))),
        above(
            "HYLA comes closer to softmax heads than linear attention does",
            {"distance of linear − distance of HYLA": linear - softmax - behind},
        ),
    ]


def sooner(tokens: Mapping[str, Mapping[str, Estimate]], scores: Mapping[str, Scores]) -> list[Verdict]:
    """`tokens[size, level][model]`: logarithm of the tokens that a model needs; `scores[size]`: of its end."""
    parts = {}
    for place, by in tokens.items():
        if {"softmax", "dual"} <= set(by):
            gain = by["softmax"] - by["dual"]
            parts[f"{place}, {-math.expm1(-gain.mean):.1%} fewer"] = gain
    claim = "dual attention reaches every perplexity that both reach with fewer tokens than softmax heads"
    verdicts = [above(claim, parts)] if parts else []
    ends = {
        f"{size}, {name}": e
        for size, by in scores.items()
        if "dual" in by
        for name, e in _lower(by, "dual", ("softmax",)).items()
    }
    return verdicts + ([above("after all tokens, dual attention is better at every size", ends)] if ends else [])


def gated(scores: Scores) -> list[Verdict]:
    """SwiGLU is better than layers without a gate.  `scores` by name of the activation."""
    if "SwiGLU" not in scores:
        return []
    parts = {f"{name} − SwiGLU": e - scores["SwiGLU"] for name, e in scores.items() if name != "SwiGLU"}
    return (
        [above("SwiGLU is better than feed-forward layers without a gate at equal parameters", parts)] if parts else []
    )


def orders(scores: Mapping[float, Scores]) -> list[Verdict]:
    """`scores[rate]["pre" | "post"]`: pre-norm is better at the best rate of each and at the highest of all."""
    both = {rate: by for rate, by in scores.items() if {"pre", "post"} <= set(by)}
    if not both:
        return []
    best = {order: min((by[order] for by in both.values()), key=lambda e: e.mean) for order in ("pre", "post")}
    most = max(both)
    return [
        above("pre-norm is better than post-norm, each at its best rate", {"post − pre": best["post"] - best["pre"]}),
        above(
            "pre-norm bears a higher rate",
            {f"post − pre at rate {most:g}": both[most]["post"] - both[most]["pre"]},
        ),
    ]
