"""Do the codes of the long trainings cluster by term?  Purity of neighbours, as in Fig. 2D, beside untrained networks.

    nice -n 10 python benchmarks/clusters.py      writes docs/results/clusters.json

All networks of fuzzy logic that come along, and each as it was before its first step.  Codes of the query attending to
itself, unseen combinations, one context for all sequences as in the paper.  Purity: the share of the ten nearest codes
with the same term, less its chance level.  This is description: the protocol has no test of it.
"""

import json
from pathlib import Path

import torch

from polyhead.analysis import clusters
from polyhead.analysis.labels import with_field
from polyhead.papers.hyla.probes import untrained
from polyhead.train import load_model
from polyhead.train.store import shipped
from polyhead.train.store.folder import environment, write

PLACE = Path(__file__).parents[1] / "docs" / "results" / "clusters.json"
CODES = 1000


def main() -> None:
    """Measure every network, trained and untrained."""
    torch.set_num_threads(1)
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name in (name for name in shipped.models() if name.startswith("fuzzy-")):
        run, trained = load_model(name)
        task = with_field(run.task, "inputs", "fixed_context")
        for kind, network in (("trained", trained), ("untrained", untrained(run))):
            rows = clusters(network, task, sequences=CODES, seed=run.seed)
            over = {f"{row['target']}, layer {row['layer'] + 1}": row["purity"] - row["chance"] for row in rows}
            found.setdefault(name, {})[kind] = over
        print(name, found[name], flush=True)
    about = {"command": "python benchmarks/clusters.py", "environment": environment(torch.device("cpu"))}
    write(PLACE, (json.dumps(about | {"purity over chance": found}, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
