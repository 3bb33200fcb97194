"""What a tracker costs beside metrics.jsonl: microseconds of CPU a row, in the loop's thread and in all.

    .venv/bin/python benchmarks/speed/tracking.py --rows 2000 --repeats 5

Weights & Biases is offline.  A tracker that is not installed is left out.
"""

import argparse
import importlib.util
import os
import pathlib
import statistics
import tempfile
import time

os.environ.setdefault("WANDB_MODE", "offline")

import polyhead as ph
from polyhead.train import tracking
from polyhead.train.store.folder import SENT, Metrics

NONE, FIELDS = "metrics.jsonl alone", ("loss", "r2", "mse", "lr", "grad_norm", "steps_per_second", "seconds")


def rows(track: tuple[str, ...], count: int) -> tuple[float, float, float]:
    """Microseconds a row: of the loop, of the process, and of the wall clock until all is written."""
    task = ph.tasks.FuzzyLogic()
    run = ph.Run(task=task, model=ph.TransformerConfig(*task.ends), name="bench", track=track)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRACKIO_DIR"] = folder
        written = tracking.TrackedMetrics(run, Metrics(pathlib.Path(folder), lambda row: True))
        for thread in written.threads:  # an import is no row
            thread.put(tracking._Entry("start", 0, {"training/start": 0.0}))
            while not (pathlib.Path(folder) / thread.tracker / SENT).is_file() and not thread.off:
                time.sleep(0.05)
        process, loop, began = time.process_time(), time.thread_time(), time.perf_counter()
        for step in range(1, count + 1):
            written.add({"kind": "train", "step": step, **dict.fromkeys(FIELDS, 1 / step)})
        loop = time.thread_time() - loop
        written.close()
        if any(thread.off for thread in written.threads):
            raise SystemExit("a tracker has left off")
        return (
            loop / count * 1e6,
            (time.process_time() - process) / count * 1e6,
            (time.perf_counter() - began) / count * 1e6,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=5)
    asked = parser.parse_args()
    names = [name for name in tracking.TRACKERS if importlib.util.find_spec(name) is not None]
    print(f"{'':22}{'loop':>8}{'process':>10}{'wall':>10}   microseconds a row, median of {asked.repeats}")
    for name in [NONE, *names]:
        track = () if name == NONE else (name,)
        found = [rows(track, asked.rows) for _ in range(asked.repeats)]
        print(f"{name:22}" + "".join(f"{statistics.median(column):>10.0f}" for column in zip(*found, strict=True)))


if __name__ == "__main__":
    main()
