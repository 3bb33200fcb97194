"""The fourteen models of Table A1 (Schug et al. 2024) and one of ours: kinds of heads and feed-forward layers.

The original code has eight of them.  For the others, `choice` states our choice where the paper is silent, and the
alternative.
"""

from dataclasses import dataclass

from polyhead.config import Hyla, Linear, Mechanism, Softmax
from polyhead.papers.study import ModelRow, Paper
from polyhead.tasks import FuzzyLogic

EXPERTS, TOP_K = 4, 2


@dataclass(frozen=True)
class TableRow(ModelRow):
    """One model of the table.

    Attributes:
        heads: The kind of heads, without sizes.
        experts: Whether a mixture of experts replaces the feed-forward layer.
        fuzzy: The paper's compositional R² x 100 (32 tokens, 70 % held out): mean and standard error over three seeds.
        sraven: The paper's compositional accuracy in per cent (4 layers, 20 M instances), likewise.
    """

    heads: Mechanism
    experts: bool = False
    fuzzy: tuple[float, float] | None = None
    sraven: tuple[float, float] | None = None

    def printed(self, task: str) -> str:
        """The paper's score on "fuzzy" or "sraven" as a fraction, with its standard error."""
        value = getattr(self, task)
        if value is None:
            return "–"
        return f"{value[0] / 100:.3f} ± {value[1] / 100:.3f}"


_MOE = (
    f"{EXPERTS} experts of the MLP's width, {TOP_K} per token, weighted by the softmax over those {TOP_K}, with a "
    "load-balance loss of weight 0.01 and no gate noise; the paper gives neither numbers nor losses. Alternative: "
    "experts of 1 / top_k the width, at equal cost"
)

# Name -> model, in the order of the paper's table.
ROWS: dict[str, TableRow] = {
    "softmax": TableRow("Softmax", Softmax(), fuzzy=(63.28, 2.31), sraven=(56.56, 1.05)),
    "linear": TableRow("Linear", Linear(), fuzzy=(59.89, 5.22), sraven=(56.30, 1.11)),
    "hyla": TableRow("HYLA", Hyla(), fuzzy=(81.13, 7.77), sraven=(69.13, 1.90)),
    "linear-rms": TableRow(
        "Linear + RMSHead", Linear(normalise="rms_heads"), fuzzy=(68.93, 5.10), sraven=(59.01, 2.50)
    ),
    "linear-rms-relu": TableRow(
        "Linear + RMSHead + nonlinear value",
        Linear(normalise="rms_heads", act="relu"),
        fuzzy=(56.91, 4.25),
        sraven=(55.38, 0.32),
        choice="ReLU on each head's values, before the sum over keys. Alternative: on each head's sum over keys",
    ),
    "hyla-norms": TableRow("HYLA − RMSHead", Hyla(normalise="identity"), fuzzy=(81.27, 7.88), sraven=(62.53, 5.73)),
    "hyla-linear": TableRow("HYLA − nonlinearity", Hyla(act="identity"), fuzzy=(84.54, 5.32), sraven=(56.54, 0.21)),
    "hyla-linear-norms": TableRow(
        "HYLA − nonlinearity − RMSHead",
        Hyla(normalise="identity", act="identity"),
        fuzzy=(79.42, 7.43),
        sraven=(56.33, 1.41),
    ),
    "hyla-softmax": TableRow(
        "HYLA − RMSHead + softmax", Hyla(normalise="softmax"), fuzzy=(70.98, 7.08), sraven=(38.21, 2.98)
    ),
    "hyla-deep": TableRow(
        "HYLA + deep value",
        Hyla(value_depth=2),
        fuzzy=(87.65, 4.54),
        sraven=(66.59, 0.08),
        choice="equation 10, the second value matrix without a bias. Alternative: with one per head",
    ),
    "hyla-both": TableRow(
        "HYLA + softmax",
        Hyla(normalise="softmax_rms_heads"),
        fuzzy=(82.47, 4.22),
        sraven=(62.21, 3.08),
        choice=(
            "softmax over the keys, then RMSHead over the heads: there is another row named HYLA − RMSHead + softmax, "
            "so this one has both. RMSHead brings a key that the softmax suppressed back to full strength. "
            "Alternative: RMSHead first"
        ),
    ),
    "softmax-moe": TableRow("Softmax + MoE", Softmax(), True, (63.83, 6.07), (57.68, 1.31), choice=_MOE),
    "linear-moe": TableRow("Linear + MoE", Linear(), True, (60.09, 6.16), (64.34, 4.30), choice=_MOE),
    "hyla-moe": TableRow("HYLA + MoE", Hyla(), True, (82.37, 6.55), (66.94, 3.94), choice=_MOE),
}

# Models beyond the paper.
OURS: dict[str, TableRow] = {
    "hyla-compete": TableRow(
        "HYLA, softmax over heads (ours)",
        Hyla(normalise="softmax_heads"),
        choice="not in the paper: the heads compete for each query-key pair",
    ),
}


HYLA = Paper(
    "Attention as a hypernetwork",
    ROWS | OURS,
    {
        "task": lambda run: "fuzzy" if isinstance(run.task, FuzzyLogic) else run.task.name,
        "held out": lambda run: getattr(run.task, "held_out", None),
        "features": lambda run: getattr(run.task, "features", None),
    },
)
label = HYLA.label
