"""Attention, relations and symbols of one input equal loops over the weights; names of tokens."""

import dataclasses
from typing import Any

import numpy as np
import torch
from refusals import refusing

import polyhead as ph
from polyhead.analysis import look
from polyhead.models.build import build
from polyhead.tasks import Maths, ObjectSorting, RelationalGames, SetCards

DUAL = (ph.Softmax(2), ph.Relational(2, symbols=ph.SymbolicAttention(count=6), relations=3))
EASY = Maths(question=40, answer=8)


def model_of(task: ph.Task, heads: Any = DUAL, cross: Any = None, **changes: Any) -> ph.Transformer:
    """A small transformer for a task, in double precision; with an encoder where the task has a source."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"dim": 16, "layers": 2, "heads": heads, "max_length": 64, **changes}
    inputs, outputs = task.ends
    if task.source is not None:
        encoder = ph.TransformerConfig(task.source, outputs, **options)
        options |= {"encoder": encoder, "causal": True, "cross_heads": cross}
    return ph.Transformer(ph.TransformerConfig(inputs, outputs, **options), dtype=torch.float64)


def batch_of(task: ph.Task, size: int = 3) -> ph.Batch:
    batch = task.batch("train", size, seed=0, step=0)
    return batch.map(lambda array: array.double() if array.is_floating_point() else array)


def inputs_of(model: ph.Transformer, batch: ph.Batch, layer: int) -> torch.Tensor:
    """What enters the first norm of a block, found by a hook: the library itself has none."""
    inputs: list[torch.Tensor] = []
    norm = model.blocks[layer].norm1
    handle = norm.register_forward_hook(lambda module, arguments, output: inputs.append(arguments[0]))
    with torch.no_grad():
        model.eval()(batch.inputs, mask=batch.mask)
    handle.remove()
    return inputs[0]


def test_attention_relations_and_symbols_are_those_of_the_equations():
    """One number after the other, from the weights of the second layer."""
    model, batch = model_of(RelationalGames(), dropout=0.5), batch_of(RelationalGames())
    layer = look(model, batch, sample=1)[1]
    x, block = inputs_of(model, batch, 1)[1], model.blocks[1]
    attention, group = block.attention, block.attention.groups[1]
    y = block.norm1(x)
    qkv = y @ attention.qkv.weight.T
    q, k = qkv[:, :16].view(9, 4, 4), qkv[:, 16:32].view(9, 4, 4)
    q_rel, k_rel = (m(y).detach().view(9, 3, -1) for m in (group.q_rel, group.k_rel))
    scores = torch.stack([torch.stack([(q[i] * k[j]).sum(-1) / 2 for j in range(9)]) for i in range(9)])  # (t s h)
    code = scores.softmax(1).permute(2, 0, 1)
    softmax, relational = layer.groups
    assert "array" not in repr(layer)
    np.testing.assert_allclose(softmax.attention, code[:2].detach(), atol=1e-6)
    np.testing.assert_allclose(relational.attention, code[2:].detach(), atol=1e-6)
    assert (softmax.kind, softmax.relations, softmax.assignments) == ("softmax", None, None)
    root = q_rel.shape[-1] ** 0.5
    expected = [[[q_rel[i, r] @ k_rel[j, r] / root for j in range(9)] for i in range(9)] for r in range(3)]
    np.testing.assert_allclose(relational.relations, torch.tensor(expected), atol=1e-6)
    source = model.symbols[0]
    symbol_queries, templates = source.query(x).view(9, 4, 4), source.templates.view(6, 4, 4)
    expected = torch.einsum("shd,nhd->shn", symbol_queries, templates).div(2).softmax(-1)
    np.testing.assert_allclose(relational.assignments, expected.detach(), atol=1e-6)


def test_an_encoder_decoder_shows_the_characters_and_no_padding():
    model, batch = model_of(EASY, cross=(ph.Relational(4, symbols=ph.SymbolicAttention(count=6)),)), batch_of(EASY)
    layers = look(model, batch, sample=2, task=EASY)
    question, answer = EASY.texts(batch)[2]
    assert [layer.name for layer in layers[:4]] == ["encoder 1", "encoder 2", "decoder 1", "cross 1"]
    encoder, decoder, cross = layers[0], layers[2], layers[3]
    assert encoder.senders == encoder.receivers == cross.senders == tuple(question.replace(" ", "␣"))
    assert decoder.senders == decoder.receivers == cross.receivers == ("start", *answer)
    assert np.triu(decoder.groups[0].attention, 1).max() == 0
    (crossing,) = cross.groups
    assert crossing.relations.shape == (4, len(answer) + 1, len(question))
    assert crossing.assignments.shape == (len(question), 4, 6)
    np.testing.assert_allclose(crossing.attention.sum(-1), np.ones((4, len(answer) + 1)), rtol=1e-5)


def test_padding_is_left_out():
    model = ph.Transformer(ph.TransformerConfig(ph.Tokens(9), ph.Classes(2), dim=16, heads=DUAL)).double()
    tokens, mask = torch.tensor([[3, 1, 4, 0], [1, 5, 0, 0]]), torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]]).bool()
    batch = ph.Batch(tokens, torch.zeros(2, 1), mask, torch.ones(2, 1).bool(), {})
    padded = look(model, batch, sample=0)[0]
    unpadded = look(model, ph.Batch(tokens[:1, :3], torch.zeros(1, 1), None, torch.ones(1, 1).bool(), {}))[0]
    assert padded.senders == padded.receivers == ("3", "1", "4")
    for a, b in zip(padded.groups, unpadded.groups, strict=True):
        np.testing.assert_allclose(a.attention, b.attention, atol=1e-9)


def test_names_that_readers_use():
    cards, games = SetCards(), RelationalGames()
    batch = batch_of(cards)
    names = look(model_of(cards), batch, task=cards)[0].senders
    assert names == tuple("".join(map(str, card)) for card in batch.latents["cards"][0].tolist())
    task = ObjectSorting(length=4)
    batch = batch_of(task)
    layers = look(model_of(task), batch, task=task)
    assert layers[0].senders == tuple(f"{i + 1}: #{n}" for i, n in enumerate(batch.latents["objects"][0].tolist()))
    assert layers[-1].receivers == ("start", *(str(n + 1) for n in batch.targets[0, :-1].tolist()))
    inputs = dataclasses.replace(games.ends[0], class_token=True)
    model = ph.Transformer(ph.TransformerConfig(inputs, ph.Classes(2), dim=16, heads=DUAL))
    assert look(model, games.batch("iid", 2, seed=0, step=0))[0].senders == ("class", *"123456789")


def test_mistakes_are_one_line():
    task = RelationalGames()
    model, batch = model_of(task), batch_of(task)
    baseline = build(ph.CoRelNetConfig(*task.ends, dim=8))
    for call, message in (
        (lambda: look(model, batch, sample=3), "look: sample must be an integer in [-3, 3) but is 3"),
        (lambda: look(baseline, batch), "look: the model must have attention (taps=...), got a CoRelNet"),
    ):
        with refusing(message):
            call()
