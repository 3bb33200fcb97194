"""The code that is shown is the code that made the output: for every mechanism of the table, by every door of a layer.

The table's own steps (support/referee.py), given the code that is shown and the values, must make the output: so a
mask, window, norm or rotation that one of the two lacks is found.  A new row of the table is tested without a line.
"""

import dataclasses
import itertools

import pytest
import referee
import torch
from torch.testing import assert_close

import polyhead as ph
from polyhead import spec
from polyhead.analysis import codes
from polyhead.layers.cache import LayerCache

ROWS = [pytest.param(row, id=row.op) for row in spec.MECHANISMS]
M, B, T, S = 24, 2, 6, 9
CU = (0, 2, 2, 5, 6)
ACTS = {name: getattr(torch.nn.functional, name) for name in ("relu", "gelu", "silu", "tanh", "sigmoid")}
ACTS["identity"] = torch.clone


def heads_of(row, n):
    """Heads of a row with its `n`-th choice of options, grouped keys and, for odd `n`, its optional tensors."""
    mechanism = getattr(ph, row.config)
    choices = [(), *itertools.product(*row.choices.values())]  # first the defaults
    options = dict(zip(row.options, choices[n % len(choices)], strict=False))
    if options.get("network") == "sequence":  # its layers are not causal: tests/ops/test_sequence_network.py
        options["network"] = "pair"
    fields = {"dim": 4, "value_dim": 7, "kv_heads": 2, **options}
    names = {field.name for field in dataclasses.fields(mechanism)}
    if "value_depth" in names:
        fields["value_depth"] = 1 + n % 2
    if "symbols" in names:
        fields["symbols"] = ph.RelativeSymbols(distance=2) if n % 2 else ph.PositionSymbols()
    return mechanism(4, **fields), {**row.options, **options}


def make(heads, **options):
    torch.manual_seed(0)
    layer = ph.MultiHeadAttention(M, heads, bias=True, max_length=16, dtype=torch.float64, **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.3)
    return layer.eval()


def output_from_code(row, options, group, code, **limits):
    """The heads' output (b t h e), by the table, from a code and the values that were tapped."""
    tapped = {name: getattr(group, "v" if name == "symbols" else name) for name in (*row.tensors, *row.optional)}
    arrays = {name: x.detach().numpy() for name, x in tapped.items() if x is not None}
    return torch.from_numpy(referee.run(row.op, arrays, options=options, code=code.detach().numpy(), **limits))


def check(row, options, layer, args, call_options, limits):
    taps = []
    y, code = layer(*args, return_code=True, taps=taps, **call_options)
    (group,) = taps[0].groups
    assert_close(layer(*args, **call_options), y)
    assert_close(layer.out(group.output.flatten(2)), y)
    assert_close(group.code(), code)
    queries, keys = [0, 2, 2, -1, -1], [0, 3, 1, 2, -1]
    assert_close(codes(taps[0], queries, keys), code[:, :, queries, keys].transpose(1, 2))
    assert_close(output_from_code(row, options, group, code, **limits), group.output, rtol=1e-9, atol=1e-9)
    hidden = ~torch.from_numpy(referee.sight(*code.shape, **limits))
    assert code[hidden].eq(0).all()
    if group.relates:
        related = group.relations()
        hidden = hidden if row.op == "disentangled_attention" else hidden.all(1, keepdim=True).expand_as(related)
        assert options["relation_act"] != "softmax" or related[hidden].eq(0).all()
        if options["relation_act"] in ACTS:
            k_rel = group.k_rel.repeat_interleave(related.shape[1] // group.k_rel.shape[2], 2)
            inner = torch.einsum("btrp,bsrp->brts", group.q_rel, k_rel)
            assert_close(related, ACTS[options["relation_act"]](inner / group.q_rel.shape[-1] ** 0.5))


# Options of the layer, arguments of its call, and limits of the referee.
PACKED = {"cu_seqlens": torch.tensor(CU, dtype=torch.int32)}
CASES = {
    "turned": ({"positions": ph.Rotary(), "qk_norm": True, "causal": True}, {}, {"causal": True}),
    "near": ({"positions": ph.Alibi(), "window": 2}, {}, {"window": 2}),
    "packed": ({"causal": True, "positions": ph.Rotary()}, PACKED, {"edges": CU, "causal": True}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("row", ROWS)
def test_the_output_is_made_of_the_code_that_is_shown(row, case):
    layer_options, call_options, limits = CASES[case]
    x = torch.randn(1 if call_options else B, T, M, dtype=torch.float64)
    for n in range(2):
        heads, options = heads_of(row, 9 * list(CASES).index(case) + n)
        check(row, options, make(heads, **layer_options), (x,), call_options, limits)


@pytest.mark.parametrize("row", ROWS)
def test_to_another_sequence_and_with_a_cache(row):
    heads, options = heads_of(row, 5)
    x, context = torch.randn(B, T, M, dtype=torch.float64), torch.randn(B, S, M, dtype=torch.float64)
    check(row, options, make(heads), (x, context), {}, {})
    check(row, options, make(heads, causal=True, window=4), (x, context), {}, {"causal": True, "window": 4})
    plain, _ = heads_of(row, 0)  # of which linear heads may keep a sum in place of all keys
    layer, cache, taps = make(plain, causal=True, positions=ph.Rotary(), qk_norm=True), LayerCache(), []
    code = layer(x, return_code=True)[1]
    layer(x[:, :4], cache=cache, return_code=True)
    assert_close(layer(x[:, 4:], cache=cache, return_code=True, taps=taps)[1], code[:, :, 4:])
    assert_close(taps[0].groups[0].code(), code[:, :, 4:])
