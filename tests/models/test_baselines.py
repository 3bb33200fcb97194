"""CoRelNet, PrediNet and the original Abstractor: equality to loops, use as an encoder, padding, bad input."""

import math
from dataclasses import replace

import pytest
import torch
from problems import draw
from refusals import refused
from some import some

import polyhead as ph
from polyhead.models.build import build
from polyhead.tasks import ObjectSorting

F64 = torch.float64
IMAGES, TWO = ph.Patches((3, 36, 36), (12, 12), norm=True), ph.Classes(2)


def randomised(settings):
    """A network in float64 whose parameters, biases and gains included, are random."""
    model = build(settings, dtype=F64).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=F64)
    return model


def softmax(numbers):
    powers = [math.exp(number) for number in numbers]
    return [power / sum(powers) for power in powers]


def dot(a, b):
    return sum(p * q for p, q in zip(a.tolist(), b.tolist(), strict=True))


# ------------------------------------------------------------------------------------------ loops
@pytest.mark.parametrize("normalised", [True, False])
def test_corelnet_is_its_equation(normalised):
    model = randomised(ph.CoRelNetConfig(ph.Vectors(5), ph.Classes(3), dim=6, length=4, hidden=7, softmax=normalised))
    x = draw(2, 4, 5)
    for row, output in some(zip(x, model(x), strict=True)):
        e = []
        for item in row:
            hidden = model.embed.up.weight @ model.inputs.linear(item) + model.embed.up.bias
            e.append(model.embed.down.weight @ hidden.clamp(min=0) + model.embed.down.bias)
        numbers = []
        for i in range(4):
            products = [dot(e[i], e[j]) for j in range(4)]
            numbers += softmax(products) if normalised else products
        y = (model.compare.weight @ torch.tensor(numbers, dtype=F64) + model.compare.bias).clamp(min=0)
        y = (model.hidden.weight @ y + model.hidden.bias).clamp(min=0)
        torch.testing.assert_close(output[0], model.outputs(y))


def test_predinet_is_its_equation():
    settings = ph.PrediNetConfig(ph.Vectors(5), ph.Classes(3), dim=6, length=4, heads=3, relations=2, key_dim=5)
    model = randomised(settings)
    x = draw(2, 4, 5)
    for row, output in some(zip(x, model(x), strict=True)):
        objects = []
        for features, location in zip(row, (-1.0, -1 / 3, 1 / 3, 1.0), strict=True):
            objects.append(torch.cat((model.inputs.linear(features), torch.tensor([location], dtype=F64))))
        related = []
        for head in range(3):
            attended = []
            for query in (model.query1, model.query2):
                q = (query.weight @ torch.cat(objects))[5 * head : 5 * head + 5]
                code = softmax([dot(q, model.key.weight @ item) for item in objects])
                attended.append(sum(weight * item for weight, item in zip(code, objects, strict=True)))
            compared = model.relations.weight @ (attended[0] - attended[1])
            related += [compared, attended[0][-1:], attended[1][-1:]]
        y = (model.hidden.weight @ torch.cat(related) + model.hidden.bias).clamp(min=0)
        torch.testing.assert_close(output[0], model.outputs(y))


@pytest.mark.parametrize("act", ["softmax", "sigmoid", "identity"])
@pytest.mark.parametrize("self_attention", [True, False])
def test_the_abstractor_is_its_equation(act, self_attention):
    settings = {"dim": 6, "layers": 2, "heads": 2, "head_dim": 4, "hidden": 7, "max_length": 5}
    settings |= {"self_attention": self_attention, "encoder_layers": int(self_attention)}
    model = randomised(ph.AbstractorConfig(ph.Vectors(5), ph.Classes(2), **settings, act=act))

    def attend(attention, heads, x, **options):
        reference = ph.MultiHeadAttention(6, heads, bias=True, own_symbols=False, dtype=F64).eval()
        reference.load_state_dict(attention.state_dict())
        return reference(x, mask=mask[:, None, None], **options)

    vectors, mask = draw(2, 4, 5), torch.tensor([[True] * 4, [True, True, False, True]])
    x, s, softmax_heads = model.inputs.linear(vectors), model.symbols.table[:4], ph.Softmax(2, dim=4, value_dim=4)
    for block in model.blocks:
        x = block.norm1(x + attend(block.attention, softmax_heads, x))
        x = block.norm2(x + block.feedforward.down(block.feedforward.up(x).relu()))
    s = s.expand(2, -1, -1)
    for layer in model.layers:
        if self_attention:
            s = layer.norm0(s + attend(layer.self_attention, softmax_heads, s))
        heads = ph.Abstractor(2, dim=4, value_dim=4, act=act)
        s = layer.norm1(s + attend(layer.relational_attention, heads, x, symbols=s))
        s = layer.norm2(s + layer.feedforward.down(layer.feedforward.up(s).relu()))
    mean = (s * mask[..., None]).sum(1, keepdim=True) / mask.sum(1)[:, None, None]
    torch.testing.assert_close(model(vectors, mask), model.outputs.linear(mean))


# ------------------------------------------------------------------------------------------ as an encoder
def test_a_decoder_reads_the_abstract_states():
    task = ObjectSorting(length=4, examples=8)
    encoder = ph.AbstractorConfig(task.source, dim=16, heads=2, layers=1)
    model = build(ph.TransformerConfig(*task.ends, dim=16, causal=True, max_length=4, encoder=encoder)).eval()
    batch, taps = task.batch("train", 3, seed=0, step=0), []
    outputs = model(batch.inputs, source=batch.source, taps=taps)
    states = model.encoder(batch.source)
    torch.testing.assert_close(model(batch.inputs, encoded=states), outputs)
    assert (model(batch.inputs, encoded=states.flip(0)) - outputs).abs().max() > 1e-3
    assert [layer.name for layer in taps] == ["encoder 0", "decoder 0", "cross 0", "decoder 1", "cross 1"]
    task.loss(outputs, batch).backward()
    assert model.encoder.symbols.table.grad.abs().sum() > 0
    settings = replace(model.config, encoder=replace(encoder, outputs=ph.Classes(2)))
    refused(lambda: build(settings), "an encoder returns its stream, so its outputs must be None")


# ------------------------------------------------------------------------------------------ bad input
def test_mistakes_are_one_line():
    model, long = build(ph.CoRelNetConfig(ph.Vectors(5), ph.Classes(2), length=4)), torch.zeros(2, 4, 5)
    short = build(ph.AbstractorConfig(ph.Vectors(5), dim=8, max_length=3))
    for call, message in (
        (lambda: model(long[:, :3]), r"CoRelNet: the number of objects must be 4 \(length\), got 3"),
        (lambda: model(long, mask=torch.ones(2, 4).bool()), "CoRelNet: it compares 4 objects, .* so mask must be None"),
        (lambda: short(long), "4 positions but max_length is 3"),
        (lambda: ph.CoRelNetConfig(ph.Vectors(5), TWO), r"length \(the number of objects\) must be given"),
        (lambda: ph.CoRelNetConfig(IMAGES, TWO, length=8), "length is 8 but the image has 9 patches"),
        (lambda: ph.CoRelNetConfig(IMAGES, ph.Classes(2, pool="class")), r"outputs must be Classes\(pool='mean'\)"),
        (lambda: ph.AbstractorConfig(IMAGES, symbols=ph.RelativeSymbols()), "symbols must be one for each object"),
        (lambda: ph.AbstractorConfig(IMAGES, symbols=ph.PositionSymbols(8)), "stream, of width 128, not 8"),
    ):
        refused(call, message)


def test_an_abstractor_takes_no_padding_for_a_neighbour():
    model = randomised(ph.AbstractorConfig(ph.Vectors(3), dim=8, symbols=ph.RelationalSymbols(count=4)))
    x, padding = draw(2, 5, 3), draw(2, 2, 3, seed=1)
    mask = torch.arange(7).expand(2, -1) < 5
    torch.testing.assert_close(model(torch.cat((x, padding), 1), mask)[:, :5], model(x))
