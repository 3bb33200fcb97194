"""Blocks against their two equations, dropout included; the tail under a mask of its own rows."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from polyhead.config import Hyla, Softmax
from polyhead.layers.attention import MultiHeadAttention
from polyhead.layers.block import TransformerBlock
from polyhead.layers.feedforward import MLP

F64 = torch.float64


class Double(nn.Module):
    """In place of dropout: whatever passes through it is seen in the sum."""

    def forward(self, x):
        return 2 * x


def make(norm_order, norm="layer"):
    torch.manual_seed(0)
    attention = MultiHeadAttention(16, [Softmax(2), Hyla(2)], dtype=F64)
    block = TransformerBlock(attention, MLP(16, dtype=F64), norm=norm, norm_order=norm_order, dropout=0.5, dtype=F64)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.5)
    return block


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("norm_order", ["pre", "post"])
def test_a_block_is_its_equation(norm_order, norm):
    block, x = make(norm_order, norm), torch.randn(2, 5, 16, dtype=F64)
    block.dropout = Double()
    attention, feedforward, norm1, norm2 = block.attention, block.feedforward, block.norm1, block.norm2
    if norm_order == "pre":
        y = x + 2 * attention(norm1(x))
        wanted = y + 2 * feedforward(norm2(y))
    else:
        y = norm1(x + 2 * attention(x))
        wanted = norm2(y + 2 * feedforward(y))
    assert_close(block(x), wanted)


@pytest.mark.parametrize("norm_order", ["pre", "post"])
def test_the_tail_keeps_the_rows_of_its_mask(norm_order):
    block, x = make(norm_order).eval(), torch.randn(2, 6, 16, dtype=F64)
    for mask in (torch.rand(6, 6) > 0.4, torch.rand(2, 4, 6, 6) > 0.4, torch.rand(6) > 0.4):
        assert_close(block(x, mask=mask, tail=2), block(x, mask=mask)[:, -2:])


def test_the_tail_keeps_the_rows_of_its_dropout():
    """`keep` may have the rows of all positions or those of the tail."""
    block, x = make("pre").eval(), torch.randn(2, 6, 16, dtype=F64)
    keep = torch.rand(2, 4, 6, 6, dtype=F64)
    wanted = block(x, keep=keep)[:, -2:]
    assert_close(block(x, tail=2, keep=keep), wanted)
    assert_close(block(x, tail=2, keep=keep[:, :, -2:]), wanted)
    assert not torch.allclose(block(x)[:, -2:], wanted)


def test_mistakes_are_one_line():
    block, x = make("pre"), torch.randn(2, 6, 16, dtype=F64)
    with pytest.raises(ValueError, match=r"^TransformerBlock: tail counts positions from 0, so positions cannot"):
        block(x, positions=torch.arange(6)[None], tail=2)
    with pytest.raises(ValueError, match=r"^TransformerBlock: unknown norm_order 'prae'; did you mean 'pre'\?"):
        make("prae")
