"""Schug, Kobayashi, Akram, Sacramento, Pascanu (2024), "Attention as a hypernetwork": single runs.

`polyhead list recipes` lists them; `polyhead train fuzzy-hyla --seed 1 --train.lr 3e-3` runs one with changed fields.
"""

from dataclasses import replace

from polyhead.config import Decay, Hyla, Linear, Mechanism, Mlp, Run, Softmax, Train, TransformerConfig
from polyhead.papers.hyla.sizes import FUZZY, SRAVEN, fuzzy_task, make, network
from polyhead.papers.sizes import Setting
from polyhead.spec.shapes import one_of
from polyhead.tasks import FuzzyLogic, Sraven

# The scales of single runs of fuzzy logic; `original`: as `paper`, with the details of the paper's code.
LONG = ("short", "paper", "original")
SPLITS = ("iid", "compositional", "novel")


def fuzzy_model(task: FuzzyLogic, group: Mechanism, *, dim: int, hidden: int) -> TransformerConfig:
    """The paper's network: two pre-norm layers, T5 relative bias per layer, biases, tanh GELU, LayerNorm eps 1e-6."""
    return network(task, group, Mlp(hidden, act="gelu_tanh"), replace(FUZZY["paper"], dim=dim))


def _paper(name: str, group: Mechanism, scale: str) -> Run:
    """One of the paper's runs.

    `short`: fewer steps, with more frequent evaluation on fewer sequences.  `original`: dropout 0.1 on the code with
    one mask for batch and heads, weight decay on q/k/v biases and relative-bias tables, a cosine that ends `warmup`
    steps early, and the splits of its random generator.
    """
    one_of("recipes", "scale", scale, LONG)
    base_scale = "short" if scale == "short" else "paper"
    shape, task = FUZZY[base_scale], fuzzy_task(base_scale, 0)
    train = Train(
        steps=shape.steps,
        evaluate=SPLITS,
        eval_batches=shape.eval_batches,
        eval_every=2500 if scale == "short" else 10_000,
        save_every=1000,
    )
    run = Run(name=name, task=task, model=fuzzy_model(task, group, dim=128, hidden=256), train=train)
    if scale != "original":
        return run
    train = replace(train, decay=Decay(qkv_biases=True, relative_bias=True), early_floor=True)
    model = replace(run.transformer, dropout=0.1, dropout_shared=True)
    return replace(run, task=replace(task, split="legacy"), model=model, train=train)


def fuzzy_softmax(scale: str = "short") -> Run:
    """Softmax attention on fuzzy logic: the network of Table A1, a shorter training.

    polyhead train fuzzy-softmax: 15,000 steps.  --scale paper: 50,000 steps; paper: compositional R² 0.633 ± 0.023.
    """
    return _paper("fuzzy-softmax", Softmax(8, dim=2, value_dim=2), scale)


def fuzzy_linear(scale: str = "short") -> Run:
    """Linear attention on fuzzy logic: the network of Table A1, a shorter training.

    polyhead train fuzzy-linear: 15,000 steps.  --scale paper: 50,000 steps; paper: compositional R² 0.599 ± 0.052.
    """
    return _paper("fuzzy-linear", Linear(8, dim=2, value_dim=2), scale)


def fuzzy_hyla(scale: str = "short") -> Run:
    """HYLA on fuzzy logic: the network of Table A1, a shorter training.

    polyhead train fuzzy-hyla: 15,000 steps.  --scale paper: 50,000 steps; paper: compositional R² 0.811 ± 0.078.
    """
    return _paper("fuzzy-hyla", Hyla(8, dim=2, value_dim=2), scale)


def fuzzy_original() -> Run:
    """HYLA with the details of the paper's code, to match its numbers.

    polyhead train fuzzy-original, as fuzzy-hyla --scale original; fuzzy-softmax and fuzzy-linear have this scale, too.
    """
    return replace(fuzzy_hyla("original"), name="fuzzy-original")


def _sraven(name: str, row: str) -> Run:
    shape = SRAVEN["paper"]
    run = make(Sraven(), row, shape, Setting(1e-3, 0.1, 1000), 0)
    return replace(run, name=name, threads=None)


def sraven_softmax() -> Run:
    """Softmax attention on SRAVEN: four layers, 20 M instances, as in Table A1.

    polyhead train sraven-softmax.  156,250 steps.  Paper: compositional accuracy 0.566 ± 0.011 (Bayes-optimal: 0.92).
    """
    return _sraven("sraven-softmax", "softmax")


def sraven_linear() -> Run:
    """Linear attention on SRAVEN, as in Table A1.

    polyhead train sraven-linear.  156,250 steps.  Paper: compositional accuracy 0.563 ± 0.011.
    """
    return _sraven("sraven-linear", "linear")


def sraven_hyla() -> Run:
    """HYLA on SRAVEN, as in Table A1.

    polyhead train sraven-hyla.  156,250 steps.  Paper: compositional accuracy 0.691 ± 0.019.
    """
    return _sraven("sraven-hyla", "hyla")
