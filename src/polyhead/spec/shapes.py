"""The letters of shapes, and `@shaped`, which checks the arguments of public functions against them.

Annotations such as `Float[Tensor, "b t h d"]` are parsed once, at import.  A call then compares sizes in plain Python:
the check costs microseconds, `torch.compile` can trace it, and it is always on.  Every error is one line: who, what was
wanted, what came.  This file imports neither torch nor jax: anything with `.shape` and `.dtype` is an array.
"""

import difflib
import functools
import inspect
import math
import numbers
import operator
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

LETTERS = {
    "b": "batch",
    "t": "query position",
    "s": "key position",
    "h": "head",
    "d": "query/key width",
    "e": "value width",
    "m": "model width",
    "f": "feed-forward width",
    "r": "relation",
    "p": "relation width",
    "g": "key/value head",
    "n": "symbol",
    "c": "class or token",
    "l": "layer",
}

Function = TypeVar("Function", bound=Callable[..., Any])


def one_of(who: str, what: str, value: object, valid: Iterable[str]) -> str:
    """`value` if it is among `valid`; otherwise raises ValueError, which suggests the nearest valid value."""
    names = list(valid)
    if value in names:
        return str(value)
    near = difflib.get_close_matches(str(value), names, n=1, cutoff=0.55)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"{who}: unknown {what} {value!r}{hint} (choose from {', '.join(map(str, names))})")


def check_number(
    who: str, name: str, value: int | float, least: int | float | None = None, *, above: bool = False
) -> None:
    """Raise ValueError unless `value` is finite and, if `least` is given, at least that (`above`: above it)."""
    if not math.isfinite(value):
        raise ValueError(f"{who}: {name} must be a finite number but is {value}")
    if least is not None and (value < least or (above and value == least)):
        raise ValueError(f"{who}: {name} must be {'above' if above else 'at least'} {least} but is {value}")


def check_rate(who: str, rate: float, name: str = "dropout") -> None:
    """Raise ValueError unless a dropout rate is in [0, 1): a rate of 1 would drop all."""
    if not isinstance(rate, numbers.Real) or not 0.0 <= rate < 1.0:
        raise ValueError(f"{who}: {name} must be in [0, 1) but is {rate}")


def check_layer(who: str, dim: object, causal: object) -> None:
    """Raise ValueError unless `dim` is an integer of at least 1 and `causal` is a bool: "no" would count as True."""
    if isinstance(dim, bool) or not isinstance(dim, numbers.Integral) or dim < 1:
        raise ValueError(f"{who}: dim must be an integer of at least 1 but is {dim!r}")
    if causal not in (True, False):
        raise ValueError(f"{who}: causal must be True or False but is {causal!r}")


def check_heads(who: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ValueError for an array `(b t h d)` without heads, or of heads without width."""
    for name, shape in shapes.items():
        if len(shape) == 4 and 0 in shape[2:]:
            raise ValueError(f"{who}: {name} must have heads, of width 1 or more, but has shape {tuple(shape)}")


def check_packed(who: str, edges: Sequence[int], t: int) -> None:
    """Raise ValueError unless `edges` begin with 0, do not decrease and end by t, as lengths in their place do not."""
    ends = [0, *edges, t]
    if edges and (edges[0] != 0 or any(map(operator.gt, ends, ends[1:]))):
        came = f"{', '.join(map(str, edges[:6]))}{', ...' if len(edges) > 6 else ''}"
        raise ValueError(f"{who}: cu_seqlens must begin with 0, not decrease and end by t = {t} but is [{came}]")


def check_window(who: str, window: object) -> int | None:
    """`window` as an integer, or None.  Raises ValueError for anything else, and for an integer below 1."""
    if window is None:
        return None
    # The plain test comes first: torch.compile cannot trace the other one.
    whole = type(window) is int or (isinstance(window, numbers.Integral) and not isinstance(window, bool))
    if not whole or window < 1:  # type: ignore[operator]
        raise ValueError(f"{who}: window must be an integer of at least 1 but is {window!r}")
    return int(window)  # type: ignore[call-overload]


@dataclass(frozen=True)
class Pattern:
    """A parsed jaxtyping annotation, such as `Float[Tensor, "#b h t+s-1"]`."""

    text: str
    dims: tuple[str, ...]
    dtypes: tuple[str, ...]
    array: type  # the required type of the argument
    open: bool  # contains "...": any number of leading dimensions


def _patterns(annotation: object) -> list[Pattern]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [p for part in typing.get_args(annotation) for p in _patterns(part)]
    text = getattr(annotation, "dim_str", None)
    if text is None:
        return []
    dims = tuple(text.split())
    dtypes = getattr(annotation, "dtypes", ())
    names = tuple(dtypes) if isinstance(dtypes, (list, tuple)) else ()
    kind = getattr(annotation, "array_type", object)
    array = kind if isinstance(kind, type) else object
    return [Pattern(text, tuple(d for d in dims if d != "..."), names, array, "..." in dims)]


def _is_dtype(array: Any, pattern: Pattern) -> bool:
    name = str(array.dtype).rpartition(".")[2]
    return not pattern.dtypes or name in pattern.dtypes


def _fits_rank(array: Any, pattern: Pattern) -> bool:
    rank = len(array.shape)
    return rank >= len(pattern.dims) if pattern.open else rank == len(pattern.dims)


def _size(dim: str, sizes: dict[str, tuple[int, str]]) -> int | None:
    """The size that `dim` ("t", "4" or "t+s-1") must have, or None while one of its letters is unbound."""
    if dim in sizes or dim.isidentifier():  # the common case: a single letter
        return sizes[dim][0] if dim in sizes else None
    total = 0
    for part in dim.replace("-", "+-").split("+"):  # torch 2.11 cannot compile a regex
        term = part.removeprefix("-")
        if term.isdigit():
            value = int(term)
        elif term in sizes:
            value = sizes[term][0]
        else:
            return None
        total = total - value if part != term else total + value
    return total


def shaped(function: Function) -> Function:
    """Decorator: compare the sizes and dtypes of all array arguments with their annotations before the call.

    >>> @shaped
    ... def dot(q: Float[Tensor, "t d"], k: Float[Tensor, "s d"]): ...
    >>> dot(zeros(3, 4), zeros(3, 5))
    ValueError: dot: d = 4 in q but 5 in k (s d) = (3, 5)
    """
    parameters = inspect.signature(function).parameters
    names = list(parameters)
    patterns = {name: found for name in names if (found := _patterns(parameters[name].annotation))}
    kinds = {name: tuple(dict.fromkeys(pattern.array for pattern in found)) for name, found in patterns.items()}
    needed = {name for name in patterns if type(None) not in typing.get_args(parameters[name].annotation)}
    owner, _, name = function.__qualname__.rpartition(".")
    of_module = bool(owner) and name == "forward"
    who = owner if of_module else name

    plain = [n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if len(args) > len(plain):
            wanted_names = " and ".join(name for name in plain if name != "self")
            raise TypeError(f"{who}: only {wanted_names} may be positional arguments, but more came")
        sizes: dict[str, tuple[int, str]] = {}
        given = dict(zip(names, args, strict=False))
        for name, wanted in patterns.items():
            value = kwargs[name] if name in kwargs else given.get(name)
            if isinstance(value, kinds[name]) and hasattr(value, "shape"):
                _compare(who, name, value, wanted, sizes)
            elif value is not None or (name in needed and (name in kwargs or name in given)):
                array = " or ".join(kind.__name__.rpartition(".")[2] for kind in kinds[name])
                came = type(value).__name__
                raise ValueError(f"{who}: {name} must be a {array} ({_texts(wanted)}) but is a {came}")
        return function(*args, **kwargs)

    return typing.cast(Function, checked)


def check_reads_all_queries(
    who: str, num_queries: int, *, causal: bool, window: int | None, is_packed: bool, mask: Any
) -> None:
    """Raise ValueError for what hides queries from one another: a network of the whole sequence reads all of them.

    A mask of keys alone would count padded queries as tokens, so it needs a row for each query.
    """
    reason = ""
    if causal:
        reason = "causal must be False"
    elif window is not None:
        reason = "window must be None"
    elif is_packed:
        reason = "cu_seqlens must be None: give packed sequences one by one"
    elif mask is not None and num_queries != 1 and (len(mask.shape) < 2 or mask.shape[-2] == 1):
        reason = "mask needs a row (t s) for each query, all False where the query is padding"
    if reason:
        raise ValueError(f"{who}: network='sequence' reads all queries, so {reason}")


def _texts(wanted: list[Pattern]) -> str:
    return ") or (".join(dict.fromkeys(p.text for p in wanted))


def _kind(pattern: Pattern) -> str:
    if pattern.dtypes and all("bool" in d for d in pattern.dtypes):
        return "boolean"
    if len(pattern.dtypes) == 1:
        return pattern.dtypes[0]
    return "of a floating dtype" if any("float" in d for d in pattern.dtypes) else "of an integer dtype"


def _compare(who: str, name: str, array: Any, wanted: list[Pattern], sizes: dict[str, tuple[int, str]]) -> None:
    if getattr(array, "is_nested", False):
        raise ValueError(f"{who}: {name} is a nested tensor; join its sequences into one row and give cu_seqlens")
    ranked = [p for p in wanted if _fits_rank(array, p)]
    shape = tuple(array.shape)
    if not ranked:
        raise ValueError(f"{who}: {name} must be ({_texts(wanted)}) but has shape {shape}")
    pattern = ranked[0]
    if not _is_dtype(array, pattern):
        hint = ", True where attention is allowed," if name == "mask" else ""
        kind = _kind(pattern).replace("an integer", "a signed integer" if "uint" in str(array.dtype) else "an integer")
        read = f"{name} ({pattern.text})" if len({p.dtypes for p in wanted}) > 1 else name
        raise ValueError(f"{who}: {read} must be {kind}{hint} but is {array.dtype}")
    for dim, size in zip(pattern.dims, shape[len(shape) - len(pattern.dims) :], strict=True):
        letter = dim.lstrip("#")
        if (dim[0] == "#" and size == 1) or letter in ("_", "*"):
            continue
        expected = _size(letter, sizes)
        if expected is None:
            sizes[letter] = (size, name)
        elif expected != size:
            origin = f" in {sizes[letter][1]}" if letter in sizes else ""
            of_keys = name == "mask" and shape == tuple(sizes.get(one, (-1, ""))[0] for one in "bs")
            hint = "; of keys it is mask[:, None, None]" if of_keys else ""
            _mismatch(who, f"{letter} = {expected}{origin}", size, name, pattern, f"{shape}{hint}")
        if letter == "g" and "h" in sizes and (size == 0 or sizes["h"][0] % size):
            _mismatch(who, f"{sizes['h'][0]} heads in {sizes['h'][1]}", size, name, pattern, f"{shape}")


def _mismatch(who: str, wanted: str, came: int, name: str, pattern: Pattern, shape: str) -> NoReturn:
    raise ValueError(f"{who}: {wanted} but {came} in {name} ({pattern.text}) = {shape}")
