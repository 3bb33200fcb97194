"""Docstrings here are plain text with the sections of Google's style; this gives them to Sphinx.

Prose stays prose, with `code` as code and nothing else as markup.  Indented lines, columns and examples keep their
layout.  The entries of a section become a list.
"""

import re
from typing import Any

MARKUP = re.compile(r"([\\*_|`<>])")
ITEM = re.compile(r"(?:[-*]|\d+\.) ")
SECTION = re.compile(r"(Args|Attributes|Returns|Yields|Raises):$")
ENTRY = re.compile(r"    (\*{0,2}\w+): (.*)")


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


def sectioned(title: str, body: list[str]) -> list[str]:
    """The list of the entries of a section; a section without names is a paragraph.

    >>> sectioned("Args", ["    q: Queries", "        (b t h d)."])
    ['', '**Args**', '', '- ``q``: Queries (b t h d).', '']
    """
    entries: list[str] = []
    for line in filter(str.strip, body):
        entry = ENTRY.match(line)
        if entry and title not in ("Returns", "Yields"):
            entries.append(f"- ``{entry[1]}``: {prose(entry[2])}")
        elif entries:
            entries[-1] += " " + prose(line.strip())
        else:
            entries.append(prose(line.strip()))
    return ["", f"**{title}**", "", *entries, ""]


def restructured(lines: list[str]) -> list[str]:
    """The same text for docutils: prose escaped, what is laid out in literal blocks, sections as lists."""
    blocks: list[tuple[str, list[str]]] = [("", [])]
    for line in lines:
        section = SECTION.match(line)
        if section:
            blocks.append((section[1], []))
        else:
            blocks[-1][1].append(line)
    made = laid_out(blocks[0][1])
    for title, body in blocks[1:]:
        made += sectioned(title, body)
    return made


def laid_out(lines: list[str]) -> list[str]:
    """Text without sections for docutils."""
    made: list[str] = []
    literal = False
    for line in lines:
        if not line.strip():
            made.append("")
            continue
        example = literal and made[-1:] != [""]  # what an example prints follows it
        inside = is_laid_out(line) or (example and made[-1].lstrip().startswith(">>>"))
        if inside and not literal:
            made += ["", ".. code-block:: text" if not line.startswith(">>>") else ".. code-block:: pycon", ""]
        elif literal and not inside:
            made.append("")
        if not inside and ITEM.match(line) and made[-1:] != [""] and not (made and ITEM.match(made[-1])):
            made.append("")
        made.append(f"   {line}" if inside else prose(line))
        literal = inside
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
    """A signature whose arrays may be of JAX or of NumPy, which says so once; choices without their pattern, numbers
    without their bounds.

    >>> shorter("(q: ~jaxtyping.Float[jaxlib._jax.Array, 'b t'] | ~jaxtyping.Float[ndarray, 'b t'])")
    "(q: ~jaxtyping.Float[Array, 'b t'])"
    >>> shorter("(n: ~typing.Annotated[int, ~msgspec.Meta(ge=1)], pool: Annotated[str, Meta(pattern='^(max|mean)Z')])")
    "(n: int, pool: 'max' | 'mean')"
    """
    signature = re.sub(r"([~\w.]+)\[jaxlib\._jax\.Array, ('[^']*')\] \| \1\[ndarray, \2\]", r"\1[Array, \2]", signature)
    choices = re.compile(r"[~\w.]*Annotated\[str, [~\w.]*Meta\(pattern='\^\(([^)]*)\)[^']*'\)\]")
    signature = choices.sub(lambda match: " | ".join(map(repr, match[1].split("|"))), signature)
    return re.sub(r"[~\w.]*Annotated\[(\w+), [~\w.]*Meta\([^)]*\)\]", r"\1", signature)


def sign(app: Any, what: str, name: str, thing: Any, options: Any, signature: str | None, returns: str | None) -> Any:
    """For autodoc-process-signature."""
    return tuple(None if text is None else shorter(text) for text in (signature, returns))


def setup(app: Any) -> dict[str, bool]:
    """Hooks into autodoc."""
    app.connect("autodoc-skip-member", skip)
    app.connect("autodoc-process-docstring", process)
    app.connect("autodoc-process-signature", sign)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
