"""Weights of the course as people save them, and tokens that a model does not have."""

import course_oracle as oracle
import pytest
import torch
from refusals import refusing
from torch.testing import assert_close

from polyhead.compat import cs336

STATE = oracle.state_dict(vocab=50, layers=2, dim=16, hidden=64)
TOKENS = torch.arange(12).view(2, 6)


def logits(state):
    return cs336.load(state, heads=4, theta=1e4, context=8)(TOKENS)


SAVED = {
    "under DDP": {f"module.{key}": value for key, value in STATE.items()},
    "compiled": {f"_orig_mod.{key}": value for key, value in STATE.items()},
    "compiled under DDP": {f"module._orig_mod.{key}": value for key, value in STATE.items()},
    "DDP, compiled": {f"_orig_mod.module.{key}": value for key, value in STATE.items()},
    "NumPy": {key: value.numpy() for key, value in STATE.items()},
}


@pytest.mark.parametrize("saved", SAVED)
def test_weights_load_as_they_were_saved(saved):
    assert_close(logits(SAVED[saved]), logits(STATE), rtol=0, atol=0)


def test_a_whole_checkpoint_is_refused_with_the_name_of_its_part():
    checkpoint = {"model": SAVED["under DDP"], "optimizer": {"state": {}}, "iteration": 7}
    with refusing("cs336.load: a state dict must come, got a whole checkpoint; give its entry 'model'"):
        logits(checkpoint)
    with refusing("cs336.load: lm_head.weight must be an array of numbers, got str"):
        logits({**STATE, "lm_head.weight": "weights"})


@pytest.mark.parametrize("token", [50, -1])
def test_a_token_outside_the_vocabulary_is_named(token):
    model = cs336.TransformerLM(50, 8, 16, 2, 4, 64)
    with refusing(f"Embedding: tokens must be in [0, 50), got {token}"):
        model(torch.tensor([[1, token]]))
    with refusing("Embedding: token_ids must be of a signed integer dtype but is torch.uint8"):
        model(torch.ones(50, dtype=torch.uint8))  # an index of uint8 is a mask
