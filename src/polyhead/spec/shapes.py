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
from collections.abc import Callable, Iterable, Mapping
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


# ---------------------------------------------------------------------------------------------- checks of single values
def one_of(caller: str, noun: str, value: object, valid: Iterable[str]) -> str:
    """`value` if it is among `valid`; otherwise raises ValueError, which suggests the nearest valid value."""
    names = list(valid)
    if value in names:
        return str(value)
    hint = ""
    for near in difflib.get_close_matches(str(value), names, n=1, cutoff=0.55):
        hint = f"; did you mean {near!r}?"
    raise ValueError(f"{caller}: unknown {noun} {value!r}{hint} (choose from {', '.join(map(str, names))})")


def check_number(
    caller: str, name: str, value: int | float, minimum: int | float | None = None, *, above: bool = False
) -> None:
    """Raise ValueError unless `value` is finite and, if `minimum` is given, at least that (`above`: above it)."""
    if not -math.inf < value < math.inf:  # torch.compile cannot trace math.isfinite
        raise ValueError(f"{caller}: {name} must be a finite number but is {value}")
    if minimum is None:
        return
    if above and value <= minimum:
        raise ValueError(f"{caller}: {name} must be above {minimum} but is {value}")
    if value < minimum:
        raise ValueError(f"{caller}: {name} must be at least {minimum} but is {value}")


def check_rate(caller: str, rate: float) -> None:
    """Raise ValueError unless a dropout rate is in [0, 1): a rate of 1 would drop all."""
    if not isinstance(rate, numbers.Real) or not 0.0 <= rate < 1.0:
        raise ValueError(f"{caller}: dropout must be in [0, 1) but is {rate}")


def check_count(caller: str, name: str, value: object) -> int:
    """`value` as an integer.  Raises ValueError for anything else, and for an integer below 1."""
    # The plain test comes first: torch.compile cannot trace the other one.
    is_integer = type(value) is int or (isinstance(value, numbers.Integral) and not isinstance(value, bool))
    if not is_integer or value < 1:  # type: ignore[operator]
        raise ValueError(f"{caller}: {name} must be an integer of at least 1 but is {value!r}")
    return int(value)  # type: ignore[call-overload]


def check_heads(caller: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ValueError for an array `(b t h d)` without heads, or of heads without width."""
    for name, shape in shapes.items():
        if len(shape) == 4 and 0 in shape[2:]:
            raise ValueError(f"{caller}: {name} must have heads, of width 1 or more, but has shape {tuple(shape)}")


def check_window(caller: str, window: object) -> int | None:
    """`window` as an integer, or None.  Raises ValueError for anything else, and for an integer below 1."""
    return None if window is None else check_count(caller, "window", window)


def check_masks(caller: str, masks: Any, b: int, t: int, s: int, is_readable: Callable[[Any], bool]) -> None:
    """Raise ValueError for what `@shaped` cannot see in the `Masks` of PyTorch or JAX.

    The edges of packed sequences are read where `is_readable`: lengths in their place do not begin with 0.
    """
    check_window(caller, masks.window)
    if not isinstance(masks.causal, bool):
        raise ValueError(f"{caller}: causal must be True or False but is {masks.causal!r}")
    if masks.cu_seqlens is None:
        return
    if b != 1 or t != s:
        raise ValueError(f"{caller}: with cu_seqlens b must be 1 and t = s but b = {b}, t = {t}, s = {s}")
    if not is_readable(masks.cu_seqlens):
        return
    edges = masks.cu_seqlens.tolist()
    ends = [0, *edges, t]
    if edges and (edges[0] != 0 or any(map(operator.gt, ends, ends[1:]))):
        raise ValueError(
            f"{caller}: cu_seqlens must begin with 0, not decrease and end by t = {t} but is {edges!r:.40}"
        )


# ---------------------------------------------------------------------------------------------------------- annotations
@dataclass(frozen=True)
class Pattern:
    """A parsed jaxtyping annotation, such as `Float[Tensor, "#b h t+s-1"]`."""

    text: str
    dims: tuple[str, ...]
    dtypes: tuple[str, ...]
    array: type  # the required type of the argument
    open: bool  # contains "...": any number of leading dimensions


def _patterns(annotation: object) -> list[Pattern]:
    """The patterns of the arrays that an annotation allows; none for an annotation of something else."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        patterns: list[Pattern] = []
        for member in typing.get_args(annotation):
            patterns += _patterns(member)
        return patterns
    text = getattr(annotation, "dim_str", None)
    if text is None:
        return []
    dims = text.split()
    is_open = "..." in dims
    if is_open:
        dims.remove("...")
    dtypes = getattr(annotation, "dtypes", ())
    if not isinstance(dtypes, (list, tuple)):  # any dtype
        dtypes = ()
    # The array type may be `Any` or a type variable, which `isinstance` does not take.
    array = getattr(annotation, "array_type", object)
    if not isinstance(array, type):
        array = object
    return [Pattern(text, tuple(dims), tuple(dtypes), array, is_open)]


def _size(dim: str, sizes: dict[str, tuple[int, str]]) -> int | None:
    """The size that `dim` ("t", "4" or "t+s-1") must have, or None while one of its letters is unbound."""
    if dim in sizes:  # the common case: a single letter
        return sizes[dim][0]
    total = 0
    for part in dim.replace("-", "+-").split("+"):  # torch 2.11 cannot compile a regex
        term = part.removeprefix("-")
        if term.isdigit():
            value = int(term)
        elif term in sizes:
            value = sizes[term][0]
        else:
            return None
        if part != term:
            value = -value
        total += value
    return total


# -------------------------------------------------------------------------------------------------------- the decorator
def shaped(function: Function) -> Function:
    """Decorator: compare the sizes and dtypes of all array arguments with their annotations before the call.

    >>> @shaped
    ... def dot(q: Float[Tensor, "t d"], k: Float[Tensor, "s d"]): ...
    >>> dot(zeros(3, 4), zeros(3, 5))
    ValueError: dot: d = 4 in q but 5 in k (s d) = (3, 5)
    """
    parameters = inspect.signature(function).parameters
    names = list(parameters)
    patterns: dict[str, list[Pattern]] = {}
    array_types: dict[str, tuple[type, ...]] = {}
    required, positional = set(), []
    for name, parameter in parameters.items():
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            positional.append(name)
        options = _patterns(parameter.annotation)
        if options:
            patterns[name] = options
            array_types[name] = tuple(dict.fromkeys(pattern.array for pattern in options))
            if type(None) not in typing.get_args(parameter.annotation):
                required.add(name)
    # Users know a layer by its class, so errors name that and not its method.
    owner, _, caller = function.__qualname__.rpartition(".")
    if owner and caller == "forward":
        caller = owner

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if len(args) > len(positional):
            allowed = " and ".join(positional).removeprefix("self and ")
            raise TypeError(f"{caller}: only {allowed} may be positional arguments, but more came")
        # Letters are bound anew in each call, by the first array that has them.
        sizes: dict[str, tuple[int, str]] = {}
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        for name, options in patterns.items():
            value = arguments.get(name)
            if isinstance(value, array_types[name]) and (getattr(value, "is_nested", False) or hasattr(value, "shape")):
                _compare(caller, name, value, options, sizes)
            elif value is not None or (name in required and name in arguments):
                array = " or ".join(array_type.__name__.rpartition(".")[2] for array_type in array_types[name])
                actual = type(value).__name__
                raise ValueError(f"{caller}: {name} must be a {array} ({_texts(options)}) but is a {actual}")
        return function(*args, **kwargs)

    return typing.cast(Function, checked)


# --------------------------------------------------------------------------------------- queries that are read together
def check_reads_all_queries(caller: str, masks: Any, num_queries: int) -> None:
    """Raise ValueError for what hides queries from one another: a network of the whole sequence reads all of them.

    A mask of keys alone would count padded queries as tokens, so it needs a row for each query.
    """
    reason, mask = "", masks.mask
    if masks.causal:
        reason = "causal must be False"
    elif masks.window is not None:
        reason = "window must be None"
    elif masks.cu_seqlens is not None:
        reason = "cu_seqlens must be None: give packed sequences one by one"
    elif mask is not None and num_queries != 1 and (len(mask.shape) < 2 or mask.shape[-2] == 1):
        reason = "mask needs a row (t s) for each query, all False where the query is padding"
    if reason:
        raise ValueError(f"{caller}: network='sequence' reads all queries, so {reason}")


# ------------------------------------------------------------------------------------------------------------ one array
def _texts(patterns: list[Pattern]) -> str:
    """The axes that an argument may have, in words: "b t h d) or (t h d"."""
    return ") or (".join(dict.fromkeys(pattern.text for pattern in patterns))


def _compare(caller: str, name: str, array: Any, options: list[Pattern], sizes: dict[str, tuple[int, str]]) -> None:
    """Raise ValueError unless an array fits the first pattern of its rank; enter the sizes of its letters."""
    if getattr(array, "is_nested", False):
        raise ValueError(f"{caller}: {name} is a nested tensor; join its sequences into one row and give cu_seqlens")
    shape = tuple(array.shape)
    # The first pattern of the right rank counts, so that errors name its letters.
    for pattern in options:
        num_leading = len(shape) - len(pattern.dims)
        if num_leading == 0 or (num_leading > 0 and pattern.open):
            break
    else:
        raise ValueError(f"{caller}: {name} must be ({_texts(options)}) but has shape {shape}")
    if pattern.dtypes and str(array.dtype).rpartition(".")[2] not in pattern.dtypes:
        _refuse_dtype(caller, name, array, pattern, options)
    for dim, size in zip(pattern.dims, shape[num_leading:], strict=True):
        letter = dim.lstrip("#")
        # "#b" may also be 1, as in broadcasting.
        if (dim[0] == "#" and size == 1) or letter in ("_", "*"):
            continue
        expected = _size(letter, sizes)
        if expected is None:
            sizes[letter] = (size, name)
        elif expected != size:
            _refuse_size(caller, name, pattern, shape, letter, size, sizes)
        # Each key head serves equally many query heads.
        if letter == "g" and "h" in sizes and (size == 0 or sizes["h"][0] % size):
            heads, origin = sizes["h"]
            raise ValueError(f"{caller}: {heads} heads in {origin} but {size} in {name} ({pattern.text}) = {shape}")


def _refuse_dtype(caller: str, name: str, array: Any, pattern: Pattern, options: list[Pattern]) -> NoReturn:
    """Raise the ValueError for an array of another dtype."""
    if all("bool" in dtype for dtype in pattern.dtypes):
        kind = "boolean"
    elif len(pattern.dtypes) == 1:
        kind = pattern.dtypes[0]
    elif any("float" in dtype for dtype in pattern.dtypes):
        kind = "of a floating dtype"
    elif "uint" in str(array.dtype):
        kind = "of a signed integer dtype"
    else:
        kind = "of an integer dtype"
    if name == "mask":
        kind += ", True where attention is allowed,"
    if len({option.dtypes for option in options}) > 1:  # the dtype depends on the shape
        name = f"{name} ({pattern.text})"
    raise ValueError(f"{caller}: {name} must be {kind} but is {array.dtype}")


def _refuse_size(
    caller: str,
    name: str,
    pattern: Pattern,
    shape: tuple[int, ...],
    letter: str,
    size: int,
    sizes: dict[str, tuple[int, str]],
) -> NoReturn:
    """Raise the ValueError for an array whose size differs from that of its letter."""
    origin = hint = ""
    if letter in sizes:
        origin = f" in {sizes[letter][1]}"
    if name == "mask" and "b" in sizes and "s" in sizes and shape == (sizes["b"][0], sizes["s"][0]):
        hint = "; of keys it is mask[:, None, None]"
    expected = _size(letter, sizes)
    raise ValueError(f"{caller}: {letter} = {expected}{origin} but {size} in {name} ({pattern.text}) = {shape}{hint}")
