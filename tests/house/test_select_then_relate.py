"""The example of docs/select_then_relate.md: the bound holds for each input, width helps, selection is not enough."""

import pathlib
import runpy

import torch

import polyhead as ph

EXAMPLE = runpy.run_path(str(pathlib.Path(__file__).parents[2] / "examples" / "select_then_relate.py"))


def generator():
    return torch.Generator().manual_seed(1)


def test_the_error_of_constructed_weights_stays_within_its_bound_and_falls():
    rows = EXAMPLE["construction"](generator(), 1000)
    assert all(row["excess"] < 1e-12 for row in rows)
    errors = [row["error"] for row in rows]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-3 < 0.1 < errors[1]


def test_wider_feature_maps_err_less_and_relating_is_what_a_softmax_head_lacks():
    narrow, wide = EXAMPLE["training"](generator(), (4, 64), 400)
    assert wide["error"] < 0.7 * narrow["error"]
    alone = EXAMPLE["contrast"](generator(), 100)
    assert wide["error"] < 0.8 * alone["softmax"]


def test_the_original_relational_attention_says_nothing_when_symbols_are_alike():
    x, y = torch.randn(5, 1, 3), torch.randn(5, 4, 3)
    layer = ph.MultiHeadAttention(
        3, ph.Abstractor(1, dim=3, value_dim=1, symbols=ph.PositionSymbols(dim=1)), own_symbols=False
    )
    out = layer(x, y, symbols=torch.ones(1, 4, 1))
    torch.testing.assert_close(out, out[:1].expand_as(out))
