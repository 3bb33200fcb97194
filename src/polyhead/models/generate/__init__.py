"""Decoding: tokens.py (with or without a cache), text.py (strings), sampling.py (how the next token is chosen)."""

from polyhead.models.generate.text import generate_text, stream_text
from polyhead.models.generate.tokens import generate, stream

__all__ = ["generate", "generate_text", "stream", "stream_text"]
