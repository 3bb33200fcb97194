"""Dual attention in language modelling: tokens needed to reach a perplexity (Altabaa and Lafferty 2024)."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from polyhead.analysis import figures
from polyhead.analysis.claims import Estimate, Verdict, above, mean
from polyhead.config import Rotary, Run, SymbolicAttention
from polyhead.papers import outcome
from polyhead.papers.language.models import LANGUAGE, ROWS, SMOKE_PAIRS, LanguageScale, label
from polyhead.papers.language.shared import GB, LIBRARY, compared, cost, course, one_text, update_tokens
from polyhead.papers.outcome import Cells, Curves, Figure, FigureOutcome, Panel, Picture, Rows, Table
from polyhead.papers.sizes import size, widened
from polyhead.papers.study import Cell, Study

# ---------------------------------------------------------------------------------------------------------------- runs
LARGE = SymbolicAttention(count=1024, heads=8, trainable=False)

# fmt: off
DUAL: dict[str, LanguageScale] = {
    "paper": LanguageScale(
        dim=1024, hidden=4096, layers=24, heads=16, head_dim=64, kv_heads=4, relations=64, positions=Rotary(),
        norm="layer", act="gelu_tanh", tied=True, init="hyla", symbols=LARGE,
        data="hub:HuggingFaceFW/fineweb-edu/sample-10BT", tokenizer="hub:openai-community/gpt2", length=1024,
        limit=60 * GB, held_out=1e-3,
        steps=19_073, batch_size=512, accumulate=16, precision="bf16", clip=1.0, betas=(0.9, 0.95),
        lrs=(6e-4,), decays=(0.1,), warmups=(715,), seeds=1, eval_batches=20, evaluations=76,
    ),
    "small": LanguageScale(
        dim=64, hidden=256, layers=4, heads=8, head_dim=8, positions=Rotary(), norm="layer", act="gelu_tanh",
        tied=True, init="hyla", symbols=LIBRARY,
        tokenizer="bpe:2048", length=128,
        steps=400, batch_size=16, clip=1.0, betas=(0.9, 0.95),
        lrs=(4e-3,), decays=(0.1,), warmups=(30,), seeds=3, eval_batches=8,
    ),
    "smoke": SMOKE_PAIRS,
}
# fmt: on


def dual_lm(scale: str = "small") -> tuple[Run, ...]:
    """Dual attention against softmax heads in language modelling, by size: tokens needed to reach a perplexity.

    polyhead reproduce dual-lm.  Paper: FineWeb-Edu 10BT in GPT-2's tokens, keys grouped in dual attention alone, one
    run per size.  Small: the standard library with 2048 BPE tokens, three seeds, equal parameters.

    We have one output projection for all heads, the released code has one per kind.  So our models have 356, 762 and
    1323 M parameters, the paper's 343, 734 and 1270 M; softmax heads have 354, 757 and 1311 M.
    """
    runs: list[Run] = []
    for shape in dual_sizes(scale):
        runs += compared(f"dual-lm-{shape.dim}", ("dual", "softmax"), shape, matched=scale != "paper")
    return tuple(runs)


def dual_sizes(scale: str) -> tuple[LanguageScale, ...]:
    """The compared sizes, by width."""
    base = size(DUAL, scale)
    if scale != "paper":
        return base, widened(base, 2.0)
    middle = replace(base, dim=1536, hidden=6144, heads=24, kv_heads=6)
    largest = replace(base, dim=2048, hidden=8192, heads=32, kv_heads=8, relations=128)
    return base, middle, replace(largest, symbols=replace(LARGE, count=2048, heads=16))


# -------------------------------------------------------------------------------------------------------------- claims
# Perplexities of the token-efficiency table.
LEVELS = {
    "paper": (30.0, 27.0, 24.0, 21.0, 18.0, 15.0),
    "small": (200.0, 150.0, 100.0, 80.0, 60.0, 50.0, 40.0, 30.0),
    "smoke": (310.0, 305.0, 300.0),
}


# Width and model -> perplexity on FineWeb-Edu after 10 B tokens, and billions of tokens until a perplexity of
# `LEVELS["paper"]` was reached: the authors' page.  343, 734 and 1270 M parameters; softmax heads 353, 757 and 1310 M.
PRINTED: dict[tuple[int, str], tuple[float, str]] = {
    (1024, "dual"): (16.09, "1.05, 1.31, 1.84, 3.01, 5.77, –"),
    (1024, "softmax"): (16.94, "1.18, 1.57, 2.23, 3.67, 7.08, –"),
    (1536, "dual"): (14.31, "0.79, 1.05, 1.44, 2.10, 3.80, 7.73"),
    (1536, "softmax"): (14.65, "0.92, 1.18, 1.57, 2.36, 4.19, 8.78"),
    (2048, "dual"): (13.43, "0.79, 0.92, 1.18, 1.70, 3.01, 6.03"),
    (2048, "softmax"): (13.63, "0.92, 1.05, 1.31, 1.97, 3.28, 6.55"),
}

# Width, perplexity and model -> the log of the millions of tokens until it is reached.
Needs = Mapping[tuple[Any, float, str], Estimate]


def sooner(needs: Needs) -> list[Verdict]:
    """Return the claim that dual attention reaches a perplexity with fewer tokens; none if no level is common."""
    gains = []
    for (width, level, model), tokens in needs.items():
        if model == "dual" and (width, level, "softmax") in needs:
            gains.append(needs[width, level, "softmax"] - tokens)
    if not gains:
        return []
    gain = mean(gains)
    name = f"log of tokens, mean of {len(gains)} places that both reach, {-math.expm1(-gain.mean):.1%} fewer"
    return [above("dual attention reaches a perplexity with fewer tokens than softmax heads", {name: gain})]


def better_at_the_end(scores: Table) -> list[Verdict]:
    """Return the claim about the final scores.  `scores`: by width."""
    parts = {}
    for width, difference in outcome.differences(scores, "softmax", "dual").items():
        parts[f"width {width}, {label('softmax')} − {label('dual')}"] = difference
    if not parts:
        return []
    return [above("after all tokens, dual attention is better at every size", parts)]


# ------------------------------------------------------------------------------------------------------------- drawing
def reached(course: Mapping[float, float], level: float) -> float | None:
    """The x at which a falling curve first reaches `level`, by linear interpolation over log x; None if it never does.

    >>> [reached({1.0: 4.0, 4.0: 2.0}, level) for level in (5.0, 3.0, 1.0)]
    [1.0, 2.0, None]
    """
    before: tuple[float, float] | None = None
    for x, y in sorted(course.items()):
        if y <= level:
            if before is None:
                return x
            part = (before[1] - level) / (before[1] - y)
            return math.exp(math.log(before[0]) + part * (math.log(x) - math.log(before[0])))
        before = x, y
    return None


def tokens_to(cell: Cell, level: float) -> Estimate | None:
    """Return the log of the millions of tokens until the validation perplexity is `level`; None if a seed misses it."""
    by_seed = dict.fromkeys(cell.diverged, math.nan)
    for point in cell.points:
        tokens = update_tokens(point.run) / 1e6
        losses = {step * tokens: loss for step, loss in point.course("validation", "loss").items()}
        needed = reached(losses, math.log(level))
        if needed is None:
            return None
        by_seed[point.run.seed] = math.log(needed)
    return Estimate.of(by_seed)


def draw(study: Study) -> FigureOutcome:
    """Draw perplexity by number of tokens, a panel per width, and the tokens needed for several perplexities."""
    cells = study.cells("width", "model")
    panels: list[Panel] = []
    needs: dict[tuple[Any, float, str], Estimate] = {}
    for width, of_width in cells.groupby(level="width", sort=False):
        curves: Curves = {}
        for (_, model), cell in of_width.items():
            for x, losses in course(cell, "loss").items():
                curves.setdefault(label(model), {})[x] = [math.exp(min(loss, 700.0)) for loss in losses]
            for level in LEVELS[study.scale]:
                tokens = tokens_to(cell, level)
                if tokens is not None:
                    needs[width, level, model] = tokens
        panels.append((f"width {width}", curves, {}))
    figure = figures.lines(panels, x_label="million tokens", y_label="perplexity", log_x=True, log_y=True)
    caption = f"Perplexity of validation text in the course of training; {outcome.SEED_CAPTION}."
    is_same, text = one_text(study)
    verdicts = []
    if is_same:
        verdicts = sooner(needs) + better_at_the_end(outcome.score_table(cells, "iid"))
    rows, numbers = efficiency(cells, needs, study.scale)
    columns = "Columns named by a perplexity: millions of tokens until validation text has it, the mean over seeds; – "
    notes = [text, f"{columns}where a seed does not come there.", *outcome.choices(ROWS, ("dual",))]
    notes += [*paper_notes(), outcome.settings_note(cells)]
    return FigureOutcome([Picture(study.figure, caption, figure)], rows, verdicts, notes, numbers)


def efficiency(cells: Cells, needs: Needs, scale: str) -> Rows:
    """Return the token-efficiency table: a row per width and model, and a column per level that some model reaches."""
    reached_levels = {level for _, level, _ in needs}
    rows = []
    numbers = {}
    for (width, model), cell in cells.items():
        row = {"width": str(width), "model": label(model)}
        values = {}
        for level in LEVELS[scale]:
            if level not in reached_levels:
                continue
            row[f"to {level:g}"] = "–"
            if (width, level, model) in needs:
                tokens = needs[width, level, model]
                row[f"to {level:g}"] = f"{math.exp(tokens.mean):.3g}"
                values[f"log of million tokens to {level:g}"] = tokens.as_json()
        perplexity, bits = cell.score("validation", "perplexity"), cell.score("iid")
        row |= {"perplexity, validation": str(perplexity), "bits per byte, iid": str(bits)}
        rows.append(row | cost(cell))
        values |= {"perplexity": perplexity.as_json(), "bits per byte": bits.as_json()}
        numbers[f"width {width}, {model}"] = values
    return rows, numbers


def paper_notes() -> list[str]:
    """Return the paper's numbers as notes."""
    notes = []
    for (width, model), (perplexity, tokens) in PRINTED.items():
        notes.append(
            f"Paper, width {width}, {label(model)}: perplexity {perplexity} on FineWeb-Edu; billion tokens to 30, 27, "
            f"24, 21, 18 and 15: {tokens}."
        )
    return notes


FIGURES = {"dual-lm": Figure("Dual attention in language", LANGUAGE, draw, dual_lm, minutes=45.4)}
