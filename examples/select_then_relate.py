"""Select, then relate: what a head of disentangled relational attention can compute, and a softmax head cannot.

    python examples/select_then_relate.py

A head is asked for R(x, y*), the relation of a query x with the one object y* among n that u(x, y) ranks first.  Three
parts: weights that solve it, with the error beside its bound; trained feature maps, whose error falls with their width;
and what a head does that may select, but not relate.  docs/select_then_relate.md states the theorem.
"""

import argparse
import math
import pathlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import polyhead as ph
from polyhead.analysis import figures

OBJECTS = 8
BETAS = (1.0, 10.0, 100.0, 1000.0, 10000.0)
WIDTHS = (16, 64, 256)
SHARP = 1000.0

Pairwise = Callable[[Tensor, Tensor], Tensor]
"""A function of queries (... 2) and objects (... 2)."""


@dataclass(frozen=True)
class Problem:
    """Queries x (b 2) and objects y (b n 2) from the square, the utility and the relation of all pairs (b n)."""

    x: Tensor
    y: Tensor
    utility: Tensor
    relation: Tensor

    @classmethod
    def draw(cls, utility: Pairwise, relation: Pairwise, count: int, generator: torch.Generator) -> "Problem":
        """`count` queries with OBJECTS objects each, uniform in [-1, 1]^2."""
        x = torch.rand(count, 2, generator=generator, dtype=torch.float64) * 2 - 1
        y = torch.rand(count, OBJECTS, 2, generator=generator, dtype=torch.float64) * 2 - 1
        return cls(x, y, utility(x[:, None], y), relation(x[:, None], y))

    @property
    def target(self) -> Tensor:
        """R(x, y*), (b)."""
        return self.relation.gather(1, self.utility.argmax(1, keepdim=True))[:, 0]

    @property
    def gap(self) -> Tensor:
        """How far the best object is above the second best, (b)."""
        best = self.utility.topk(2, dim=1).values
        return best[:, 0] - best[:, 1]


def head(width: int, *, dim: int, relation_dim: int, hidden: int | None = None) -> ph.MultiHeadAttention:
    """One disentangled head whose symbols are all 1: it returns the sum over objects of attention times relation."""
    mechanism = ph.Disentangled(
        1, dim=dim, value_dim=1, relation_dim=relation_dim, hidden=hidden, symbols=ph.PositionSymbols(dim=1)
    )
    layer = ph.MultiHeadAttention(width, mechanism, own_symbols=False, dtype=torch.float64)
    with torch.no_grad():
        layer.groups[0].value.weight.fill_(1.0)
        layer.out.weight.fill_(1.0)  # the answer, in every coordinate
    return layer


def answer(layer: ph.MultiHeadAttention, x: Tensor, y: Tensor, taps: list[ph.Taps] | None = None) -> Tensor:
    """The head's output (b) for tokens x (b 1 m) that look at tokens y (b n m)."""
    return layer(x, y, symbols=y.new_ones(1, y.shape[1], 1), taps=taps)[:, 0, 0]


# ---- weights that solve it ----


def nearest(x: Tensor, y: Tensor) -> Tensor:
    """u(x, y) = -|A x - y|^2 + |A x|^2, A a quarter turn: the object nearest to the turned query is selected."""
    turned = torch.stack([x[..., 1], -x[..., 0]], -1)
    return 2 * (turned * y).sum(-1) - y.square().sum(-1)


def sine(x: Tensor, y: Tensor) -> Tensor:
    """R(x, y) = sin(3 (x_1 - y_2)), of rank two."""
    return torch.sin(3 * (x[..., 0] - y[..., 1]))


def features(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens (b 1 5) and (b n 5) whose inner products, of the first three and of the last two, are u and R."""
    wave = 3 * x[:, 0]
    ask = [2 * x[:, 1], -2 * x[:, 0], -torch.ones_like(wave), wave.sin(), -wave.cos()]
    offer = [y[..., 0], y[..., 1], y.square().sum(-1), (3 * y[..., 1]).cos(), (3 * y[..., 1]).sin()]
    return torch.stack(ask, -1)[:, None], torch.stack(offer, -1)


def constructed(beta: float) -> ph.MultiHeadAttention:
    """The head with weights as in the proof: scores beta u, relations R."""
    layer, pick = head(5, dim=3, relation_dim=2), torch.eye(5, dtype=torch.float64)
    with torch.no_grad():
        q, k, _ = layer.qkv.weight.split(layer.widths)
        q.copy_(pick[:3] * beta * math.sqrt(3))  # the op divides scores by sqrt(3), relations by sqrt(2)
        k.copy_(pick[:3])
        layer.groups[0].q_rel.weight.copy_(pick[3:] * math.sqrt(2))
        layer.groups[0].k_rel.weight.copy_(pick[3:])
    return layer


@torch.no_grad()
def construction(generator: torch.Generator, count: int = 4000) -> list[dict[str, float]]:
    """For each sharpness: mean error, how often it exceeds 1/20, mean bound, and the largest error over its bound."""
    problem, rows = Problem.draw(nearest, sine, count, generator), []
    tokens = features(problem.x, problem.y)
    for beta in BETAS:
        error = (answer(constructed(beta), *tokens) - problem.target).abs()
        # |R| <= 1, so that all attention outside y*, at most (n - 1) exp(-beta gap), costs at most twice itself.
        bound = 2 * (OBJECTS - 1) * torch.exp(-beta * problem.gap)
        row = {"beta": beta, "error": error.mean().item(), "over": (error > 0.05).double().mean().item()}
        row |= {"bound": bound.clamp(max=2).mean().item(), "excess": (error - bound).max().item()}
        rows.append(row)
    return rows


# ---- trained feature maps ----


def rough_utility(x: Tensor, y: Tensor) -> Tensor:
    """A selection criterion that is no inner product of few features."""
    wave = torch.cos(2 * (x[..., 1] - y[..., 0])) * y[..., 1]
    return torch.sin(3 * x[..., 0] * y[..., 1]) + wave + 0.5 * (x * y).sum(-1)


def rough_relation(x: Tensor, y: Tensor) -> Tensor:
    """A relation that is no inner product of few features."""
    return torch.exp(-(x - y).square().sum(-1)) * torch.sin(4 * x[..., 0] + 2 * y[..., 1])


def tagged(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens (b 1 5) and (b n 5) in which queries and objects have coordinates of their own, and queries a mark."""
    ask = torch.cat([x, torch.zeros_like(x), torch.ones_like(x[:, :1])], -1)
    offer = torch.cat([torch.zeros_like(y), y, torch.zeros_like(y[..., :1])], -1)
    return ask[:, None], offer


def maps(layer: ph.MultiHeadAttention, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """What the head takes for u and R of all pairs, (b n) each."""
    taps: list[ph.Taps] = []
    answer(layer, *tagged(x, y), taps=taps)
    group = taps[0].groups[0]
    scores = torch.einsum("bthd,bshd->bs", group.q, group.k) * group.scale
    return scores, group.relations()[:, 0, 0]


def trained(width: int, generator: torch.Generator, steps: int) -> ph.MultiHeadAttention:
    """A head whose four feature maps, MLPs of `width` hidden units, are fitted to u and R on random pairs."""
    torch.manual_seed(width)
    layer = head(5, dim=max(4, width // 4), relation_dim=max(4, width // 4), hidden=width)
    with torch.no_grad():  # hidden units that bend within the square; torch's default leaves them almost linear there
        layer.groups[0].hidden.features.weight.normal_(std=1.4)
        layer.groups[0].hidden.features.bias.uniform_(-2, 2)
    learned = [p for name, p in layer.named_parameters() if "value" not in name and "out" not in name]
    optimiser = torch.optim.AdamW(learned, lr=3e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for _ in range(steps):
        batch = Problem.draw(rough_utility, rough_relation, 64, generator)
        scores, relations = maps(layer, batch.x, batch.y)
        loss = (scores - batch.utility).square().mean() + (relations - batch.relation).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    return layer


def training(generator: torch.Generator, widths: tuple[int, ...] = WIDTHS, steps: int = 3000) -> list[dict[str, float]]:
    """For each width: largest errors of u and R, how often the right object is selected, and the head's mean error."""
    problem, rows = Problem.draw(rough_utility, rough_relation, 4000, generator), []
    for width in widths:
        layer = trained(width, generator, steps)
        with torch.no_grad():
            scores, relations = maps(layer, problem.x, problem.y)
            right = (scores.argmax(1) == problem.utility.argmax(1)).double().mean().item()
            layer.groups[0].hidden.q.weight.mul_(SHARP)
            error = (answer(layer, *tagged(problem.x, problem.y)) - problem.target).abs().mean().item()
        row = {"width": width, "utility": (scores - problem.utility).abs().max().item()}
        row |= {"relation": (relations - problem.relation).abs().max().item(), "right": right, "error": error}
        rows.append(row)
    return rows


# ---- what selecting alone is worth ----


def contrast(generator: torch.Generator, steps: int = 1500) -> dict[str, float]:
    """Mean errors of a softmax head that selects perfectly, and of answering with one number.

    Whatever the softmax head's value map, a head that looks at y* alone returns a function of y*; here that is an MLP,
    fitted to the target.  It never sees the query, so relations are out of reach.
    """
    problem = Problem.draw(rough_utility, rough_relation, 4000, generator)
    chosen = problem.utility.argmax(1)
    star = problem.y[torch.arange(len(chosen)), chosen]
    torch.manual_seed(0)
    value = nn.Sequential(nn.Linear(2, 128), nn.GELU(), nn.Linear(128, 1)).double()
    optimiser = torch.optim.AdamW(value.parameters(), lr=2e-3, weight_decay=0.0)
    for _ in range(steps):
        rows = torch.randint(len(star), (512,), generator=generator)
        loss = (value(star[rows])[:, 0] - problem.target[rows]).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    with torch.no_grad():
        softmax = (value(star)[:, 0] - problem.target).abs().mean().item()
    return {"softmax": softmax, "constant": (problem.target - problem.target.median()).abs().mean().item()}


def draw(
    built: list[dict[str, float]], fitted: list[dict[str, float]], alone: dict[str, float], folder: pathlib.Path
) -> None:
    """Two still figures: constructed weights beside their bound, trained maps beside heads that cannot relate."""
    folder.mkdir(parents=True, exist_ok=True)
    by_beta = {name: {row["beta"]: [row[name]] for row in built} for name in ("error", "bound")}
    figures.save(
        figures.lines(
            [("constructed weights", by_beta, {})],
            x_label="sharpness of the selection",
            y_label="mean absolute error",
            log_x=True,
        ),
        folder / "select-then-relate-beta.png",
    )
    by_width = {"trained maps": {row["width"]: [row["error"]] for row in fitted}}
    others = {"softmax head, perfect selection": alone["softmax"], "one number for all": alone["constant"]}
    figures.save(
        figures.lines(
            [("trained maps", by_width, others)],
            x_label="hidden units",
            y_label="mean absolute error",
            log_x=True,
            limits=(0, None),
        ),
        folder / "select-then-relate-width.png",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--figures", type=pathlib.Path, help="a folder for the pictures")
    options = parser.parse_args()
    generator = torch.Generator().manual_seed(options.seed)
    print(f"Constructed weights, {OBJECTS} objects, R = sin(3 (x1 - y2)):")
    built = construction(generator)
    for row in built:
        print(
            f"  beta {row['beta']:7.0f}   mean error {row['error']:.4f}   above 0.05: {row['over']:.4f}   "
            f"mean bound {row['bound']:.4f}   largest (error - bound) {row['excess']:.1e}"
        )
    print(f"Trained feature maps, sharpness {SHARP:.0f}:")
    fitted = training(generator)
    for row in fitted:
        print(
            f"  {row['width']:4.0f} hidden units   sup|u - u^| {row['utility']:.3f}   "
            f"sup|R - R^| {row['relation']:.3f}   right object {row['right']:.3f}   mean error {row['error']:.4f}"
        )
    alone = contrast(generator)
    print(f"Softmax head with perfect selection: mean error {alone['softmax']:.4f}")
    print(f"One number for all: mean error {alone['constant']:.4f}")
    if options.figures:
        draw(built, fitted, alone, options.figures)


if __name__ == "__main__":
    main()
