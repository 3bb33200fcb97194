"""Packed sequences in a layer, and what ops get of a window; that they equal single ones, is in tests/models."""

import torch
import zoo
from gradients import same_with_gradients
from refusals import refused

import polyhead as ph
from polyhead.layers.cache import LayerCache

F64 = torch.float64
M, LENGTHS = 48, (3, 0, 1, 6, 2)  # one is empty, one a single token
CU = torch.tensor([0, 3, 3, 4, 10, 12], dtype=torch.int32)
PLAIN = [ph.Softmax(2), ph.Linear(2), ph.Linear(2, normalise="rms_heads", act="relu"), ph.Hyla(2)]


def make(heads, *, max_length=8, **options):
    return zoo.make_layer(heads, max_length=max_length, **options)


def test_a_mask_and_positions_of_packed_sequences():
    layer = make(PLAIN, positions=ph.Rotary(), window=3)
    x, mask = torch.randn(1, 12, M, dtype=F64, requires_grad=True), torch.rand(1, 1, 1, 12) > 0.4
    positions = torch.tensor([[0, 2, 3, 1, 0, 1, 2, 5, 6, 7, 4, 5]])
    sequences = zip(x.split(LENGTHS, 1), mask.split(LENGTHS, -1), positions.split(LENGTHS, 1), strict=True)
    outputs = [layer(tokens, mask=key_mask, positions=rows) for tokens, key_mask, rows in sequences]
    packed = layer(x, mask=mask, positions=positions, cu_seqlens=CU)
    same_with_gradients(packed, torch.cat(outputs, 1), [x, *layer.parameters()])
    assert torch.equal(layer(x[:, :8], cu_seqlens=CU[:0]), layer(x[:, :8]))  # no edge: one sequence


def test_mistakes_are_one_line():
    x = torch.randn(1, 12, M, dtype=F64)
    layer = make([ph.Softmax(2)], causal=True, positions=ph.Rotary(), max_length=5)
    block = ph.TransformerBlock(make([ph.Softmax(2)]), ph.MlpLayer(M, dtype=F64), dtype=F64)
    far = make([ph.Relational(2, symbols=ph.RelativeSymbols())], max_length=5)
    near = make([ph.Relational(2, symbols=ph.PositionSymbols())], max_length=5)
    for call, message in (
        (lambda: block.attention(x, x, cu_seqlens=CU), r"got x \(b t m\) = \(1, 12, 48\) and a context"),
        (lambda: layer(x, cache=LayerCache(), cu_seqlens=CU), "without a context or a cache, got .* and a cache"),
        (lambda: layer(x.expand(2, -1, -1), cu_seqlens=CU), r"x \(1 t m\) .* got x \(b t m\) = \(2, 12, 48\)$"),
        (lambda: block(x, cu_seqlens=CU, tail=2), "x is several sequences, so tail must be None"),
        (lambda: layer(x, cu_seqlens=CU), "positions must be below max_length = 5 but reach 5"),
        (lambda: near(x, cu_seqlens=CU), "PositionSymbols: positions must be below max_length = 5 but reach 5"),
        (lambda: far(x, cu_seqlens=CU), "RelativeSymbols: positions must be below max_length = 5 but reach 5"),
    ):
        refused(call, message)
