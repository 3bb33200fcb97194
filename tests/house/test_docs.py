"""The documents are right: Python blocks run, links lead somewhere."""

import re
import runpy
import shlex
import sys

import pytest
import torch
from scripts import DOCUMENTS, ROOT, short_name

from polyhead import extensions
from polyhead.cli import main
from polyhead.cli.dispatch import VERBS
from polyhead.papers.recipes import STUDIES

EXTRAS = ("wandb", "diffusers", "timm", "torchvision", "lm_eval")
"""Packages that pages name and the suite does without."""
FENCE = re.compile(r"^(<!-- trains -->\n)?```(python|bash)\n(.*?)^```", re.M | re.S)


def blocks(path, language):
    """(line, code) of the fenced blocks of a language, but for those behind <!-- trains -->, which take long."""
    text = path.read_text(encoding="utf-8")
    for match in FENCE.finditer(text):
        if match[2] == language and not match[1]:
            yield text[: match.start()].count("\n") + 2, match[3]


@pytest.mark.usefixtures("quick_jax")
@pytest.mark.parametrize("path", [path for path in DOCUMENTS if list(blocks(path, "python"))], ids=short_name)
def test_python_blocks_run_in_order(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.path_importer_cache, ".", raising=False)  # the folder of an earlier page
    monkeypatch.setattr(extensions, "_ADDED", {sort: {} for sort in extensions.GROUPS})
    torch.manual_seed(0)
    namespace = {"__name__": "__document__"}
    for line, code in blocks(path, "python"):
        try:
            exec(compile("\n" * (line - 1) + code, str(path), "exec"), namespace)
        except ModuleNotFoundError as error:
            if error.name not in EXTRAS:
                raise
            return  # later blocks build on this one


def test_the_example_keeps_the_meaning_of_the_mask():
    example = runpy.run_path(str(ROOT / "examples" / "swap_heads.py"))
    change, losses = example["main"](steps=40)
    assert change < 1e-5
    assert sum(losses[-5:]) / 5 < 0.5 * losses[0]


def test_the_example_of_selecting_and_relating_keeps_its_bound():
    example, generator = runpy.run_path(str(ROOT / "examples" / "select_then_relate.py")), torch.Generator()
    rows = example["construction"](generator.manual_seed(1), 1000)
    assert all(row["excess"] < 1e-12 for row in rows)
    errors = [row["error"] for row in rows]
    assert errors == sorted(errors, reverse=True)


def commands():
    """The words of every `polyhead ...` that a page shows."""
    lines = set()
    for path in DOCUMENTS:
        for _, code in blocks(path, "bash"):
            for line in re.sub(r"\\\n\s*", " ", code).splitlines():
                if line.startswith("polyhead ") and "--tyro" not in line:
                    lines.add(line.removeprefix("polyhead ").split("  #")[0])
    return sorted(lines)


@pytest.mark.parametrize("command", commands())
def test_commands_on_pages_are_understood(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command, comments=True)
    verb = words[0]
    assert verb in VERBS
    if verb == "train":
        assert main([*words, "--print"]) in (0, None), capsys.readouterr().err
        return
    for topic in ([], [verb], words[:2]):
        assert main([*topic, "--help"]) == 0
    explained = capsys.readouterr().out
    if verb == "list":
        assert words[1] in explained
    if verb == "reproduce":
        assert words[1] in STUDIES
    for word in words:
        if word.startswith("--") and not word.startswith("--model.heads"):
            assert word.replace("_", "-") in explained, word


@pytest.mark.parametrize("path", [*DOCUMENTS, *sorted((ROOT / "record").glob("*.md"))], ids=short_name)
def test_links_lead_to_files_that_github_shows(path):
    """Anchors, and pages in no menu, are for `make docs`, where each warning is an error."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)#\s]+)[^)\s]*\)", text):
        if not target.startswith(("https://", "http://")):
            assert (path.parent / target).is_file(), target
            assert not target.endswith(".html"), target
