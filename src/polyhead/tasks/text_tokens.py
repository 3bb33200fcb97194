"""Text as tokens and back: bytes, a byte-pair encoding trained on the spot, or a tokenizer that exists."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable


@runtime_checkable
class Codec(Protocol):
    """What turns text into tokens 0 to `count` - 1 and back."""

    @property
    def count(self) -> int:
        """Tokens it knows."""

    @property
    def digest(self) -> str:
        """Of all that decides which tokens a text becomes: a model fits the codec it was trained with only."""

    def encode(self, text: str) -> list[int]:
        """The tokens of a text."""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens; what is no text (half a character) becomes U+FFFD."""

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """How each token by itself is shown to a person."""
