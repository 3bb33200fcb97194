"""What all tasks are made of: streams of seeds, batches, and the base class."""

from dataclasses import dataclass

import torch
from refusals import refusing

from polyhead.tasks import FuzzyLogic
from polyhead.tasks.base import Batch, stream


def test_streams_never_meet():
    names = ["fuzzy_logic/train", "fuzzy_logic/iid", "fuzzy_logic/compositional", "init", "dropout"]
    seeds = {stream(seed, name, step) for seed in range(5) for name in names for step in range(50)}
    assert len(seeds) == 5 * 5 * 50
    assert all(0 <= s < 2**63 for s in seeds)
    assert stream(1, "train", 23) == 3332356567283682511  # in every process and version: batches are drawn by it


def test_the_direction_of_a_users_metric_is_checked():
    @dataclass(frozen=True)
    class Loss(FuzzyLogic):
        better = "Lower"

    with refusing("Loss: unknown better 'Lower'; did you mean 'lower'? (choose from higher, lower)"):
        Loss()


def test_a_batch_without_a_mask_has_real_tokens_only_beside_one_with_a_mask():
    """The masks of all were those of the first: none."""
    x, mask = torch.zeros(2, 3), torch.tensor([[True, True, False], [True, False, False]])
    unpadded, padded = (Batch(x, x, batch_mask, x == 0, {}) for batch_mask in (None, mask))
    for batches in ([unpadded, padded], [padded, unpadded]):
        masks = [mask if batch is padded else torch.ones_like(mask) for batch in batches]
        assert torch.equal(Batch.cat(batches).mask, torch.cat(masks))
    assert Batch.cat([unpadded, unpadded]).mask is None


def test_batches_are_joined_if_they_have_the_same_parts():
    """The labels of the first were kept and all others lost."""
    x = torch.zeros(2, 3)
    plain = Batch(x, x, None, x == 0, {})
    with_rule = Batch(x, x, None, x == 0, {"rule": x})
    with_source = Batch(x, x, None, x == 0, {}, source=x)
    for batches, part in (
        ([plain, with_rule], "latents['rule']"),
        ([with_rule, plain], "latents['rule']"),
        ([plain, with_source], "source"),
    ):
        with refusing(f"Batch: {part} must be in all batches or in none, but is in some of 2"):
            Batch.cat(batches)
    with refusing("Batch: there must be at least one batch"):
        Batch.cat([])
    assert Batch.cat([with_rule, with_rule]).latents["rule"].shape == (4, 3)


def test_a_batch_moves_as_other_libraries_move_it():
    x = torch.zeros(2, 3)
    moved = Batch(x, x, None, x == 0, {"rule": x}, source=x).to(torch.device("meta"), non_blocking=True)
    arrays = (moved.inputs, moved.targets, moved.scored, moved.latents["rule"], moved.source)
    assert all(array.is_meta for array in arrays)
    assert moved.mask is None
    assert moved.source_mask is None
