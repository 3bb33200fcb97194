"""What is in the rows of benchmarks/on_card.py: a line each, tables, pictures."""

import json
import math
import pathlib
import pprint
from typing import Any

from polyhead.analysis import figures

TITLES = {
    1: "Parity",
    2: "compute-sanitizer",
    3: "HYLA",
    4: "Relational and linear heads, decoding",
    5: "A training step",
    6: "Populations",
    7: "float32",
}


def line(row: dict[str, Any]) -> str:
    """A row in a line."""
    for word in ("error", "skipped"):
        if word in row:
            return f"{row['key']}: {word}: {row[word]}"
    if "errors" in row:
        told = f"worst error {max(row['errors']):.1e}, of the reference {max(row['reference']):.1e}"
        return f"{row['key']}: {told}{', RED' * bool(row.get('red'))}; first call {row['first']:.1f} s"
    if "sides" in row:
        return f"{row['key']}: " + ", ".join(f"{name} {shown(side)}" for name, side in row["sides"].items())
    rest = {name: x for name, x in row.items() if name not in ("key", "seconds", "tail")}
    return f"{row['key']}: {json.dumps(rest)[:160]}"


def shown(side: dict[str, Any]) -> str:
    return f"{side['ms']:.3f} ms, {side['mib']:.0f} MiB" if "ms" in side else f"({side['skipped'][:60]})"


def read(folder: pathlib.Path) -> dict[int, list[dict[str, Any]]]:
    """Slice -> rows."""
    found = {}
    for number in TITLES:
        path = folder / f"slice-{number}.jsonl"
        if path.exists():
            found[number] = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
    return found


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Milliseconds of each side over those of stock attention where it is there; other rows as lines."""
    names = list(dict.fromkeys(name for row in rows for name in row.get("sides", {})))
    out = [f"- {line(row)}" for row in rows if "sides" not in row]
    if names:
        out += ["", "| | " + " | ".join(f"{name}, ms" for name in names) + " |", "|---" * (len(names) + 1) + "|"]
        for row in rows:
            if "sides" in row:
                out.append(f"| {row['key']} | " + " | ".join(cell(row["sides"], name) for name in names) + " |")
    return out


def cell(sides: dict[str, Any], name: str) -> str:
    side, stock = sides.get(name, {}), sides.get("stock", {})
    if "ms" not in side:
        return "-"
    over = f" ({side['ms'] / stock['ms']:.1f})" if name != "stock" and stock.get("ms") else ""
    return f"{side['ms']:.3f}{over}"


def pictures(number: int, rows: list[dict[str, Any]], folder: pathlib.Path) -> list[str]:
    """Time over length, forward and with gradients, for each op of a slice."""
    panels: dict[str, dict[str, dict[float, list[float]]]] = {}
    for row in rows:
        for name, side in row.get("sides", {}).items():
            if "ms" in side and row.get("t", 1) > 1:
                title = f"{row['op']} d {row.get('d', '')}, {row['pass']}, {row['dtype']}"
                panels.setdefault(title, {}).setdefault(name, {})[row["t"]] = [side["ms"]]
    if not panels:
        return []
    path = folder / f"slice-{number}.png"
    drawn: list[Any] = [(title, series, {}) for title, series in panels.items()]
    figures.lines(drawn, path, x_label="tokens", y_label="ms", log_x=True, log_y=True, columns=2)
    return ["", f"![time over tokens]({path.name})"]


def faster(rows: list[dict[str, Any]]) -> dict[tuple[str, str, bool], dict[int, int | None]]:
    """What `polyhead.ops.cards.FASTER` has of a card: the fewest tokens from which on the kernels are faster.

    They are if they beat every other way to compute the op, forward and with gradients, with every number of samples,
    at that length and at all larger ones.
    """
    found: dict[tuple[str, str, bool], dict[int, dict[int, bool]]] = {}
    for row in rows:
        taken = {name: side["ms"] for name, side in row.get("sides", {}).items() if "ms" in side and name != "stock"}
        others = [ms for name, ms in taken.items() if name != "triton"]
        if "d" in row and "triton" in row["sides"] and others:
            one = row["t"] == 1
            lengths = found.setdefault((row["op"], row["dtype"], one), {}).setdefault(row["d"], {})
            size = row["s"] if one else row["t"]
            lengths[size] = lengths.get(size, True) and taken.get("triton", math.inf) < min(others)
    return {key: {d: fewest(lengths) for d, lengths in widths.items()} for key, widths in found.items()}


def fewest(wins: dict[int, bool]) -> int | None:
    """The smallest length such that it and all larger ones are True.

    >>> fewest({512: True, 2048: True, 1024: False}), fewest({512: False})
    (2048, None)
    """
    slow = max((size for size, won in wins.items() if not won), default=0)
    return min((size for size in wins if size > slow), default=None)


def write(folder: pathlib.Path) -> pathlib.Path:
    """DIR/report.md, with pictures beside it; its path."""
    machine = json.loads((folder / "machine.json").read_text(encoding="utf-8"))
    out = ["# On a card", "", ", ".join(f"{name} {value}" for name, value in machine.items()), ""]
    out.append("In brackets: times as long as stock attention of the same shape.")
    for number, rows in read(folder).items():
        out += ["", f"## {number}. {TITLES[number]}", "", *table(rows), *pictures(number, rows, folder)]
    name = machine["device"].removeprefix("cuda (").removesuffix(")")
    entry = {name: faster([row for rows in read(folder).values() for row in rows])}
    out += ["", "## For `FASTER` of polyhead/ops/cards.py", "", "```python", pprint.pformat(entry, width=100), "```"]
    path = folder / "report.md"
    path.write_text("\n".join(out) + "\n", encoding="utf-8")
    return path
