"""The scores of a committed figure as finished runs: with more seeds or models, only the new runs are trained.

    python benchmarks/keep_scores.py docs/results/small/maths runs/disrca/maths
    polyhead reproduce maths --scale small --seeds 5 --folder runs/disrca/maths

For figures whose data are generated: the fingerprint of a text is not kept.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

from polyhead.papers.reproduce import RESULTS, study_from
from polyhead.papers.study import TRAINING_LOSS, FinishedRun
from polyhead.train.store.folder import METRICS, add_row, claim, place_of, write_result


def keep(point: FinishedRun, folder: Path) -> None:
    """Write the folder of a finished run, without weights: its configuration, its courses and its result."""
    place = place_of(point.run, folder)
    with claim(point.run, place):
        (place / METRICS).unlink(missing_ok=True)
        for split, score_by_step in (point.courses or {}).items():
            for step, score in score_by_step.items():
                row = {"kind": "eval", "split": split, "step": step, point.run.task.metric: score}
                if split == TRAINING_LOSS:
                    row = {"kind": "train", "step": step, "loss": score}
                add_row(place, row)
        write_result(replace(point.result, folder=place))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="the folder of a committed figure")
    parser.add_argument("folder", type=Path, help="where its runs are trained")
    options = parser.parse_args()
    path = options.results / RESULTS
    points = study_from(json.loads(path.read_text(encoding="utf-8")), path).points
    for point in points:
        keep(point, options.folder)
    print(f"{len(points)} runs")


if __name__ == "__main__":
    main()
