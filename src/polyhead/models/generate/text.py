"""Decoding of text: it yields complete characters only, and finds stop strings across token borders."""

from collections.abc import Iterator, Sequence
from typing import Protocol, Unpack, runtime_checkable

from polyhead import config
from polyhead.models.generate.tokens import Decoding, check_model, stream
from polyhead.models.transformer import Transformer

# The last character of a decoded text whose last bytes are an incomplete character.
HALF = "\N{REPLACEMENT CHARACTER}"


@runtime_checkable
class Codec(Protocol):
    """A tokenizer, see tasks/text/tokens.py; `decode` gives U+FFFD for invalid bytes, such as half a character.

    Attributes:
        count: Size of the vocabulary.
        end: The token between documents, or None.
    """

    @property
    def count(self) -> int: ...
    @property
    def end(self) -> int | None: ...
    def encode(self, text: str) -> list[int]: ...
    def decode(self, tokens: Sequence[int]) -> str: ...


def generate_text(
    model: Transformer,
    codec: Codec,
    prompts: Sequence[str],
    *,
    steps: int,
    stop: str | Sequence[str] = (),
    **decoding: Unpack[Decoding],
) -> list[str]:
    """The continuation of each prompt, without the prompt: up to `steps` tokens, or to the end of the document.

    An empty prompt begins a document.  The arguments in `decoding` are those of `generate`.

    Args:
        stop: The first complete string of these ends a continuation, which does not include the string.

    Raises:
        ValueError: As `generate` does, and for a codec whose vocabulary differs from the model's.
    """
    texts = [""] * len(prompts)
    for pieces in stream_text(model, codec, prompts, steps=steps, stop=stop, **decoding):
        for i, piece in enumerate(pieces):
            if piece is not None:
                texts[i] += piece
    return texts


def stream_text(
    model: Transformer,
    codec: Codec,
    prompts: Sequence[str],
    *,
    steps: int,
    stop: str | Sequence[str] = (),
    **decoding: Unpack[Decoding],
) -> Iterator[list[str | None]]:
    """`generate_text` as a stream: at each step the new text of each row ("" if none is certain yet), None after its
    end.

    Incomplete characters, and text that may begin a stop string, are held back.
    """
    stops = tuple(stop)
    if isinstance(stop, str):
        stops = (stop,)
    if isinstance(prompts, str):  # a sequence of texts, too: its characters
        raise ValueError("generate: prompts must be a list of texts, got one text")
    if not all(stops):
        raise ValueError("generate: a stop string must not be empty")
    check_model(model)
    assert isinstance(model.config.inputs, config.Tokens)
    if codec.count != model.config.inputs.count:
        expected = model.config.inputs.count
        raise ValueError(f"generate: the tokenizer has {codec.count} tokens but the model was made for {expected}")
    # The token between documents ends a continuation, and is the prompt of a row that has none.
    document_ends = []
    if codec.end is not None:
        document_ends.append(codec.end)
    tokens = [codec.encode(prompt) or document_ends for prompt in prompts]
    if [] in tokens:
        raise ValueError("generate: a prompt is empty, and the tokenizer has no token that begins a document")
    new_tokens = stream(model, tokens, steps=steps, stop=document_ends, **decoding)
    return _pieces(new_tokens, [_Row(codec, row, stops) for row in tokens])


def _pieces(steps: Iterator[list[int | None]], rows: Sequence["_Row"]) -> Iterator[list[str | None]]:
    for new in steps:
        yield [row.say(token) for row, token in zip(rows, new, strict=True)]
        if all(row.ended for row in rows):
            return
    yield [row.say(None) for row in rows]


class _Row:
    """The text of one row.  `codec` decodes its last tokens together with some already shown ones, because the text of
    a token may depend on its neighbour."""

    def __init__(self, codec: Codec, prompt: list[int], stops: tuple[str, ...]) -> None:
        self.codec, self.stops = codec, stops
        self.tokens, self.shown = list(prompt), len(prompt)
        self.held = ""
        self.ended = False

    def say(self, token: int | None) -> str | None:
        """The new text after one more token, or at the end (`token` None); None if the row had ended before."""
        if self.ended:
            return None
        if token is not None:
            self.tokens.append(token)
        self.held += self._decoded(is_last=token is None)
        # The stop string that is complete first ends the text where it begins; of several, the longest.
        ends = []
        for stop in self.stops:
            start = self.held.find(stop)
            if start >= 0:
                ends.append((start + len(stop), start))
        self.ended = token is None or bool(ends)
        if ends:
            _, length = min(ends)
        elif self.ended:
            length = len(self.held)
        else:
            length = len(self.held) - _begun(self.held, self.stops)
        piece = self.held[:length]
        self.held = self.held[length:]
        return piece

    def _decoded(self, *, is_last: bool) -> str:
        """The text of the tokens that are not shown; "" if it is incomplete and may still change."""
        # The new tokens add what the joint text has beyond that of the tokens already shown.
        before = self.codec.decode(self.tokens[: self.shown])
        now = self.codec.decode(self.tokens)
        if not is_last and (now.endswith(HALF) or len(now) <= len(before)):
            return ""
        # The tokens that were shown just now stay as neighbours of the next; older ones are no longer needed.
        self.tokens = self.tokens[self.shown :]
        self.shown = len(self.tokens)
        return now[len(before) :]


def _begun(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end of `text` may begin a stop string.

    >>> _begun("a = 1\\n", ["\\n\\n", "x"]), _begun("abc", ["bd"])
    (1, 0)
    """
    longest = min(len(text), max(map(len, stops), default=0))
    for length in range(longest, 0, -1):
        if any(stop.startswith(text[-length:]) for stop in stops):
            return length
    return 0
