"""Random calls of the ops, as users make them: a case is a pure function of its seed and number.

`draw` returns the description of a case; arrays.py makes its arrays.  Sizes are powers of two, primes and
others, b up to 128, t and s up to 512, with a limit on multiply-adds.  Tensors may be sliced, strided, transposed,
expanded, slices of one projection (queries, keys and values), or the same tensor; some require gradients.  Tile sizes
are the defaults, or 1, 2, 3 and primes.  Some cases test limits: b, t or s of 0, biases of -inf, NaN and inf behind
masks, a `keep` with gradients, forward-mode derivatives.
"""

import math
import random
from dataclasses import dataclass, field
from typing import Any

from polyhead.ops.dispatch import TENSORS
from polyhead.spec import ACTS, NORMALISE, RELATION_ACTS

LARGEST, SMALL = 2**25, 2**14
"""Multiply-adds of a case, at most, and of those that `make test` runs."""

IMPLS = {
    "softmax": ("sdpa", "blocked", "reference"),
    "linear": ("chunked", "recurrent", "triton", "blocked", "reference"),
    "hyla": ("blocked", "blocked", "blocked", "state", "triton", "reference"),
    "relational": ("blocked", "blocked", "sdpa", "triton", "reference"),
    "disentangled": ("blocked", "reference"),
    "abstractor": ("sdpa", "blocked", "reference"),
}
"""Op -> impls, as often as each comes.  Not pooled heads: recorded cases would get other numbers, and where two keys
give nearly the maximum its gradient jumps, so that no bound holds in half precision."""

SHARE = {"softmax": 2, "linear": 3, "hyla": 6, "relational": 5, "disentangled": 1, "abstractor": 2}
HALF = ("bfloat16", "float16")
PATCHES = {
    "hyla": {"hyla_blocked": ("QUERIES", "KEYS", "PAIRS", "ROWS"), "hyla_state": ("SMALL", "LARGE")},
    "relational": {"relational_blocked": ("QUERIES", "PAIRS", "ROWS"), "relational_sdpa": ("WIDTH",)},
    "linear": {"linear_chunked": ("CHUNK",)},
    **{op: {"tiling": ("QUERIES", "KEYS", "NUMBERS")} for op in ("softmax", "disentangled", "abstractor")},
}
"""Op -> file -> constants that cut its work into pieces; `tiles.NARROW` is one for all."""

BY_KEY = ("k", "v", "symbols", "k_rel")
COUNTS = ("PAIRS", "ROWS", "NUMBERS")
"""Constants that count numbers of a tile."""

Layout = tuple[Any, ...]
"""("plain",), ("swap", i, j), ("slice", i), ("stride", i) or ("expand", i): how a tensor lies in another."""


@dataclass
class Case:
    """The description of a call."""

    number: int
    op: str
    impl: str
    dtype: str
    sizes: dict[str, int]
    options: dict[str, Any]
    bias: tuple[int, ...] | None = None
    mask: tuple[int, ...] | None = None
    keep: tuple[int, ...] | None = None
    edges: tuple[int, ...] | None = None
    by_offset: bool = False
    tie: str = ""
    deep: bool = False
    odd: str = ""  # "empty", "-inf", "nan", "keep" or "jvp"
    layouts: dict[str, Layout] = field(default_factory=dict)
    learned: tuple[str, ...] = ()
    patches: dict[str, int] = field(default_factory=dict)
    sharp: float = 1.0
    simple: bool = True
    scaled: bool = False  # by a number that learns

    @property
    def shape(self) -> tuple[int, int, int, int]:
        b, h, t, s = (self.sizes[x] for x in "bhts")
        return b, h, t, s


# --------------------------------------------------------------------------------------------------------------- sizes
def prime(n: int) -> bool:
    return n > 1 and all(n % m for m in range(2, math.isqrt(n) + 1))


def near(dice: random.Random, most: float, cap: int) -> int:
    """A power of two, a prime or any number, up to `most` and `cap`."""
    n = max(1, min(int(most), cap))
    how = dice.random()
    if how < 0.4:
        return 1 << (n.bit_length() - 1)
    if how < 0.7:
        return next((m for m in range(n, 1, -1) if prime(m)), 1)
    return dice.randint(max(1, n // 2), n)


def draw_sizes(dice: random.Random, work: float, packed: bool) -> dict[str, int]:
    """Heads and widths first, then as many samples, queries and keys as there is room for."""
    h = dice.choice((1, 2, 2, 3, 4, 4, 6, 8, 8, 12, 16))
    g = dice.choice([n for n in range(1, h + 1) if h % n == 0])
    d, e = (dice.choice((1, 2, 3, 4, 5, 7, 8, 8, 16, 32, 64)) for _ in range(2))
    if dice.random() < 0.4:
        e = d
    r, p = dice.choice((1, 2, 3, 4, 8)), dice.choice((1, 1, 2, 3, 8, 16))
    pairs = max(1.0, work / (h * (d + e)))
    parts = [dice.random() ** 0.7 + 0.02 for _ in range(3)]
    if packed:
        t = s = near(dice, math.sqrt(pairs), 512)
        return {"b": 1, "t": t, "s": s, "h": h, "g": g, "d": d, "e": e, "r": r, "p": p}
    b = near(dice, pairs ** (parts[0] / sum(parts)), 128)
    t = near(dice, (pairs / b) ** (parts[1] / (parts[1] + parts[2])), 512)
    s = near(dice, pairs / b / t, 512)
    if dice.random() < 0.5 and pairs / b >= 1:
        t = s = near(dice, math.sqrt(pairs / b), 512)
    return {"b": b, "t": t, "s": s, "h": h, "g": g, "d": d, "e": e, "r": r, "p": p}


def draw_layout(dice: random.Random, ndim: int) -> Layout:
    if dice.random() < 0.5 or ndim < 1:
        return ("plain",)
    kind, i = dice.choice(("swap", "swap", "slice", "stride", "expand")), dice.randrange(ndim)
    if kind == "swap":
        return ("swap", 1, 2) if ndim > 2 and dice.random() < 0.6 else ("swap", i, dice.randrange(ndim))
    return (kind, ndim - 1 if kind == "slice" and dice.random() < 0.6 else i)


def edges_of(dice: random.Random, t: int) -> tuple[int, ...]:
    """Of packed sequences: some of length 0 or 1; the last may end before the sample does."""
    inner = sorted(dice.randint(0, t) for _ in range(dice.choice((0, 1, 2, 3, 6, 12))))
    return (0, *inner, t if dice.random() < 0.9 else dice.randint(inner[-1] if inner else 0, t))


def part_of(dice: random.Random, shape: tuple[int, ...], free: tuple[int, ...]) -> tuple[int, ...]:
    """A shape that broadcasts to it: dimensions in `free` may be 1."""
    return tuple(1 if i in free and dice.random() < 0.5 else n for i, n in enumerate(shape))


# --------------------------------------------------------------------------------------------------------------- cases
def draw(seed: int, number: int, *, small: bool = False, only: str = "") -> Case:
    """Case `number`.  Of the small ones none is of Triton's kernels, whose interpreter is slow.

    `only`: of this impl, or of OP:IMPL; native code, which the table lacks as it takes no float64, gets float32 and
    half precision.
    """
    largest, kernels = (SMALL, False) if small else (LARGEST, True)
    dice = random.Random(f"{seed} {number}")
    its, _, only = only.rpartition(":")
    everywhere = ("linear", "hyla", "relational") if only == "native" else [*SHARE]
    has = (its,) if its else [op for op in everywhere if only in ("", "native", *IMPLS[op])]
    op = dice.choices(has, [SHARE[op] for op in has])[0]
    impl = "auto" if dice.random() < 0.2 else dice.choice(IMPLS[op])
    impl = only or impl
    if impl == "triton" and not (kernels and dice.random() < 0.25):
        impl = "auto"
    dtype = dice.choices(("float64", "float32", *HALF), (0, 80, 10, 10) if only == "native" else (62, 12, 13, 13))[0]
    work = 2 ** dice.uniform(4, math.log2(largest))
    if impl == "triton":
        dtype, work = ("float32" if dice.random() < 0.3 else "float64"), min(work, 2.0**12)
    cut = dice.choice(("", "", "small", "small", "primes"))
    if cut:
        work = min(work, 2.0**13 if cut == "small" else 2.0**17)
    packed = dice.random() < (0.4 if impl in ("chunked", "recurrent") else 0.12)
    sizes = draw_sizes(dice, work, packed)
    if impl == "triton":
        sizes["h"], sizes["d"], sizes["e"] = min(sizes["h"], 4), min(sizes["d"], 16), min(sizes["e"], 16)
        sizes["g"] = math.gcd(sizes["g"], sizes["h"])
    case = Case(number, op, impl, dtype, sizes, {"causal": dice.random() < 0.5})
    _limits(dice, case, packed)
    _choices(dice, case)
    if dice.random() < 0.95:
        _simplify(dice, case)
    else:
        case.simple = False
    _odd(dice, case)
    _lie(dice, case)
    case.patches = _patches(dice, case, cut) if cut else {}
    return case


def _limits(dice: random.Random, case: Case, packed: bool) -> None:
    """Limits, and all else that changes the scores."""
    b, h, t, s = case.shape
    if dice.random() < 0.35:
        case.bias = (h, t + s - 1) if dice.random() < 0.5 else part_of(dice, (b, h, t, s), (0, 1))
    if dice.random() < 0.4:
        shape = part_of(dice, (b, h, t, s), (0, 1, 2, 3))
        shape = (*shape[:2], 1, s) if dice.random() < 0.4 else shape
        case.mask = shape[dice.choice((0, 0, 0, 1, 2, 3)) :]
    if dice.random() < 0.15:
        case.keep = part_of(dice, (b, h, t, s), (0, 1))
    if dice.random() < 0.2:
        case.options["window"] = dice.choice((1, 2, 3, dice.randint(1, max(t, s)), max(t, s)))
    if packed:
        case.edges = edges_of(dice, t)
    if dice.random() < 0.25:
        case.options["scale"] = dice.choice((1.0, 0.3, dice.uniform(0.05, 2), -0.4, 0.0))


def _choices(dice: random.Random, case: Case) -> None:
    """Options of the op itself; its defaults are left unsaid now and then."""
    op, own = case.op, {}
    if op in ("linear", "hyla"):
        own = {"normalise": dice.choice(NORMALISE), "act": dice.choice(ACTS)}
        case.deep = op == "hyla" and dice.random() < 0.3
    elif op in ("relational", "disentangled"):
        own = {"relation_act": dice.choice(RELATION_ACTS)}
    elif op == "abstractor":
        own = {"act": dice.choice(RELATION_ACTS)}
    case.options |= {name: x for name, x in own.items() if dice.random() < 0.9}
    n = case.sizes
    symbols = "symbols" in TENSORS[op]
    # Symbols by offset are spelled out pair by pair by the oracle.
    case.by_offset = symbols and n["t"] * n["s"] * n["h"] * n["e"] <= 2**21 and dice.random() < 0.4
    ties = [""] * 4
    if n["t"] == n["s"]:
        ties += [] if case.by_offset else ["joint"]
        ties += ["q_rel is k_rel"] if op in ("relational", "disentangled") else []
        ties += ["q is k"] if n["g"] == n["h"] else []
    if n["d"] == n["e"] and not case.by_offset:
        ties += ["k is v"]
    case.tie = dice.choice(ties)
    if case.tie == "q_rel is k_rel" and op == "disentangled" and n["g"] != n["h"]:
        case.tie = ""


def _simplify(dice: random.Random, case: Case) -> None:
    """Make it one that the impl says it takes."""
    op, impl, b, s = case.op, case.impl, case.sizes["b"], case.sizes["s"]
    keys = (1, 1, 1, s) if dice.random() < 0.5 else (b, 1, 1, s)
    key_mask = keys if case.mask is not None else None
    if impl == "sdpa":
        case.keep, case.by_offset = None, False
        case.options |= {"abstractor": {"act": "softmax"}, "relational": {"relation_act": "identity"}}.get(op, {})
    elif impl in ("chunked", "recurrent", "state") or (op == "linear" and impl in ("triton", "native")):
        case.options |= {"normalise": "identity"}
        case.options.pop("window", None)
        case.bias, case.keep, case.mask = None, None, key_mask
        if impl == "triton":
            case.options["causal"] = True
        if impl == "state":
            case.options["act"], case.deep, case.edges = "identity", False, None
    elif impl == "triton":
        case.keep, case.mask, case.deep = None, key_mask, False
        case.bias = None if case.bias is None else (case.sizes["h"], case.sizes["t"] + s - 1)
        if op == "hyla":
            case.options["normalise"] = dice.choice(("softmax", "rms_heads", "identity"))
            case.options["act"] = dice.choice(("relu", "identity"))
    if impl == "native":
        case.deep = False
    if op == "relational" and impl in ("triton", "blocked", "native") and case.options.get("relation_act") == "softmax":
        case.options["relation_act"] = "tanh"


def _odd(dice: random.Random, case: Case) -> None:
    """A share of cases is at the edge of what is defined."""
    how, n = dice.random(), case.sizes
    if how < 0.03 and case.edges is None and case.impl != "triton":
        case.odd, case.tie, case.by_offset = "empty", "", False
        n[dice.choice("bts")] = 0
        case.bias = None if case.bias is None else (1, n["h"], n["t"], n["s"])
        case.mask, case.keep = (n["t"], n["s"]) if case.mask else None, None
        summed = case.impl in ("chunked", "recurrent", "state") or (case.op, case.impl) == ("linear", "native")
        if case.simple and summed:
            case.bias, case.mask = None, (n["s"],) if case.mask else None
    elif how < 0.13 and case.bias is not None:
        case.odd = "-inf"
    elif how < 0.33 and case.mask is not None and case.tie in ("", "k is v"):
        case.odd = "nan"
    elif how < 0.5 and case.keep is not None:
        case.odd = "keep"
    elif 0.5 <= how < 0.53 and case.dtype == "float64" and case.impl != "triton":
        case.odd = "jvp"


def _lie(dice: random.Random, case: Case) -> None:
    """How tensors lie in memory, and which of them learn."""
    shapes = shapes_of(case)
    case.layouts = {name: draw_layout(dice, len(shape)) for name, shape in shapes.items()}
    names = [name for name in shapes if name not in ("mask", "keep", "dout")]
    how = dice.random()
    if how < 0.55 or case.odd == "jvp":
        case.learned = tuple(names)
    elif how < 0.95:
        case.learned = tuple(sorted(dice.sample(names, dice.randint(1, len(names)))))
    if case.odd == "keep":
        case.learned = (*case.learned, "keep")
    if case.odd == "nan":
        spread = [name for name, (kind, *_) in case.layouts.items() if kind == "expand" and name in BY_KEY]
        case.layouts |= dict.fromkeys(spread, ("plain",))
    case.sharp = dice.choice((1.0, 1.0, 1.0, 0.1, 3.0))


def _patches(dice: random.Random, case: Case, cut: str) -> dict[str, int]:
    sizes = (1, 2, 3) if cut == "small" else (5, 7, 11, 13, 31)
    b, h, t, s = case.shape
    total, found = b * h * t * s * max(1, case.sizes["e"]), {}
    for file, names in PATCHES.get(case.op, {}).items():
        for name in names:
            if dice.random() < 0.7:
                parts = dice.choice((1, 2, 3, 5, 8, 20, 60))
                found[f"{file}.{name}"] = max(1, total // parts) if name in COUNTS else dice.choice(sizes)
    if dice.random() < 0.5:
        found["tiles.NARROW"] = dice.choice((0, 1, 4, 64))
    return found


# ------------------------------------------------------------------------------------------------------------- numbers
def shapes_of(case: Case) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors that are drawn, by name."""
    b, t, s, h, g, d, e, r, p = (case.sizes[x] for x in "btshgderp")
    sent = (r, r) if case.op == "relational" else (h, g)
    values = (t + s - 1, g, e) if case.by_offset else (b, s, g, e)
    every = {"q": (b, t, h, d), "k": (b, s, g, d), "v": values, "symbols": values, "relation_weight": (h, e, r)}
    every |= {"q_rel": (b, t, sent[0], p), "k_rel": (b, s, sent[1], p)}
    shapes = {name: every[name] for name in TENSORS[case.op]}
    last = "symbols" if "symbols" in shapes else "v"
    if case.tie == "joint":
        shapes = {"qkv": (b, t, h * d + g * d + g * e), **shapes}
    ties = {"joint": ("q", "k", last), "q_rel is k_rel": ("k_rel",), "q is k": ("k",), "k is v": (last,)}
    for name in ties.get(case.tie, ()):
        del shapes[name]
    shapes |= {} if case.bias is None else {"bias": case.bias}
    shapes |= {"value_weight": (h, e, e)} if case.deep else {}
    shapes |= {} if case.mask is None else {"mask": case.mask}
    shapes |= {} if case.keep is None else {"keep": case.keep}
    shapes |= {"scale": ()} if case.scaled else {}
    return shapes | {"dout": (b, t, h, e)}
