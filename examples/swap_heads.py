"""Other heads in a model of one's own: every `nn.MultiheadAttention` replaced by polyhead's drop-in, weights kept.

    python examples/swap_heads.py

First with softmax heads, to see that nothing changes; then with HYLA heads, which are trained.  Calls and masks stay
PyTorch's: `key_padding_mask` is True where a key is to be ignored.
"""

import torch
from torch import Tensor, nn

import polyhead as ph
from polyhead.compat.torch_mha import replace


class Reader(nn.Module):
    """The model of one's own: two post-norm layers that read labelled examples and answer the last one."""

    def __init__(self, size: int, dim: int = 32) -> None:
        super().__init__()
        self.inputs, self.outputs = nn.Linear(size, dim), nn.Linear(dim, 1)
        self.attention = nn.ModuleList(nn.MultiheadAttention(dim, 4, batch_first=True) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        x = self.inputs(x)
        for attention, norm in zip(self.attention, self.norms, strict=True):
            x = norm(x + attention(x, x, x, key_padding_mask=padding, need_weights=False)[0])
        return self.outputs(x)


def main(steps: int = 100) -> tuple[float, list[float]]:
    """(The largest change that softmax heads with the old weights make, the losses of HYLA heads in training.)"""
    torch.manual_seed(0)
    task = ph.tasks.FuzzyLogic(length=16)
    model = Reader(task.variables + 1)
    x = task.batch("train", 64, seed=0, step=0).inputs
    padding = torch.zeros(64, 16, dtype=torch.bool)
    padding[:, :3] = True  # ignore the first three examples
    before = model(x, padding)
    replace(model)
    change = (model(x, padding) - before).abs().max().item()
    print(f"softmax heads, old weights: outputs change by at most {change:.1e}")

    model = Reader(task.variables + 1)
    replace(model, ph.Hyla(4))
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        batch = task.batch("train", 64, seed=0, step=step)
        loss = task.loss(model(batch.inputs), batch)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    print(f"HYLA heads: loss {losses[0]:.3f} -> {sum(losses[-10:]) / 10:.3f}")
    return change, losses


if __name__ == "__main__":
    main()
