"""Language modelling of any text.

Text is tokenised once (corpus.py) into one long row of tokens for each split, document after document.  A sequence is a
window of the row; its targets are the same tokens shifted by one:

    row       \\0 d e f   f ( ) : \\0 i m p o r t ...            length 4
    inputs    \\0 d e f                                          targets   d e f _
"""

import functools
import lzma
import math
import os
import pathlib
import re
import zlib
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from msgspec import Meta
from torch import Tensor

from polyhead.config import Logits, Tokens, non_semantic
from polyhead.spec.checked import Count
from polyhead.spec.home import located
from polyhead.tasks import record
from polyhead.tasks.base import Baseline, Batch, Task, Words, check_draw, check_split, stream
from polyhead.tasks.scores import LazyLogitsLike, Score, check_baselines, token_guesses, token_losses
from polyhead.tasks.text import sources, tokens as text_tokens
from polyhead.tasks.text.corpus import Corpus, open_corpus
from polyhead.tasks.text.sources import SPLITS
from polyhead.tasks.text.tokens import Bytes, Codec, Subwords

COMPRESSED_TOKENS = 1 << 24  # the most that compressors read, for a baseline


@dataclass(frozen=True)
class Text(Task):
    """Language modelling of any text.

        train         the text that is not held out
        validation    whole documents, `held_out` of all bytes, to select hyper-parameters
        iid           equally many others, for reported scores

    The windows of a held-out split score each token but the first once, in a shuffled order that is the same for every
    seed.  Scores are comparable only with the same `fingerprint`: another Python version has another standard library.

    Attributes:
        data: "stdlib", the sources of Python's standard library on this machine, without tests, 11 MB; a file; a
            folder, of which files with a usual suffix are read (`sources.SUFFIXES`); "hub:OWNER/NAME/CONFIG", streamed
            from the Hugging Face Hub through `datasets`.
        length: Tokens of a window.
        tokenizer: "bytes"; "bpe:4096", a byte-level byte-pair encoding with 4096 tokens, trained on the training text;
            a tokenizer.json of `tokenizers`; or one of the Hub, such as "hub:openai-community/gpt2".
        held_out: Fraction of all bytes in each of the two held-out splits.
        limit: How many bytes of the Hub's text are read, from its start.
        column: The column of the Hub's table that holds the text.
        folder: Where the tokenised text is kept.

    Raises:
        ValueError: For invalid settings, and for text that is missing when it is read.
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
        metric=("Bits per byte", "Of held-out text, by any tokenizer: lower is better. A compressor sees whole files."),
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
        return self._existing_codec or self._corpus.codec

    @functools.cached_property
    def _existing_codec(self) -> Codec | None:
        return text_tokens.existing(self.tokenizer)

    def fingerprint(self) -> str:
        """A hash of the text and its splits; it does not depend on the tokenizer."""
        return str(self._corpus.manifest["fingerprint"])

    @functools.cached_property
    def _corpus(self) -> Corpus:
        """Opened once: text that is edited changes no task that has read it, but is what the next one reads."""
        folder = pathlib.Path(located(self.folder))
        source: list[Any] = [self.data, self.held_out]
        if self.limit is None:
            files = sources.list_files(self.data, folder)
            source += [(str(file.path), file.size, file.changed) for file in files]
            pieces = functools.partial(sources.read_files, files, self.held_out)
        else:
            source += [self.limit, self.column]
            pieces = functools.partial(sources.read_hub, self.data, self.held_out, self.limit, self.column)
        # A folder for each text and tokenizer: a readable name, and a hash of all that decides the tokens.
        name = re.sub(r"[^A-Za-z0-9]+", "-", self.data)[-40:].strip("-")
        source.append(getattr(self._existing_codec, "digest", self.tokenizer))
        path = folder / f"{name}-{stream(0, repr(source)):016x}"
        return open_corpus(path, self.data, pieces, self.tokenizer, self._existing_codec)

    # ---------------------------------------------------------------------------------------------------------- batches
    def count(self, split: str) -> int | None:
        if split == "train":
            return None
        return math.ceil((len(self._tokens(split)) - 1) / self.length)

    def shared(self, split: str) -> bool:
        return split != "train"

    def _tokens(self, split: str) -> np.ndarray:
        check_split(self, split)
        tokens = self._corpus.tokens[split]
        if len(tokens) <= self.length:
            reason = f"but a sequence takes {self.length + 1}; lower length or give more text"
            raise ValueError(f"Text: {self.data} has {len(tokens)} tokens for {split!r}, {reason}")
        return tokens

    def sample(self, split: str, batch_size: int, generator: torch.Generator) -> Batch:
        """A batch on the generator's device: windows at random offsets in the text."""
        check_draw(self, split, batch_size)
        last = len(self._tokens(split)) - self.length
        starts = torch.randint(last, (batch_size,), generator=generator, device=generator.device)
        return self._batch(split, starts.cpu().numpy(), generator.device)

    def batch(self, split: str, batch_size: int, *, seed: int, step: int, device: Any = "cpu") -> Batch:
        """Batch number `step`: a pure function of (seed, split, step, batch size); held-out splits ignore the seed."""
        count = self.count(split)
        if count is None:
            return super().batch(split, batch_size, seed=seed, step=step, device=device)
        check_draw(self, split, batch_size)
        first = step % math.ceil(count / batch_size) * batch_size  # the last batch of a pass may be short
        order = torch.randperm(count, generator=self.generator(split, seed=0, step=0), device="cpu").numpy()
        rows = order[first : first + batch_size]
        last = len(self._tokens(split)) - 1 - self.length
        starts = np.minimum(rows * self.length, last)  # the last window is full, and scores only new tokens
        return self._batch(split, starts, torch.device(device), rows * self.length - starts)

    def _batch(self, split: str, starts: np.ndarray, device: torch.device | str, skipped: Any = 0) -> Batch:
        """The windows at `starts` (b); their first `skipped` (b) targets are not scored."""
        corpus = self._corpus
        windows = np.lib.stride_tricks.sliding_window_view(corpus.tokens[split], self.length + 1)[starts]
        tokens = torch.from_numpy(windows.astype(np.int64))
        scored = torch.from_numpy(np.arange(self.length) >= np.broadcast_to(skipped, len(starts))[:, None])
        size = (scored.sum(dim=1) * corpus.rate(split)).float()
        # A copy: noise is added to inputs in place, and the targets must stay as they are.
        return Batch(tokens[:, :-1].clone(), tokens[:, 1:], None, scored, {"bytes": size}).to(device)

    # ----------------------------------------------------------------------------------------------------------- scores
    def loss(self, outputs: Tensor | LazyLogitsLike, batch: Batch) -> Tensor:
        """Mean cross-entropy in nats per token."""
        nats = token_losses(outputs, batch.targets)
        return (nats * batch.scored).sum() / batch.scored.sum().clamp(min=1)

    def metrics(self, outputs: Tensor | LazyLogitsLike, batch: Batch) -> dict[str, Tensor]:
        """For each sequence (b): `bits_per_byte`, and `accuracy`, the share of tokens whose logit is the largest.

        Each token counts as its split's mean bytes per token, so that the mean over a split, weighted by `amounts`, is
        its bits over its bytes.  A separator of documents counts as one byte.
        """
        nats = (token_losses(outputs, batch.targets) * batch.scored).sum(dim=1)
        right = ((token_guesses(outputs) == batch.targets) & batch.scored).sum(dim=1)
        bits = nats / math.log(2)
        return {"bits_per_byte": bits / batch.latents["bytes"], "accuracy": right.to(bits) / batch.scored.sum(dim=1)}

    def amounts(self, batch: Batch) -> Tensor:
        """The bytes (b) that each window scores: the last window of a split scores fewer than the others."""
        return batch.latents["bytes"]

    def derived(self, scores: dict[str, float]) -> dict[str, float]:
        """`perplexity` per token; it depends on the tokenizer."""
        return {"perplexity": math.exp(min(scores["loss"], 700.0))}

    def baselines(self, split: str, *, sequences: int = 2000, seed: int = 0) -> dict[str, Score]:
        """Bits per byte of compressors on `split`, or on its first `COMPRESSED_TOKENS`; they draw no sequences."""
        check_baselines(self, split, sequences)
        tokens = np.array(self._tokens(split)[1 : COMPRESSED_TOKENS + 1])
        codec = self.codec()
        data = tokens.tobytes()
        if not isinstance(codec, Bytes):
            data = codec.decode(tokens.tolist()).encode()
        size = self._corpus.rate(split) * len(tokens)  # longer than `data` if the tokenizer loses some
        if len(tokens) < len(self._tokens(split)) - 1:  # a part may have more bytes per token than the whole
            size = len(data)
        compressed = {"zlib": zlib.compress(data, 9), "lzma": lzma.compress(data, preset=9)}
        return {name: Score(8 * len(result) / size) for name, result in compressed.items()}

    def token_names(self, batch: Batch, *, source: bool = False) -> tuple[str, ...]:
        return tuple(self.class_name("answer", token) for token in batch.inputs[0].tolist())

    def class_name(self, target: str, label: int) -> str:
        return repr(self.codec().piece(label))[1:-1].replace(" ", "␣")

    def keep(self, folder: str | os.PathLike[str]) -> None:
        """Write data.json, the text's name, fingerprint, and counts of tokens and bytes, and a tokenizer's file.

        Raises:
            ValueError: If the run in the folder was started with another text or tokenizer.
        """
        corpus = self._corpus
        tokenizer = {"name": self.tokenizer, "digest": corpus.codec.digest, "count": corpus.codec.count}
        text = {"tokenizer": tokenizer, "splits": corpus.manifest["splits"]}
        record.keep("Text", folder, self.data, self.fingerprint(), text)
        path = pathlib.Path(folder) / text_tokens.FILE
        if isinstance(corpus.codec, Subwords) and not path.exists():
            record.write(path, corpus.codec.text.encode())
