"""Native code of the wheel: the right build is chosen, checked once, and refused where it computes wrong numbers."""

import pytest
import torch

from polyhead import ops
from polyhead.ops.native import library, prebuilt


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A package whose wheel has the build of HYLA that this machine has made, under the highest level here."""
    levels = prebuilt.levels_of_this_processor()
    if not levels or library.load_error("hyla") is not None:
        pytest.skip("no native code on this machine")
    with pytest.MonkeyPatch.context() as own:  # nothing came with the package
        own.setattr(library, "prebuilt_library", lambda source: None)
        library._load_or_build("hyla", torch.float32)
    own_build = library.library_path("hyla")
    folder = tmp_path / "prebuilt"
    folder.mkdir()
    digest = prebuilt.source_digest(prebuilt.FOLDER.parent, "hyla")
    path = folder / prebuilt.library_name("hyla", levels[0], digest)
    path.write_bytes(own_build.read_bytes())
    monkeypatch.setattr(prebuilt, "FOLDER", folder)
    monkeypatch.setattr(prebuilt, "source_digest", lambda folder, source: digest)
    monkeypatch.setattr(library, "_LIBRARIES", {})
    monkeypatch.setenv("POLYHEAD_NATIVE_CACHE", str(tmp_path / "cache"))
    return path


def test_the_wheel_needs_no_compiler(wheel, monkeypatch):
    monkeypatch.setattr(library, "_find_compiler", lambda: None)
    q, k, v = torch.randn(3, 1, 5, 2, 4)
    expected = ops.hyla(q, k, v, impl="reference")
    torch.testing.assert_close(ops.hyla(q, k, v, impl="native"), expected)
    assert library.status("hyla") == "came with the package"


def test_the_verdict_of_the_check_is_kept_in_the_cache(wheel, monkeypatch):
    assert library.load_error("hyla") is None
    monkeypatch.setattr(library, "_LIBRARIES", {})
    monkeypatch.setattr(library, "worst_error", lambda *_: pytest.fail("checked twice"))
    assert library.load_error("hyla") is None


@pytest.mark.parametrize("error", [library.TOLERANCE, float("nan")])
def test_wrong_numbers_of_the_wheel_are_refused(wheel, monkeypatch, error):
    monkeypatch.setattr(library, "worst_error", lambda *_: error)
    assert "computes wrong numbers" in library.load_error("hyla")


def test_a_build_of_other_sources_is_not_taken(wheel, monkeypatch):
    monkeypatch.setattr(prebuilt, "source_digest", lambda folder, source: "0" * 16)
    assert prebuilt.prebuilt_library("hyla") is None


def test_the_highest_level_that_the_processor_has_is_chosen(wheel, monkeypatch):
    monkeypatch.setattr(prebuilt, "levels_of_this_processor", lambda: ["none", *prebuilt.NEEDED_FLAGS, "aarch64"])
    assert prebuilt.prebuilt_library("hyla") == wheel


def test_flags_of_the_user_ask_for_a_build(wheel, monkeypatch):
    monkeypatch.setenv("POLYHEAD_NATIVE_FLAGS", "-O2")
    assert library._prebuilt("hyla", torch.float32) is None
