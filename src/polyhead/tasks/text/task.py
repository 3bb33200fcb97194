"""Language modelling of any text, from the Python sources of this machine to a data set of the Hub.

Text is tokenised once (corpus.py) into one long row of tokens for each split, document after document.  A sequence is a
window of the row; its targets are the same tokens shifted by one:

    row       \\0 d e f   f ( ) : \\0 i m p o r t ...            length 4
    inputs    \\0 d e f                                          targets   d e f _

In one pass of training the windows are adjacent; their offset and their order change with each pass.
"""

import functools
import lzma
import math
import os
import pathlib
import zlib
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from msgspec import Meta
from torch import Tensor

from polyhead.config import Logits, Tokens, non_semantic
from polyhead.config.checked import Count
from polyhead.tasks import record
from polyhead.tasks.base import Baseline, Batch, Task, Words, stream
from polyhead.tasks.task import (
    LazyLogitsLike,
    Score,
    check_baselines,
    check_draw,
    check_split,
    located,
    token_guesses,
    token_losses,
)
from polyhead.tasks.text import tokens as text_tokens
from polyhead.tasks.text.corpus import Corpus, Request, open_corpus
from polyhead.tasks.text.sources import SPLITS, File, list_files
from polyhead.tasks.text.tokens import Bytes, Codec

ROUNDS = 5  # rounds of the Feistel network


@dataclass(frozen=True)
class Text(Task):
    """Language modelling of any text.

        train         the text that is not held out
        validation    whole documents, `held_out` of all bytes, to select hyper-parameters
        iid           equally many others, for reported scores

    data: "stdlib", the sources of Python's standard library on this machine, without tests, 11 MB; a file; a folder, of
        which files with a usual suffix are read (`sources.SUFFIXES`); "hub:OWNER/NAME/CONFIG", streamed from the
        Hugging Face Hub through `datasets`: the first `limit` bytes of its `column`.
    tokenizer: "bytes"; "bpe:4096", a byte-level byte-pair encoding with 4096 tokens, trained on the training text; a
        tokenizer.json of `tokenizers`; or one of the Hub, such as "hub:openai-community/gpt2".
    folder: where the token files are stored.

    The windows of a held-out split score each token but the first once, in a shuffled order that is the same for every
    seed.  Scores are comparable only with the same `fingerprint`: another Python version has another standard library.

    Raises ValueError for invalid settings, and for text that is missing when it is read.
    """

    data: str = "stdlib"
    length: Count = 256
    tokenizer: str = "bytes"
    held_out: Annotated[float, Meta(gt=0, lt=0.5)] = 0.05
    limit: Count | None = None
    column: str = "text"
    folder: str = non_semantic("data/text")

    name: ClassVar[str] = "text"
    splits: ClassVar[tuple[str, ...]] = SPLITS
    metric: ClassVar[str] = "bits_per_byte"
    better: ClassVar[str] = "lower"
    lazy: ClassVar[bool] = True
    autoregressive: ClassVar[bool] = True
    words: ClassVar[Words] = Words(
        metric=(
            "Bits per byte",
            "The bits per byte of held-out text under the model, comparable between tokenizers: lower is better. A "
            "compressor has not seen the training text, but sees whole files.",
        ),
        baselines={
            "zlib": Baseline("Zlib", "compresses the text and looks back 32 KiB"),
            "lzma": Baseline("Lzma", "compresses the text and looks back over all of it"),
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        text_tokens.check(self.tokenizer)
        kind, _, name = self.data.partition(":")
        if kind == "hub" and "/" not in name.strip("/"):
            raise ValueError(f"Text: a data set of the Hub is 'hub:OWNER/NAME[/CONFIG]', not {self.data!r}")
        if (kind == "hub") != (self.limit is not None):
            raise ValueError(f"Text: limit is the bytes to take of a data set of the Hub; {self.data} has {self.limit}")

    @property
    def ends(self) -> tuple[Tokens, Logits]:
        kind, _, count = self.tokenizer.partition(":")
        size = int(count) if kind == "bpe" else self.codec().count
        return Tokens(size), Logits(size)

    def codec(self) -> Codec:
        """The codec between text and tokens; a codec trained on the text needs the data."""
        return self._existing_codec or self._corpus().codec

    @functools.cached_property
    def _existing_codec(self) -> Codec | None:
        return text_tokens.existing(self.tokenizer)

    def fingerprint(self) -> str:
        """A hash of the text and its splits; it does not depend on the tokenizer."""
        return str(self._corpus().manifest["fingerprint"])

    def _corpus(self) -> Corpus:
        return open_corpus(self._request, pathlib.Path(located(self.folder)))

    @functools.cached_property
    def _request(self) -> Request:
        """Made once: text that is edited changes no task that has read it, but is what the next one reads."""
        files: tuple[File, ...] = ()
        if self.limit is None:
            files = list_files(self.data, pathlib.Path(located(self.folder)))
        return Request(self.data, self.tokenizer, self._existing_codec, self.held_out, self.limit, self.column, files)

    # ---------------------------------------------------------------------------------------------------------- batches
    def count(self, split: str) -> int | None:
        if split == "train":
            return None
        return math.ceil((len(self._tokens(split)) - 1) / self.length)

    def shared(self, split: str) -> bool:
        return split != "train"

    def _tokens(self, split: str) -> np.ndarray:
        check_split(self, split)
        tokens = self._corpus().tokens[split]
        if len(tokens) <= self.length:
            raise ValueError(
                f"Text: {self.data} has {len(tokens)} tokens for {split!r}, but a sequence takes {self.length + 1}; "
                "lower length or give more text"
            )
        return tokens

    def sample(self, split: str, batch_size: int, generator: torch.Generator) -> Batch:
        """A batch on the generator's device: windows at random offsets in the text."""
        check_draw(self, split, batch_size)
        last = len(self._tokens(split)) - self.length
        starts = torch.randint(last, (batch_size,), generator=generator, device=generator.device)
        return self._batch(split, starts.cpu().numpy(), None, generator.device)

    def batch(self, split: str, batch_size: int, *, seed: int, step: int, device: Any = "cpu") -> Batch:
        """Batch number `step`: a pure function of (seed, split, step, batch size); held-out splits ignore the seed."""
        check_draw(self, split, batch_size)
        device = torch.device(device)
        tokens = self._tokens(split)
        count = self.count(split)
        if count is None:
            return self._batch(split, self._starts(len(tokens), batch_size, seed, step), None, device)
        batches = math.ceil(count / batch_size)  # in a pass; the last may be short
        first = step % batches * batch_size
        indices = np.arange(first, min(first + batch_size, count))
        rows = order(indices, count, key=stream(0, f"{self.name}/{split}/order"))
        last = len(tokens) - 1 - self.length
        starts = np.minimum(rows * self.length, last)  # the last window is full, and scores only new tokens
        return self._batch(split, starts, rows * self.length - starts, device)

    def _starts(self, count: int, batch_size: int, seed: int, step: int) -> np.ndarray:
        """The starts of the windows of a training batch, in a row of `count` tokens."""
        windows = max(1, (count - self.length) // self.length)
        spare = min(self.length, count - windows * self.length)  # the number of offsets with room for all windows
        passes, indices = np.divmod(np.arange(step * batch_size, (step + 1) * batch_size), windows)
        starts = np.empty(batch_size, np.int64)
        for number in range(int(passes[0]), int(passes[-1]) + 1):
            in_pass = passes == number
            key = stream(seed, f"{self.name}/train/order", number)
            starts[in_pass] = order(indices[in_pass], windows, key=key) * self.length + key % spare
        return starts

    def _batch(self, split: str, starts: np.ndarray, skipped: np.ndarray | None, device: torch.device) -> Batch:
        """The windows at `starts` (b); their first `skipped` (b) targets are not scored."""
        corpus = self._corpus()
        windows = np.lib.stride_tricks.sliding_window_view(corpus.tokens[split], self.length + 1)[starts]
        tokens = torch.from_numpy(windows.astype(np.int64))
        scored = torch.ones(len(starts), self.length, dtype=torch.bool)
        size = torch.full((len(starts),), self.length * corpus.rate(split), dtype=torch.float32)
        if skipped is not None and skipped.any():
            scored = torch.arange(self.length) >= torch.from_numpy(skipped)[:, None]
            size = (scored.sum(dim=1) * corpus.rate(split)).float()
        # A copy: noise is added to inputs in place, and the targets must stay as they are.
        batch = Batch(tokens[:, :-1].clone(), tokens[:, 1:], None, scored, {"bytes": size})
        return batch.to(device)

    # ----------------------------------------------------------------------------------------------------------- scores
    def loss(self, outputs: Tensor | LazyLogitsLike, batch: Batch) -> Tensor:
        """Mean cross-entropy in nats per token."""
        nats = token_losses(outputs, batch.targets)
        return (nats * batch.scored).sum() / batch.scored.sum().clamp(min=1)

    def metrics(self, outputs: Tensor | LazyLogitsLike, batch: Batch) -> dict[str, Tensor]:
        """For each sequence (b): `bits_per_byte`, and `accuracy`, the share of tokens whose logit is the largest.

        Each token counts as its split's mean bytes per token.  So the mean over a whole split, weighted by `amounts`,
        is total bits over total bytes, and tokenizers can be compared.  A separator of documents counts as one byte.
        """
        nats = (token_losses(outputs, batch.targets) * batch.scored).sum(dim=1)
        right = ((token_guesses(outputs) == batch.targets) & batch.scored).sum(dim=1)
        return {
            "bits_per_byte": nats / math.log(2) / batch.latents["bytes"],
            "accuracy": right / batch.scored.sum(dim=1),
        }

    def amounts(self, batch: Batch) -> Tensor:
        """The bytes (b) that each window scores: the last window of a split scores fewer than the others."""
        return batch.latents["bytes"]

    def derived(self, scores: dict[str, float]) -> dict[str, float]:
        """`perplexity` per token; it depends on the tokenizer."""
        return {"perplexity": math.exp(min(scores["loss"], 700.0))}

    def baselines(self, split: str, *, sequences: int = 2000, seed: int = 0) -> dict[str, Score]:
        """Bits per byte of compressors on the first `sequences` sequences of `split`, in the order of the text."""
        check_baselines(self, split, sequences)
        tokens = np.array(self._tokens(split)[1 : sequences * self.length + 1])
        data = tokens.tobytes()
        if not isinstance(self.codec(), Bytes):
            data = self.codec().decode(tokens.tolist()).encode()
        size = self._corpus().rate(split) * len(tokens)  # longer than `data` if the tokenizer loses some
        return {
            "zlib": Score(8 * len(zlib.compress(data, 9)) / size, 0.0, 1),
            "lzma": Score(8 * len(lzma.compress(data, preset=9)) / size, 0.0, 1),
        }

    # ------------------------------------------------------------------------------------------------------------ words
    def token_names(self, batch: Batch, *, source: bool = False) -> tuple[str, ...]:
        return tuple(self.class_name("answer", token) for token in batch.inputs[0].tolist())

    def class_name(self, target: str, label: int) -> str:
        return self.codec().pieces([label])[0].replace(" ", "␣")

    # ------------------------------------------------------------------------------------------------------------- runs
    def keep(self, folder: str | os.PathLike[str]) -> None:
        """Write tokenizer.json, and data.json: the text's name, fingerprint, and counts of tokens and bytes.

        Raises ValueError if the run in the folder was started with another text or tokenizer.
        """
        corpus = self._corpus()
        tokenizer = {"name": self.tokenizer, "digest": corpus.codec.digest, "count": corpus.codec.count}
        text = {"tokenizer": tokenizer, "splits": corpus.manifest["splits"]}
        record.keep("Text", folder, self.data, self.fingerprint(), text)
        record.write(pathlib.Path(folder) / text_tokens.FILE, corpus.codec.to_json().encode())


# ---------------------------------------------------------------------------------------------------------------- order
def order(indices: np.ndarray, count: int, *, key: int) -> np.ndarray:
    """The images of `indices` (b) under a pseudorandom permutation of 0 to `count` - 1: a Feistel network.

    A number is two digits in base n, the smallest n with n² >= count.  In each round a hash of one digit is added to
    the other, modulo n.  A result of `count` or more is permuted again until it is below `count`.
    """
    base = max(1, math.isqrt(max(0, count - 1)) + 1)
    salts = [np.uint64(stream(key, "text/rounds", number)) for number in range(ROUNDS)]
    result = indices.astype(np.int64)
    outside = np.arange(len(result))
    while len(outside):
        left, right = np.divmod(result[outside], base)
        for salt in salts:
            left, right = right, (left + (_mixed(right, salt) % base).astype(np.int64)) % base
        result[outside] = left * base + right
        outside = outside[result[outside] >= count]
    return result


def _mixed(values: np.ndarray, salt: np.uint64) -> np.ndarray:
    """A hash of each value, modulo 2^64: multiplied and xor-shifted twice, as in splitmix64."""
    mixed = (values.astype(np.uint64) ^ salt) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(31))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(29))
