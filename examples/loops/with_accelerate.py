"""Train in Accelerate's loop: `python examples/loops/with_accelerate.py`, or `accelerate launch` on several devices."""

import torch
from accelerate import Accelerator

import polyhead as ph


def main(steps: int = 100) -> list[float]:
    """The losses of a causal model that learns to repeat: token i + 4 is token i."""
    accelerator = Accelerator(mixed_precision="bf16")
    torch.manual_seed(0)
    heads = [ph.Softmax(2), ph.Hyla(2)]
    settings = ph.TransformerConfig(
        ph.Tokens(8), ph.Logits(8), dim=32, heads=heads, causal=True, positions=ph.Rotary(), max_length=16
    )
    model = ph.Transformer(settings)
    model, optimiser = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    losses = []
    for _ in range(steps):
        tokens = torch.randint(8, (64, 4), device=accelerator.device).repeat(1, 4)
        loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
        accelerator.backward(loss)
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    losses = main()
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}; three of the 15 targets cannot be known: {3 / 15 * 2.08:.2f}")
