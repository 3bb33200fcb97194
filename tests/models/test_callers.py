"""The transformer under a compiler, an exporter, vmap and checkpointing; repeated backward passes."""

import copy
import io
from dataclasses import replace

import pytest
import torch
import zoo
from torch.testing import assert_close
from zoo import fresh as build

import polyhead as ph
from polyhead import config

F64 = torch.float64
RELATIONAL = ph.Relational(1, symbols=ph.SymbolicAttention())
BIDIRECTIONAL = ph.TransformerConfig(
    ph.Vectors(5), ph.Values(2), dim=24, layers=2, heads=[ph.Hyla(2), RELATIONAL, ph.Softmax(1)], positions=ph.Rotary()
)
DECODER = replace(BIDIRECTIONAL, inputs=ph.Tokens(7), outputs=ph.Logits(7), causal=True, positions=ph.RelativeBias(8))
DECODER = replace(DECODER, heads=zoo.FEW["all 1"], dim=zoo.width(zoo.FEW["all 1"]))
RELATIVE_SYMBOLS = replace(DECODER, heads=[ph.Relational(2, symbols=ph.RelativeSymbols(distance=5))], dim=16)


def inputs_of(settings, t, b=2):
    return torch.randint(7, (b, t)) if isinstance(settings.inputs, ph.Tokens) else torch.randn(b, t, 5, dtype=F64)


@pytest.mark.compile
@pytest.mark.parametrize(("settings", "saved"), [(DECODER, False), (RELATIVE_SYMBOLS, True)], ids=["all", "saved"])
def test_exported_saved_and_loaded_it_takes_any_batch_and_length(settings, saved):
    """Up to 4096, beyond the sizes at which "auto" changes its mind; made of PyTorch's own operations only."""
    settings = replace(settings, layers=1, max_length=4096)
    model, t = build(settings), torch.export.Dim("t", max=4096)
    sizes = {0: torch.export.Dim("b"), 1: t}
    program = torch.export.export(model, (inputs_of(settings, 12),), dynamic_shapes={"inputs": sizes})
    assert not [node for node in program.graph.nodes if "polyhead" in str(node.target)]
    if saved:
        file = io.BytesIO()
        torch.export.save(program, file)
        file.seek(0)
        program = torch.export.load(file)
    loaded = program.module()
    for batch, length in ((3, 2), (1, 400)):
        x = inputs_of(settings, length, batch)
        assert_close(loaded(x), model(x), atol=1e-9, rtol=1e-9)


TIED = replace(DECODER, outputs=ph.Logits(7, tied=True, scaled=True), positions=ph.Rotary())


def test_a_tied_table_is_one_after_any_loading():
    model, x = build(TIED), inputs_of(TIED, 6)
    state = model.state_dict()
    with torch.device("meta"):
        empty = ph.Transformer(TIED, dtype=F64).eval()
    for loaded, assign in (
        (copy.deepcopy(empty).to_empty(device="cpu"), False),
        (empty, True),
        (ph.Transformer(TIED, dtype=F64).eval(), False),
    ):
        loaded.load_state_dict(state, assign=assign)
        assert loaded.inputs.table.weight is loaded.outputs.weight
        assert torch.equal(loaded(x), model(x))

    class Table(torch.nn.Embedding):
        """A table of another library."""

    larger = Table(9, TIED.dim)
    model.inputs.table = larger
    model.double()
    assert model.outputs.weight is larger.weight
    assert model(x).shape[-1] == 9
    model.outputs = torch.nn.Sequential(model.outputs)
    model.load_state_dict(model.state_dict(), assign=True)
    assert model.outputs[0].weight is model.inputs.table.weight
    other = build(TIED)
    other.inputs = model.inputs
    assert other.outputs.weight is model.inputs.table.weight
    assert other(x).shape[-1] == 9


@pytest.mark.compile
@pytest.mark.parametrize("positions", [ph.Rotary(), ph.RelativeBias(), ph.Alibi(), ph.Sinusoidal()], ids=repr)
def test_off_the_meta_device_by_assigning_it_compiles_at_once(positions):
    """A compiled graph cannot compute the constants, which no state has."""
    settings = replace(DECODER, heads=(ph.Softmax(2),), dim=24, layers=1, positions=positions)
    model, x = build(settings), inputs_of(settings, 6)
    empty = ph.Transformer(settings, dtype=F64, device="meta").eval()
    empty.load_state_dict(model.state_dict(), assign=True)
    torch._dynamo.reset()
    assert_close(torch.compile(empty, fullgraph=True, backend="eager")(x), model(x))
    layer = ph.MultiHeadAttention(24, ph.Softmax(2), positions=ph.Rotary(), device="meta")
    layer.load_state_dict(ph.MultiHeadAttention(24, ph.Softmax(2)).state_dict(), assign=True)
    assert not any(buffer.is_meta for buffer in layer.buffers())


# -------------------------------------------------------------------------------------------------------- checkpointing
WITH_DROPOUT = replace(BIDIRECTIONAL, dropout=0.3, residual_dropout=0.2, feedforward=ph.Experts(3, 2, hidden=8))


def loss_and_gradients(model, x):
    torch.manual_seed(1)
    loss = model(x).square().mean() + model.auxiliary_loss()
    return [loss.detach(), *torch.autograd.grad(loss, [x, *model.parameters()])]


def test_checkpointing_changes_no_bit():
    """Dropout draws the same again, the balance of experts counts; every block runs twice, in training only."""
    x, calls = inputs_of(WITH_DROPOUT, 6).requires_grad_(), []
    plain, checkpointed = build(WITH_DROPOUT).train(), build(replace(WITH_DROPOUT, checkpoint=True)).train()
    for block in checkpointed.blocks:
        block.register_forward_pre_hook(lambda block, _: calls.append(list(checkpointed.blocks).index(block)))
    for actual, expected in zip(loss_and_gradients(checkpointed, x), loss_and_gradients(plain, x), strict=True):
        assert torch.equal(actual, expected)
    assert calls == [0, 1, 1, 0]
    calls.clear()
    taps = []
    checkpointed(x, taps=taps).sum().backward()
    checkpointed.eval()(x).sum().backward()
    assert calls == [0, 1, 0, 1]
    assert len(taps) == 2
    assert config.digest(replace(WITH_DROPOUT, checkpoint=True)) == config.digest(WITH_DROPOUT)
    plain, checkpointed = (build(replace(BIDIRECTIONAL, checkpoint=again)).train() for again in (False, True))
    gradients = [torch.func.grad(lambda x, model=model: model(x).sum())(x.detach()) for model in (plain, checkpointed)]
    assert torch.equal(*gradients)  # torch.func cannot recompute


# ------------------------------------------------------------------------------------------------------------ gradients
def test_every_trained_parameter_gets_a_gradient():
    """DistributedDataParallel waits for each.  Hidden features leave the joint projections without rows."""
    heads = [ph.Relational(2, hidden=8), ph.Abstractor(1, hidden=8)]
    model = build(
        replace(DECODER, heads=heads, dim=24, bias=True, encoder=replace(BIDIRECTIONAL, dim=24), cross_heads=heads)
    )
    model(inputs_of(DECODER, 6), source=inputs_of(BIDIRECTIONAL, 4)).square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None] == []
    assert model.blocks[0].attention.qkv.weight.shape == model.blocks[0].cross.qkv.weight.shape == (0, 24)
