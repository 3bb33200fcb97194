"""Plain words: sentences of pages, of documented docstrings and of help texts keep the rules that a machine can check.

A sentence has at most 25 words and two numbers.
"""

import inspect
import pkgutil
import re

import pytest
from scripts import PAGES, ROOT, short_name

from polyhead.cli import dispatch

FROZEN = ROOT / "docs" / "results" / "protocol.md"
"""Written before its runs, and not edited since."""

GENERATED = [path for path in PAGES if path.name == "README.md"]
"""Pages of results: a script writes them, with settings and seeds as lists."""

WRITTEN = [path for path in PAGES if path != FROZEN and path not in GENERATED]
WRITTEN += [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]

MAX_WORDS = 25
MAX_NUMBERS = 2

NUMBER = re.compile(r"(?<![\w.#/-])[+−-]?\d[\d,]*(?:\.\d+)?")
NO_QUANTITY = re.compile(
    r"\((?:[^(),]+, )+[^(),]+\)|± ?[\d.]+"  # a tuple; an error
    r"|20\d\d(?:-\d\d-\d\d)?|arXiv:[\d.]+|\b(?:Python|torch|PyTorch|JAX|transformers) [\d.]+"
)


def prose(text):
    """The text of a page or docstring without code, tables, pictures, headings, formulas and addresses."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    text = re.sub(r"^ *>>> .*?(?:\n\s*\n|\Z)", "\n\n", text, flags=re.M | re.S)  # with what an example prints
    text = re.sub(r"<!--.*?-->|\$\$.*?\$\$|\$[^$\n]+\$", "", text, flags=re.S)
    text = re.sub(r"^\s*(\||!\[|#|polyhead ).*$", "\n", text, flags=re.M)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    return re.sub(r"`[^`]*`", "X", text)


def sentences(text):
    """Paragraphs, entries of lists and indented blocks, cut into sentences."""
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )|\n(?=    )", prose(text)):
        for sentence in re.split(r"(?<=[.!?:;])\**\s+(?=[A-Z*\[(\"“a-z])", paragraph):
            if sentence.strip():
                yield " ".join(sentence.split())


def faults(text):
    """(what is wrong, sentence) of every sentence that breaks a rule."""
    for sentence in sentences(text):
        if len(re.findall(r"[A-Za-z][\w'’-]*", sentence)) > MAX_WORDS:
            yield f"more than {MAX_WORDS} words", sentence
        if len(NUMBER.findall(NO_QUANTITY.sub("", sentence))) > MAX_NUMBERS:
            yield f"more than {MAX_NUMBERS} numbers", sentence


def documented():
    """The names that the pages of the API show."""
    names = []
    for path in sorted((ROOT / "docs" / "api").glob("*.md")):
        names += re.findall(r"^\.\. auto\w+:: (\S+)", path.read_text(encoding="utf-8"), re.M)
    return names


@pytest.mark.parametrize("page", WRITTEN, ids=short_name)
def test_sentences_of_a_page_are_plain(page):
    assert not list(faults(page.read_text(encoding="utf-8")))


@pytest.mark.parametrize("name", documented())
def test_sentences_of_a_documented_docstring_are_plain(name):
    if name.startswith("polyhead.jaxside"):
        pytest.importorskip("jax")
    if name.startswith("polyhead.compat.huggingface"):
        pytest.importorskip("transformers")
    assert not list(faults(inspect.getdoc(pkgutil.resolve_name(name)) or ""))


@pytest.mark.parametrize("verb", dispatch.VERBS)
def test_sentences_of_a_help_text_are_plain(verb):
    assert not list(faults(inspect.getdoc(dispatch.VERBS[verb]).partition("\nArgs:")[0]))


@pytest.mark.parametrize(
    ("sentence", "fault"),
    [("HYLA has 0.1, 0.2 and 0.3.", "numbers"), (" ".join(["word"] * (MAX_WORDS + 1)) + ".", "words")],
)
def test_a_planted_fault_is_reported(sentence, fault):
    ((kind, _),) = faults(sentence)
    assert fault in kind
