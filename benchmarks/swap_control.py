"""Swapped codes beside a control with the same inputs: how much of the swap's gain is the function?

    nice -n 10 python benchmarks/swap_control.py      writes docs/results/swap_control.json

The swap of docs/results/protocol.md compares the donor's code with a third sequence's.  The donor has the inputs of the
sequence that gets its code, and the third sequence has others, so its code fits neither the function nor the inputs.
Here a further sequence has the inputs of the pair and a third function of the split.  Pairs and networks are those of
docs/results/fuzzy/inside.  This is description: the protocol has no test of it.
"""

import json
from dataclasses import replace
from pathlib import Path

import torch

from polyhead.analysis.swap import codes_of, replaced
from polyhead.config import Batch, stream
from polyhead.tasks import FuzzyLogic
from polyhead.tasks.fuzzy_logic.task import zadeh
from polyhead.train import load_model
from polyhead.train.evaluation import predict
from polyhead.train.store import shipped
from polyhead.train.store.folder import environment, write

PLACE = Path(__file__).parents[1] / "docs" / "results" / "swap_control.json"
SPLIT, STEPS, COUNT, LAYER = "compositional", 4, 500, 1
RULES = ("own", "donor")


def third(task: FuzzyLogic, pair: tuple[Batch, Batch], generator: torch.Generator) -> Batch:
    """The inputs of the pair with a function of the split that is neither of its two, equally likely."""
    functions = task.functions(SPLIT)
    taken = sum((batch.latents["terms"][:, None] == functions).all(dim=-1) for batch in pair)
    terms = functions[torch.multinomial((taken == 0).double(), 1, generator=generator)[:, 0]]
    inputs = pair[0].inputs.clone()
    y = zadeh(inputs[..., :-1], terms)[..., None]
    inputs[:, :-1, -1] = y[:, :-1, 0]
    return replace(pair[0], inputs=inputs, targets=y, latents={"terms": terms})


def scored(name: str) -> dict[str, dict[str, float]]:
    """R² to the function of the sequence and to the donor's, by the code that the query gets."""
    run, model = load_model(name)
    task, found = run.task, {}
    for step in range(STEPS):
        drawn = stream(run.seed, f"{task.name}/{SPLIT}/swap", step)
        pair = task.contrasts(SPLIT, COUNT, torch.Generator().manual_seed(drawn))
        more = third(task, pair, torch.Generator().manual_seed(drawn + 1))
        _, donor, same = (codes_of(model, LAYER, batch) for batch in (*pair, more))
        given = {"donor": donor, "other inputs": [x.roll(1, 0) for x in donor], "same inputs": same}
        for code, rows in given.items():
            with replaced(model, LAYER, rows):
                outputs = predict(model, task, pair[0]).float()
            for rule, batch in zip(RULES, pair, strict=True):
                found.setdefault(code, {}).setdefault(rule, []).append(task.metrics(outputs, batch)["r2"])
    return {code: {rule: torch.cat(parts).mean().item() for rule, parts in by.items()} for code, by in found.items()}


def main() -> None:
    """Score all models of fuzzy logic that come along."""
    torch.set_num_threads(1)
    scores: dict[str, dict] = {}
    for name in (name for name in shipped.models() if name.startswith("fuzzy-")):
        scores[name] = scored(name)
        print(name, scores[name], flush=True)
    about = {"command": "python benchmarks/swap_control.py", "environment": environment(torch.device("cpu"))}
    write(PLACE, (json.dumps(about | {"r2": scores}, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
