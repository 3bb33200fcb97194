"""Writes every table of numbers in the README and the pages from the committed results.

    python docs/make_tables.py            # writes; a table stands between <!-- table: NAME --> and <!-- /table -->
    python docs/make_tables.py --check    # changes nothing; exit code 1 and the names of pages that differ

A cell is a mean over seeds, with ± and one standard error where the table says so.
"""

import argparse
import functools
import json
import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
TABLE = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- /table -->)", re.DOTALL)
GAMES = ("same", "occurs", "xoccurs", "between", "match_pattern")
HEADS = {
    "softmax": "softmax",
    "softmax-rope": "softmax, rotary positions",
    "dual": "softmax + relational",
    "disentangled": "softmax + disentangled",
}
SEEDS = ("1", "2", "3", "4", "5")  # of the main test on fuzzy logic; seed 6 only repeats it
DASH = "–"

Scores = Mapping[str, float]
"""Seed -> score."""


def numbers(folder: str) -> dict[str, Any]:
    """The numbers of a results folder, such as "fuzzy/long"."""
    stored: dict[str, Any] = json.loads((RESULTS / folder / "results.json").read_text(encoding="utf-8"))["numbers"]
    return stored


def main_seeds(scores: Scores) -> list[float]:
    return [scores[seed] for seed in SEEDS if seed in scores]


def plus_minus(scores: Sequence[float]) -> str:
    """Mean ± standard error over seeds, and how many seeds where they are fewer than five."""
    if len(scores) < 2:
        return f"{scores[0]:.3f} (1 seed)" if scores else DASH
    error = statistics.stdev(scores) / len(scores) ** 0.5
    text = f"{statistics.fmean(scores):.3f} ± {error:.3f}".replace("-", "−")
    return text if len(scores) >= 5 else f"{text} ({len(scores)} seeds)"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def accuracy_of_games(model: str, images: int = 1000) -> list[float]:
    """Mean accuracy over the five games on new pentominoes, one number a seed."""
    games = numbers("small/games")
    by_seed: dict[str, list[float]] = {}
    for game in GAMES:
        for seed, accuracy in games[f"{game}, {images}"][model]["pentominoes"]["by_seed"].items():
            by_seed.setdefault(seed, []).append(accuracy)
    return [statistics.fmean(accuracies) for accuracies in by_seed.values()]


def readme() -> str:
    narrow, wide = numbers("fuzzy/long"), numbers("fuzzy/width")
    language = numbers("small/lm-bytes")
    models = ("Softmax", "Linear", "HYLA")

    def mean(scores: Sequence[float]) -> str:
        return f"{statistics.fmean(scores):.3f}"

    fuzzy = [mean(main_seeds(narrow[model]["unseen"])) for model in models]
    fuzzy_wide = [mean(main_seeds(wide[f"{model}, width 16"]["unseen"])) for model in models]
    games = [mean(accuracy_of_games(model)) for model in ("softmax", "dual", "disentangled")]
    bits = []
    for model in ("softmax", "linear", "hyla", "dual", "disentangled"):
        bits.append(f"{language[model]['bits per byte, iid']['mean']:.3f}")
    rows = [
        ["recombine known parts: fuzzy logic, R² on unseen combinations", *fuzzy[:2], f"**{fuzzy[2]}**", "", "", "5"],
        ["the same with heads of width 16 in place of 2", *fuzzy_wide[:2], f"**{fuzzy_wide[2]}**", "", "", "5"],
        [
            "compare shapes: accuracy, new pictures, five games (disentangled: `symmetric=True`)",
            games[0],
            "",
            "",
            games[1],
            f"**{games[2]}**",
            "5",
        ],
        ["language: bits per byte of source code, lower is better", *bits, "5"],
    ]
    return markdown(["task and score", "softmax", "linear", "HYLA", "relational", "disentangled", "seeds"], rows)


def fuzzy_main() -> str:
    scores = numbers("fuzzy/long")
    rows = []
    for model, label in (("HYLA", "HYLA"), ("Softmax", "softmax"), ("Linear", "linear")):
        cells = [plus_minus(main_seeds(scores[model][key])) for key in ("known", "unseen", "gap")]
        rows.append([label, *cells])
    return markdown(["heads", "known combinations", "unseen combinations", "drop"], rows)


def fuzzy_width() -> str:
    scores = numbers("fuzzy/width")
    rows = []
    for model, label in (("HYLA", "HYLA"), ("Softmax", "softmax"), ("Linear", "linear")):
        cells = []
        for suffix in ("", ", width 4", ", width 8", ", width 16"):
            by_seed = scores.get(f"{model}{suffix}", {}).get("unseen")
            cells.append(plus_minus(main_seeds(by_seed)) if by_seed else "not run")
        rows.append([label, *cells])
    return markdown(["heads", "width 2", "width 4", "width 8", "width 16"], rows)


def summary() -> str:
    """What HYLA and disentangled heads gain over softmax heads, and what not."""
    width = numbers("fuzzy/width")

    def lead(suffix: str) -> str:
        hyla, softmax = width[f"HYLA{suffix}"]["unseen"], width[f"Softmax{suffix}"]["unseen"]
        return f"{statistics.fmean(hyla[seed] - softmax[seed] for seed in SEEDS if seed in hyla):+.2f}"

    language = numbers("small/lm-bytes")
    bits = {model: f"{scores['bits per byte, iid']['mean']:.2f}" for model, scores in language.items()}
    games = 0.0  # the mean of both numbers of images, which the test takes
    for images in (250, 1000):
        gain = statistics.fmean(accuracy_of_games("disentangled", images))
        games += (gain - statistics.fmean(accuracy_of_games("softmax", images))) / 2
    rows = [
        [
            "HYLA",
            f"{lead('')} R² on unseen combinations: fuzzy logic, heads of width 2; {lead(', width 16')} at width 16",
            f"width 4: {lead(', width 4')}, width 8: {lead(', width 8')}, both undecided; Raven matrices: undecided; "
            f"language: {bits['hyla']} bits per byte against {bits['softmax']}",
        ],
        [
            "disentangled, beside as many softmax heads",
            f"{games:+.2f} accuracy over five comparison games, mean of 250 and 1,000 images, with `symmetric=True`; "
            "[sorting](small/sorting/README.md); [order](small/order/README.md): over absolute and rotary positions; "
            "[images](small/images/README.md): over rotary positions",
            "order against T5 bias, images against absolute positions, [SET](small/set/README.md), mathematics: "
            f"undecided; language: undecided, {bits['disentangled']} bits per byte against {bits['softmax']}",
        ],
    ]
    return markdown(["heads", "ahead of softmax heads", "not ahead, or not known"], rows)


def fuzzy_baselines() -> str:
    scores = numbers("fuzzy/long")
    hyla = scores["HYLA"]["unseen"]
    rows = []
    for baseline in ("Mixture", "Gaussian process", "Recall"):
        values = scores[baseline]["unseen"]
        differences = [hyla[seed] - values[seed] for seed in SEEDS if seed in values]
        ahead = sum(difference > 0 for difference in differences)
        row = [baseline.lower() if baseline != "Gaussian process" else baseline, plus_minus(main_seeds(values))]
        rows.append([*row, plus_minus(differences), f"{ahead} of {len(differences)}"])
    return markdown(
        ["baseline", "R², unseen combinations", "HYLA minus baseline", "divisions in which HYLA leads"], rows
    )


def fuzzy_parts() -> str:
    scores = numbers("fuzzy/parts")
    labels = {
        "HYLA": "HYLA",
        "HYLA − nonlinearity": "without its nonlinearity",
        "HYLA − RMSHead": "without its norm over heads",
        "HYLA − RMSHead + softmax": "softmax in place of that norm",
        "Linear + RMSHead": "linear heads with that norm",
    }
    rows = []
    for model, label in labels.items():
        rows.append([label, *(f"{scores[model]['unseen'][seed]:.3f}" for seed in ("1", "2", "3"))])
    return markdown(["R², unseen combinations", "seed 1", "seed 2", "seed 3"], rows)


def swapped_codes() -> str:
    scores = numbers("fuzzy/inside")["HYLA"]
    rows = []
    for key, label in (("the donor's", "the donor's"), ("a third sequence's", "a random sequence's")):
        by_seed = scores[f"{key}, against the donor's function"]["by_seed"]
        cells = [f"{by_seed[seed]:.3f}".replace("-", "−") for seed in SEEDS]
        rows.append([label, plus_minus(main_seeds(by_seed)), *cells])
    return markdown(["latent code used", "mean", *(f"seed {seed}" for seed in SEEDS)], rows)


def sraven() -> str:
    scores = numbers("sraven")
    rows = []
    for model, label in (("HYLA", "HYLA"), ("Softmax", "softmax"), ("Linear", "linear")):
        unseen = scores[model]["unseen"]
        cells = [f"{unseen[seed]:.3f}" if seed in unseen else "not run" for seed in ("0", "1", "2", "3")]
        rows.append([label, *cells])
    return markdown(["accuracy, unseen combinations", "seed 0", "seed 1", "seed 2", "seed 3"], rows)


def games() -> str:
    scores = numbers("small/games")
    rows = []
    for model, label in {**HEADS, "corelnet": "CoRelNet, made for comparisons only"}.items():
        cells = []
        for game in GAMES:
            by_seed = scores[f"{game}, 1000"][model]["pentominoes"]["by_seed"]
            cells.append(plus_minus(list(by_seed.values())))
        rows.append([label, *cells, f"{statistics.fmean(accuracy_of_games(model)):.3f}"])
    return markdown(["heads", *(game.replace("_", " ") for game in GAMES), "mean"], rows)


def maths() -> str:
    """Exact answers to questions like those in training."""
    scores = numbers("small/maths")
    rows = []
    for model, label in {**HEADS, "abstractor": "Abstractor"}.items():
        cells, means = [], []
        for module in scores:
            exact = scores[module][model]["exact, interpolation"]
            cells.append(plus_minus(list(exact["by_seed"].values())))
            means.append(exact["mean"])
        rows.append([label, *cells, f"{statistics.fmean(means):.3f}"])
    return markdown(["heads", *(module.split("__")[1].replace("_", " ") for module in scores), "mean"], rows)


def language() -> str:
    scores = numbers("small/lm-bytes")
    labels = {
        "softmax": "softmax",
        "dual": "softmax + relational",
        "disentangled": "softmax + disentangled",
        "hyla": "HYLA",
        "linear": "linear",
    }
    rows = []
    for model, label in labels.items():
        rows.append([label, plus_minus(list(scores[model]["bits per byte, iid"]["by_seed"].values()))])
    return markdown(["heads", "bits per byte of source code, lower is better"], rows)


def claims(*folders: str) -> str:
    """Every claim of some results folders with its verdict, and the largest number of seeds behind it."""
    rows = []
    for folder in folders:
        stored = json.loads((RESULTS / folder / "results.json").read_text(encoding="utf-8"))
        all_seeds = len({run["seed"] for run in stored["runs"]})
        link = f"[{stored['title']}]({folder}/README.md)"
        for verdict in stored["verdicts"]:
            outcome = verdict["outcome"]
            seeds = min((int(part["runs"]) for part in verdict.get("parts", ()) if part["runs"]), default=all_seeds)
            rows.append([link, verdict["claim"].replace("|", "\\|"), f"**{outcome}**", str(seeds or "a count")])
            link = ""
        if not stored["verdicts"]:
            rows.append([link, "a picture without a claim", "", str(all_seeds)])
    return markdown(["figure", "claim", "verdict", "seeds"], rows)


def small(*names: str) -> Callable[[], str]:
    return functools.partial(claims, *(f"small/{name}" for name in names))


def release() -> str:
    """What an installation takes beside torch, from the dry run of a release (packaging/release.py)."""
    about = json.loads((ROOT / "benchmarks" / "release.json").read_text(encoding="utf-8"))
    rows = []
    for row in about["installed"]:
        kind = {"whl": "wheel", "gz": "sdist"}[row["file"]]
        extra = f"`[{row['extra']}]`" if row["extra"] else "core"
        rows.append([kind, extra, f"{row['megabytes']:.0f}", f"{row['seconds']:.0f}", row["example"]])
    return markdown(["file", "extra", "MB", "seconds", "README's first example prints"], rows)


def native_code() -> str:
    """Native code of the wheel beside a build of this machine, from the dry run of a release."""
    row = json.loads((ROOT / "benchmarks" / "release.json").read_text(encoding="utf-8"))["installed"][0]
    times = row["times"]
    rows = []
    for name, wheel, compiled in zip(
        ("`ops.hyla`", "a step of `fuzzy-hyla`"), times["wheel"], times["compiled"], strict=True
    ):
        rows.append([name, f"{wheel * 1e3:.2f}", f"{compiled * 1e3:.2f}", f"{wheel / compiled:.2f}"])
    rows.append(["first call of `ops.hyla` after the installation", f"{row['first call'] * 1e3:.0f}", DASH, DASH])
    return markdown(["", "wheel, without a compiler, ms", "compiled here, ms", "ratio"], rows)


TABLES: dict[str, Callable[[], str]] = {
    "readme": readme,
    "summary": summary,
    "fuzzy-main": fuzzy_main,
    "fuzzy-width": fuzzy_width,
    "fuzzy-baselines": fuzzy_baselines,
    "fuzzy-parts": fuzzy_parts,
    "swapped-codes": swapped_codes,
    "sraven": sraven,
    "games": games,
    "maths": maths,
    "language": language,
    "release": release,
    "native-code": native_code,
    "claims-fuzzy": functools.partial(
        claims, "fuzzy/long", "fuzzy/width", "fuzzy/settings", "fuzzy/parts", "fuzzy/length", "fuzzy/inside"
    ),
    "claims-sraven": functools.partial(claims, "sraven"),
    "claims-hyla-small": small(
        *("table-a1", "table-a2", "table-a3", "fig-2b", "fig-2c", "fig-2d", "fig-4a", "fig-4a-heads", "fig-4b"),
        *("fig-5a", "fig-5b", "fig-5c", "fig-5d", "fig-5e", "fig-5f"),
        *("fig-a2", "fig-a3", "fig-a4", "fig-a5", "fig-a6", "fig-a7", "fig-a8", "fig-a9"),
    ),
    "claims-dual": small("games", "maths", "sorting", "order", "set", "images"),
    "claims-language": small("lm-bytes", "fig-6", "dual-lm"),
}


def with_tables(text: str) -> str:
    """The page with every table written anew.  Raises KeyError for a table without a function here."""
    return TABLE.sub(lambda match: f"{match[1]}{TABLES[match[2]]()}\n{match[3]}", text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    changed = []
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        text = page.read_text(encoding="utf-8")
        new_text = with_tables(text)
        if new_text != text:
            changed.append(str(page.relative_to(ROOT)))
            if not check:
                page.write_text(new_text, encoding="utf-8")
    for name in changed:
        print(name, "differs" if check else "written", file=sys.stderr)
    return int(check and bool(changed))


if __name__ == "__main__":
    sys.exit(main())
