"""Head groups and positions: arguments that every module accepts, the meta device, compilation."""

import pytest
import torch
from torch._dynamo.utils import counters
from torch.testing import assert_close

import polyhead as ph
from polyhead.layers.heads.groups import HylaHeads, LinearHeads, SoftmaxHeads
from polyhead.layers.positions import AlibiBias, RotaryEmbedding


@pytest.mark.parametrize("kind", [SoftmaxHeads, LinearHeads, HylaHeads])
def test_every_group_takes_a_device_and_a_dtype(kind):
    group = kind(4, 8, device="cpu", dtype=torch.float64)
    q = torch.randn(2, 5, 4, 8, dtype=torch.float64)
    assert group(q, q, q).dtype == torch.float64


def test_positions_take_a_dtype_and_keep_at_least_float32():
    for dtype, wanted in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        assert RotaryEmbedding(8, max_length=4, dtype=dtype).table.value.dtype == wanted
        assert AlibiBias(4, dtype=dtype).slopes.value.dtype == wanted


def test_alibi_after_assigning_a_state_dict_to_a_meta_model():
    """Its slopes are in no state dict, so the first call makes them."""
    model = ph.MultiHeadAttention(16, [ph.Softmax(4)], positions=ph.Alibi())
    empty = ph.MultiHeadAttention(16, [ph.Softmax(4)], positions=ph.Alibi(), device="meta")
    empty.load_state_dict(model.state_dict(), assign=True)
    x = torch.randn(2, 5, 16)
    assert_close(empty(x), model(x), atol=0, rtol=0)


@pytest.mark.compile
def test_linear_heads_by_chunks_compile_with_their_projection():
    """The last chunk is not padded with queries; a matrix product follows in the backward pass."""
    attention = ph.MultiHeadAttention(16, [ph.Linear(8, impl="chunked")], causal=True)
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    for t in (9, 13):
        grads = []
        for run in (compiled, attention):
            x = torch.linspace(-1, 1, 3 * t * 16).view(3, t, 16).requires_grad_()
            torch._dynamo.mark_dynamic(x, 1)
            grads += torch.autograd.grad(run(x).square().sum(), x)
        assert_close(*grads)
    assert counters["stats"]["unique_graphs"] == 1
