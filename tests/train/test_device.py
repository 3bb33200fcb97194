"""A run has settings of its own, and the caller's come back after it."""

import contextlib
import threading

import pytest
import torch
from run_folders import same

import polyhead.train
from polyhead.train import device, trainer


def test_the_caller_keeps_threads_dtype_determinism_and_random_state(tiny, tmp_path, at_step):
    """A run has its own: a digest has one result."""
    torch.manual_seed(5)
    expected_numbers, threads, states_in_run = torch.rand(2), torch.get_num_threads(), []

    def state():
        strict = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        return torch.get_num_threads(), torch.get_default_dtype(), *strict

    at_step(0, lambda: states_in_run.append(state()))
    torch.manual_seed(5)
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        trainer.run(tiny(tmp_path, threads=2, steps=1, deterministic=True), progress=False)
        assert states_in_run == [(2, torch.float32, True, False)]
        assert state() == (threads, torch.float64, True, True)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.rand(2), expected_numbers)


@pytest.mark.parametrize(("precision", "no_gradients"), [("fp32", torch.inference_mode), ("bf16", torch.no_grad)])
def test_the_callers_defaults_change_neither_a_run_nor_its_model(precision, no_gradients, tiny, tmp_path):
    expected = trainer.run(tiny(tmp_path / "one", steps=3, precision=precision), progress=False)
    with torch.device("meta"), torch.autocast("cpu", torch.bfloat16), no_gradients():
        result = trainer.run(tiny(tmp_path / "two", steps=3, precision=precision), progress=False)
        assert torch.empty(1).is_meta
        loaded = polyhead.train.load_model(result.folder)[1]
    assert result.scores == expected.scores
    same(expected.folder, result.folder)
    torch.set_default_dtype(torch.bfloat16)  # restored after each test
    half = polyhead.train.load_model(result.folder)[1]
    for model in (loaded, half):
        assert {(p.dtype, p.device.type) for p in model.parameters()} == {(torch.float32, "cpu")}


def test_threads_that_load_models_keep_the_callers_dtype():
    """Their contexts overlap, but are not nested."""
    torch.set_default_dtype(torch.float64)  # restored after each test
    threads = contextlib.ExitStack(), contextlib.ExitStack()
    for thread in threads:
        thread.enter_context(device.usual_defaults())
    threads[0].close()
    assert torch.get_default_dtype() == torch.float32
    threads[1].close()
    assert torch.get_default_dtype() == torch.float64


def test_two_threads_do_not_train_at_once(tiny, tmp_path, at_step):
    """They would share random numbers: each run would have the dropout of the other."""
    errors = []

    def meanwhile():
        try:
            trainer.run(tiny(tmp_path / "second", seed=8), progress=False, again=True)
        except ValueError as error:
            errors.append(str(error))

    def start():
        thread = threading.Thread(target=meanwhile)
        thread.start()
        thread.join()

    trainer.run(tiny(tmp_path / "second", seed=8), progress=False)
    at_step(3, start)
    trainer.run(tiny(tmp_path / "first"), progress=False)
    assert (tmp_path / "second" / "result.json").exists()
    assert errors == ["train: another thread of this process trains a run; give each a process (polyhead sweep)"]
    start()
    assert len(errors) == 1
    assert (tmp_path / "second" / "result.json").exists()


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_the_callers_matmul_precision_does_not_change_a_run(tiny, tmp_path, uninterrupted, at_step, precision):
    """It stays the caller's after the run.  In the run it is the run's own, also where processors round alike."""
    precision_in_run = []
    at_step(0, lambda: precision_in_run.append(device.SWITCH.fp32_precision))
    torch.set_float32_matmul_precision(precision)
    try:
        polyhead.train.run(tiny(tmp_path), progress=False)
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision("highest")
        for backend in (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul):
            backend.fp32_precision = "none"
    assert precision_in_run == [device.FAST if device.onednn_is_exact() else device.STOCK]
    same(tmp_path, uninterrupted)
