"""Recipes: functions that return a run, or several."""

import polyhead as ph
from parity_heads.heads import Cosine
from parity_heads.task import Parity


def parity_hyla(heads: ph.Mechanism | None = None, name: str = "parity-hyla") -> ph.Run:
    """Two layers of HYLA heads on the parity of 8 bits, for 300 steps."""
    task = Parity()
    model = ph.TransformerConfig(
        *task.ends, dim=32, layers=2, heads=(heads or ph.Hyla(4),), positions=ph.RelativeBias(), max_length=task.length
    )
    train = ph.Train(steps=300, batch_size=64, lr=3e-3, evaluate=("iid", "compositional"), eval_batches=4, log_every=50)
    return ph.Run(name=name, task=task, model=model, train=train, threads=1)


def parity_heads() -> tuple[ph.Run, ...]:
    """HYLA, softmax and cosine heads on parity."""
    rows = {"hyla": ph.Hyla(4), "softmax": ph.Softmax(4), "cosine": Cosine(4)}
    return tuple(parity_hyla(group, f"parity-{name}") for name, group in rows.items())
