"""Everything that only a card can tell, in one command: are the Triton kernels right there, and how fast are they?

    python benchmarks/on_card.py --all --json DIR        all slices, the most valuable first
    python benchmarks/on_card.py --slice 1 --json DIR    one of them, below ten minutes on an H200
    python benchmarks/on_card.py --report DIR            tables and pictures of what is in DIR, in DIR
    python benchmarks/on_card.py --all --dry-run         every slice on a CPU in tiny sizes: does the script work?

    1  parity of the kernels with the reference: three ops, bf16, fp16, fp32, tf32, outputs and gradients; compile times
    2  compute-sanitizer: memcheck, racecheck, initcheck on a ragged case of each op
    3  HYLA: kernels, reference, stock attention (flash), over lengths; what a plain product reaches
    4  relational and linear heads over lengths; decoding
    5  a training step of a language model: eager and compiled; an op in a CUDA graph
    6  a population of 64 runs of fuzzy logic, beside one run alone
    7  float32: kernels, tiles and the compiled reference

A slice appends a row to DIR/slice-N.jsonl as soon as it has it.  Called again it goes on after the last row, so a
slice that was cut off loses one row.  `--minutes` is when a slice stops by itself (exit code 3).  At the first row
whose parity is red everything stops (exit code 1), and the inputs are in DIR/red-N.pt.  Other errors are rows, and exit
code 2.  Rows of earlier calls count for the exit code, too.  It wants src and tests/support beside it, torch from 2.11
on, triton from 3.6 on, and no more than numpy, einops, jaxtyping, safetensors, pyyaml, rich and matplotlib.
"""

import argparse
import json
import os
import pathlib
import sys
import tempfile
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests" / "support"))
sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "src"))
os.environ.setdefault("POLYHEAD_TRITON", "1")  # the first-use check would stop what is to be measured
os.environ.update({"TRITON_INTERPRET": "1"} if "--dry-run" in sys.argv else {})

import numpy as np
import torch

from card import report, slices
from card.case import Item, Setting
from polyhead.ops import cards
from polyhead.timing.measure import machine

OLD_INTERPRETER, NEW_ARRAYS = (3, 6), (2, 4)
"""Triton's interpreter up to the first version does not run with NumPy from the second one on."""

ORDER = (1, 3, 4, 5, 6, 7, 2)
"""By value: what is wrong need not be timed, and the sanitizers are slow."""

FINISHED, RED, ERROR, UNFINISHED = 0, 1, 2, 3


def known(path: pathlib.Path) -> dict[str, int]:
    """Exit codes of the rows that a file has, by key; what was cut off in the middle of a row is removed from it."""
    if not path.exists():
        return {}
    whole = [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
    path.write_text("".join(whole), encoding="utf-8")
    rows = map(json.loads, whole)
    return {row["key"]: RED if row.get("red") else ERROR if "error" in row else FINISHED for row in rows}


def answer(item: Item) -> dict[str, Any]:
    """The row of an item; an error is a row, too."""
    start = time.perf_counter()
    try:
        row = item.run()
    except torch.OutOfMemoryError:
        row = {"skipped": "out of memory"}
    except Exception as error:
        row = {"error": f"{type(error).__name__}: {(str(error).strip() or 'no word').splitlines()[0][:300]}"}
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return {"key": item.key} | row | {"seconds": round(time.perf_counter() - start, 2)}


def run(number: int, setting: Setting, folder: pathlib.Path, minutes: float) -> int:
    """One slice, as far as the time reaches: FINISHED, RED, ERROR or UNFINISHED."""
    path, start = folder / f"slice-{number}.jsonl", time.monotonic()
    done = known(path)
    code = RED if RED in done.values() else max(done.values(), default=FINISHED)
    for item in slices.SLICES[number](setting):
        if item.key in done:
            continue
        if time.monotonic() - start > 60 * minutes:
            print(f"slice {number}: {minutes} minutes are over; the same command goes on", flush=True)
            return RED if code == RED else UNFINISHED
        row = answer(item)
        inputs = row.pop("inputs", None)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(f"slice {number}: {report.line(row)}", flush=True)
        if row.get("red"):
            torch.save(inputs, folder / f"red-{number}.pt")
            print(f"slice {number}: parity is red; the inputs are in {folder / f'red-{number}.pt'}", flush=True)
            return RED
        code = code or (ERROR if "error" in row else FINISHED)
    return code


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slice", type=int, nargs="+", choices=ORDER)
    parser.add_argument("--all", action="store_true", help="all slices")
    parser.add_argument("--json", type=pathlib.Path, metavar="DIR", help="where rows are, or will be")
    parser.add_argument("--report", type=pathlib.Path, metavar="DIR", help="tables and pictures of the rows there")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on a CPU, kernels interpreted")
    parser.add_argument("--minutes", type=float, default=9.0, help="when a slice stops by itself")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--one", choices=slices.RAGGED, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.report:
        print(report.write(options.report))
        return FINISHED
    if not (options.slice or options.all or options.one):
        parser.error("wants --slice N, --all or --report DIR")
    device = torch.device("cpu" if options.dry_run else "cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        print("on_card: there is no card here; --dry-run tries the script on a CPU")
        return RED
    arrays = tuple(map(int, np.__version__.split(".")[:2]))
    if options.dry_run and cards.VERSION <= OLD_INTERPRETER and arrays >= NEW_ARRAYS:
        told = "interprets the kernels, for which triton 3.6 wants NumPy 2.3 or older"
        print(f"on_card: --dry-run {told}, not {np.__version__}")
        return ERROR
    setting = Setting(device, options.dry_run, options.repeats)
    if options.one:
        return RED if slices.RAGGED[options.one](setting).run().get("red") else FINISHED
    with tempfile.TemporaryDirectory() as spare:
        folder = options.json or pathlib.Path(spare)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "machine.json").write_text(json.dumps(machine(device), indent=1) + "\n", encoding="utf-8")
        codes = []
        for number in ORDER if options.all else [n for n in ORDER if n in options.slice]:
            codes.append(run(number, setting, folder, options.minutes))
            if codes[-1] == RED:
                break
        if options.dry_run:
            print(report.write(folder))
    return RED if RED in codes else max(codes)


if __name__ == "__main__":
    sys.exit(main())
