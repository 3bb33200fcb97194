"""The picture of the README's first example: trains it with five seeds for each kind of heads, or draws what is there.

python docs/figures/first_model.py --train      # docs/figures/first_model.json: ten minutes of one core
python docs/figures/first_model.py              # docs/figures/first_model.svg
"""

import argparse
import datetime
import json
import platform
from pathlib import Path

import torch

from polyhead.analysis import canvas
from polyhead.papers import demo

DATA = Path(__file__).with_name("first_model.json")
PICTURE = Path(__file__).with_name("first_model.svg")
SEEDS = range(5)


def train() -> None:
    """Train every network of the race and write its curve: accuracy on new shapes every 25 steps."""
    torch.set_num_threads(1)
    curves: dict[str, dict[str, demo.Curve]] = {racer: {} for racer in demo.RACERS}
    for seed in SEEDS:
        for racer in demo.RACERS:
            curves[racer][str(seed)] = list(demo.race(racer, seed))
            print(f"{racer}, seed {seed}: {curves[racer][str(seed)][-1][1]:.3f}", flush=True)
    about = {
        "command": "python docs/figures/first_model.py --train",
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()}, {platform.system()}, torch {torch.__version__}",
        "seeds": list(SEEDS),
        "curves": curves,
    }
    DATA.write_text(json.dumps(about) + "\n", encoding="utf-8")


def draw(path: Path) -> None:
    """The picture as SVG, from the committed curves."""
    canvas.save(demo.draw_race(json.loads(DATA.read_text(encoding="utf-8"))["curves"]), path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", action="store_true")
    if parser.parse_args().train:
        train()
    draw(PICTURE)
