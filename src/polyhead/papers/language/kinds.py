"""Language models by kind of heads: `lm-bytes` (ours), and Figure 6 of Schug et al. 2024 (HYLA on C4)."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from polyhead.analysis import figures
from polyhead.analysis.claims import Estimate, Scores, Verdict, above, constant
from polyhead.config import Rotary, Run
from polyhead.papers import outcome
from polyhead.papers.language.models import LANGUAGE, ROWS, SMOKE, SMOKE_PAIRS, LanguageScale, label
from polyhead.papers.language.shared import GB, LIBRARY, compared, cost, course, one_text
from polyhead.papers.outcome import Cells, Figure, FigureOutcome, Panel, Picture, Rows, scores_of
from polyhead.papers.sizes import size
from polyhead.papers.study import Cell, Study
from polyhead.tasks import Text

# ---------------------------------------------------------------------------------------------------------------- runs
# fmt: off
BYTES: dict[str, LanguageScale] = {
    "paper": LanguageScale(
        dim=512, hidden=1344, layers=6, heads=8, head_dim=64, positions=Rotary(),
        length=1024,
        steps=20_000, batch_size=64, precision="bf16", clip=1.0, betas=(0.9, 0.99),
        lrs=(1e-3,), decays=(0.1,), warmups=(500,), seeds=3, eval_batches=32,
    ),
    "small": LanguageScale(
        dim=128, hidden=320, layers=4, heads=8, head_dim=16, positions=Rotary(), symbols=LIBRARY,
        steps=1275, batch_size=8, clip=1.0, betas=(0.9, 0.99),
        lrs=(4e-3,), decays=(0.1,), warmups=(50,), seeds=1, eval_batches=24, evaluations=8,
    ),
    "smoke": SMOKE,
}
C4: dict[str, LanguageScale] = {
    "paper": LanguageScale(
        dim=512, hidden=2048, layers=6, heads=8, head_dim=64, positions=Rotary(), norm="layer", act="gelu_tanh",
        tied=True, init="hyla",
        data="hub:allenai/c4/en", tokenizer="bpe:32000", length=512, limit=640 * GB, held_out=1e-4,
        steps=991_821, batch_size=256, precision="bf16", clip=None,
        lrs=(1e-3, 3e-3), decays=(0.1, 0.03), warmups=(1000,), seeds=1, eval_batches=32, evaluations=100,
    ),
    "small": LanguageScale(
        dim=128, hidden=512, layers=4, heads=8, head_dim=16, positions=Rotary(), norm="layer", act="gelu_tanh",
        tied=True, init="hyla",
        tokenizer="bpe:2048", length=128,
        steps=300, batch_size=16, clip=1.0, betas=(0.9, 0.99),
        lrs=(3e-3,), decays=(0.1,), warmups=(30,), seeds=3, eval_batches=10, evaluations=6,
    ),
    "smoke": SMOKE_PAIRS,
}
# fmt: on

COMPARED = ("softmax", "hyla", "dual", "disentangled", "linear")


def lm_bytes(scale: str = "small") -> tuple[Run, ...]:
    """Bytes of the standard library's sources, one model per kind of heads.

    polyhead reproduce lm-bytes.  8 to 15 minutes of one core per model; with `--workers 1` one run at a time uses all
    cores.
    """
    return compared("bytes", COMPARED, size(BYTES, scale))


def fig_6(scale: str = "small") -> tuple[Run, ...]:
    """Fig. 6: loss on C4 during training; softmax, linear, HYLA.

    polyhead reproduce fig-6.  Paper: 72 to 100 hours on 16 TPU v5e per run.  Small: the standard library.  With tied
    embeddings and without biases our models have 35 M parameters; the paper says 50 M.
    """
    return compared("c4", ("hyla", "softmax", "linear"), size(C4, scale))


def single(row: str) -> Callable[[], Run]:
    """The recipe of one language model of bytes."""

    def recipe() -> Run:
        (run,) = compared("lm", (row,), BYTES["small"])
        return replace(run, name=f"lm-{row}")

    recipe.__doc__ = f"""{ROWS[row].label}: a language model of the Python standard library's sources, byte by byte.

    polyhead train lm-{row}.  1275 updates of 8 x 256 bytes; with as many parameters as all of `lm-bytes`.
    """
    return recipe


# -------------------------------------------------------------------------------------------------------------- claims
# Bits per byte that minutes on a CPU should reach; single runs have errors over sequences.
ENOUGH = 2.2


def lower(claim: str, scores: Scores, first: str, second: str) -> list[Verdict]:
    """Return the claim that `first` has a lower score than `second`; none if one of them was not run."""
    if first not in scores or second not in scores:
        return []
    return [above(claim, {f"{label(second)} − {label(first)}": scores[second] - scores[first]})]


def bytes_claims(cells: Cells) -> list[Verdict]:
    """The claims of `lm-bytes`: without those whose models were not run."""
    parts = {}
    for model, score in cells.map(ending).items():
        parts[f"{ENOUGH} − {label(model)}"] = constant(ENOUGH) - score
    verdicts = [above(f"every model reaches {ENOUGH} bits per byte on held-out files", parts)]
    verdicts += fig_6_claims(cells)
    scores = scores_of(cells, "iid")
    verdicts += lower("dual attention is better than softmax heads", scores, "dual", "softmax")
    half = "softmax and disentangled heads"
    verdicts += lower(f"{half} are better than softmax heads alone", scores, "disentangled", "softmax")
    return verdicts + lower(f"dual attention is better than {half}", scores, "dual", "disentangled")


def fig_6_claims(cells: Cells) -> list[Verdict]:
    """The claims of Fig. 6: HYLA is better than linear attention, and closer to softmax heads.

    Both are the same difference; the second was registered, so it stays.  Without claims whose models were not run.
    """
    scores = scores_of(cells, "iid")
    verdicts = lower("HYLA is better than linear attention", scores, "hyla", "linear")
    if not {"hyla", "linear", "softmax"} <= set(scores.keys()):
        return verdicts
    linear, hyla, softmax = scores["linear"], scores["hyla"], scores["softmax"]
    claim = "HYLA comes closer to softmax heads than linear attention does"
    distance = {"distance of linear − distance of HYLA": (linear - softmax) - (hyla - softmax)}
    return [*verdicts, above(claim, distance)]


# ------------------------------------------------------------------------------------------------------------- drawing
def ending(cell: Cell) -> Estimate:
    """The final score on held-out text over seeds; for a single run, with its error over sequences."""
    if len(cell.points) > 1:
        return cell.score("iid")
    (point,) = cell.points
    error = point.score("iid", f"{point.run.task.metric}_se")
    count = point.score("iid", "sequences")
    return Estimate(point.score("iid"), error, count - 1.0, runs=1.0, sampling=error)


def baselines(study: Study, split: str) -> dict[str, float]:
    """Bits per byte of compressors on the text of `split`; {} if it is not here."""
    task = study.points[0].run.task
    assert isinstance(task, Text)
    if {point.fingerprint() for point in study.points} != {task.fingerprint()}:
        return {}
    return {name: score.mean for name, score in task.baselines(split).items()}


def curves(study: Study, claim: Callable[[Cells], list[Verdict]]) -> FigureOutcome:
    """Draws bits per byte by number of tokens, a line per kind of heads, with zlib, and a table of final scores."""
    cells = study.cells("model")
    is_same, text = one_text(study)
    levels = baselines(study, "iid")
    by_label = {label(model): course(cell) for model, cell in cells.items()}
    drawn_levels: dict[str, float] = {}
    compressors = "The text on this machine is not that of the runs: there are no baselines."
    if levels:
        # The curves are of the validation text, the table is of the other held-out text.
        drawn_levels["zlib"] = baselines(study, "validation")["zlib"]
        sizes = ", ".join(f"{name} {level:.3f}" for name, level in levels.items())
        compressors = f"Bits per byte of the same held-out text by what trains no network: {sizes}."
    panel: Panel = ("", by_label, drawn_levels)
    figure = figures.lines([panel], x_label="million tokens", y_label="bits per byte", log_x=True)
    seeds = outcome.SEED_CAPTION if any(len(cell.points) > 1 for cell in cells) else "one seed"
    caption = f"Bits per byte on validation text in the course of training; {seeds}."
    verdicts: Sequence[Verdict] = ()
    if is_same:
        verdicts = claim(cells)
    rows, numbers = table(cells)
    return FigureOutcome(
        pictures=[Picture(study.figure, caption, figure)],
        table=rows,
        verdicts=verdicts,
        notes=[text, compressors, *outcome.choices(ROWS, cells.index), outcome.settings_note(cells)],
        numbers=numbers,
    )


# Title, split and metric of a column of the table.
MEASURED = (
    ("bits per byte, validation", "validation", None),
    ("bits per byte, iid", "iid", None),
    ("perplexity, iid", "iid", "perplexity"),
    ("accuracy, iid", "iid", "accuracy"),
)


def table(cells: Cells) -> Rows:
    """Return a row per model, with its final scores, size and time."""
    rows = []
    numbers = {}
    for model, cell in cells.items():
        texts, numbers[model] = outcome.score_row(cell, MEASURED)
        rows.append({"model": label(model), **texts, **cost(cell)})
    return rows, numbers


_TPU = "72-100 hours on 16 TPU v5e"
FIGURES = {
    "lm-bytes": Figure("Language models of bytes", LANGUAGE, partial(curves, claim=bytes_claims), lm_bytes, minutes=51),
    "fig-6": Figure(
        "Fig. 6: language modelling", LANGUAGE, partial(curves, claim=fig_6_claims), fig_6, minutes=29.6, gpu=_TPU
    ),
}
