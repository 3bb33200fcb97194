"""Other heads in a model of one's own: replace every `nn.MultiheadAttention` by polyhead's attention.

    python examples/swap_heads.py

First with softmax heads and the old weights, to see that nothing changes; then with HYLA heads, which are trained.
The one trap is the mask: PyTorch's `key_padding_mask` is True where a key is to be ignored, ours where it may be seen.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

import polyhead as ph
from polyhead.config import Mechanism


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


class Swapped(nn.Module):
    """polyhead's attention behind the call of `nn.MultiheadAttention` (batch first)."""

    def __init__(self, old: nn.MultiheadAttention, heads: Sequence[Mechanism]) -> None:
        super().__init__()
        self.new = ph.MultiHeadAttention(old.embed_dim, heads, bias=True)
        if self.new.qkv.weight.shape == old.in_proj_weight.shape:  # same widths: the old weights fit as they are
            self.new.qkv.load_state_dict({"weight": old.in_proj_weight, "bias": old.in_proj_bias})
            self.new.out.load_state_dict(old.out_proj.state_dict())

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        mask = None if key_padding_mask is None else ~key_padding_mask[:, None, None, :]
        context = None if key is query else key
        return self.new(query, context, mask=mask), None


def swap_heads(model: nn.Module, heads: Sequence[Mechanism]) -> nn.Module:
    """Replace every `nn.MultiheadAttention` inside `model`, which is changed and returned."""
    for name, child in model.named_children():
        if isinstance(child, nn.MultiheadAttention):
            setattr(model, name, Swapped(child, heads))
        else:
            swap_heads(child, heads)
    return model


def main(steps: int = 100) -> tuple[float, list[float]]:
    """(The largest change that softmax heads with the old weights make, the losses of HYLA heads in training.)"""
    torch.manual_seed(0)
    task = ph.tasks.FuzzyLogic(length=16)
    model = Reader(task.variables + 1)
    x = task.batch("train", 64, seed=0, step=0).inputs
    padding = torch.zeros(64, 16, dtype=torch.bool)
    padding[:, :3] = True  # ignore the first three examples
    before = model(x, padding)
    change = (swap_heads(model, [ph.Softmax(4)])(x, padding) - before).abs().max().item()
    print(f"softmax heads, old weights: outputs change by at most {change:.1e}")

    model = swap_heads(Reader(task.variables + 1), [ph.Hyla(4)])
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
