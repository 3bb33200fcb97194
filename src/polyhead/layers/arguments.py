"""What a call of a layer is given beside its input: checked in one place, and cut up for its groups of heads."""

from collections.abc import Sequence

from torch import Tensor

WHO = "MultiHeadAttention"


def check(wanted: tuple[int, int, int, int], mask: Tensor | None, bias: Tensor | None, keep: Tensor | None) -> None:
    """Raise a ValueError unless mask, bias and keep fit (b h t s) = `wanted`."""
    if mask is not None and not _broadcasts(mask.shape, wanted):
        raise ValueError(f"{WHO}: mask must broadcast to (b h t s) = {wanted} but is {tuple(mask.shape)}")
    if bias is not None and not (bias.ndim == 4 and _broadcasts(bias.shape, wanted)):
        by_offset = (wanted[1], wanted[2] + wanted[3] - 1)
        if tuple(bias.shape) != by_offset:
            shape = tuple(bias.shape)
            raise ValueError(f"{WHO}: bias must be (b h t s) = {wanted} or (h t+s-1) = {by_offset} but is {shape}")
    # Queries and keys written out, as the backends want them; only batch and heads may be shared.
    if keep is not None and not (keep.shape[-2:] == wanted[2:] and keep.ndim == 4 and _broadcasts(keep.shape, wanted)):
        raise ValueError(f"{WHO}: keep must be (b|1 h|1 t s), here {wanted}, but is {tuple(keep.shape)}")


def _broadcasts(shape: Sequence[int], wanted: Sequence[int]) -> bool:
    sizes = zip(reversed(shape), reversed(wanted), strict=False)
    return len(shape) <= len(wanted) and all(size in (1, want) for size, want in sizes)


def heads_of(array: Tensor | None, first: int, last: int) -> Tensor | None:
    """The heads `first` to `last` of a bias (b h t s) or (h t+s-1), a mask of 1 to 4 dimensions or a dropout mask."""
    if array is None or array.ndim == 1:
        return array
    if array.ndim == 2:  # by offset if floating; a (t s) mask is for all heads
        return array[first:last] if array.is_floating_point() else array
    return array if array.shape[-3] == 1 else array[..., first:last, :, :]


def symbols_of(
    symbols: Tensor | Sequence[Tensor | None], widths: Sequence[int | None], b: int, s: int
) -> Sequence[Tensor | None]:
    """The symbols of each group, whose width is in `widths` (None: it takes none).

    Raises ValueError unless each is (b|1 s m) or a table of 2 distance + 1 rows.
    """
    each: Sequence[Tensor | None] = [symbols] * len(widths) if isinstance(symbols, Tensor) else list(symbols)
    if len(each) != len(widths):
        raise ValueError(f"{WHO}: symbols must be one tensor or one (or None) a group: {len(widths)}, not {len(each)}")
    for i, (given, width) in enumerate(zip(each, widths, strict=True)):
        if width is None:
            continue
        if given is None:
            raise ValueError(f"{WHO}: group {i} takes symbols, of width {width}, but there are none for it")
        _check_symbols(given, width, b, s)
    return each


def _check_symbols(symbols: Tensor, width: int, b: int, s: int) -> None:
    shape = tuple(symbols.shape)
    if not symbols.is_floating_point():
        raise ValueError(f"{WHO}: symbols must be of a floating dtype but are {symbols.dtype}")
    if symbols.ndim == 2 and shape[1] == width:
        if shape[0] % 2 == 0:
            raise ValueError(
                f"{WHO}: a table of relative symbols has 2 distance + 1 rows, an odd number, not {shape[0]}"
            )
    elif symbols.ndim != 3 or shape[0] not in (1, b) or shape[1:] != (s, width):
        raise ValueError(
            f"{WHO}: symbols must be (b|1 s m) = ({b}, {s}, {width}) or, if relative, a table (2 distance + 1, m) "
            f"but are {shape}"
        )
