"""Processes of our own keep the memory that they free."""

import ctypes
import types

import pytest

import polyhead.cli.train
import polyhead.train
from polyhead.papers.recipes import RECIPES
from polyhead.train import device, trainer
from polyhead.train.__main__ import main


@pytest.fixture
def asked(monkeypatch):
    """What the C library is asked for."""
    for name in device.MALLOPT:
        monkeypatch.delenv(name, raising=False)
    calls = []
    library = types.SimpleNamespace(mallopt=lambda *given: calls.append(given) or 1)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    return calls


def test_the_c_library_is_asked_to_keep_what_is_freed(asked):
    """The numbers are those of malloc.h; glibc ignores a threshold above 32 MB."""
    device.keep_memory()
    assert dict(asked) == {-3: 2**25, -1: 2**31 - 1, -2: 2**26}


@pytest.mark.parametrize("name", device.MALLOPT)
def test_who_has_set_its_variables_is_left_alone(asked, monkeypatch, name):
    monkeypatch.setenv(name, "65536")
    device.keep_memory()
    assert asked == []


def test_other_libraries_are_left_alone(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    device.keep_memory()
    monkeypatch.setattr("os.name", "nt")
    monkeypatch.setattr(ctypes, "CDLL", None)
    device.keep_memory()


def test_processes_of_our_own_do_so_and_no_others(asked, monkeypatch, tmp_path):
    monkeypatch.setattr(trainer, "run", lambda *args, **options: None)
    monkeypatch.setattr(polyhead.train, "run", lambda *args, **options: None)
    monkeypatch.setattr("polyhead.train.store.folder.read_config", lambda path: RECIPES["fuzzy-softmax"]())
    assert main([str(tmp_path), "--quiet"]) == 0
    assert len(asked) == 3
    polyhead.cli.train.train([RECIPES["fuzzy-softmax"]()])
    assert len(asked) == 6
    with device.process(RECIPES["fuzzy-softmax"]()):
        assert len(asked) == 6
