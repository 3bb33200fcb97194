"""The pictures of docs/course.md: SiLU beside ReLU, and a pre-norm block beside a post-norm block.

python docs/figures/course.py        writes course-silu.svg and course-blocks.svg
"""

import pathlib
from xml.sax.saxutils import escape

import torch

from polyhead.ops.textbook import silu

HERE = pathlib.Path(__file__).parent
INK, FAINT, BLUE, ORANGE = "#333333", "#bbbbbb", "#2a6fb0", "#c8641e"
STYLE = 'font-family="sans-serif" font-size="13" stroke-linecap="round"'


def svg(width: int, height: int, parts: list[str]) -> str:
    """Return a picture of this size, on a white ground that is readable on dark pages, too."""
    ground = f'<rect width="{width}" height="{height}" rx="6" fill="white"/>'
    body = "\n".join([ground, *parts])
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {STYLE}>\n{body}\n</svg>\n'


def text(x: float, y: float, words: str, color: str = INK, anchor: str = "middle") -> str:
    return f'<text x="{x}" y="{y}" fill="{color}" text-anchor="{anchor}">{escape(words)}</text>'


def line(points: list[tuple[float, float]], color: str, width: float = 1.5, end: str = "") -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width}" {end}/>'


def activations() -> str:
    """SiLU and ReLU from -6 to 6."""
    x = torch.linspace(-6, 6, 121)

    def place(number: float, value: float) -> tuple[float, float]:
        return 40 + (number + 6) * 30, 190 - value * 25

    parts = [line([place(-6, 0), place(6, 0)], FAINT, 1), line([place(0, -0.8), place(0, 6)], FAINT, 1)]
    for number in (-6, -3, 3, 6):
        parts.append(text(place(number, 0)[0], 210, str(number)))
    for name, values, color in (("ReLU", x.clamp(min=0), ORANGE), ("SiLU", silu(x), BLUE)):
        points = [place(float(number), float(value)) for number, value in zip(x, values, strict=True)]
        parts.append(line(points, color, 2))
        parts.append(text(60, 40 if name == "SiLU" else 60, name, color, "start"))
    return svg(440, 225, parts)


ARROW = (
    '<defs><marker id="a" viewBox="0 0 6 6" refX="5" refY="3" markerWidth="7" markerHeight="7" orient="auto">'
    f'<path d="M0,0 L6,3 L0,6 z" fill="{INK}"/></marker></defs>'
)
UP = 'marker-end="url(#a)"'


def box(x: float, y: float, words: str, color: str) -> list[str]:
    frame = (
        f'<rect x="{x - 55}" y="{y}" width="110" height="28" rx="5" fill="white" stroke="{color}" stroke-width="1.5"/>'
    )
    return [frame, text(x, y + 19, words, color)]


def column(x: float, title: str, order: list[str]) -> list[str]:
    """A block from bottom to top: `order` names its parts; "+" ends the residual connection that "|" began."""
    parts = [text(x, 24, title), text(x, 375, "x")]
    y = 358.0
    start = y
    for name in order:
        if name == "|":  # the residual connection leaves the stream here
            start = y - 12
            parts.append(line([(x, y), (x, y - 14)], INK))
            y -= 14
            continue
        top = y - 46
        parts.append(line([(x, y), (x, y - 16)], INK, 1.5, UP))
        if name == "+":
            center = top + 18
            parts.append(f'<circle cx="{x}" cy="{center}" r="10" fill="white" stroke="{INK}" stroke-width="1.5"/>')
            parts.append(text(x, center + 5, "+"))
            parts.append(line([(x, start), (x + 80, start), (x + 80, center), (x + 12, center)], INK, 1.5, UP))
            y = center - 10
        else:
            parts += box(x, top + 2, name, BLUE if name == "norm" else ORANGE)
            y = top + 2
    parts.append(line([(x, y), (x, 36)], INK, 1.5, UP))
    return parts


def blocks() -> str:
    """The order of norms in both kinds of blocks."""
    pre = ["|", "norm", "attention", "+", "|", "norm", "SwiGLU", "+"]
    post = ["|", "attention", "+", "norm", "|", "SwiGLU", "+", "norm"]
    parts = [ARROW, *column(110, "pre-norm", pre), *column(330, "post-norm", post)]
    return svg(460, 390, parts)


def main() -> None:
    """Write both pictures."""
    for name, picture in (("course-silu", activations()), ("course-blocks", blocks())):
        (HERE / f"{name}.svg").write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
