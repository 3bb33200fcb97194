"""The command generate: a language model continues a text, printed token by token."""

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from polyhead.cli.options import Device, RunFolder
from polyhead.cli.output import SETTINGS, emit
from polyhead.train.messages import escape

if TYPE_CHECKING:
    from polyhead.config import Run

Pieces = Iterator[list[str | None]]
"""The next piece of the text, in a list of one; None once it has ended."""


def generate(
    run: RunFolder,
    prompt: str,
    steps: int = 200,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: tuple[str, ...] = (),
    seed: int = 0,
    device: Device = "auto",
) -> int:
    """Continue a text with a trained language model; new text appears token by token after the prompt.

    With an empty prompt it starts a new document.  Ctrl-C stops it.

    examples:
      polyhead generate lm-bytes-softmax --prompt "def main("
      polyhead generate runs/lm-hyla-1a2b3c4d5e6f --prompt - --temperature 0.5 < begun.py

    Args:
        prompt: The text to continue; - reads standard input.
        steps: The largest number of new tokens.
        temperature: Divides the logits before sampling; 0 takes the most likely token.
        top_k: Sample only from this many of the most likely tokens.
        top_p: Sample from the smallest set of most likely tokens whose probabilities sum to this share.
        stop: Strings that end the text; write a line end as \\n, a tab as \\t.
        seed: Seed for sampling.
    """
    import torch

    from polyhead.models.generate.text import stream_text
    from polyhead.spec.checked import MAX_INT
    from polyhead.tasks.text.tokens import codec_of
    from polyhead.train import load_model, read_config
    from polyhead.train.device import pick_device

    if abs(seed) > MAX_INT:
        raise ValueError(f"generate: --seed must be from -{MAX_INT} to {MAX_INT} but is {seed}")
    text = read_prompt(prompt)
    # The configuration alone shows whether the run fits; a wrong one is refused before its weights are read.
    config = read_config(run)
    check_run(config)
    codec = codec_of(config, run)
    _, model = load_model(run, pick_device(device))
    stops = [word.replace("\\n", "\n").replace("\\t", "\t") for word in stop]
    pieces = stream_text(
        model, codec, [text], steps=steps, temperature=temperature, top_k=top_k, top_p=top_p, stop=stops,
        generator=torch.Generator().manual_seed(seed),
    )  # fmt: skip
    result: dict[str, Any] = {"run": run, "prompt": text, "text": ""}
    try:
        if SETTINGS["json"]:  # printed as a whole, when the text has ended
            for (piece,) in pieces:
                result["text"] += piece or ""
        emit(result, print_pieces, pieces, text)
    except KeyboardInterrupt:
        print()
        return 130
    return 0


def read_prompt(prompt: str) -> str:
    """The prompt, from standard input for "-".  Raises ValueError unless it is UTF-8."""
    try:
        if prompt == "-":
            return sys.stdin.buffer.read().decode()
        prompt.encode()
    except (UnicodeDecodeError, UnicodeEncodeError) as error:  # the terminal sent bytes of another encoding
        raise ValueError(f"generate: the prompt must be UTF-8 (character {error.start} is not)") from None
    return prompt


def check_run(run: "Run") -> None:
    """Raise a ValueError unless the run trains a decoder of text."""
    if not hasattr(run.task, "codec"):
        raise ValueError(f"generate: the run must train on text, but {run.name} learns {run.task.name}")
    if not getattr(run.model, "causal", False):
        raise ValueError(f"generate: the model must not see later tokens, but {run.name} has causal=False")


def print_pieces(pieces: Pieces, prompt: str) -> None:
    """Print the text after `prompt`, token by token."""
    _print_at_once(prompt)
    for (piece,) in pieces:
        _print_at_once(piece or "")
    _print_at_once("\n")


def _print_at_once(text: str) -> None:
    """Print without buffering; on a terminal, with control characters escaped."""
    print(escape(text) if sys.stdout.isatty() else text, end="", flush=True)
