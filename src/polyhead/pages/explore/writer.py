"""A page for exploring how a model reads a text.  Point at a token to see, for each layer, the latent code over heads,
the attended tokens, relations and symbols, and the nearest tokens by latent code.

    explore(model, text, codec, path)        our model, or a causal model of Hugging Face with its tokenizer
    explore_folder(folder, text, path)       a run folder, or a folder with a model of Hugging Face
    write(taps, tokens, path)                the taps of any model from `capture`
"""

import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from polyhead.analysis import capture
from polyhead.compat.foreign import holds_model
from polyhead.config import Run, Tokens
from polyhead.layers.taps import Taps
from polyhead.models.transformer import Transformer
from polyhead.pages.document import HtmlPage
from polyhead.pages.explore.data import TOKENS, gather
from polyhead.pages.explore.page import explore_page
from polyhead.tasks.base import Batch
from polyhead.tasks.text import tokens as text_tokens
from polyhead.train import load_model, read_config, read_result
from polyhead.train.progress import wanted
from polyhead.train.store.files import check_place
from polyhead.train.store.folder import run_path

Path = str | pathlib.Path


def taps_page(taps: Sequence[Taps], tokens: Sequence[str], *, title: str = "", of: int = 0) -> HtmlPage:
    """The page on one sequence, which a notebook shows by itself; arguments as in `write`."""
    return explore_page(gather(taps, tokens, of=of), title)


def write(
    taps: Sequence[Taps], tokens: Sequence[str], path: Path, *, title: str = "", of: int = 0, progress: bool = True
) -> pathlib.Path:
    """Write the page on one sequence, with `tokens` as text, and return its path.

    A page shows at most 512 tokens, fewer for large models, and says so.  It needs no network and no other file.

    >>> heads = (Hyla(2), Softmax(2))
    >>> model = Transformer(TransformerConfig(Tokens(9), Logits(9), dim=8, layers=2, heads=heads, causal=True))
    >>> ids = torch.tensor([[3, 1, 4, 1, 5]])
    >>> taps = capture(model, Batch(ids, ids, None, torch.ones(1, 5), {}))
    >>> write(taps, ["to", " be", " or", " not", " to"], "explore.html").name
    'explore.html'

    Args:
        taps: From `polyhead.analysis.capture` or `polyhead.compat.huggingface.capture`, for one sequence.
        of: The number of tokens before truncation.

    Raises:
        ValueError: If taps and tokens do not match, numbers are not finite, or the path cannot be written.
    """
    path = pathlib.Path(path)
    contents = gather(taps, tokens, of=of)
    explore_page(contents, title).save(path, "explore")
    if wanted(progress):
        count = path.stat().st_size
        size = f"{count / 1e3:.0f} kB"
        if count >= 1e6:
            size = f"{count / 1e6:.1f} MB"
        print(f"explore: {size}, {contents.facts}. {contents.note}".rstrip(), file=sys.stderr)
    return path


def explore(
    model: nn.Module, text: str, codec: Any, path: Path, *, title: str = "", progress: bool = True
) -> pathlib.Path:
    """Write the page on `text` as `model` reads it, and return its path.

    Only the first 512 tokens are read; for a causal model, later tokens have no effect on the first ones.

    Args:
        model: Ours, or a causal model of Hugging Face.
        codec: Our model's codec (from `polyhead.tasks.text.tokens`), or the other model's tokenizer.

    Raises:
        ValueError: For an empty text, a text longer than the model's context, and tokens outside its vocabulary.
            Also for a model that does not read tokens, and as in `write`.
    """
    check_place("explore", pathlib.Path(path))
    if not text:
        raise ValueError("explore: the text must have at least one token but is empty")
    ids = list(map(int, codec.encode(text)))
    x = torch.tensor([ids[:TOKENS]])  # (1 t)
    # Our model, which another module may wrap; else one of Hugging Face.
    transformer = next((module for module in model.modules() if isinstance(module, Transformer)), None)
    if transformer is not None:
        _check_ids(ids, *_limits(transformer))
        taps = capture(transformer, Batch(x, x, None, torch.ones_like(x), {}))
    else:
        from polyhead.pages.explore import foreign  # takes seconds

        _check_ids(ids, *foreign.limits(model))
        taps = foreign.capture(model, x.to(next(model.parameters()).device))
    return write(taps, pieces(codec, ids[:TOKENS]), path, title=title, of=len(ids), progress=progress)


def explore_folder(
    folder: Path, text: str, path: Path, *, device: str | torch.device = "cpu", progress: bool = True
) -> pathlib.Path:
    """Write the page on `text` as read by the model in `folder`, and return its path.

    Args:
        folder: A run folder, the name of a trained model that comes with polyhead, or a folder written by Hugging
            Face's `save_pretrained`, with its tokenizer.

    Raises:
        ValueError: For a run that is not finished or not on text, and as in `explore`.
    """
    folder = run_path(folder)
    check_place("explore", pathlib.Path(path))
    model: Any
    if holds_model(folder):
        from polyhead.pages.explore import foreign  # takes seconds

        model, codec = foreign.load(folder, device)
        title = folder.resolve().name
    else:
        run = _finished(folder)
        codec = text_tokens.codec_of(run, folder)
        _, model = load_model(folder, device)
        title = run.name
    return explore(model, text, codec, path, title=title, progress=progress)


def pieces(codec: Any, tokens: Sequence[int]) -> list[str]:
    """The text of each token; `codec`: ours, or a tokenizer of Hugging Face."""
    if hasattr(codec, "piece"):
        return [codec.piece(token) for token in tokens]
    names = [str(codec.convert_ids_to_tokens(token)) for token in tokens]
    return [text_tokens.with_blank(codec.decode([token]), name) for token, name in zip(tokens, names, strict=True)]


def _finished(folder: pathlib.Path) -> Run:
    run = read_config(folder)
    if not hasattr(run.task, "codec"):
        task = run.task.name.replace("_", " ")
        raise ValueError(
            f"explore: {folder} must be trained on text but is on {task}; polyhead report {folder} shows its attention"
        )
    if read_result(folder) is None:
        raise ValueError(f"explore: {folder} must be finished but is not; polyhead resume {folder} finishes it")
    return run


def _limits(model: Transformer) -> tuple[int, int]:
    """The context length and the vocabulary size of a model."""
    settings = model.config
    if not isinstance(settings.inputs, Tokens) or settings.encoder is not None:
        raise ValueError(f"explore: the model must take only tokens, got {settings.inputs}")
    return settings.max_length, settings.inputs.count


def _check_ids(ids: Sequence[int], context: int | None, vocabulary: int | None) -> None:
    """Raise ValueError for token ids that the model cannot read."""
    if not ids:
        raise ValueError("explore: the text must have at least one token but is empty")
    if vocabulary is not None and max(ids) >= vocabulary:
        raise ValueError(
            f"explore: the tokenizer must have the model's {vocabulary} tokens but the text has token {max(ids)}: it "
            "belongs to another model"
        )
    if context is not None and len(ids) > context:
        raise ValueError(f"explore: the text must have at most {context} tokens, the model's context, got {len(ids)}")
