"""What the kernels' building blocks do outside of kernels."""

import ast
import importlib
import inspect
import typing

import pytest
import torch

from polyhead.ops import cards

pytestmark = pytest.mark.skipif(not cards.TRITON, reason="triton is not installed")


@pytest.fixture(scope="module")
def tiles():
    return importlib.import_module("polyhead.ops.triton_tiles")


def test_a_window_is_as_wide_as_places_need(tiles):
    """Places and windows are added up in 32 bits; lengths stay below 2^30."""
    assert tiles.limits(None, None, 2**31 - 1, 3).window == 2**30
    assert tiles.limits(None, None, 5, 3).window == 5
    assert tiles.limits(None, None, None, 3).window is None


def test_the_stride_of_a_mask_is_its_own(tiles):
    mask = torch.ones(3, 9, dtype=torch.bool)
    assert tiles.limits(mask[:, 2:7], None, None, 5).sample == 9
    assert tiles.limits(mask[:1], None, None, 9).sample == 0
    assert tiles.limits(mask[:, ::2], None, None, 5).sample == 5  # a copy


def test_rows_too_far_apart_are_copied(tiles):
    """Offsets within a tile have 32 bits: 64 rows of 2^26 numbers are beyond them."""
    far = torch.empty_strided((1, 2, 1, 4), (1, 2**25, 4, 1), device="meta")
    assert tiles.rowwise(far).stride(1) == 4
    near = torch.empty_strided((1, 2, 1, 4), (1, 2**24, 4, 1), device="meta")
    assert tiles.rowwise(near) is near
    heads = torch.empty_strided((1, 2, 3, 4), (1, 4, 2**29 + 1, 1), device="meta")
    assert tiles.rowwise(heads).stride(2) == 4
    assert tiles.rowwise(heads[:, :, :2]).stride(2) == 2**29 + 1


def test_two_numbers_make_one_without_a_device(tiles, monkeypatch):
    """A tensor of the default device would be read back, which waits for it."""
    monkeypatch.setattr(torch, "tensor", None)
    high, low = tiles.pair(0.1)
    assert high + low == 0.1
    assert (high, low) == (0.10000000149011612, 0.1 - 0.10000000149011612)


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
    kernels = importlib.import_module("polyhead.ops.linear.triton.kernels")
    x = torch.empty(1, 3, 2, 16, dtype=dtype, device="meta")
    assert kernels.plan(x, x, 64).in_two
    assert not kernels.plan(x.float(), x.float(), 64).in_two


def test_tf32_is_refused_where_it_does_not_fit(monkeypatch):
    """Found by compiling (benchmarks/ahead_of_time.py): 112 KB for the shortest rows, more for longer ones."""
    hyla = importlib.import_module("polyhead.ops.hyla.triton")
    monkeypatch.setattr(hyla, "tf32", lambda: True)
    short, long = torch.empty(1, 1, 8, 16, device="meta"), torch.empty(1, 1, 8, 64, device="meta")
    assert hyla.too_large_for(short, 163 << 10) is None
    assert hyla.too_large_for(short, 99 << 10) == "takes no 8 x 16 in tf32 on a card with 99 KB of shared memory"
    assert hyla.too_large_for(long, 227 << 10) is None
    assert hyla.too_large_for(long, 163 << 10) == "takes no 8 x 64 in tf32 on a card with 163 KB of shared memory"
    assert hyla.too_large_for(short.bfloat16(), 99 << 10) is None


def handed_on(module, compiled):
    """What kernels hand to each other of what is compiled in, with its type: `f(..., C.a.b)`, C a `compiled`."""
    for call in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(call, ast.Call) and hasattr(getattr(module, ast.unparse(call.func), None), "fn"):
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
    """Triton 3.6 takes numbers, dtypes and what says that it is no value of the kernel; no text, no other object."""
    compiled = getattr(importlib.import_module(f"polyhead.ops.{of}"), name)
    found = dict(handed_on(importlib.import_module(f"polyhead.ops.{where}"), compiled))
    assert tiles.Dots in found.values()
    known = tiles.CompiledIn, tiles.tl.dtype, int, float
    assert not {what: kind for what, kind in found.items() if not issubclass(kind, known)}


def test_what_is_compiled_in_is_no_value_of_a_kernel(tiles):
    """What triton 3.6 asks of it: a type that holds it, and no number of run time."""
    sight, handles = tiles.Sight(16, 32, True), []
    sight._flatten_ir(handles)
    value, cursor = sight.type._unflatten_ir(handles, 0)
    assert (value.value, cursor, handles) == (sight, 0, [])
