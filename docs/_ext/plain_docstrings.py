"""Docstrings here are plain text that reads well in a terminal; this gives them to Sphinx without changing a letter.

Prose stays prose, with `code` as code and nothing else as markup.  Indented lines, columns and examples keep their
layout.
"""

import re
from typing import Any

MARKUP = re.compile(r"([\\*_|`<>])")
ITEM = re.compile(r"(?:[-*]|\d+\.) ")


def is_laid_out(line: str) -> bool:
    """Whether the spaces of a line mean something."""
    return line.startswith((" ", ">>>")) or bool(re.search(r"\S {3,}\S", line))


def prose(line: str) -> str:
    """A line with `code` as code and all other markup as it was typed.

    >>> prose("`Run`s with lr_h, |i - j| and `**a`")
    '``Run``\\\\ s with lr\\\\_h, \\\\|i - j\\\\| and ``**a``'
    """
    parts = re.split(r"(`[^`]+`)", line)
    made = ""
    for before, part in zip(["", *parts], parts, strict=False):
        if part.startswith("`") and len(part) > 2:
            made += ("\\ " if made and (before[-1:].isalnum() or before[-1:] in "=") else "") + f"`{part}`"
        else:
            made += ("\\ " if before.startswith("`") and part[:1].isalnum() else "") + MARKUP.sub(r"\\\1", part)
    return made


def restructured(lines: list[str]) -> list[str]:
    """The same text for docutils: prose escaped, what is laid out in literal blocks."""
    made: list[str] = []
    laid_out = False
    for line in lines:
        if not line.strip():
            made.append("")
            continue
        example = laid_out and made[-1:] != [""]  # what an example prints follows it
        inside = is_laid_out(line) or (example and made[-1].lstrip().startswith(">>>"))
        if inside and not laid_out:
            made += ["", ".. code-block:: text" if not line.startswith(">>>") else ".. code-block:: pycon", ""]
        elif laid_out and not inside:
            made.append("")
        if not inside and ITEM.match(line) and made[-1:] != [""] and not (made and ITEM.match(made[-1])):
            made.append("")
        made.append(f"   {line}" if inside else prose(line))
        laid_out = inside
    return [*made, ""]


def process(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """For autodoc-process-docstring."""
    if re.match(rf"{re.escape(name.rpartition('.')[2])}\(", " ".join(lines)):  # a dataclass's signature is no text
        lines[:] = []
    lines[:] = restructured(lines)


def skip(app: Any, what: str, name: str, thing: Any, skipped: bool, options: Any) -> bool | None:
    """For autodoc-skip-member: fields stand in the signature of their class; what is left is what one can call."""
    is_method = callable(thing) or isinstance(thing, (property, staticmethod, classmethod))
    return None if what != "class" or is_method else True


def shorter(signature: str) -> str:
    """A signature whose arrays may be of JAX or of NumPy, which says so once.

    >>> shorter("(q: ~jaxtyping.Float[jaxlib._jax.Array, 'b t'] | ~jaxtyping.Float[ndarray, 'b t'])")
    "(q: ~jaxtyping.Float[Array, 'b t'])"
    """
    return re.sub(r"([~\w.]+)\[jaxlib\._jax\.Array, ('[^']*')\] \| \1\[ndarray, \2\]", r"\1[Array, \2]", signature)


def sign(app: Any, what: str, name: str, thing: Any, options: Any, signature: str | None, returns: str | None) -> Any:
    """For autodoc-process-signature."""
    return tuple(None if text is None else shorter(text) for text in (signature, returns))


def setup(app: Any) -> dict[str, bool]:
    """Hooks into autodoc."""
    app.connect("autodoc-skip-member", skip)
    app.connect("autodoc-process-docstring", process)
    app.connect("autodoc-process-signature", sign)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
