"""Runs that are killed and files that are damaged, over and over: is any run lost, or silently wrong?

    python benchmarks/fault_campaign.py [--kills 200] [--damages 1] [--fuzz 10000] [--seed 0] [--json FILE]

Kills: SIGKILL at random moments and inside operations on files, of a run that trains, of text while it is tokenised, of
a run on text (both), of a sweep (the sweep, a worker, or all of it); several in a row, each time
started again; at the end rows, scores, parameters and the optimiser's state must be those of a run that nothing
happened to, bit for bit.  Damages: every kind of damage to every file of a run, of a text
run with its tokens, of one run of a sweep, killed or finished.  Fuzz: so many configurations,
checkpoints and other files changed at random, each of which must be taken or refused in one line.

A table is printed; what came of every case is written to FILE.  The exit code is 1 if anything was lost, silently wrong
or unclear, or if fewer kills hit than were asked for.  What the words mean says tests/support/killed_or_damaged.py.
"""

import argparse
import collections
import datetime
import json
import os
import pathlib
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests" / "support"))

from killed_or_damaged import GOOD, Campaign
from lives import Order, Zygote
from scenarios import tiny

SHARES = {"train": 0.45, "text run": 0.2, "tokenise": 0.15, "sweep": 0.2}
"""Of the kills."""
ROW = 5  # kills of one run, at most
DAMAGED = {
    "train": (False, True),
    "text run": (False, True),
    "tokenise": (False,),
    "sweep": (True,),
}
"""Whose files are damaged, and whether when it was killed or when it had finished."""


def killed(campaign: Campaign, kills: int) -> Iterator[Order]:
    """Cases until enough kills of each scenario have hit."""
    for kind, share in SHARES.items():
        hits = case = 0
        while hits < share * kills:
            for record in campaign.kills(kind, case, 2 if kind == "sweep" else ROW):
                hits += record["outcome"] != "unharmed"
                yield record
            case += 1
            if case > kills:
                break


def damaged(campaign: Campaign, rounds: int) -> Iterator[Order]:
    for number in range(rounds):
        for kind, ends in DAMAGED.items():
            for finished in ends:
                yield from campaign.damages(kind, number, finished=finished)


def fuzzed(count: int, root: pathlib.Path) -> Iterator[Order]:
    """Half of the inputs are configurations, a quarter checkpoints; the others have the rest."""
    import torch
    from fuzz import fuzz, targets

    import polyhead as ph

    torch.set_num_threads(1)
    (root / "files").mkdir()
    run = tiny(root / "run", steps=4)
    ph.train.run(run, progress=False)
    shares = {"config": 0.35, "config.json": 0.1, "run.yaml": 0.05, "checkpoint": 0.2, "vouched checkpoint": 0.05}
    known = targets(root / "files", run)
    for name, target in known.items():
        share = shares.get(name, (1 - sum(shares.values())) / (len(known) - len(shares)))
        yield fuzz(target, name, range(round(share * count)))


def table(rows: list[list[Any]]) -> str:
    widths = [max(len(str(row[i])) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(str(cell).ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def counted(records: list[Order]) -> list[list[Any]]:
    """A row for each scenario and fault: how many, and what came of them."""
    counts = collections.Counter((r["scenario"], r["fault"], r["outcome"]) for r in records)
    outcomes = sorted({outcome for _, _, outcome in counts}, key=lambda o: (o not in GOOD, o))
    rows: list[list[Any]] = [["scenario", "fault", "cases", *outcomes]]
    for scenario, fault in dict.fromkeys((r["scenario"], r["fault"]) for r in records):
        found = [counts[scenario, fault, outcome] for outcome in outcomes]
        rows.append([scenario, fault, sum(found), *found])
    return rows


def moments(records: list[Order]) -> list[list[Any]]:
    """Where the kills hit: which operation on which kind of file, or at a random moment whom."""
    whom = {
        "life": "at a random moment",
        "worker": "at a random moment, a worker",
        "all": "at a random moment, all of it",
    }
    told = [r["moment"] for r in records if r["fault"] == "kill" and r["moment"]]
    found = collections.Counter(whom.get(moment) or _moment(moment) for moment in told)
    return [["killed", "times"], *map(list, found.most_common())]


def _moment(text: str) -> str:
    operation, _, name = text.partition(" ")
    for ending in ("train.bin", "validation.bin", "iid.bin", "tokenizer.json", "journal", "journal.part"):
        name = f"tokens ({ending})" if name.endswith(f".{ending}") else name
    if name.startswith("checkpoint-"):
        name = "an earlier checkpoint"
    said = {"write": "while writing", "fsync": "after writing", "open": "before opening", "rename": "before renaming"}
    return f"{said.get(operation, f'before {operation} of')} {name.removesuffix('.partial')}"


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    for name, default in (("kills", 200), ("damages", 1), ("fuzz", 10_000), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", type=pathlib.Path)
    asked = parser.parse_args()
    began, records, inputs = time.process_time(), [], []
    with tempfile.TemporaryDirectory(prefix="faults-") as root, Zygote() as zygote:
        campaign = Campaign(zygote, pathlib.Path(root), asked.seed)
        for part in (killed(campaign, asked.kills), damaged(campaign, asked.damages)):
            for record in part:
                records.append(record)
                if record["outcome"] not in GOOD:
                    print(json.dumps(record), flush=True)
        for found in fuzzed(asked.fuzz, pathlib.Path(root)) if asked.fuzz else ():
            inputs.append(found)
            for bad in found["bad"]:
                print(json.dumps({"target": found["target"], "bad": bad}), flush=True)
    hits = sum(r["fault"] == "kill" and r["outcome"] != "unharmed" for r in records)
    bad = [r for r in records if r["outcome"] not in GOOD]
    print(table(counted(records)), "", table(moments(records)), "", sep="\n")
    heads = ["target", "inputs", "taken", "refused"]
    print(table([[*heads, "neither"], *([*(found[h] for h in heads), len(found["bad"])] for found in inputs)]))
    wrong = len(bad) + sum(len(found["bad"]) for found in inputs)
    print(f"\n{hits} kills, {sum(r['fault'] != 'kill' for r in records)} damaged files, "
          f"{sum(found['inputs'] for found in inputs)} fuzzed inputs: {wrong} lost, wrong or unclear")  # fmt: skip
    if asked.json is not None:
        about = {
            "command": " ".join(["python", *sys.argv]),
            "seed": asked.seed,
            "date": datetime.date.today().isoformat(),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
            "seconds of CPU time of the campaign's own process": round(time.process_time() - began, 1),
            "kills": hits,
            "outcomes": counted(records),
            "moments": moments(records),
            "fuzzed": inputs,
            "records": [{name: value for name, value in r.items() if name != "said"} for r in records],
        }
        asked.json.parent.mkdir(parents=True, exist_ok=True)
        asked.json.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    return int(bool(wrong) or hits < asked.kills)


if __name__ == "__main__":
    sys.exit(main())
