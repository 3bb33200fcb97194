"""Codecs between text and tokens: bytes, or a tokenizer of the library `tokenizers`.

>>> Bytes().encode("né"), Bytes().decode([110, 195])  # an incomplete character
([110, 195, 169], 'n�')
"""

import hashlib
import os
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from polyhead.config import Run
from polyhead.spec.optional import optional
from polyhead.spec.values import one_line
from polyhead.tasks.record import recorded

FILE = "tokenizer.json"  # in a run's folder: its tokenizer
# Names of the separator of documents; the first that a tokenizer has is used.
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")


class Bytes:
    """Each byte of UTF-8 is a token.  NUL, which text does not contain, separates documents."""

    count = 256
    digest = "bytes"
    end: int | None = 0

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", "surrogateescape"))

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode("utf-8", "replace")

    def piece(self, token: int) -> str:
        """The text of a token; a byte that is no character alone is shown as its number."""
        return chr(token) if token < 128 else f"\\x{token:02x}"


class Subwords:
    """A tokenizer of the library `tokenizers`, from the text of a tokenizer.json; `name` is for errors."""

    def __init__(self, text: str, name: str = FILE) -> None:
        with optional(f"Text: {name}", "polyhead[text]"):
            import tokenizers
        self.text, self.name = text, name
        self.tokenizer = _call(self.name, tokenizers.Tokenizer.from_str, text)
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.tokenizer.encode_special_tokens = True  # "<|endoftext|>" inside a text is ordinary text, not the end
        vocabulary = self.tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise ValueError(f"Text: {name} has an empty vocabulary; train it first")
        self.count = max(vocabulary.values()) + 1
        self.digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        self.end: int | None = next((vocabulary[end] for end in ENDS if end in vocabulary), None)

    def encode(self, text: str) -> list[int]:
        return list(_call(self.name, self.tokenizer.encode, text, add_special_tokens=False).ids)

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each text, on all cores."""
        encodings = _call(self.name, self.tokenizer.encode_batch_fast, list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, tokens: Sequence[int]) -> str:
        return str(_call(self.name, self.tokenizer.decode, list(tokens), skip_special_tokens=True))

    def piece(self, token: int) -> str:
        """The text of a token, which for a part of a character is "�"."""
        text = str(_call(self.name, self.tokenizer.decode, [token], skip_special_tokens=False))
        return with_blank(text, self.tokenizer.id_to_token(token) or "")


def with_blank(text: str, name: str) -> str:
    """A decoded token, else its name.  SentencePiece drops a first blank, for which the name has a bar."""
    if name.startswith("▁") and not text.startswith(" "):
        return f" {text}"
    return text or name


def _call(name: str, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """The function's result.  The library's errors, and its panics, which are no Exception, become a ValueError."""
    try:
        return function(*args, **options)
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"Text: {name} fails in tokenizers: {one_line(error)}") from None


# It has `count` tokens, a `digest` of all that affects encoding, and `end`, the separator of documents, or None.
Codec = Bytes | Subwords


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
    if kind == "bytes":
        return Bytes()
    if kind == "bpe":
        return None
    if kind != "hub":
        return read(tokenizer)
    with optional(f"Text: tokenizer='{tokenizer}'", "polyhead[text]"):
        import tokenizers
    return Subwords(_call(tokenizer, tokenizers.Tokenizer.from_pretrained, name).to_str(), tokenizer)


def read(path: str | os.PathLike[str]) -> Codec:
    """The codec from a tokenizer.json of `tokenizers`.  Raises ValueError for any other file."""
    path = pathlib.Path(path).absolute()
    try:
        return Subwords(path.read_bytes().decode(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"Text: {path} cannot be read as a tokenizer.json in UTF-8 ({error})") from None


def train(texts: Iterable[str], count: int) -> Subwords:
    """A byte-level BPE of `count` tokens, a function of the texts: <|endoftext|> is 0, then the bytes, then merges."""
    with optional(f"Text: tokenizer='bpe:{count}'", "polyhead[text]"):
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    options: dict[str, Any] = {"special_tokens": [ENDS[0]], "initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=count, show_progress=False, **options))
    size = tokenizer.get_vocab_size()
    if size < count:
        raise ValueError(f"Text: the text gives {size} tokens, not {count}; use tokenizer='bpe:{size}' or more text")
    return Subwords(tokenizer.to_str())


def codec_of(run: Run, folder: str | os.PathLike[str]) -> Codec:
    """The codec of a run on text: from its folder, or if none is there from its task, which may need the data.

    Raises:
        ValueError: If the model was trained with another codec.
    """
    task: Any = run.task
    path = pathlib.Path(folder, FILE)
    is_bytes = getattr(task, "tokenizer", "bytes") == "bytes"
    codec: Codec = read(path) if path.exists() and not is_bytes else task.codec()
    before = recorded("codec_of", folder, "tokenizer", "digest")
    if before not in (None, codec.digest):
        raise ValueError(f"codec_of: the tokenizer is {codec.digest}, but the model was trained with {before}")
    count = getattr(run.model.inputs, "count", codec.count)
    if count != codec.count:
        raise ValueError(f"codec_of: the tokenizer has {codec.count} tokens, but the model was made for {count}")
    return codec
