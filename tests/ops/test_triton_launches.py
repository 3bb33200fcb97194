"""Triton's kernels before they run: tiles, grids, strides, what fits on a card, what is compiled in."""

import ast
import dataclasses
import importlib
import inspect
import typing

import pytest
import torch

from polyhead.ops import cards
from polyhead.ops.call import AttentionCall
from polyhead.ops.dispatch import implementation

pytestmark = pytest.mark.skipif(not cards.TRITON, reason="triton is not installed")
META = {"device": "meta"}


def module(name):
    return importlib.import_module(f"polyhead.ops.{name}")


@pytest.fixture(scope="module")
def tiles():
    return module("triton_tiles")


@pytest.fixture(scope="module")
def launches():
    return module("relational.triton.launches")


# ----------------------------------------------------------------------------------------------- what kernels are given
def test_a_window_is_as_wide_as_places_need(tiles):
    """Places and windows are added up in 32 bits; lengths stay below 2^30."""
    assert [tiles.limits(None, None, n, 3).window for n in (2**31 - 1, 5, None)] == [2**30, 5, None]


def test_the_stride_of_a_mask_is_its_own(tiles):
    mask = torch.ones(3, 9, dtype=torch.bool)
    parts = (mask[:, 2:7], 5, 9), (mask[:1], 9, 0), (mask[:, ::2], 5, 5)  # the last is copied
    assert all(tiles.limits(part, None, None, t).sample == stride for part, t, stride in parts)


def test_rows_too_far_apart_are_copied(tiles):
    """Offsets within a tile have 32 bits: 64 rows of 2^26 numbers are beyond them."""
    far, near = (torch.empty_strided((1, 2, 1, 4), (1, n, 4, 1), **META) for n in (2**25, 2**24))
    assert tiles.rowwise(far).stride(1) == 4
    assert tiles.rowwise(near) is near
    heads = torch.empty_strided((1, 2, 3, 4), (1, 4, 2**29 + 1, 1), **META)
    assert tiles.rowwise(heads).stride(2) == 4
    assert tiles.rowwise(heads[:, :, :2]).stride(2) == 2**29 + 1


def test_two_numbers_make_one_without_a_device(tiles, monkeypatch):
    """A tensor of the default device would be read back, which waits for it."""
    monkeypatch.setattr(torch, "tensor", None)
    high, low = tiles.pair(0.1)
    assert (high, low) == (0.10000000149011612, 0.1 - 0.10000000149011612)
    assert high + low == 0.1


@pytest.mark.parametrize(("precision", "wanted"), [("tf32", "tf32"), ("ieee", "ieee"), ("none", "ieee")])
def test_products_of_float32_round_where_pytorchs_own_do(tiles, precision, wanted):
    """The newer switch: once it was set, reading `allow_tf32` raises."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = precision
        assert tiles.dots(torch.float32).precision == wanted
        assert tiles.dots(torch.bfloat16).precision == "ieee"
    finally:
        matmul.fp32_precision = before


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_states_of_half_precision_are_read_to_more_than_ten_bits(dtype):
    """In tf32 4099 is 4096; the interpreter rounds nothing to tf32, so that only the plan can show it."""
    plan, x = module("linear.triton.kernels").plan, torch.empty(1, 3, 2, 16, dtype=dtype, **META)
    assert plan(x, x, 64).in_two
    assert not plan(x.float(), x.float(), 64).in_two


# ---------------------------------------------------------------------------------------------------- what a card holds
HYLA = "takes at most 32 heads and heads x width up to 1024 (padded, torch.float32), not {} x {}"
LITTLE = "takes heads x width up to {} on a card with 99 KB of shared memory, not 8 x {} (padded, {})"
RELATIONAL = "takes widths of heads, symbols and relations up to 128 only, not 129"
FITS = [
    *(("hyla", 227, torch.float32, [(h, d), (h, 4096)], None) for h, d in ((16, 64), (17, 32), (32, 1))),
    *(("hyla", 227, torch.float32, [(h, d)] * 2, HYLA.format(h, d)) for h, d in ((16, 65), (33, 1))),
    ("hyla", 99, torch.bfloat16, [(8, 32)] * 2, None),
    ("hyla", 99, torch.bfloat16, [(8, 33)] * 2, LITTLE.format(512, 33, "torch.bfloat16")),
    ("hyla", 99, torch.float32, [(8, 17)] * 2, LITTLE.format(256, 17, "torch.float32")),
    ("relational", 227, torch.float32, [(2, 128)] * 3, None),
    *(("relational", 227, torch.float32, [(2, 128 + (n == wide)) for n in range(3)], RELATIONAL) for wide in range(3)),
]
"""Op, KB of shared memory, dtype, heads and widths of queries, values and relations, why the kernels do not take them:
so that "auto" passes them over on a card where they could not start."""


@pytest.mark.skipif(not cards.INTERPRETED, reason="needs triton's interpreter")
@pytest.mark.parametrize(("op", "kb", "dtype", "widths", "told"), FITS)
def test_more_than_a_card_holds_is_refused_before_it_is_asked(monkeypatch, op, kb, dtype, widths, told):
    monkeypatch.setattr(module("hyla.triton"), "shared_memory", lambda device: kb << 10)
    q, v, *rel = (torch.zeros(1, 1, *size, dtype=dtype) for size in widths)
    call = AttentionCall(q, q, v, q_rel=rel[0] if rel else None, normalise="rms_heads", act="relu")
    assert implementation(op, "triton").unsupported_reason(call) == told


def test_tf32_is_refused_where_it_does_not_fit(monkeypatch):
    """Found by compiling (benchmarks/ahead_of_time.py): 112 KB for the shortest rows, more for longer ones."""
    hyla = module("hyla.triton")
    monkeypatch.setattr(hyla, "tf32", lambda: True)
    short, long = (torch.empty(1, 1, 8, n, **META) for n in (16, 64))
    told = "takes no 8 x {} in tf32 on a card with {} KB of shared memory"
    for q, kb, width in ((short, 163, 0), (short, 99, 16), (long, 227, 0), (long, 163, 64), (short.bfloat16(), 99, 0)):
        assert hyla.too_large_for(q, kb << 10) == (told.format(width, kb) if width else None)


# -------------------------------------------------------------------------------------------------------- tiles of HYLA
def problem_of(h, dtype):
    x = torch.zeros(1, 4, h, 64, dtype=dtype)
    call = AttentionCall(x, x, x, causal=True, normalise="rms_heads", act="relu")
    return module("hyla.triton.kernels").prepare(call)


@pytest.mark.parametrize(
    ("kernel", "h", "dtype", "kb", "queries", "keys"),
    [
        ("forward", 8, torch.bfloat16, 227, 32, 16),  # few heads leave room for more queries
        ("forward", 8, torch.bfloat16, 99, 16, 16),
        ("forward", 4, torch.float16, 99, 32, 16),
        ("forward", 9, torch.bfloat16, 227, 16, 16),
        ("forward", 8, torch.float32, 227, 16, 16),
        ("queries", 16, torch.float32, 163, 2, 16),  # rows of 4 KB: what an A100 has room for
        ("queries", 16, torch.float32, 227, 8, 16),
        ("keys", 8, torch.bfloat16, 163, 16, 16),
        ("keys", 16, torch.bfloat16, 227, 16, 8),
        ("keys", 8, torch.float32, 163, 16, 8),
    ],
)
def test_tiles_fit_where_there_is_less_memory(kernel, h, dtype, kb, queries, keys):
    """Of heads of width 64, as found by compiling, see benchmarks/ahead_of_time.py; registers allow 16-bit halves."""
    problem = problem_of(h, dtype)
    size = module("hyla.triton.kernels").tile(kernel, dataclasses.replace(problem, shared=kb << 10))
    assert (size.queries, size.keys) == (queries, keys)
    C = problem.config(size)
    assert C.halves == (kernel == "keys" and dtype == torch.bfloat16)
    assert (C.v.tile.width_padded, C.more_v.tile.first) == ((32, 32) if C.halves else (64, 0))


@pytest.mark.parametrize(("h", "held", "between"), [(1, 2, 8), (3, 4, 4), (8, 8, 2), (9, 16, 1), (20, 32, 1)])
def test_heads_are_not_padded_but_where_a_product_sums_over_them(h, held, between):
    """A product sums over 16 terms at least; where there are fewer heads, rows of zeros lie between their values."""
    C = problem_of(h, torch.bfloat16).config(module("hyla.triton.kernels").TileSettings(16, 16, 8, 1))
    assert {(x.heads_padded, x.spread) for x in (C.q, C.k, C.v.tile, C.out.tile)} == {(held, 1)}
    assert {(x.heads_padded, x.spread) for x in (C.v.deep, C.out.deep)} == {(held * between, between)}


# ------------------------------------------------------------------------------------------------ launches of relations
def call_of(launches, tiles, sizes, symbols=None, *, causal=False, dtype=torch.float32):
    """A call whose tensors have no numbers: (b t s h d r p)."""
    b, t, s, h, d, r, p = sizes
    q, k, q_rel, k_rel = (torch.empty(b, n, *size, dtype=dtype, **META) for size in ((h, d), (r, p)) for n in (t, s))
    limits = tiles.limits(None, None, None, t)
    by_offset = symbols is not None
    return launches.RelationalKernelCall(
        q, k, q_rel, k_rel, symbols if by_offset else k, None, limits, causal, 1.0, "relu", by_offset
    )


@pytest.mark.parametrize("r", [1, 2, 17])
def test_no_product_has_a_single_column(launches, tiles, r):
    """Triton compiles stacks of such products wrongly, and its interpreter sees nothing of it."""
    call = call_of(launches, tiles, (2, 3, 5, 4, 3, r, 2))
    assert min(call.plan(part).related.width_padded for part in call.parts()) >= 2


@pytest.mark.parametrize(("b", "t", "programs"), [(8, 1, 256), (1, 1, 256), (8, 512, 256), (200, 1, 200)])
def test_decoding_fills_a_card(launches, tiles, b, t, programs):
    call = call_of(launches, tiles, (b, t, 32_768, 8, 64, 8, 64), causal=True, dtype=torch.bfloat16)
    out = call.q, *(torch.empty(size, dtype=torch.bfloat16, **META) for size in ((b, t, 8, 8), (b, 8, t)))
    (forward,) = launches.forward_launches(call, out, launches.shares(call))
    assert forward.grid == (b * -(-t // forward.args[-1].q.rows), programs // (b * -(-t // 16)))


def test_samples_share_an_axis_of_the_grid_with_tiles(launches, tiles):
    """The other axes of a grid end at 65,535."""
    by_offset = torch.empty(1, 65, 2, 4, **META).expand(70_000, -1, -1, -1)
    call, stat = call_of(launches, tiles, (70_000, 33, 33, 2, 4, 2, 4), by_offset), torch.empty(70_000, 2, 33, **META)
    above = launches.OutputGradients(call.q, call.q_rel, stat, stat)
    found = [*launches.forward_launches(call, (call.q, call.q_rel, stat))]
    found += launches.backward_launches(call, above, launches.PartialGradients.empty(call))
    assert [launch.grid[0] for launch in found] == [3 * 70_000] * 3 + [5 * 70_000]
    assert all(n == 1 for launch in found for n in launch.grid[1:])


# ------------------------------------------------------------------------------------------------- what is compiled in
def handed_on(where, compiled):
    """The compile-time constants that kernels pass to each other, with their types: `f(..., C.a.b)`, C a `compiled`."""
    for call in ast.walk(ast.parse(inspect.getsource(where))):
        if isinstance(call, ast.Call) and hasattr(getattr(where, ast.unparse(call.func), None), "fn"):
            for words in (ast.unparse(arg).split(".") for arg in call.args):
                if words[0] == "C" and len(words) > 1:
                    kind = compiled
                    for word in words[1:]:
                        kind = typing.get_type_hints(kind)[word]
                    yield ".".join(words), kind


@pytest.mark.parametrize(
    ("where", "of", "name"),
    [
        ("hyla.triton.code", "hyla.triton.code", "Config"),
        ("hyla.triton.kernels", "hyla.triton.code", "Config"),
        ("hyla.triton.gradients", "hyla.triton.code", "Config"),
        ("linear.triton.kernels", "linear.triton.kernels", "Compiled"),
        ("relational.triton.kernels", "relational.triton.launches", "Compiled"),
    ],
)
def test_kernels_hand_on_what_the_oldest_compiler_takes(tiles, where, of, name):
    """Triton 3.6 takes numbers, dtypes and `CompiledIn`; no text, no other object."""
    found = dict(handed_on(module(where), getattr(module(of), name)))
    assert tiles.Dots in found.values()
    known = tiles.CompiledIn, tiles.tl.dtype, int, float
    assert not {what: kind for what, kind in found.items() if not issubclass(kind, known)}


def test_what_is_compiled_in_is_no_value_of_a_kernel(tiles):
    """Triton 3.6 needs a type that holds it, and no value at run time."""
    sight, handles = tiles.Sight(16, 32, True), []
    sight._flatten_ir(handles)
    value, cursor = sight.type._unflatten_ir(handles, 0)
    assert (value.value, cursor, handles) == (sight, 0, [])
