"""The command generate: a language model continues a text, printed token by token."""

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from polyhead.cli.output import emit, escape
from polyhead.cli.parse import Device, RunFolder
from polyhead.spec.shapes import check_number

if TYPE_CHECKING:
    from polyhead.config import Run

Pieces = Iterator[list[str | None]]
"""The next piece of text of each sample; None once it has ended."""


def generate(
    run: RunFolder,
    prompt: str | None = None,
    prompt_file: Path | None = None,
    steps: int = 200,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: tuple[str, ...] = (),
    samples: int = 1,
    seed: int = 0,
    echo: bool = True,
    device: Device = "auto",
) -> int:
    """Continue a text with a trained language model; new text appears token by token after the prompt.

    With an empty prompt it starts a new document.  Ctrl-C stops it.

    examples:
      polyhead generate lm-bytes-softmax --prompt "def main("
      polyhead generate runs/lm-hyla-1a2b3c4d5e6f --prompt-file begun.py --samples 3 --temperature 0.5

    Args:
        prompt: The text to continue; - reads standard input.
        prompt_file: A file with the prompt, in source of --prompt.
        steps: The largest number of new tokens.
        temperature: Divides the logits before sampling; 0 takes the most likely token.
        top_k: Sample only from this many of the most likely tokens.
        top_p: Sample from the smallest set of most likely tokens whose probabilities sum to this share.
        stop: Strings that end the text; write a line end as \\n, a tab as \\t.
        samples: Number of texts, one after another.
        seed: Seed for sampling.
        echo: Also print the prompt.
    """
    import torch

    from polyhead.models.generate.text import stream_text
    from polyhead.tasks.text.tokens import codec_of
    from polyhead.train import load_model, read_config
    from polyhead.train.device import pick_device

    check_number("generate", "samples", samples, 1)
    text = read_prompt(prompt, prompt_file)
    # The configuration alone shows whether the run fits; a wrong one is refused before its weights are read.
    config = read_config(run)
    check_run(config)
    codec = codec_of(config, run)
    _, model = load_model(run, pick_device(device))
    stops = [word.replace("\\n", "\n").replace("\\t", "\t") for word in stop]
    pieces = stream_text(
        model, codec, [text] * samples, steps=steps, temperature=temperature, top_k=top_k, top_p=top_p, stop=stops,
        generator=torch.Generator().manual_seed(seed),
    )  # fmt: skip
    try:
        emit(
            lambda: {"run": str(run), "prompt": text, "texts": join_pieces(pieces, samples)},
            lambda: print_pieces(pieces, text if echo else "", samples),
        )
    except KeyboardInterrupt:
        print()
        return 130
    return 0


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """Return the prompt.  Raises ValueError unless exactly one source is given and its text is UTF-8."""
    if (prompt is None) == (prompt_file is None):
        raise ValueError("generate: give either --prompt or --prompt-file")
    if prompt is not None and prompt != "-":
        try:
            prompt.encode()
        except UnicodeEncodeError as error:  # the terminal sent bytes of another encoding
            raise ValueError(f"generate: the prompt must be UTF-8 (character {error.start} is not)") from None
        return prompt
    source = str(prompt_file or "standard input")
    try:
        content = sys.stdin.buffer.read() if prompt_file is None else prompt_file.read_bytes()
        return content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"generate: the prompt in {source} must be UTF-8 (byte {error.start} is not)") from None
    except OSError as error:
        raise ValueError(f"generate: {source}: {error.strerror}") from None


def check_run(run: "Run") -> None:
    """Raise a ValueError unless the run trains a decoder of text."""
    if not hasattr(run.task, "codec"):
        raise ValueError(f"generate: the run must train on text, but {run.name} learns {run.task.name}")
    if not getattr(run.model, "causal", False):
        raise ValueError(f"generate: the model must not see later tokens, but {run.name} has causal=False")


def join_pieces(pieces: Pieces, samples: int) -> list[str]:
    """Return the new text of each sample."""
    texts = [""] * samples
    for step in pieces:
        texts = [text + (piece or "") for text, piece in zip(texts, step, strict=True)]
    return texts


def print_pieces(pieces: Pieces, prompt: str, samples: int) -> None:
    """Print each sample's text after `prompt`, one sample after another; the current sample appears token by token."""
    # All samples grow together, so the text of later ones waits until the current one has ended.
    waiting = [""] * samples
    current = 0
    # After the last piece every sample counts as ended, also one that reached the largest number of tokens.
    end: list[str | None] = [None] * samples
    _print_at_once(_heading(current, samples) + prompt)
    for step in itertools.chain(pieces, [end]):
        waiting = [text + (piece or "") for text, piece in zip(waiting, step, strict=True)]
        _print_at_once(waiting[current])
        while step[current] is None and current + 1 < samples:
            current += 1
            _print_at_once(f"\n{_heading(current, samples)}{prompt}{waiting[current]}")
        waiting[current] = ""
    _print_at_once("\n")


def _heading(sample: int, samples: int) -> str:
    if samples == 1:
        return ""
    return f"--- sample {sample + 1}\n"


def _print_at_once(text: str) -> None:
    """Print without buffering; on a terminal, with control characters escaped."""
    print(escape(text) if sys.stdout.isatty() else text, end="", flush=True)
