"""The table of mechanisms is correct: its arguments are those of the ops, its parameters those of the layers."""

import dataclasses

import pytest
import signatures
import torch
from torch.utils.flop_counter import FlopCounterMode

import polyhead as ph
from polyhead import spec
from polyhead.ops.registry import TENSORS

ROWS = [pytest.param(row, id=row.op) for row in spec.MECHANISMS]


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
    expected = {name: spec.shape(axes, SIZES) for name, axes in row.layer.items()}
    state = ph.MultiHeadAttention(30, [heads], bias=True, max_length=9).state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items() if not name.startswith("symbols.")}
    assert shapes == expected


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize(("dim", "heads"), [(48, 4), (40, 2)])
def test_its_parameters_and_work_are_those_of_a_layer(row, dim, heads):
    """Matrix multiplications of the reference are counted as they run: each multiply-add is two operations."""
    tokens, width = 7, dim // heads
    sizes = {"m": dim, "h": heads, "s": tokens, "r": heads, "d": width, "e": width, "p": width}
    layer = ph.MultiHeadAttention(dim, [getattr(ph, row.config)(heads, impl="reference")], own_symbols=False)
    assert heads * spec.amount(row.size, sizes) == sum(p.numel() for p in layer.parameters())
    x = torch.randn(1, tokens, dim)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        layer(x, symbols=x if row.reads_symbols else None)
    # Of pooled heads the products of code and hidden layer are pooled, not added: no matrix multiplication.
    pooled = tokens * dim if row.config == "Pooled" else 0
    if row.config != "Linear":  # whose work is that of the recurrent form
        assert heads * spec.amount(row.work, sizes) == counter.get_total_flops() // (2 * tokens) + pooled
