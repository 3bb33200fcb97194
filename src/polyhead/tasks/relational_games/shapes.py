"""The objects of relational games: coloured polyominoes and striped squares, drawn into cells of 12 x 12 pixels.

Along each axis a cell has one empty pixel, 3 blocks of 3 pixels, and two empty pixels, as in the original images.  The
pentominoes and hexominoes are those that fit into 3 x 3 blocks; each rotation and reflection is a separate shape.
Stripes fill the same 9 x 9 pixels.  The F pentomino:

    . # #
    # # .
    . # .
"""

import functools
import itertools

import torch
from torch import Tensor

SHAPES = ("pentominoes", "hexominoes", "stripes")
CELL, BLOCK, BLOCKS, MARGIN = 12, 3, 3, 1

# 23 colours, all bright enough to be seen on black.
COLOURS = tuple(rgb for rgb in itertools.product((0, 128, 255), repeat=3) if sum(rgb) >= 200)


@functools.lru_cache(maxsize=16)
def masks(shapes: str, device: torch.device) -> Tensor:
    """The shapes of a set as boolean cells (n 12 12); the last is an empty cell, for shape -1."""
    if shapes == "stripes":
        squares = _stripes()
    elif shapes == "pentominoes":
        squares = _blocks(_polyominoes(5))
    else:
        squares = _blocks(_polyominoes(6))
    cells = torch.zeros(len(squares) + 1, CELL, CELL, dtype=torch.bool, device="cpu")
    inside = slice(MARGIN, MARGIN + BLOCK * BLOCKS)
    cells[:-1, inside, inside] = squares
    return cells.to(device)


def count(shapes: str) -> int:
    """The number of shapes in a set."""
    return len(masks(shapes, torch.device("cpu"))) - 1


def draw(shapes: str, shape: Tensor, colour: Tensor) -> Tensor:
    """Images (b 3 36 36) in [0, 1] of 3 x 3 cells from `shape` and `colour` (b 9), with -1 for an empty cell."""
    mask = masks(shapes, shape.device)[shape]  # (b 9 12 12)
    palette = (torch.tensor([*COLOURS, (0, 0, 0)], dtype=torch.float32, device="cpu") / 255).to(
        shape.device
    )  # the last for -1
    cells = mask[:, :, None] * palette[colour][..., None, None]  # (b 9 3 12 12)
    rows = cells.unflatten(1, (3, 3)).permute(0, 3, 1, 4, 2, 5)  # (b 3 row 12 column 12)
    return rows.reshape(len(shape), 3, 3 * CELL, 3 * CELL)


def _polyominoes(size: int) -> list[tuple[tuple[int, int], ...]]:
    """All polyominoes of `size` squares that fit into 3 x 3, with all rotations and reflections, at the top left."""
    polyominoes = []
    board = itertools.product(range(BLOCKS), range(BLOCKS))
    for squares in itertools.combinations(board, size):
        rows, columns = zip(*squares, strict=True)
        if min(rows) == min(columns) == 0 and _connected(set(squares)):
            polyominoes.append(squares)
    return polyominoes


def _connected(squares: set[tuple[int, int]]) -> bool:
    reached = set()
    edge = [min(squares)]
    while edge:
        row, column = edge.pop()
        if (row, column) in squares and (row, column) not in reached:
            reached.add((row, column))
            edge += [(row + 1, column), (row - 1, column), (row, column + 1), (row, column - 1)]
    return reached == squares


def _blocks(polyominoes: list[tuple[tuple[int, int], ...]]) -> Tensor:
    """Polyominoes as squares of pixels (n 9 9)."""
    blocks = torch.zeros(len(polyominoes), BLOCKS, BLOCKS, dtype=torch.bool, device="cpu")
    for i, squares in enumerate(polyominoes):
        rows, columns = zip(*squares, strict=True)
        blocks[i, rows, columns] = True
    return blocks.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)


def _stripes() -> Tensor:
    """Striped squares (n 9 9) in four directions and three widths, each with its negative.

    Diagonal stripes have a width of at least two pixels: with one, both diagonals give the same chequerboard.
    """
    row, column = torch.meshgrid(torch.arange(9, device="cpu"), torch.arange(9, device="cpu"), indexing="ij")
    straight, diagonal = (1, 2, 3), (2, 3, 4)
    directions = ((row, straight), (column, straight), (row + column, diagonal), (row - column + 9, diagonal))
    squares = []
    for position, widths in directions:
        for width in widths:
            stripe = position // width % 2
            squares += [stripe == 0, stripe == 1]
    return torch.stack(squares)
