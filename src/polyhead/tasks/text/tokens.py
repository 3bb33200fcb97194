"""Codecs between text and tokens: bytes, a byte-pair encoding trained on the text, or an existing tokenizer.

>>> codec = Bytes()
>>> codec.encode("né")
[110, 195, 169]
>>> codec.decode([110, 195, 169]), codec.decode([110, 195])  # an incomplete character
('né', 'n�')
"""

import base64
import binascii
import functools
import hashlib
import importlib
import json
import os
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

from polyhead.config import Run, Task
from polyhead.spec.optional import optional
from polyhead.tasks.record import RECORD

FILE = "tokenizer.json"
"""In a run's folder: its tokenizer."""

ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")
"""Names of the separator of documents in other tokenizers; the first that a tokenizer has is used."""

MALFORMED = (UnicodeError, json.JSONDecodeError, binascii.Error, RecursionError, AttributeError, KeyError, TypeError)
"""Errors while a file is read that is no tokenizer.json."""


@runtime_checkable
class Codec(Protocol):
    """Encodes text as tokens 0 to `count` - 1 and decodes them."""

    @property
    def count(self) -> int:
        """The size of the vocabulary."""

    @property
    def digest(self) -> str:
        """A hash of everything that affects encoding: a model needs the codec that it was trained with."""

    @property
    def end(self) -> int | None:
        """The separator of documents, if there is one; 0 for bytes."""

    def encode(self, text: str) -> list[int]:
        """The tokens of a text."""

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each text, on all cores if the library supports it."""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens; invalid UTF-8, such as an incomplete character, becomes U+FFFD."""

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """Each token as printable text."""

    def to_json(self) -> str:
        """The codec as JSON; `read` makes the same codec from it."""


def shown(data: bytes) -> str:
    """Bytes as printable text, with escapes.

    >>> shown("é 1".encode()), shown(b"\\n\\xc3")
    ('é 1', '\\\\n\\\\xc3')
    """
    text = data.decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _library(name: str, wanted: str) -> Any:
    with optional(f"Text: {wanted}", "polyhead[text]"):
        return importlib.import_module(name)


@functools.cache
def _alphabet() -> tuple[str, ...]:
    """The printable character for each byte in byte-level tokenizers, as in GPT-2."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return tuple(chr(byte) if byte in kept else chr(next(others)) for byte in range(256))


@functools.cache
def _bytes_of() -> dict[str, int]:
    return {character: byte for byte, character in enumerate(_alphabet())}


def spelled(name: str) -> str:
    """The printable text of a byte-level tokenizer's token name; other names are unchanged.

    >>> spelled("Ġif"), spelled("Ã"), spelled("日")
    (' if', '\\\\xc3', '日')
    """
    known = _bytes_of()
    return shown(bytes(known[c] for c in name)) if all(c in known for c in name) else name


class Bytes:
    """Each byte of UTF-8 is a token.  NUL, which text does not contain, separates documents."""

    count = 256
    digest = "bytes"
    end: int | None = 0

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", "surrogateescape"))

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode("utf-8", "replace")

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        return [shown(bytes([token])) for token in tokens]

    def to_json(self) -> str:
        """A tokenizer.json of `tokenizers`: byte-level BPE without merges; token i is byte i."""
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        vocabulary = {character: byte for byte, character in enumerate(_alphabet())}
        model: dict[str, Any] = {"type": "BPE", "dropout": None, "unk_token": None, "vocab": vocabulary, "merges": []}
        parts = {"pre_tokenizer": level, "post_processor": None, "decoder": level, "model": model}
        return json.dumps({"version": "1.0", "added_tokens": [], "normalizer": None, **parts})


class Subwords:
    """A tokenizer of the library `tokenizers`, from the text of a tokenizer.json."""

    def __init__(self, text: str, where: str = FILE) -> None:
        library = _library("tokenizers", where)
        try:
            self.tokenizer = library.Tokenizer.from_str(text)
        except Exception as error:
            raise ValueError(f"Text: {where} is no tokenizer.json ({' '.join(str(error).split())})") from None
        self.text = text
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.tokenizer.encode_special_tokens = True  # "<|endoftext|>" inside a text is ordinary text, not the end
        vocabulary = self.tokenizer.get_vocab(with_added_tokens=True)
        self.count = max(vocabulary.values()) + 1
        self.digest = _digest(text.encode())
        self.end: int | None = next((vocabulary[name] for name in ENDS if name in vocabulary), None)
        decoder = json.loads(text).get("decoder") or {}
        kinds = [decoder.get("type"), *(part.get("type") for part in decoder.get("decoders", []))]
        self.levelled = "ByteLevel" in kinds

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        return [each.ids for each in self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        return [self._piece(self.tokenizer.id_to_token(token)) for token in tokens]

    def _piece(self, name: str | None) -> str:
        if name is None:
            return "\N{REPLACEMENT CHARACTER}"
        plain = spelled(name) if self.levelled else name
        return plain if plain != name else shown(name.replace("▁", " ").encode())

    def to_json(self) -> str:
        return self.text


class Tiktoken:
    """An encoding of the library `tiktoken`.  Made from the output of `to_json`, it needs no network."""

    def __init__(self, encoding: Any) -> None:
        self.encoding = encoding
        self.count = encoding.n_vocab
        self.end: int | None = encoding._special_tokens.get("<|endoftext|>")

    @functools.cached_property
    def digest(self) -> str:
        return _digest(self.to_json().encode())

    @classmethod
    @functools.lru_cache(maxsize=8)
    def named(cls, name: str) -> "Tiktoken":
        """The encoding `name`.  Raises ValueError for an unknown name, or if its vocabulary cannot be downloaded."""
        library = _library("tiktoken", f"tokenizer='tiktoken:{name}'")
        if name not in library.list_encoding_names():
            known = ", ".join(library.list_encoding_names())
            raise ValueError(f"Text: tiktoken has no encoding {name!r} (choose from {known})")
        try:
            return cls(library.get_encoding(name))
        except Exception as error:  # of whichever library it downloads with
            reason = f"the vocabulary is not here and cannot be downloaded ({type(error).__name__})"
            raise ValueError(f"Text: tiktoken:{name}: {reason}; offline, 'bytes' and 'bpe:4096' need none") from None

    @classmethod
    def from_json(cls, parts: dict[str, Any]) -> "Tiktoken":
        library = _library("tiktoken", f"a run with tiktoken:{parts['name']}")
        ranks = {base64.b64decode(token): rank for token, rank in parts["ranks"].items()}
        made = library.Encoding(
            parts["name"], pat_str=parts["pattern"], mergeable_ranks=ranks, special_tokens=parts["special"]
        )
        return cls(made)

    def encode(self, text: str) -> list[int]:
        return list(self.encoding.encode_ordinary(text))

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        return list(self.encoding.encode_ordinary_batch(list(texts), num_threads=threads))

    def decode(self, tokens: Sequence[int]) -> str:
        return b"".join(self._bytes(token) for token in tokens).decode("utf-8", "replace")

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        return [shown(self._bytes(token)) for token in tokens]

    def _bytes(self, token: int) -> bytes:
        try:
            return bytes(self.encoding.decode_single_token_bytes(token))
        except KeyError:  # an unused index below `count`
            return "\N{REPLACEMENT CHARACTER}".encode()

    def to_json(self) -> str:
        ranks = {base64.b64encode(token).decode(): rank for token, rank in self.encoding._mergeable_ranks.items()}
        parts = {"pattern": self.encoding._pat_str, "special": self.encoding._special_tokens, "ranks": ranks}
        return json.dumps({"kind": "tiktoken", "name": self.encoding.name, **parts})


class Sentences:
    """A SentencePiece model.  Most models normalise the text, so decoded text may differ in spaces and line ends."""

    def __init__(self, model: bytes, where: str = FILE) -> None:
        library = _library("sentencepiece", where)
        try:
            self.processor = library.SentencePieceProcessor(model_proto=model)
            self.count = self.processor.get_piece_size()
        except Exception as error:
            raise ValueError(f"Text: {where} is no SentencePiece model ({' '.join(str(error).split())})") from None
        if not self.count:
            raise ValueError(f"Text: {where} is no SentencePiece model (it has no pieces)")
        self.model = model
        self.digest = _digest(model)
        self.end: int | None = self.processor.eos_id() if self.processor.eos_id() >= 0 else None

    def encode(self, text: str) -> list[int]:
        return list(self.processor.encode(text, out_type=int))

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        return list(self.processor.encode(list(texts), out_type=int))

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.processor.decode(list(tokens)))

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        return [shown(self.processor.id_to_piece(token).replace("▁", " ").encode()) for token in tokens]

    def to_json(self) -> str:
        return json.dumps({"kind": "sentencepiece", "model": base64.b64encode(self.model).decode()})


def train(texts: Iterable[str], count: int) -> Subwords:
    """A byte-level BPE of `count` tokens: <|endoftext|> is 0, then the 256 bytes, then merges.

    It depends only on the texts.  Raises ValueError if the text is too short for `count` tokens.
    """
    library = _library("tokenizers", f"tokenizer='bpe:{count}'")
    level = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = level, library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=count, special_tokens=[ENDS[0]], initial_alphabet=sorted(_alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    if (came := tokenizer.get_vocab_size()) < count:
        raise ValueError(f"Text: the text gives {came} tokens, not {count}; use tokenizer='bpe:{came}' or more text")
    return Subwords(tokenizer.to_str())


def check(tokenizer: str) -> None:
    """Raise a ValueError unless `tokenizer` has a valid form; whether files and libraries exist is not checked."""
    kind, _, rest = tokenizer.partition(":")
    if kind == "bpe" and rest:
        if not rest.isdecimal() or int(rest) < 257:
            raise ValueError(f"Text: tokenizer='bpe:N' takes N of at least 257, the bytes and an end, but is {rest!r}")
    elif tokenizer != "bytes" and not (kind == "tiktoken" and rest) and not tokenizer.endswith((".json", ".model")):
        forms = "'bytes', 'bpe:N', 'tiktoken:NAME', a tokenizer.json or a SentencePiece .model"
        raise ValueError(f"Text: tokenizer must be {forms} but is {tokenizer!r}")


def existing(tokenizer: str) -> Codec | None:
    """The codec that `tokenizer` names, or None if it must be trained.

    Raises ValueError for a missing file or library.
    """
    kind, _, rest = tokenizer.partition(":")
    if tokenizer == "bytes":
        return Bytes()
    if kind == "tiktoken":
        return Tiktoken.named(rest)
    return None if kind == "bpe" else read(tokenizer)


def read(path: str | os.PathLike[str]) -> Codec:
    """The codec from a file: a tokenizer.json of `tokenizers` or of `Codec.to_json`, or a SentencePiece model."""
    path = pathlib.Path(path).absolute()
    try:
        stamp = path.stat()
        return _read(path, stamp.st_mtime_ns, stamp.st_size)
    except OSError as error:
        raise ValueError(f"Text: tokenizer {path} cannot be read ({error.strerror})") from None


@functools.lru_cache(maxsize=8)
def _read(path: pathlib.Path, changed: int, size: int) -> Codec:
    data = path.read_bytes()
    if path.suffix == ".model":
        return Sentences(data, str(path))
    try:
        parts = json.loads(data)
        kind = parts.get("kind")
        if kind == "tiktoken":
            return Tiktoken.from_json(parts)
        if kind == "sentencepiece":
            return Sentences(base64.b64decode(parts["model"]), str(path))
    except MALFORMED as error:
        raise ValueError(f"Text: {path} is no tokenizer.json ({' '.join(str(error).split())})") from None
    return Subwords(data.decode(), str(path))


def codec_of(config: Run | Task, folder: str | os.PathLike[str] | None = None) -> Codec:
    """The codec of a run or task: from its `folder` if it is there, else from its task, which may need the data.

    Raises ValueError if the task has no text, or if the model was trained with another codec.
    """
    task = config.task if isinstance(config, Run) else config
    if not (hasattr(task, "codec") and hasattr(task, "tokenizer")):
        raise ValueError(f"codec_of: {type(task).__name__} is no text, so it has no tokenizer")
    root = pathlib.Path("" if folder is None else folder)
    kept = folder is not None and (root / FILE).exists() and task.tokenizer != "bytes"
    codec: Codec = read(root / FILE) if kept else task.codec()
    if folder is not None and (root / RECORD).exists():
        wanted = _recorded(root / RECORD)
        if codec.digest != wanted:
            where = root / FILE if kept else task.tokenizer
            raise ValueError(
                f"codec_of: the tokenizer {where} is {codec.digest}, but the model was trained with {wanted}"
            )
    if isinstance(config, Run) and (model := getattr(config.model.inputs, "count", None)) not in (None, codec.count):
        raise ValueError(f"codec_of: the tokenizer has {codec.count} tokens, but the model was made for {model}")
    return codec


def _recorded(path: pathlib.Path) -> str:
    try:
        return str(json.loads(path.read_bytes())["tokenizer"]["digest"])
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise ValueError(f"codec_of: {path} cannot be read ({' '.join(str(error).split())})") from None
