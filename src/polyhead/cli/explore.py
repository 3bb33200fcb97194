"""`polyhead explore MODEL --text "..."`: a page for exploring how a model reads a text."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from polyhead.cli.output import emit
from polyhead.cli.parse import Device


@dataclass(frozen=True)
class Explore:
    """Write one self-contained HTML page on a text: point at a token to see its latent codes and the tokens it reads.

    MODEL is a run folder of a language model, a model of text of `polyhead list models`, or a folder with a causal
    model of Hugging Face and its tokenizer. The first 512 tokens of the text are shown.

    >>> polyhead explore lm-bytes-softmax --text "def add(a, b):"
    >>> polyhead explore models/gpt2 --text "To be, or not to be" --out gpt2.html
    """

    model: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A run folder, a trained model, or a folder of a Hugging Face model."""
    text: str
    """The text to explore."""
    out: Path = Path("explore.html")
    """The page."""
    device: Device = "auto"

    def __call__(self) -> int:
        from polyhead.pages.explore import explore_folder
        from polyhead.train.device import pick_device

        device = pick_device(self.device)
        path = explore_folder(self.model, self.text, self.out, device=device)
        emit(lambda: {"explore": path}, lambda: print(f"explore: {path}"))
        return 0
