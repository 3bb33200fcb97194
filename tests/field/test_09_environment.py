"""Python's switches, the terminal and the environment never break the command line."""

import os
import pty
import subprocess
import sys

import pytest

from polyhead.spec.optional import MissingPackage, optional


def run(*arguments, **environment):
    """A new Python process; returns its output in one text, and its exit code."""
    command = [sys.executable, "-m", "polyhead", *arguments]
    process = subprocess.run(
        command, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120
    )
    return process.stdout.decode(), process.returncode


@pytest.mark.parametrize(
    "arguments", [["--help"], ["eval", "--help"], ["train", "fuzzy-hyla", "--help"], ["list", "tasks"]]
)
def test_python_without_docstrings_shows_help_and_lists(arguments):
    text, code = run(*arguments, PYTHONOPTIMIZE="2")
    assert code == 0, text
    assert "Traceback" not in text


def test_help_in_a_terminal_of_one_column_ends():
    text, code = run("train", "fuzzy-hyla", "--help", COLUMNS="1")
    assert code == 0
    assert "--train.lr" in text


@pytest.mark.parametrize(("arguments", "text"), [(["eval", "--help"], b"usage"), (["list", "tasks"], b"FuzzyLogic")])
def test_no_color_means_none_on_a_terminal(arguments, text):
    reader, writer = pty.openpty()
    environment = {**os.environ, "NO_COLOR": "1", "TERM": "xterm-256color"}
    process = subprocess.Popen(
        [sys.executable, "-m", "polyhead", *arguments], env=environment, stdout=writer, stderr=writer
    )
    os.close(writer)
    printed = b""
    try:
        for chunk in iter(lambda: os.read(reader, 65536), b""):
            printed += chunk
    except OSError:  # Linux says that the other end is closed
        pass
    os.close(reader)
    assert process.wait() == 0
    assert text in printed
    without_italics = printed.replace(b"\x1b[3m", b"")
    assert not any(code in without_italics for code in (b"\x1b[3", b"\x1b[9", b"\x1b[4", b"\x1b[36m")), printed


@pytest.mark.parametrize("redirection", [">&-", "2>&-", ">&- 2>&-"])
def test_closed_output_is_no_error(redirection):
    command = f"{sys.executable} -m polyhead list tasks {redirection}"
    process = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert process.returncode == 0
    assert "Traceback" not in process.stderr


def test_a_folder_of_a_packages_name_is_not_the_package(tmp_path, monkeypatch):
    (tmp_path / "not_installed_here").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(MissingPackage, match="not_installed_here"), optional("track", "it"):
        import not_installed_here  # noqa: F401
