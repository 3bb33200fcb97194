"""What do the codes of a language model say of the text that it reads?  Any model on text, beside itself untrained.

    python benchmarks/codes_of_language.py                                  writes docs/results/language_codes.*
    python benchmarks/codes_of_language.py models/gpt2 --texts FIT HELD --into gpt2.json

MODEL is the name of a trained model that comes with the package, a run folder of a language model, or a folder with a
causal model of Hugging Face and its tokenizer.  Probes are fitted on the text FIT and scored on HELD; without them they
are the splits `validation` and `iid` of the run's own text, which are other files than those of the training.

What is asked was written down before the first number: docs/results/protocol.md.  The labels and the measure are those
of `polyhead.analysis.probe_text`.
"""

import argparse
import json
import re
import shlex
import sys
from functools import partial
from pathlib import Path
from statistics import mean

import sklearn.linear_model  # noqa: F401 - threads are limited of libraries that are there
import torch
from threadpoolctl import threadpool_limits

from polyhead.analysis import capture, figures, probe_text
from polyhead.compat.foreign import holds_model
from polyhead.config import Batch
from polyhead.pages.explore.writer import pieces
from polyhead.papers.hyla.probes import untrained
from polyhead.tasks.text.tokens import codec_of
from polyhead.train import load_model
from polyhead.train.store.folder import environment, place, write

RESULTS = Path(__file__).parents[1] / "docs" / "results"
MODEL = "lm-bytes-softmax"
NETWORKS = ("trained", "untrained")
SPLITS = ("validation", "iid")
NAMES = {"self": "Self", "previous": "Previous", "input": "Input", "input, directions": "Directions of input"}
BYTES = re.compile(r"(\\x[0-9a-f]{2})+")
TARGETS = ("next", "place")
MEASURES = ("f1", "chance", "purity", "by_chance")


def ours(model, ids):
    """The taps of a model of ours."""
    return capture(model, Batch(ids, ids, None, torch.ones_like(ids), {}))


def loaded(name):
    """What is known of a model, its codec, its task if it has one, and how to look into it, trained and untrained."""
    folder = place(name)
    if holds_model(folder):
        from polyhead.compat.huggingface import capture as foreign, explore

        model, codec = explore.load(folder)
        torch.manual_seed(0)
        fresh = type(model)(model.config).eval()
        return (
            {"model": folder.name},
            codec,
            None,
            {"trained": partial(foreign, model), "untrained": partial(foreign, fresh)},
        )
    run, model = load_model(folder)
    looks = {"trained": partial(ours, model), "untrained": partial(ours, untrained(run))}
    about = {"model": folder.name, "seed": run.seed, "text": run.task.fingerprint()}
    return about, codec_of(run, folder), run.task, looks


def named(codec, ids):
    """The text of each token; none of one that is part of a longer character, which `pieces` spells as bytes."""
    return ["" if BYTES.fullmatch(piece) else piece for piece in pieces(codec, ids)]


def windows(source, count, length, codec):
    """`count` windows of tokens: adjacent ones of a file, or those of a split of a task in its order."""
    if isinstance(source, Path):
        ids = torch.tensor(codec.encode(source.read_text(encoding="utf-8"))[: count * length])
        if len(ids) < count * length:
            raise SystemExit(f"{source} has {len(ids)} tokens but {count} windows take {count * length}")
        return ids.view(count, length)
    task, split = source
    return task.batch(split, count, seed=0, step=0).inputs


def measured(look, texts, name, *, blocks, places):
    """By what is read, layer and label: every measure of every block of windows, anew after each block."""
    found = {}
    for fit, held in zip(*(text.chunk(blocks) for text in texts), strict=True):
        for row in probe_text(look, fit, held, name, places=places, targets=TARGETS):
            values = found.setdefault(row["of"], {}).setdefault(row["layer"], {}).setdefault(row["target"], {})
            for measure in MEASURES:
                if row[measure] is not None:
                    values.setdefault(measure, []).append(round(row[measure], 5))
        yield found


def picture(found, path):
    """F1 less that of permuted labels by layer, a dot a block of windows; the token itself is a horizontal line."""
    panels = []
    for target, title in {"next": "what follows", "place": "place in the word"}.items():
        lines, level = {}, None
        for network, suffix in {"trained": "", "untrained": figures.UNTRAINED}.items():
            for of, layers in found[network].items():
                gains = [gained(values[target]) for values in layers.values()]
                if of == "token":
                    level = mean(gains[0])
                else:
                    lines[NAMES[of] + suffix] = dict(enumerate(gains, start=1))
        panels.append((title, lines, {"Token": level}))
    figures.save(figures.lines(panels, x_label="layer", y_label="F1 less that of permuted labels", columns=2), path)


def gained(values):
    """F1 less that of permuted labels, block by block."""
    return [f1 - chance for f1, chance in zip(values["f1"], values["chance"], strict=True)]


def main(arguments=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=MODEL)
    parser.add_argument("--texts", type=Path, nargs=2, metavar=("FIT", "HELD"))
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--windows", type=int, default=64, help="windows of each text in a block")
    parser.add_argument("--length", type=int, default=256, help="tokens of a window of a foreign model")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=NETWORKS)
    parser.add_argument("--into", type=Path, default=RESULTS / "language_codes.json")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    about, codec, task, looks = loaded(given.model)
    if task is None and given.texts is None:
        parser.error("a model of Hugging Face has no text of its own: --texts FIT HELD")
    length = given.length if task is None else task.length
    sources = given.texts or [(task, split) for split in SPLITS]
    texts = [windows(source, given.blocks * given.windows, length, codec) for source in sources]
    places = range(length // 4, length, max(1, length // 16))
    about |= {
        "command": shlex.join(["python", "benchmarks/codes_of_language.py", *(arguments or sys.argv[1:])]),
        "environment": environment(torch.device("cpu")),
        "windows": given.windows,
        "places": list(places),
        "measured": {},
    }
    with threadpool_limits(1):
        for network in given.networks:
            for found in measured(looks[network], texts, partial(named, codec), blocks=given.blocks, places=places):
                about["measured"][network] = found
                write(given.into, (json.dumps(about, indent=1) + "\n").encode())
                print(network, "a block is finished", flush=True)
    if set(about["measured"]) == set(NETWORKS):
        picture(about["measured"], given.into.with_suffix(".png"))


if __name__ == "__main__":
    main()
