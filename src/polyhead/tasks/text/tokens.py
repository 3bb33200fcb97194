"""Codecs between text and tokens: bytes, or a tokenizer of the library `tokenizers`.

>>> Bytes().encode("né"), Bytes().decode([110, 195])  # an incomplete character
([110, 195, 169], 'n�')
"""

import functools
import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from polyhead.config import Run
from polyhead.spec.optional import optional
from polyhead.tasks.record import RECORD

# In a run's folder: its tokenizer.
FILE = "tokenizer.json"

# Names of the separator of documents; the first that a tokenizer has is used.
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")

Result = TypeVar("Result")


def printable(data: bytes) -> str:
    """Bytes as printable text, with escapes.

    >>> printable("é 1".encode()), printable(b"\\n\\xc3")
    ('é 1', '\\\\n\\\\xc3')
    """
    text = ""
    for character in data.decode("utf-8", "backslashreplace"):
        text += character if character.isprintable() else character.encode("unicode_escape").decode()
    return text


@functools.cache
def _byte_by_character() -> dict[str, int]:
    """The printable characters that stand for bytes in byte-level tokenizers, as in GPT-2."""
    bytes_of_themselves = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = sorted(set(range(256)).difference(bytes_of_themselves))
    characters = map(chr, [*bytes_of_themselves, *range(256, 256 + len(others))])
    return dict(zip(characters, [*bytes_of_themselves, *others], strict=True))


def spelled(name: str) -> str:
    """The printable text of a byte-level tokenizer's token name; other names are unchanged.

    >>> spelled("Ġif"), spelled("Ã"), spelled("日")
    (' if', '\\\\xc3', '日')
    """
    if not _byte_by_character().keys() >= set(name):
        return name
    return printable(bytes(_byte_by_character()[character] for character in name))


class Bytes:
    """Each byte of UTF-8 is a token.  NUL, which text does not contain, separates documents."""

    count = 256
    digest = "bytes"
    end: int | None = 0

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", "surrogateescape"))

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode("utf-8", "replace")

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """Each token as printable text."""
        return [printable(bytes([token])) for token in tokens]

    def to_json(self) -> str:
        """A tokenizer.json of `tokenizers`: byte-level BPE without merges; token i is byte i."""
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        model: dict[str, Any] = {"type": "BPE", "dropout": None, "unk_token": None, "merges": []}
        model["vocab"] = _byte_by_character()
        parts = {"pre_tokenizer": level, "post_processor": None, "decoder": level, "model": model}
        return json.dumps({"version": "1.0", "added_tokens": [], "normalizer": None, **parts})


class Subwords:
    """A tokenizer of the library `tokenizers`, from the text of a tokenizer.json; `name` is for errors."""

    def __init__(self, text: str, name: str = FILE) -> None:
        with optional(f"Text: {name}", "polyhead[text]"):
            import tokenizers
        self.text = text
        self.name = name
        self.tokenizer = self._call(tokenizers.Tokenizer.from_str, text)
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.tokenizer.encode_special_tokens = True  # "<|endoftext|>" inside a text is ordinary text, not the end
        vocabulary = self.tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise ValueError(f"Text: {name} has an empty vocabulary; train it first")
        self.count = max(vocabulary.values()) + 1
        self.digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        self.end: int | None = next((vocabulary[end] for end in ENDS if end in vocabulary), None)
        self.is_byte_level = "ByteLevel" in json.dumps(json.loads(text).get("decoder"))

    def _call(self, function: Callable[..., Result], *args: Any, **options: Any) -> Result:
        """The function's result.  The library's errors, and its panics, which are no Exception, become a ValueError."""
        try:
            return function(*args, **options)
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise ValueError(f"Text: {self.name} fails in tokenizers: {' '.join(str(error).split())}") from None

    def encode(self, text: str) -> list[int]:
        return list(self._call(self.tokenizer.encode, text, add_special_tokens=False).ids)

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each text, on all cores."""
        encodings = self._call(self.tokenizer.encode_batch_fast, list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._call(self.tokenizer.decode, list(tokens), skip_special_tokens=True))

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """Each token as printable text."""
        pieces = []
        for token in tokens:
            name = self.tokenizer.id_to_token(token) or "\N{REPLACEMENT CHARACTER}"
            if self.is_byte_level and spelled(name) != name:
                pieces.append(spelled(name))
            else:
                pieces.append(printable(name.replace("▁", " ").encode()))
        return pieces

    def to_json(self) -> str:
        return self.text


# It has `count` tokens, a `digest` of all that affects encoding, and `end`, the separator of documents, or None.
Codec = Bytes | Subwords


# -------------------------------------------------------------------------------------------------------------- origins
def check(tokenizer: str) -> None:
    """Raise a ValueError unless `tokenizer` has a valid form; whether files and libraries exist is not checked."""
    kind, _, name = tokenizer.partition(":")
    is_trained = kind == "bpe" and name.isdecimal() and int(name) >= 257
    if not (tokenizer == "bytes" or is_trained or (kind == "hub" and name) or tokenizer.endswith(".json")):
        forms = "'bytes', 'bpe:N' with N of at least 257 (the bytes and an end), 'hub:OWNER/NAME' or a tokenizer.json"
        raise ValueError(f"Text: tokenizer must be {forms} but is {tokenizer!r}")


def existing(tokenizer: str) -> Codec | None:
    """The codec that `tokenizer` names, or None if it must be trained.  Raises ValueError if it is not there."""
    kind, _, name = tokenizer.partition(":")
    if tokenizer == "bytes":
        return Bytes()
    if kind == "bpe":
        return None
    if kind != "hub":
        return read(tokenizer)
    with optional(f"Text: tokenizer='{tokenizer}'", "polyhead[text]"):
        import tokenizers
    try:
        text = tokenizers.Tokenizer.from_pretrained(name).to_str()
    except Exception as error:  # of whichever library it downloads with
        raise ValueError(f"Text: {tokenizer} cannot be downloaded ({type(error).__name__})") from None
    return Subwords(text, tokenizer)


def read(path: str | os.PathLike[str]) -> Codec:
    """The codec from a tokenizer.json of `tokenizers`, or of `to_json`.  Raises ValueError for any other file."""
    path = pathlib.Path(path).absolute()
    try:
        return Subwords(path.read_bytes().decode(), str(path))
    except OSError as error:
        raise ValueError(f"Text: tokenizer {path} cannot be read ({error.strerror})") from None
    except (UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"Text: {path} is no tokenizer.json in UTF-8 ({' '.join(str(error).split())})") from None


def train(texts: Iterable[str], count: int) -> Subwords:
    """A byte-level BPE of `count` tokens, a function of the texts: <|endoftext|> is 0, then the bytes, then merges."""
    with optional(f"Text: tokenizer='bpe:{count}'", "polyhead[text]"):
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=count, special_tokens=[ENDS[0]], initial_alphabet=sorted(_byte_by_character()), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    size = tokenizer.get_vocab_size()
    if size < count:
        raise ValueError(f"Text: the text gives {size} tokens, not {count}; use tokenizer='bpe:{size}' or more text")
    return Subwords(tokenizer.to_str())


def codec_of(run: Run, folder: str | os.PathLike[str]) -> Codec:
    """The codec of a run on text: from its folder, or if none is there from its task, which may need the data.

    Raises ValueError if the model was trained with another codec.
    """
    task: Any = run.task
    codec: Codec
    if getattr(task, "tokenizer", "bytes") != "bytes" and pathlib.Path(folder, FILE).exists():
        codec = read(pathlib.Path(folder, FILE))
    else:
        codec = task.codec()
    path = pathlib.Path(folder, RECORD)
    if path.exists():
        try:
            digest = str(json.loads(path.read_bytes())["tokenizer"]["digest"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"codec_of: {path} cannot be read ({' '.join(str(error).split())})") from None
        if codec.digest != digest:
            raise ValueError(f"codec_of: the tokenizer is {codec.digest}, but the model was trained with {digest}")
    count = getattr(run.model.inputs, "count", codec.count)
    if count != codec.count:
        raise ValueError(f"codec_of: the tokenizer has {codec.count} tokens, but the model was made for {count}")
    return codec
