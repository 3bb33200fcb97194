"""Do the codes of the long trainings cluster by term?  Purity of neighbours, as in Fig. 2D, and similarity of codes.

    nice -n 10 python benchmarks/clusters.py      writes docs/results/clusters.json

All networks of fuzzy logic that come along, and each as it was before its first step.  Codes of the query attending to
itself, unseen combinations, one context for all sequences as in the paper.  Purity: the share of the ten nearest codes
with the same term, less its chance level.  Similarity: the mean cosine of two codes with the same term less that of
two codes with another one, the mean code subtracted.  This is description: the protocol has no test of it.
"""

import json
from pathlib import Path

import numpy as np
import torch

from polyhead.analysis import clusters, query_codes
from polyhead.analysis.labels import targets, with_field
from polyhead.papers.hyla.probes import untrained
from polyhead.train import load_model
from polyhead.train.store import shipped
from polyhead.train.store.folder import environment, write

PLACE = Path(__file__).parents[1] / "docs" / "results" / "clusters.json"
CODES = 1000


def closer(codes: np.ndarray, labels: np.ndarray) -> float:
    """Mean cosine of two codes (b h) of one class less that of two codes of two classes, the mean code subtracted."""
    codes = codes - codes.mean(0)
    unit = codes / np.maximum(np.linalg.norm(codes, axis=1, keepdims=True), 1e-12)
    cosine, same = unit @ unit.T, labels[:, None] == labels
    other, itself = ~same, np.eye(len(labels), dtype=bool)
    return float(cosine[same & ~itself].mean() - cosine[other].mean())


def main() -> None:
    """Measure every network, trained and untrained."""
    torch.set_num_threads(1)
    found: dict[str, dict[str, dict[str, float]]] = {}
    near: dict[str, dict[str, dict[str, float]]] = {}
    for name in (name for name in shipped.models() if name.startswith("fuzzy-")):
        run, trained = load_model(name)
        task = with_field(run.task, "inputs", "fixed_context")
        for kind, network in (("trained", trained), ("untrained", untrained(run))):
            rows = clusters(network, task, sequences=CODES, seed=run.seed)
            over = {f"{row['target']}, layer {row['layer'] + 1}": row["purity"] - row["chance"] for row in rows}
            found.setdefault(name, {})[kind] = over
            layers, batch = query_codes(network, task, "compositional", CODES, seed=run.seed, purpose="maps")
            near.setdefault(name, {})[kind] = {
                f"{target}, layer {layer + 1}": closer(codes, labels)
                for layer, codes in enumerate(layers)
                for target, labels in targets(batch).items()
            }
        print(name, found[name], near[name], flush=True)
    about = {"command": "python benchmarks/clusters.py", "environment": environment(torch.device("cpu"))}
    measured = {"purity over chance": found, "similarity, same term less another": near}
    write(PLACE, (json.dumps(about | measured, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
