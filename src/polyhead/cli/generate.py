"""`polyhead generate RUN`: a language model continues a text, printed token by token."""

import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from polyhead.cli.output import emit
from polyhead.cli.parse import Device, RunFolder
from polyhead.spec.shapes import check_number

if TYPE_CHECKING:
    from polyhead.config import Run


@dataclass(frozen=True)
class Generate:
    """Continue a text with a trained language model; new text appears token by token after the prompt.

    With an empty prompt it starts a new document.  Ctrl-C stops it.

    >>> polyhead generate lm-bytes-softmax --prompt "def main("
    >>> polyhead generate runs/lm-hyla-1a2b3c4d5e6f --prompt-file begun.py --samples 3 --temperature 0.5
    """

    run: RunFolder
    prompt: str | None = None
    """The text to continue; - reads standard input."""
    prompt_file: Path | None = None
    """A file with the prompt, in place of --prompt."""
    steps: int = 200
    """The largest number of new tokens."""
    temperature: float = 0.8
    """Divides the logits before sampling; 0 takes the most likely token."""
    top_k: int | None = None
    """Sample only from this many of the most likely tokens."""
    top_p: float | None = None
    """Sample from the smallest set of most likely tokens whose probabilities sum to this share."""
    stop: tuple[str, ...] = ()
    """Strings that end the text; write a line end as \\n, a tab as \\t."""
    samples: int = 1
    """Number of texts, one after another."""
    seed: int = 0
    """Seed for sampling."""
    echo: bool = True
    """Also print the prompt."""
    device: Device = "auto"

    def __call__(self) -> int:
        import torch

        from polyhead.models.generate.text import stream_text
        from polyhead.tasks.text.tokens import codec_of
        from polyhead.train import load_model, read_config
        from polyhead.train.device import pick_device

        check_number("generate", "samples", self.samples, 1)
        prompt, run = self._prompt(), read_config(self.run)
        check_run(run)
        codec = codec_of(run, self.run)
        _, model = load_model(self.run, pick_device(self.device))
        stops = [stop.replace("\\n", "\n").replace("\\t", "\t") for stop in self.stop]
        generator = torch.Generator().manual_seed(self.seed)
        pieces = stream_text(
            model, codec, [prompt] * self.samples, steps=self.steps, temperature=self.temperature, top_k=self.top_k,
            top_p=self.top_p, stop=stops, generator=generator,
        )  # fmt: skip
        try:
            emit(
                lambda: {"run": str(self.run), "prompt": prompt, "texts": texts(pieces, self.samples)},
                lambda: show(pieces, prompt if self.echo else "", self.samples),
            )
        except KeyboardInterrupt:
            print()
            return 130
        return 0

    def _prompt(self) -> str:
        if (self.prompt is None) == (self.prompt_file is None):
            came = "neither" if self.prompt is None else "both"
            raise ValueError(f"generate: --prompt or --prompt-file must be given but {came} came")
        if self.prompt not in (None, "-"):
            return str(self.prompt)
        where = "standard input" if self.prompt_file is None else str(self.prompt_file)
        try:
            read = sys.stdin.buffer.read() if self.prompt_file is None else self.prompt_file.read_bytes()
            return read.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"generate: the prompt in {where} is no UTF-8 (byte {error.start})") from None
        except OSError as error:
            raise ValueError(f"generate: {where}: {error.strerror}") from None


def check_run(run: "Run") -> None:
    """Raise a ValueError unless the run trains a decoder of text."""
    if not hasattr(run.task, "codec"):
        raise ValueError(f"generate: a run that trains on text was wanted but {run.name} learns {run.task.name}")
    if not getattr(run.model, "causal", False):
        raise ValueError(f"generate: a model that sees no later tokens was wanted but {run.name} has no causal=True")


def texts(pieces: Iterator[list[str | None]], samples: int) -> list[str]:
    """The new text of each sample."""
    found = [""] * samples
    for said in pieces:
        found = [text + (piece or "") for text, piece in zip(found, said, strict=True)]
    return found


def show(pieces: Iterator[list[str | None]], prompt: str, samples: int) -> None:
    """Print each sample's text after `prompt`, one sample after another; the current sample appears token by token."""
    waiting, now = [""] * samples, 0
    end: list[str | None] = [None] * samples

    def head() -> str:
        return (f"--- sample {now + 1}\n" if samples > 1 else "") + prompt

    _say(head())
    for said in itertools.chain(pieces, [end]):
        waiting = [text + (piece or "") for text, piece in zip(waiting, said, strict=True)]
        _say(waiting[now])
        while said[now] is None and now + 1 < samples:
            now += 1
            _say(f"\n{head()}{waiting[now]}")
        waiting[now] = ""
    _say("\n")


def _say(text: str) -> None:
    """Print without buffering; on a terminal, without control characters."""
    if sys.stdout.isatty():
        text = "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
    print(text, end="", flush=True)
