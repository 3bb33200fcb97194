"""Blocks against their equations, dropout included; the tail under a mask of its own rows."""

import pytest
import torch
from refusals import refused
from torch import nn
from torch.testing import assert_close

import polyhead as ph
from polyhead.layers.cache import LayerCache

F64 = torch.float64


class Double(nn.Module):
    """In place of dropout: it doubles its input, so its place in the sum is visible."""

    def forward(self, x):
        return 2 * x


def make(**options):
    torch.manual_seed(0)
    attention = ph.MultiHeadAttention(16, [ph.Softmax(2), ph.Hyla(2)], causal=True, dtype=F64)
    block = ph.TransformerBlock(attention, ph.MlpLayer(16, dtype=F64), dtype=F64, **options).eval()
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.5)
    return block


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("norm_order", ["pre", "post"])
def test_a_block_is_its_equation(norm_order, norm):
    """With cross-attention between the two, which has a norm of its own; the masks are each for its own sequence."""
    cross = ph.MultiHeadAttention(16, [ph.Softmax(1), ph.Relational(1)], own_symbols=False, dtype=F64)
    block = make(cross=cross, norm=norm, norm_order=norm_order)
    block.dropout = Double()
    x, context, symbols = (torch.randn(2, t, 16, dtype=F64) for t in (5, 7, 7))
    mask, context_mask = torch.rand(5, 5) > 0.3, torch.rand(2, 1, 1, 7) > 0.3
    expected = x
    for sublayer_norm, sublayer in (
        (block.norm1, lambda z: block.attention(z, mask=mask)),
        (block.norm_cross, lambda z: cross(z, context, mask=context_mask, symbols=symbols)),
        (block.norm2, block.feedforward),
    ):
        if norm_order == "pre":
            expected = expected + 2 * sublayer(sublayer_norm(expected))
        else:
            expected = sublayer_norm(expected + 2 * sublayer(expected))
    arguments = {"context_mask": context_mask, "context_symbols": symbols}
    assert_close(block(x, context, mask=mask, **arguments), expected)
    assert_close(block(x, context, mask=mask, tail=2, **arguments), expected[:, -2:])


def test_the_tail_keeps_the_rows_of_its_mask_and_dropout():
    """`keep` may have the rows of all positions or those of the tail."""
    block, x, keep = make(), torch.randn(2, 6, 16, dtype=F64), torch.rand(2, 4, 6, 6, dtype=F64)
    for arguments in ({"mask": torch.rand(2, 4, 6, 6) > 0.4}, {"mask": torch.rand(6) > 0.4}, {"keep": keep}):
        expected = block(x, **arguments)[:, -2:]
        assert_close(block(x, tail=2, **arguments), expected)
    assert_close(block(x, tail=2, keep=keep[:, :, -2:]), expected)
    assert not torch.allclose(block(x)[:, -2:], expected)
    symbols = ph.Relational(2, symbols=ph.RelationalSymbols(neighbours=2))
    block.attention = ph.MultiHeadAttention(16, symbols, causal=True, dtype=F64)
    mask = torch.tensor([[1, 1, 0, 0, 1, 1]]) > 0  # of keys, also beside a single row
    assert_close(block(x, mask=mask, tail=1), block(x, mask=mask)[:, -1:])
    mask = torch.rand(2, 1, 6, 6) > 0.4  # of pairs: one row of it hides no neighbours either
    for rows in ({}, {"keep": keep[:, :2]}, {"keep": keep[:, :2, -1:]}):
        expected = block(x, mask=mask, **({"keep": keep[:, :2]} if rows else {}))[:, -1:]
        assert_close(block(x, mask=mask, tail=1, **rows), expected)


def test_mistakes_are_one_line():
    block, x, counts = make(), torch.randn(2, 6, 16, dtype=F64), "tail counts positions from 0, so"
    refused(lambda: block(x, mask=torch.ones(2, 6, dtype=bool), tail=2), r"mask must broadcast to .*mask\[:, None")
    decoder = ph.TransformerBlock(block.attention, block.feedforward, cross=block.attention)
    whole = ph.MultiHeadAttention(16, [ph.Pooled(2, network="sequence")], dtype=F64)
    for call, message in (
        (lambda: block(x, positions=torch.arange(6)[None], tail=2), f"{counts} positions cannot"),
        (lambda: block(x, cache=LayerCache(), tail=2), f"{counts} a cache cannot"),
        (lambda: block(x, tail=0), r"tail must be 1 to 6 \(the positions\) but is 0"),
        (lambda: block(x, tail=7), r"tail must be 1 to 6 \(the positions\) but is 7"),
        (lambda: block(x, x), "context must be None"),
        (lambda: block(x, context_mask=torch.ones(1, dtype=bool)), "context_mask must come with a context"),
        (lambda: block(x, context_symbols=x), "context_symbols must come with a context"),
        (lambda: decoder(x), "context must be given"),
        (lambda: make(cross=whole), "cross-attention with network='sequence' would read later queries"),
        (lambda: make(norm_order="prae"), r"unknown norm_order 'prae'; did you mean 'pre'\?"),
    ):
        refused(call, f"^TransformerBlock: {message}")
