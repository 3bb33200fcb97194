"""Image classification (Altabaa and Lafferty 2024)."""

import itertools
from dataclasses import replace
from functools import partial

from polyhead.analysis.claims import Verdict
from polyhead.config import Learned, RelativeSymbols, Run
from polyhead.papers.dual.models import DUAL, Relations
from polyhead.papers.dual.shared import EARLIER, RELATIVE, RunPlan, better, compared, course, operators, percent, single
from polyhead.papers.outcome import Cells, Figure, score_table
from polyhead.papers.sizes import SMOKE, Scale, size
from polyhead.tasks import Images

# ---------------------------------------------------------------------------------------------------------------- runs
# fmt: off
IMAGES: dict[str, Scale] = {
    "paper": Scale(
        dim=384, hidden=384, layers=8, heads=12, head_dim=32, positions=Learned(), act="gelu",
        steps=35_200, batch_size=128, clip=None, final=0.01,
        lrs=(1e-3,), decays=(5e-5,), warmups=(1760,), seeds=10, eval_batches=79,
    ),
    "small": Scale(
        dim=64, hidden=128, layers=2, heads=4, head_dim=16, positions=Learned(), act="gelu", dropout=0.1,
        steps=3000, batch_size=64, clip=1.0,
        lrs=(3e-3,), decays=(0.1,), warmups=(100,), seeds=3, eval_batches=6,
    ),
    "smoke": replace(SMOKE, positions=Learned(), act="gelu"),
}
# fmt: on

VISION = ("dual", "dual-package", "softmax", "softmax-rope", "softmax-t5", *EARLIER)


def images(scale: str = "small") -> tuple[Run, ...]:
    """Image classification: scikit-learn's digits; at paper scale CIFAR-10 and CIFAR-100 from the folder `images`.

    polyhead reproduce images.
    """
    shape = size(IMAGES, scale)
    sets = ["digits"]
    if scale == "paper":
        sets = ["cifar10", "cifar100"]
    plans: list[RunPlan] = []
    for seed, data in itertools.product(range(shape.seeds), sets):
        plans.append((Images(data, split_seed=seed), shape, data, seed))
    return compared(plans, VISION, Relations(RelativeSymbols()))


def digits_dual() -> Run:
    """Dual attention on scikit-learn's digits: 16 patches of 2 x 2, shifts by one pixel in training.

    polyhead train digits-dual.  6000 steps with batches of 64, about three minutes of one core.
    """
    run = single("digits-dual", images("small"), "digits-dual-0")
    return replace(run, train=replace(run.train, steps=6000))


# -------------------------------------------------------------------------------------------------- claims and drawing
# Data -> model -> accuracy in per cent with AutoAugment: 7.1 million parameters, and 7.2 with ungrouped keys.
PRINTED: dict[str, dict[str, tuple[float, float]]] = {
    "cifar10": {"softmax": (89.5, 0.1), "dual": (91.7, 0.1)},
    "cifar100": {"softmax": (68.2, 0.1), "dual": (71.1, 0.1)},
}


def _claims(cells: Cells) -> list[Verdict]:
    scores = score_table(cells, "iid")
    verdicts = []
    for others in (("softmax",), RELATIVE, ("dual-package",)):
        verdicts += better("images", "dual", others, scores)
    return verdicts + operators("images", scores)


draw = partial(
    course,
    axis="data",
    columns=(("accuracy", "iid", None), ("validation", "validation", None)),
    claim=_claims,
    printed=lambda condition, model: percent(PRINTED.get(condition[0], {}), model),
)

FIGURES = {"images": Figure("Images", DUAL, draw, images, minutes=27.7)}
