"""The picture of finding correspondences in docs/mechanisms/hyla.md (after Fig. 3B of the HYLA paper).

python docs/figures/correspondences.py        writes correspondences.svg
"""

import pathlib

from course import BLUE, FAINT, INK, ORANGE, svg, text

HERE = pathlib.Path(__file__).parent
PANEL = 84
"""Width of a panel; three rows of three make a matrix."""

SHAPES = ("line", "rectangle", "curve")


def shape(name: str, x: float, y: float, length: float, color: str, *, is_vertical: bool) -> str:
    """One object around the point (x, y)."""
    half = length / 2
    outline = {
        "line": f"M{-half},0 H{half}",
        "rectangle": f"M{-half},-3.5 H{half} V3.5 H{-half} Z",
        "curve": f"M{-half},3.5 Q0,-10.5 {half},3.5",
    }[name]
    turn = " rotate(90)" if is_vertical else ""
    style = f'fill="none" stroke="{color}" stroke-width="2"'
    return f'<path d="{outline}" {style} transform="translate({x:.1f} {y:.1f}){turn}"/>'


def objects(row: int, column: int, colors: tuple[str, str]) -> list[str]:
    """The objects of a panel, from its corner: rules hold for the horizontal and for the vertical objects."""
    # Horizontal: three shapes in each row, and a constant number.  Vertical: three shapes, and one object more.
    horizontal, vertical = SHAPES[(row + column) % 3], SHAPES[(row + 2 * column + 1) % 3]
    num_horizontal, num_vertical = row + 1, column + 1
    parts = []
    for i in range(num_horizontal):
        parts.append(shape(horizontal, PANEL / 2, 10 + 12 * i, 40, colors[0], is_vertical=False))
    for i in range(num_vertical):
        x = PANEL / 2 + 16 * (i - (num_vertical - 1) / 2)
        parts.append(shape(vertical, x, 62, 32, colors[1], is_vertical=True))
    return parts


def matrix(left: float, title: str, colors: tuple[str, str]) -> list[str]:
    """Nine panels, the last of them hidden."""
    parts = [text(left + 1.5 * PANEL, 20, title)]
    for row in range(3):
        for column in range(3):
            frame = f'<rect width="{PANEL}" height="{PANEL}" fill="none" stroke="{FAINT}"/>'
            is_hidden = row == column == 2
            inside = [text(PANEL / 2, PANEL / 2 + 5, "?")] if is_hidden else objects(row, column, colors)
            parts.append(f'<g transform="translate({left + PANEL * column} {32 + PANEL * row})">{frame}')
            parts += [*inside, "</g>"]
    return parts


def main() -> None:
    """Write the picture."""
    parts = matrix(10, "as it is seen", (INK, INK))
    parts += matrix(30 + 3 * PANEL, "by orientation", (BLUE, ORANGE))
    parts.append(text(36 + 6 * PANEL + 6, 80, "horizontal objects:", BLUE, "start"))
    parts.append(text(36 + 6 * PANEL + 6, 98, "their number is constant,", BLUE, "start"))
    parts.append(text(36 + 6 * PANEL + 6, 116, "each shape once in a row", BLUE, "start"))
    parts.append(text(36 + 6 * PANEL + 6, 180, "vertical objects:", ORANGE, "start"))
    parts.append(text(36 + 6 * PANEL + 6, 198, "one more in each column,", ORANGE, "start"))
    parts.append(text(36 + 6 * PANEL + 6, 216, "each shape once in a row", ORANGE, "start"))
    picture = svg(6 * PANEL + 220, 3 * PANEL + 46, parts)
    (HERE / "correspondences.svg").write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
