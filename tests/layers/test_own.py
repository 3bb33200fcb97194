"""A user's own positions and feed-forward layers: their outputs wherever ours can be used; saving; refusals."""

import dataclasses
import sys
from dataclasses import dataclass

import pytest
import torch
from refusals import refused
from torch import nn
from torch.testing import assert_close
from zoo import fresh

import polyhead as ph
from polyhead.config import extensions, from_dict
from polyhead.config.serial import to_dict
from polyhead.layers.cache import Cache
from polyhead.models.generate.tokens import reach
from polyhead.train import optimiser

F64 = torch.float64
HALVES = torch.tensor([0.5, 0.25], dtype=F64)


@dataclass(frozen=True)
class Slopes(ph.Position):
    """ALiBi as a user may write it, with a learned slope that begins as a constant of the user's module."""

    def parameters(self, heads, dim, max_length):
        return {"slope": HALVES}

    def bias(self, own, distance):
        return -own.slope.view(-1, *[1] * distance.ndim) * distance.abs()


@dataclass(frozen=True)
class Turns(ph.Position):
    """Rotary positions as a user may write them."""

    def rotate(self, own, x, positions):
        return ph.ops.rope(x, positions[..., None])


@dataclass(frozen=True)
class Table(ph.Position):
    """A learned vector for each position."""

    def parameters(self, heads, dim, max_length):
        return {"table": torch.arange(max_length * dim).view(max_length, dim).cos()}

    def vectors(self, own, positions):
        return own.table[positions]


@dataclass(frozen=True)
class Bilinear(ph.FeedForward):
    hidden: int = 6

    def module(self, dim):
        return nn.Sequential(nn.Linear(dim, self.hidden), nn.Tanh(), nn.Linear(self.hidden, dim))


ENDS = {"inputs": ph.Tokens(7), "outputs": ph.Logits(7)}
SETTINGS = ph.TransformerConfig(**ENDS, dim=8, layers=2, heads=[ph.Softmax(1), ph.Hyla(1)], causal=True, max_length=12)


@pytest.fixture(autouse=True)
def found(monkeypatch):
    """This file as a module that another process would find."""
    module = sys.modules.setdefault(__name__, type(sys)(__name__))
    for kind in (Slopes, Turns, Table, Bilinear):
        monkeypatch.setattr(module, kind.__name__, kind, raising=False)
    monkeypatch.setattr(extensions, "_ADDED", {sort: {} for sort in extensions.GROUPS})


def build(**changes):
    return fresh(dataclasses.replace(SETTINGS, **changes))


@pytest.mark.parametrize(("own", "ours"), [(Slopes(), ph.Alibi()), (Turns(), ph.Rotary())])
def test_they_are_ours_where_they_say_the_same(own, ours):
    mine, theirs = build(positions=own), build(positions=ours)
    if isinstance(own, Slopes):
        slopes = theirs.blocks[0].attention.relative.slopes.value
        for block in mine.blocks:
            block.attention.relative.slope.data = slopes.to(F64)
    own_state = {name: value for name, value in mine.state_dict().items() if "slope" not in name}
    theirs.load_state_dict(own_state, strict=False)
    x = torch.randint(7, (2, 9))
    assert_close(mine(x), theirs(x))
    mask, where = torch.ones(2, 9, dtype=torch.bool), torch.arange(9).expand(2, 9).clone()
    mask[0, :3], where[0] = False, (torch.arange(9) - 3).clamp(min=0)
    assert_close(mine(x, mask=mask, positions=where)[mask], theirs(x, mask=mask, positions=where)[mask])
    packed = torch.tensor([0, 4, 9], dtype=torch.int32)
    assert_close(mine(x[:1], cu_seqlens=packed), theirs(x[:1], cu_seqlens=packed))


@pytest.mark.parametrize("own", [Slopes(), Turns(), Table()])
def test_with_a_cache_and_where_they_end(own):
    model, x = build(positions=own), torch.randint(7, (2, 12))
    cache = Cache(2)
    parts = [model(x[:, a:b], cache=cache) for a, b in ((0, 5), (5, 6), (6, 12))]
    assert_close(torch.cat(parts, 1), model(x))
    assert not torch.allclose(model(x), build()(x))  # the positions have an effect
    assigned = ph.Transformer(model.config, device="meta", dtype=F64).eval()
    assigned.load_state_dict(model.state_dict(), assign=True)
    assert_close(assigned(x), model(x))
    ends = isinstance(own, Table)
    assert reach(model.config) == (12 if ends else None)
    if ends:
        refused(lambda: model(torch.randint(7, (1, 13))), "Table: positions must be below max_length = 12 but reach 12")


def test_they_are_registered_saved_initialised_and_decayed():
    assert {ph.register(kind) for kind in (Slopes, Bilinear)} == {Slopes, Bilinear}
    assert extensions.added("positions") == {"Slopes": Slopes}
    assert extensions.added("feedforwards") == {"Bilinear": Bilinear}
    assert not extensions.added("tasks")
    settings = dataclasses.replace(SETTINGS, positions=Slopes(), feedforward=Bilinear(3))
    written = to_dict(settings)
    assert written["positions"]["kind"] == f"{__name__}:Slopes"
    assert from_dict(written) == settings
    model = build(positions=Slopes(), feedforward=Bilinear(3), init="hyla")
    kinds = optimiser.parameter_kinds(model)
    assert kinds["blocks.0.attention.relative.slope"] == "norms"
    assert kinds["blocks.0.feedforward.layer.0.weight"] == "weights"
    slope, other = (block.attention.relative.slope for block in model.blocks)
    layer = model.blocks[0].feedforward.layer
    slope.data.zero_()
    assert other.all()
    before = layer[0].bias.clone()
    model.reset_parameters()
    assert slope.tolist() == [0.5, 0.25]
    assert not torch.equal(layer[0].bias, before)
    assert layer[0].bias.any()  # our presets would make it 0


@dataclass(frozen=True)
class Wide(Slopes):
    def bias(self, own, distance):
        return distance.double()


@dataclass(frozen=True)
class Turned(ph.Rotary):
    def rotate(self, own, x, positions):
        return -x


@dataclass(frozen=True)
class Slow(ph.Rotary):
    """Settings of ours, without a method: no mistake."""

    theta: float = 1e6


@dataclass(frozen=True)
class Plain(ph.Mlp):
    def module(self, dim):
        return nn.Identity()


def test_unusable_parts_are_refused():
    values = to_dict(SETTINGS)
    wide = ph.MultiHeadAttention(8, ph.Softmax(2), positions=Wide())
    assert Slow().theta == 1e6
    for call, text in (
        (Turned, r"^Turned: a class with a method rotate must inherit from ph.Position but inherits from Rotary$"),
        (Plain, r"^Plain: a class with a method module must inherit from ph.FeedForward but inherits from Mlp$"),
        (lambda: build(positions=ph.Position()), "Position: positions have one method of bias, rotate, vectors but"),
        (lambda: build(feedforward=ph.FeedForward()), r"FeedForward: a feed-forward layer has a method module\(dim\)"),
        (lambda: from_dict({**values, "positions": {"theta": 3.0}}), 'positions: "kind" is missing'),
        (lambda: from_dict({**values, "positions": {"kind": "Rotory"}}), "positions: unknown kind 'Rotory'; did you"),
        (lambda: ph.MultiHeadAttention(8, ph.Softmax(2), positions=Table()), "^MultiHeadAttention: positions must be"),
        (lambda: wide(torch.randn(1, 5, 8)), r"Wide: bias must be \(2, 9\) \(heads, then distances\) but is \(9,\)"),
    ):
        refused(call, text)
