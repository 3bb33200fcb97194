"""Operations of a step against PyTorch's counter; the share of a card's peak."""

import types

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import polyhead as ph
from polyhead.train import loop, run
from polyhead.train.member import Member
from polyhead.train.store.folder import read_metrics
from polyhead.train.throughput import Throughput, operations, peak


def config(**changes):
    shape = {"dim": 16, "layers": 2, "heads": ph.Softmax(4), "feedforward": ph.Swiglu(24), "max_length": 12, **changes}
    outputs = shape.pop("outputs", ph.Logits(50))
    return ph.TransformerConfig(ph.Tokens(50), outputs, **shape)


@pytest.mark.parametrize("tied", [False, True])
def test_operations_are_those_of_pytorchs_counter(tied):
    """Without a causal mask, whose half the reference does not save; two operations a multiply-add."""
    heads = (ph.Softmax(4, dim=3, value_dim=5, kv_heads=2, impl="reference"),)
    model = ph.Transformer(config(heads=heads, outputs=ph.Logits(50, tied=tied)))
    tokens = torch.randint(50, (3, 12), generator=torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    assert counter.get_total_flops() == operations(model, 12) * 3 * 12


def cost(**changes):
    return operations(ph.Transformer(config(**changes)), 12)


def test_causal_tokens_see_half_the_keys_and_a_window_less():
    each = 6 * 2 * 4 * (4 + 4)  # of a key: two layers, four heads, widths of keys and values
    assert cost(window=12) == cost()
    for changes, keys in (({"causal": True}, 6), ({"causal": True, "window": 4}, 4), ({"window": 3}, 4)):
        assert cost() - cost(**changes) == each * (12 - keys)


def test_only_the_chosen_experts_count():
    one, three = (cost(layers=1, feedforward=ph.Experts(4, k, hidden=8, bias=False)) for k in (1, 3))
    assert three - one == 6 * 2 * (2 * 16 * 8)


def test_relations_count():
    two, five = (cost(layers=1, heads=ph.Relational(2, relations=n, relation_dim=4)) for n in (2, 5))
    weights = 2 * 16 * 4 + 2 * 8  # of one relation: its two projections, its row for each head
    assert five - two == 3 * 6 * (weights + 12 * (2 * 1 + 4))


CARDS = {
    "NVIDIA H200": 989e12,
    "NVIDIA H200 NVL": 835e12,
    "NVIDIA H200 MIG 1g.18gb": None,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA L4": 121e12,
    "NVIDIA L40S": None,
    "NVIDIA GeForce RTX 4090": 165.2e12,
    "NVIDIA GeForce RTX 4090 Laptop GPU": None,
}


def test_the_peak_of_a_card():
    assert {card: peak(card) for card in CARDS} == CARDS


class Words(ph.tasks.PairwiseOrder):
    """Of tokens, as far as a row of training is concerned."""

    ends = (ph.Tokens(50), ph.Logits(50))
    length = 12


def test_rates_in_a_row(monkeypatch):
    """Nothing where inputs are no tokens; on a card that is known its share, which a CPU stands in for here."""
    model, task = ph.Transformer(config(causal=True)), Words()
    run = ph.Run(task=task, model=model.config, train=ph.Train(batch_size=5))
    assert Throughput(run, model, torch.device("cpu")).row(2.0) == {"tokens_per_second": 120.0}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    row = Throughput(run, model, torch.device("cuda")).row(2.0)
    assert row == {"tokens_per_second": 120.0, "share_of_peak": pytest.approx(120 * operations(model, 12) / 312e12)}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    assert Throughput(run, model, torch.device("cuda")).row(2.0).keys() == {"tokens_per_second"}
    logic = ph.tasks.FuzzyLogic()
    other = ph.Run(task=logic, model=ph.TransformerConfig(*logic.ends))
    assert Throughput(other, ph.Transformer(other.model), torch.device("cpu")).row(2.0) == {}


def test_steps_per_second_are_those_of_training_alone(tiny, tmp_path, monkeypatch):
    """By a clock of which a step takes 2 s, a batch of an evaluation 100 and a checkpoint 50."""
    now = [7.0]
    draw, save = ph.tasks.FuzzyLogic.batch, Member.save

    def batch(task, split, *given, **where):
        now[0] += 2.0 if split == "train" else 100.0
        return draw(task, split, *given, **where)

    def saving(*given):
        now[0] += 50.0
        return save(*given)

    monkeypatch.setattr(loop, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(ph.tasks.FuzzyLogic, "batch", batch)
    monkeypatch.setattr(Member, "save", saving)
    settings = tiny(tmp_path, log_every=5, evaluate=("iid", "novel"))
    whole = run(settings, progress=False)
    rows = [row for row in read_metrics(tmp_path) if row["kind"] == "train"]
    assert [row["step"] for row in rows] == [1, 5, 10, 12]
    assert [row["steps_per_second"] for row in rows] == [0.5] * 4
    others = 50 + 2 * 2 * 100  # saved after 5 steps, two batches of two splits evaluated after 6
    assert [row["seconds"] for row in rows] == [2, 10, 20 + others, 24 + others + 50]
    (tmp_path / "result.json").unlink()
    assert run(settings, progress=False, resume=True).seconds >= whole.seconds > 24 + others  # it continues from there
