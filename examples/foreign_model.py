"""What do the heads of somebody else's model encode?  Latent codes of GPT-2 and of PyTorch's own encoder.

    python examples/foreign_model.py

Both models are random, so that nothing is downloaded; put a trained one in their place.  Three questions: can the token
be read off the code with which it attends to itself (fitted on some sequences, scored on others), how alike are the
codes of different tokens, and which heads say the same.  The answers are printed and drawn.  The token can be read off
random heads, too: what training adds is the difference to a random twin.
"""

import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import polyhead as ph
from polyhead.analysis import codes, figures, probe_layers, similarity

TOKENS, LENGTH, PLACE = 6, 8, 3
"""Sequences of a few tokens; the one at PLACE is looked at."""

Capture = Callable[[Tensor], list[ph.Taps]]


def gpt2() -> Capture:
    """Hugging Face's GPT-2, by its attention interface (needs transformers: `pip install 'polyhead[hf]'`)."""
    import transformers

    config = transformers.GPT2Config(
        vocab_size=TOKENS, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=8, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config)
    return lambda ids: ph.compat.huggingface.capture(model, input_ids=ids)


def encoder() -> Capture:
    """PyTorch's own encoder."""
    layer = nn.TransformerEncoderLayer(64, 8, 128, batch_first=True)
    model = nn.Sequential(nn.Embedding(TOKENS, 64), nn.TransformerEncoder(layer, 2))
    return lambda ids: ph.compat.torch_mha.capture(model, ids)


def look(name: str, capture: Capture, batches: list[Tensor]) -> tuple[list[dict[str, Any]], list[tuple]]:
    """(One row per layer: what a probe reads off the code; panels for a figure.)"""
    rows = probe_layers(map(capture, batches), [ids[:, PLACE] for ids in batches], PLACE, PLACE)
    panels = []
    for i, layer in enumerate(capture(batches[0])):
        code = codes(layer, PLACE, PLACE)
        classes, tokens = similarity(code - code.mean(0), batches[0][:, PLACE])
        heads = np.corrcoef(code.T.double().numpy())
        for what, matrix, names in (
            ("tokens", tokens, [str(label) for label in classes]),
            ("heads", heads, [str(head) for head in range(len(heads))]),
        ):
            panels.append((f"{name}, layer {i + 1}: {what}", matrix, names, names))
    return rows, panels


def main(path: str | pathlib.Path = "runs/foreign_model.png", sequences: int = 600) -> list[dict[str, Any]]:
    """Rows {model, layer, name, f1, chance, n, classes}; the figure is written to `path`."""
    torch.manual_seed(0)
    models = {"GPT-2": gpt2(), "nn.TransformerEncoder": encoder()}
    batches = list(torch.randint(TOKENS, (sequences, LENGTH)).split(200))
    found, drawn = [], []
    for name, capture in models.items():
        rows, panels = look(name, capture, batches)
        for row in rows:
            print(f"{name}, {row['name']}: F1 {row['f1']:.2f} of the token, by chance {row['chance']:.2f}")
        found += [{"model": name, **row} for row in rows]
        drawn += panels
    print(
        figures.save(
            figures.heat(drawn, label="cosine of mean codes, correlation of heads", limits=(-1, 1), columns=4), path
        )
    )
    return found


if __name__ == "__main__":
    main()
