"""Are probes of networks that know nothing at their null?  Twenty untrained networks, and as many with a constant code.

    python benchmarks/probe_null.py [--repeats 20]        writes docs/results/probe_null.json

The networks are the paper's for fuzzy logic, untrained, each with a seed and a split of its own.  With the weights of
queries and keys at zero all scores are zero, so that the code is one constant.  The test is that of Fig. 2B: F1 of the
probe over F1 of the same probe fitted on permuted labels, Student's t over the repeats, Holm over all parts.  The test
of "training puts it there" is put to twenty pairs of untrained networks, which differ in their start alone.  Trained
networks that come along stand beside themselves before their first step.
"""

import argparse
import itertools
import json
from dataclasses import replace
from pathlib import Path

import torch

from polyhead.analysis import probe_model
from polyhead.models.build import build
from polyhead.papers.estimates import Estimate
from polyhead.papers.hyla.probes import decodable, learned, untrained
from polyhead.papers.hyla.singles import fuzzy_hyla, fuzzy_softmax
from polyhead.train import load_model
from polyhead.train.store import shipped
from polyhead.train.store.folder import environment, write

PLACE = Path(__file__).parents[1] / "docs" / "results" / "probe_null.json"
RECIPES = {"HYLA": fuzzy_hyla, "Softmax": fuzzy_softmax}
SEQUENCES = 1024
BEFORE = "before its first step"
OTHER = "untrained, another start"


def network(recipe, seed, constant, start=0):
    """An untrained network and its task; `constant`: with the weights of queries and keys at zero."""
    run = recipe()
    torch.manual_seed(seed + start)
    model = build(run.model)
    for attention in (block.attention for block in model.blocks if constant):
        group = run.model.heads[0]
        for parameter in (attention.qkv.weight, attention.qkv.bias):
            parameter.data[: 2 * group.heads * group.dim] = 0
    return model, replace(run.task, split_seed=seed)


def measured(repeats):
    """F1 and null, [kind of network][heads, term, layer][repeat], one context for all sequences as in the paper."""
    found = {}
    for kind, name, seed, model, task in networks(repeats):
        for row in probe_model(model, task, sequences=SEQUENCES, queries=0, seed=seed):
            if row["query"] == "alone":
                place = f"{name}, {row['target']}, layer {row['layer'] + 1}"
                values = found.setdefault(kind, {}).setdefault(place, {"f1": [], "null": []})
                values["f1"].append(row["f1"])
                values["null"].append(row["chance"])
        print(kind, name, seed, flush=True)
    return found


def networks(repeats):
    """Kind, heads, seed, network and task: of those without training, and of the trained ones that come along."""
    for model in (name for name in shipped.models() if name.startswith("fuzzy-")):
        run, trained = load_model(model)
        name = {"hyla": "HYLA", "softmax": "Softmax"}.get(model.split("-")[1], "Linear")
        yield "trained", name, run.seed, trained, run.task
        yield BEFORE, name, run.seed, untrained(run), run.task
    for constant, (name, recipe), seed in itertools.product((True, False), RECIPES.items(), range(repeats)):
        yield "a constant code" if constant else "untrained", name, seed, *network(recipe, seed, constant)
    for (name, recipe), seed in itertools.product(RECIPES.items(), range(repeats)):
        yield OTHER, name, seed, *network(recipe, seed, constant=False, start=1000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--into", type=Path, default=PLACE)
    given = parser.parse_args()
    verdicts = {}
    for kind, places in (found := measured(given.repeats)).items():
        f1, null = (
            {place: Estimate.of(dict(enumerate(values[what]))) for place, values in places.items()}
            for what in ("f1", "null")
        )
        (verdicts[kind],) = decodable("the term", f1, null)
        print(f"{kind}: {verdicts[kind]}")
    for name, pair in {"training": ("trained", BEFORE), "another start": (OTHER, "untrained")}.items():
        after, before = ({p: Estimate.of(dict(enumerate(v["f1"]))) for p, v in found[kind].items()} for kind in pair)
        (verdicts[name],) = learned("the term", after, before)
        print(verdicts[name])
    about = {
        "command": f"python benchmarks/probe_null.py --repeats {given.repeats}",
        "environment": environment(torch.device("cpu")),
        "sequences": SEQUENCES,
        "verdicts": {kind: verdict.to_dict() for kind, verdict in verdicts.items()},
        "measured": found,
    }
    write(given.into, (json.dumps(about, indent=1, ensure_ascii=False) + "\n").encode())


if __name__ == "__main__":
    main()
