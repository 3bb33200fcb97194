"""The table of mechanisms is correct: its steps in NumPy equal the ops, and its arguments are the ops' arguments."""

import dataclasses
import itertools
import re

import numpy as np
import pytest
import referee
import signatures
import torch
from problems import make_arguments, make_problem

import polyhead as ph
from polyhead import spec
from polyhead.ops.registry import TENSORS, resolve
from polyhead.spec.shapes import LETTERS

ROWS = [pytest.param(row, id=row.op) for row in spec.MECHANISMS]
CASES = list(
    itertools.product([(1, 4), (5, 3), (3, 5)], (None, "rows", "keys"), (False, True), (None, "offset", "dense"))
)


@pytest.mark.parametrize("row", ROWS)
def test_it_speaks_the_alphabet(row):
    axes = [step.einsum for step in row.steps] + [*row.tensors.values(), *row.optional.values()]
    assert set(re.findall(r"\w+", " ".join(axes))) <= set(LETTERS)
    known, made = {*row.tensors, *row.optional}, set()
    for step in row.steps:
        assert set(step.reads) <= known | made
        made.add(step.result)
    assert row.steps[-1].result == "out"


@pytest.mark.parametrize("row", ROWS)
def test_its_arguments_are_those_of_the_op(row):
    op = row.folder
    signatures.check(getattr(ph.ops, row.op), row, row.torch_only)
    assert tuple(row.tensors) == TENSORS[op]
    assert getattr(ph, row.config)(2).heads == 2


SIZES = {"m": 30, "h": 4, "g": 2, "d": 3, "e": 5, "r": 6, "p": 7}


@pytest.mark.parametrize("row", ROWS)
def test_its_parameters_are_those_of_the_layers(row):
    kind = getattr(ph, row.config)
    fields = {field.name for field in dataclasses.fields(kind)}
    wide = {"dim": 3, "value_dim": 5, "kv_heads": 2, "relations": 6, "relation_dim": 7, "value_depth": 2}
    heads = kind(4, **{name: value for name, value in wide.items() if name in fields})
    wanted = {name: spec.shape(axes, SIZES) for name, axes in row.layer.items()}
    state = ph.MultiHeadAttention(30, [heads], bias=True, max_length=9).state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items() if not name.startswith("symbols.")}
    assert shapes == wanted


@pytest.mark.parametrize("row", ROWS)
def test_its_steps_give_what_the_op_gives(row):
    op = row.folder
    choices = [dict(zip(row.options, each, strict=True)) for each in itertools.product(*row.choices.values())]
    for n, ((t, s), mask, causal, bias) in enumerate(CASES):
        torch.manual_seed(n)
        limits = {"window": 2} if n % 5 == 0 else {"edges": (0, 1 + n % 2, 2, 2 + n % 2)} if n % 5 == 1 else {}
        t, s = (3, 3) if "edges" in limits else (t, s)
        how = choices[7 * n % len(choices)]
        if how.get("network") == "sequence":  # it reads all queries
            limits, causal, mask = {}, False, "rows" if mask else None
        qkv, options = make_problem(t, s, mask=mask, causal=causal, bias=bias, keep=n % 3 == 0, **limits)
        tensors = [x.detach() for x in make_arguments(op, qkv, offset=row.reads_symbols and n % 2 == 0)]
        extra = {"value_weight": torch.randn(4, 5, 5).double()} if row.optional and n % 2 else {}
        scale = None if n % 4 else 0.3
        wanted = resolve(op, "reference")(*tensors, **options, **how, **extra, scale=scale)
        arrays = {name: x.numpy() for name, x in {**dict(zip(row.tensors, tensors, strict=True)), **extra}.items()}
        given = {x: None if options[x] is None else options[x].detach().numpy() for x in ("bias", "mask", "keep")}
        came = referee.run(row.op, arrays, options=how, **given, causal=causal, **limits, scale=scale)
        np.testing.assert_allclose(came, wanted.detach().numpy(), rtol=1e-10, atol=1e-10)
