"""Native code: how it is built, and what happens where it cannot be.  It belongs to the grids like any impl.

A compiler here is a script that copies what was built before, so that nothing is compiled twice.
"""

import logging
import os
import shutil
import threading
from unittest import mock

import pytest
import torch
from compilers import READY
from filelock import FileLock
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close

from polyhead import ops
from polyhead.ops.call import AttentionCall, Masks
from polyhead.ops.dispatch import choose
from polyhead.ops.native import library as native, prebuilt
from polyhead.ops.native.check import CHECKS
from polyhead.ops.registry import IMPLS, OPS

OPS_WITH_NATIVE = [op for op, impls in IMPLS.items() if "native" in impls]
needs_compiler = pytest.mark.skipif(not READY, reason="no compiler")
COMPILER, COMPILERS = shutil.which("g++") or shutil.which("clang++"), os.environ["PATH"]


@pytest.fixture
def sandbox(monkeypatch, tmp_path):
    """An empty cache, and no compiler but what a test writes."""
    monkeypatch.setenv("POLYHEAD_NATIVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("POLYHEAD_NATIVE", raising=False)
    monkeypatch.setattr(native, "_LIBRARIES", {})
    monkeypatch.setattr(native, "prebuilt_library", lambda source: None)  # nothing came with the package
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path


def write_compiler(sandbox, *lines):
    """A script for the shell; $out is the library that is wanted."""
    count = f"echo called >> {sandbox}/calls"
    script = sandbox / "bin" / "g++"
    script.write_text("\n".join(["#!/bin/sh", count, 'for out in "$@"; do :; done', *lines]) + "\n")
    script.chmod(0o755)


def num_compiler_calls(sandbox):
    return (sandbox / "calls").read_text().count("called") if (sandbox / "calls").exists() else 0


def write_copying_compiler(sandbox, library):
    write_compiler(sandbox, f'/bin/cp {library} "$out"')


@pytest.fixture(scope="module")
def library():
    """One that is built already."""
    if not READY:
        pytest.skip("no compiler")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(native, "prebuilt_library", lambda source: None)
        monkeypatch.setattr(native, "_LIBRARIES", {})
        assert native.load_error("hyla") is None  # else it is there, and wrong
    return native.library_path("hyla")


def test_it_is_compiled_and_checked_once_outside_the_modes_of_its_caller(sandbox, monkeypatch, library, caplog):
    write_copying_compiler(sandbox, library)
    original, errors = native.worst_error, []

    def recorded(*arguments):
        errors.append(original(*arguments))
        return errors[-1]

    monkeypatch.setattr(native, "worst_error", recorded)
    assert native.status("hyla") == "not built yet: compiled on first use"
    for _ in range(2):
        with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16), FakeTensorMode():
            assert native.load_error("hyla") is None
        native._LIBRARIES.clear()  # as in the next process
    assert num_compiler_calls(sandbox) == 1
    assert native.status("hyla") == "built"
    message = f"polyhead: compiling native code for hyla, once ({sandbox / 'cache'})"
    assert [record.message for record in caplog.records] == [message]
    assert not list((sandbox / "cache").glob("*.part"))
    assert len(errors) == 1
    assert 0 < errors[0] < 1e-5


def test_threads_and_processes_do_not_build_it_twice(sandbox, library):
    write_copying_compiler(sandbox, library)
    libraries = []

    def load():
        libraries.append(native._load_or_build("hyla", torch.float32))

    threads = [threading.Thread(target=load) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert num_compiler_calls(sandbox) == 1
    assert len(libraries) == 2
    assert not any(isinstance(library, str) for library in libraries)


def test_a_killed_build_leaves_nothing_in_the_way(sandbox, monkeypatch, library):
    """Its half a library has another name, and its lock died with it."""
    write_copying_compiler(sandbox, library)
    path = native.library_path("hyla")
    path.parent.mkdir()
    half = path.with_suffix(".4711.part")
    half.write_bytes(b"half")
    with monkeypatch.context() as patch, FileLock(path.with_suffix(".lock")):
        patch.setattr(native, "TIMEOUT", 0.0)
        assert "another process holds" in native.load_error("hyla")
    native._LIBRARIES.clear()
    assert native.load_error("hyla") is None
    assert not half.exists()


@pytest.mark.parametrize("damage", ["half of it", "a note that is no text"])
def test_a_damaged_library_is_built_anew(sandbox, library, damage):
    write_copying_compiler(sandbox, library)
    path, data, note = native.library_path("hyla"), library.read_bytes(), library.with_suffix(".sum").read_bytes()
    path.parent.mkdir()
    path.write_bytes(data[:1000] if damage == "half of it" else data)
    path.with_suffix(".sum").write_bytes(note if damage == "half of it" else b"\xff\xfe")
    assert native.load_error("hyla") is None
    assert num_compiler_calls(sandbox) == 1


def test_without_a_home_there_is_none(sandbox, monkeypatch):
    monkeypatch.setattr(native.Path, "home", mock.Mock(side_effect=RuntimeError("Could not determine home directory.")))
    monkeypatch.delenv("POLYHEAD_NATIVE_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    line = "cannot be built: this user has no home folder (set HOME or POLYHEAD_NATIVE_CACHE)"
    assert native.load_error("hyla") == native.status("hyla") == line


FAILURES = {
    "no compiler": ([], "needs a compiler, g++ or clang++, and neither is there"),
    "broken": (["echo x.cpp:1: error: no such luck >&2", "exit 1"], "cannot be compiled: x.cpp:1: error: no such luck"),
    "killed": (["exit 137"], "cannot be compiled: exit code 137"),
    "garbage": (['echo garbage > "$out"'], "cannot be built: "),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_what_cannot_be_built_is_one_line_and_tiles_go_on(sandbox, caplog, failure):
    lines, message = FAILURES[failure]
    if lines:
        write_compiler(sandbox, *lines)
    q, k, v = torch.randn(3, 1, 600, 2, 4)
    chosen = choose(OPS["hyla"], AttentionCall(q, k, v, masks=Masks(causal=True), normalise="rms_heads", act="relu"))
    assert chosen == OPS["hyla"].backends["blocked"].forward
    with pytest.raises(ValueError, match=r"^hyla: impl 'native' .*; use impl='auto' or 'reference'$") as error:
        ops.hyla(q, k, v, impl="native")
    assert message in str(error.value)
    (record,) = [record for record in caplog.records if "no native code" in record.message]
    assert record.levelno == logging.WARNING
    assert message in record.message
    assert "\n" not in record.message


def test_it_can_be_turned_off_and_small_calls_compile_nothing(sandbox, monkeypatch, caplog):
    write_compiler(sandbox)
    ops.hyla(*torch.randn(3, 1, 8, 2, 4))
    monkeypatch.setenv("POLYHEAD_NATIVE", "0")
    assert native.load_error("hyla") == "is turned off by POLYHEAD_NATIVE=0"
    assert native.status("hyla") == "turned off by POLYHEAD_NATIVE=0"
    assert not caplog.records
    assert not num_compiler_calls(sandbox)
    call = AttentionCall(*torch.randn(3, 1, 8, 2, 4))
    tensors, options = OPS["hyla"].backends["native"].arguments(call)
    with pytest.raises(RuntimeError, match=r"^polyhead: native code for hyla is turned off by POLYHEAD_NATIVE=0$"):
        torch.ops.polyhead.hyla_native(*tensors, **options)


# ------------------------------------------------------------------------------------------------------- the self-check
def test_every_op_is_checked():
    assert sorted(check.op for checks in CHECKS.values() for check in checks) == sorted(OPS_WITH_NATIVE)
    assert all(source == native.source_of(check.op) for source, checks in CHECKS.items() for check in checks)


def write_stub_compiler(sandbox):
    """A library that does nothing, and says that it did it."""
    source = sandbox / "stub.cpp"
    source.write_text('extern "C" int polyhead_hyla(const void*, int) { return 0; }\n')
    write_compiler(sandbox, f'PATH={COMPILERS} {COMPILER} -shared -fPIC {source} -o "$out"')


@needs_compiler
def test_wrong_numbers_are_found_before_the_first_use(sandbox, caplog):
    write_stub_compiler(sandbox)
    q, k, v = torch.randn(3, 1, 600, 2, 4)
    message = "computes wrong numbers on this processor (relative error "
    for _ in range(2):  # the second is as in the next process
        with pytest.raises(ValueError, match=r"^hyla: impl 'native' computes wrong numbers .*; use impl='auto'"):
            ops.hyla(q, k, v, impl="native")
        assert_close(ops.hyla(q, k, v), ops.hyla(q, k, v, impl="blocked"), rtol=0, atol=0)
        native._LIBRARIES.clear()
    assert num_compiler_calls(sandbox) == 1
    warnings = [record.message for record in caplog.records if "no native code" in record.message]
    assert len(warnings) == 2
    assert all(message in warning and "\n" not in warning for warning in warnings)


def test_a_check_that_ends_in_an_error_is_made_again_by_the_next_process(sandbox, monkeypatch, library):
    write_copying_compiler(sandbox, library)
    with monkeypatch.context() as patch:
        patch.setattr(native, "worst_error", lambda name, dtype: 1 / 0)
        assert native.load_error("hyla") == "cannot be checked: division by zero"
    native._LIBRARIES.clear()
    assert native.load_error("hyla") is None


def test_a_check_whose_verdict_cannot_be_kept_is_made_again(sandbox, monkeypatch, library):
    write_copying_compiler(sandbox, library)
    assert native.load_error("hyla") is None
    checks = mock.Mock(return_value=0.0)
    monkeypatch.setattr(native, "worst_error", checks)
    monkeypatch.setattr(native, "_verdict_file", mock.Mock(side_effect=OSError("read-only")))
    native._LIBRARIES.clear()
    assert native.load_error("hyla") is None
    assert checks.call_count == 1


# ---------------------------------------------------------------------------------------------------- builds of a wheel
@pytest.fixture
def wheel(sandbox, monkeypatch, library):
    """A package whose wheel has that build under the highest level of this processor; there is no compiler."""
    levels = prebuilt.levels_of_this_processor()
    if not levels:
        pytest.skip("no wheels for such a processor")
    digest = prebuilt.source_digest(prebuilt.FOLDER.parent, "hyla")
    folder = sandbox / "prebuilt"
    folder.mkdir()
    path = folder / prebuilt.library_name("hyla", levels[0], digest)
    path.write_bytes(library.read_bytes())
    monkeypatch.setattr(prebuilt, "FOLDER", folder)
    monkeypatch.setattr(prebuilt, "source_digest", lambda folder, source: digest)
    monkeypatch.setattr(native, "prebuilt_library", prebuilt.prebuilt_library)
    return path


def test_the_wheel_needs_no_compiler(wheel):
    q, k, v = torch.randn(3, 1, 5, 2, 4)
    expected = ops.hyla(q, k, v, impl="reference")
    assert_close(ops.hyla(q, k, v, impl="native"), expected)
    assert native.status("hyla") == "came with the package"


def test_the_verdict_of_the_check_is_kept_in_the_cache(wheel, monkeypatch):
    assert native.load_error("hyla") is None
    monkeypatch.setattr(native, "_LIBRARIES", {})
    monkeypatch.setattr(native, "worst_error", lambda *_: pytest.fail("checked twice"))
    assert native.load_error("hyla") is None


@pytest.mark.parametrize("error", [native.TOLERANCE, float("nan")])
def test_wrong_numbers_of_the_wheel_are_refused(wheel, monkeypatch, error):
    monkeypatch.setattr(native, "worst_error", lambda *_: error)
    assert "computes wrong numbers" in native.load_error("hyla")


def test_the_highest_level_of_the_same_sources_is_chosen_without_flags_of_the_user(wheel, monkeypatch):
    monkeypatch.setattr(prebuilt, "levels_of_this_processor", lambda: ["none", *prebuilt.NEEDED_FLAGS, "aarch64"])
    assert native._prebuilt("hyla", torch.float32) == wheel
    with monkeypatch.context() as patch:
        patch.setenv("POLYHEAD_NATIVE_FLAGS", "-O2")
        assert native._prebuilt("hyla", torch.float32) is None
    monkeypatch.setattr(prebuilt, "source_digest", lambda folder, source: "0" * 16)
    assert native._prebuilt("hyla", torch.float32) is None
