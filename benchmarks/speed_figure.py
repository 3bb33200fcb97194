"""The picture that opens docs/speed.md: time and memory over tokens, as `polyhead bench` measures them.

    python benchmarks/speed_figure.py                     # measures with one and two threads, then draws: minutes
    python benchmarks/speed_figure.py --draw              # draws what is there

HYLA, relational and linear heads are measured one after the other, each beside stock softmax attention, so that ratios
are within one run.  Causal, b 1, 8 heads of width 64, float32; relational heads have 8 relations.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyhead.analysis import figures
from polyhead.timing import measure
from polyhead.timing.options import Options
from polyhead.timing.sides import PASSES

PLACE = Path(__file__).parents[1] / "docs" / "results" / "kernels" / "speed"
LENGTHS = (256, 512, 1024, 2048, 4096)
SIDES = {
    "hyla": ("reference", "blocked", "native", "stock"),
    "relational": ("reference", "blocked", "native", "stock", "dual-attention"),
    "linear": ("reference", "chunked", "native", "stock"),
}
SHOWN = {
    ("hyla", "reference"): "HYLA, the equation",
    ("hyla", "blocked"): "HYLA, tiles",
    ("hyla", "native"): "HYLA, native",
    ("relational", "dual-attention"): "relational, package dual-attention",
    ("relational", "native"): "relational, native",
    ("hyla", "stock"): "softmax, PyTorch's own",
}
MEMORY = 6.0
"""GiB: references that take more are left out."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", action="store_true", help="measure nothing")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--into", type=Path, default=PLACE)
    given = parser.parse_args()
    for threads in () if given.draw else given.threads:
        for op, sides in SIDES.items():
            asked = Options(
                op,
                lengths=tuple(given.lengths),
                device="cpu",
                threads=threads,
                repeats=given.repeats,
                sides=sides,
                memory=MEMORY,
            )
            folder = given.into / f"threads-{threads}"
            measure.run(asked, folder, lambda text, done, total: print(text, flush=True))
            for each in (*folder.glob("*.png"), *folder.glob("*.svg")):
                each.unlink()  # one picture is enough
    draw(given.into)


def draw(folder: Path) -> None:
    """Time with gradients by threads, and memory, which threads hardly change."""
    found = {int(each.name.split("-")[1]): each for each in sorted(folder.glob("threads-*"))}
    panels: list[Any] = []
    for threads, each in found.items():
        rows = {op: json.loads((each / f"{op}.json").read_text(encoding="utf-8"))["rows"] for op in SIDES}
        table(rows, threads)
        words = "1 thread" if threads == 1 else f"{threads} threads"
        panels.append((f"forward and backward, ms, {words}", series(rows, lambda row: row["seconds"]["min"] * 1e3), {}))
        if threads == min(found):
            memory = (f"growth of peak memory, MiB, {words}", series(rows, lambda row: row["memory"] / 2**20), {})
    for kind in ("png", "svg"):
        axes: Any = {"x_label": "tokens", "log_x": True, "log_y": True}
        figures.lines([*panels, memory], folder / f"speed.{kind}", **axes)
    print(folder / "speed.png")


def table(rows: Mapping[str, list[dict[str, Any]]], threads: int) -> None:
    """Print the table of docs/speed.md: ratios to the softmax attention of the same run."""
    print(f"\n| threads {threads} | " + " | ".join(f"t {t}" for t in LENGTHS) + " |\n|---|" + "---|" * len(LENGTHS))
    for op, sides in SIDES.items():
        for side, which in ((s, w) for s in sides if s != "stock" for w in PASSES):
            found = {row["t"]: row for row in rows[op] if (row["side"], row["pass"]) == (side, which)}
            cells = (
                f"{1 / row['stock_over']['time']:.2f}, {1 / row['stock_over']['memory']:.2f}"
                if "stock_over" in row
                else ""
                for row in (found.get(t, {}) for t in LENGTHS)
            )
            print(f"| {op}, {side}, {which} | " + " | ".join(cells) + " |")


def series(rows: Mapping[str, list[dict[str, Any]]], value: Any) -> dict[str, dict[float, list[float]]]:
    """Lines by their name in the picture."""
    found: dict[str, dict[float, list[float]]] = {}
    for (op, side), name in SHOWN.items():
        for row in rows[op]:
            if (row["side"], row["pass"]) == (side, "forward+backward") and "skipped" not in row:
                found.setdefault(name, {})[row["t"]] = [value(row)]
    return found


if __name__ == "__main__":
    main()
