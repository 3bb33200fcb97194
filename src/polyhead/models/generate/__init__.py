"""Decoding: tokens.py (with or without a cache), text.py (strings), sampling.py (how the next token is chosen)."""

from polyhead.models.generate.text import generate_text, stream_text
from polyhead.models.generate.tokens import generate, greedy, stream

__all__ = ["generate", "generate_text", "greedy", "stream", "stream_text"]
