"""`polyhead bench OP`: the verb, its progress and its table."""

import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from polyhead.cli.output import emit
from polyhead.cli.text import say, table
from polyhead.timing.options import Options


@dataclass(frozen=True)
class Bench(Options):
    """Time and peak memory of an op by t, forward and forward + backward: each implementation against the reference.

    Also stock scaled-dot-product attention of the same shape (the baseline), torch.compile(reference), and for
    relational the package dual-attention if installed.  Refuses to time an op whose parity check fails.  Writes
    OP.json, OP-time and OP-memory (.png, .svg) to --out.

    >>> polyhead bench hyla
    >>> polyhead bench relational --lengths 512 1024 --relations 32 --no-causal
    >>> polyhead bench hyla --device cuda --batch 8 --lengths 1024 2048 16384
    """

    op: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="OP")]
    out: Path = Path("runs/bench")
    """The folder for JSON and figures."""

    def __call__(self) -> int:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences the profiler; read when torch is imported
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        from polyhead.timing import measure as bench

        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(Options)}
        try:
            with _bar(sys.stderr.isatty()) as tell:
                result = bench.run(Options(**given), self.out, tell)
        except bench.ParityError as red:
            return say(str(red), 1)
        emit(lambda: result, lambda: show(result, self.out))
        return 0


@contextlib.contextmanager
def _bar(enabled: bool) -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar on a terminal, nothing elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not enabled) as progress:
        task = progress.add_task("", total=None)

        def tell(text: str, done: int, total: int) -> None:
            progress.update(task, description=text, completed=done, total=total)

        yield tell


def show(result: dict[str, Any], out: Path) -> None:
    """Print a table for each pass with a row per length and side, and the paths of the files."""
    options, where, gpu = result["options"], result["environment"], result["matrix_tflops"] is not None
    limits = "causal" if options["causal"] else "full"
    limits += f", window {options['window']}" if options["window"] else ""
    sizes = f"b {options['batch']}, h {options['heads']}, d {options['dim']}"
    sizes += f", r {options['relations']}" if options["op"] == "relational" else ""
    clock = "1 thread, CPU time" if options["threads"] == 1 else f"{options['threads']} threads, elapsed time"
    machine = where["device"] if gpu else f"{where['cpu']}, {clock}"
    print(f"{options['op']}, {limits}, {sizes}, {options['dtype']}; {machine}, torch {where['torch']}")
    for which in dict.fromkeys(row["pass"] for row in result["rows"]):
        table(which, [_cells(row, gpu) for row in result["rows"] if row["pass"] == which])
    print(f"ms: fastest of {options['repeats']}, and their median; × ref, × stock: times as fast as the reference, as")
    print("stock attention; MiB: growth of peak memory; ref MiB / MiB: how often it fits into the reference's")
    if gpu:
        print(f"TFLOP/s: useful work; a large bfloat16 matrix product reaches {result['matrix_tflops']:.0f}")
    for name, reason in result["left_out"].items():
        print(f"left out: {name} {reason}")
    print(f"figures and JSON: {out}")


def _cells(row: dict[str, Any], gpu: bool) -> dict[str, Any]:
    """The cells of a row as text, empty if nothing was measured."""
    done = "skipped" not in row
    seconds, memory = row.get("seconds", {}), row.get("memory", 0)
    over = {name: row.get(f"{name}_over") for name in ("reference", "stock")}
    cells = {
        "t": row["t"],
        "": row["side"],
        "ms": f"{seconds['min'] * 1e3:.2f}" if done else row["skipped"],
        "median": f"{seconds['median'] * 1e3:.2f}" if done else "",
        "× ref": f"{over['reference']['time']:.2f}" if over["reference"] else "",
        "× stock": f"{over['stock']['time']:.2f}" if over["stock"] else "",
        "MiB": f"{memory / 2**20:.1f}" if done else "",
        "ref MiB / MiB": f"{over['reference']['memory']:.1f}" if over["reference"] else "",
    }
    return cells | ({"TFLOP/s": f"{row['tflops']:.1f}" if "tflops" in row else ""} if gpu else {})
