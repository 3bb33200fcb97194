"""Features that need a package of an extra: without it, one line names the extra."""

import json
import re
import subprocess
import sys
import tomllib

import pytest
from scripts import ROOT

from polyhead.spec.optional import MissingPackage, optional

FEATURES = """
import importlib.machinery, json, pathlib, sys

missing = set("sklearn matplotlib scipy PIL optuna tokenizers datasets transformers ray "
              "tensorboard".split())


class Finder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in missing else super().find_spec(name, path, target)


sys.meta_path = [finder for finder in sys.meta_path if finder is not importlib.machinery.PathFinder] + [Finder]
import numpy as np
import polyhead as ph
from polyhead.tasks import Images, Text
from polyhead.train import tracking
from polyhead.analysis import figures
from polyhead.scale.sweep.engines.ray import Ray

here = pathlib.Path(sys.argv[1])
(here / "x.txt").write_text("some text " * 200, encoding="utf-8")
(here / "x.model").write_bytes(b"x")
for split in ("train", "val"):
    for label in "ab":
        (here / split / label).mkdir(parents=True)
        (here / split / label / "x.png").write_bytes(b"")
task, run = ph.tasks.FuzzyLogic(), ph.recipes.RECIPES["fuzzy-hyla"]()


def text(tokenizer, data=str(here / "x.txt")):
    return Text(data, tokenizer=tokenizer)


def jax():
    missing.add("jax")
    for name in [name for name in sys.modules if name.startswith(("polyhead.jaxside", "jax"))]:
        del sys.modules[name]
    __import__("polyhead.jaxside")


messages = {}
for name, call in {
    "report": lambda: ph.report.write([here], here / "report.html"),
    "reproduce": lambda: ph.reproduce.reproduce("table-a2", "smoke", folder=here / "r"),
    "figures": lambda: figures.save(figures.results({"a": [1.0]}), here / "a.png"),
    "embed": lambda: ph.analysis.embed(np.eye(5)),
    "probe": lambda: ph.analysis.probe(np.eye(8), np.arange(8) % 2, train=slice(0, 4), test=slice(4, 8)),
    "digits": lambda: Images("digits").batch("train", 2, seed=0, step=0),
    "bpe": lambda: text("bpe:300").codec(),
    "hub": lambda: Text("hub:a/b", limit=9).count("iid"),
    "ray": lambda: ph.sweep([run], here / "s", engine=Ray("local")),
    "tensorboard": lambda: tracking.check(["tensorboard"]),
    "huggingface": lambda: ph.compat.huggingface.register(),
    "jaxside": jax,
}.items():
    try:
        messages[name] = repr(call())
    except (ImportError, ValueError) as error:
        messages[name] = f"{type(error).__name__}: {error}"
print(json.dumps(messages))
"""
REPORT, TEXT = "pip install 'polyhead[report]'", "pip install 'polyhead[text]'"
LINES = {
    "report": f"figures needs matplotlib: {REPORT}",
    "reproduce": f"reproduce needs matplotlib: {REPORT}",
    "figures": f"figures needs matplotlib: {REPORT}",
    "embed": f"embed needs scikit-learn: {REPORT}",
    "probe": f"probe needs scikit-learn: {REPORT}",
    "digits": f"Images: data='digits' needs scikit-learn: {REPORT}",
    "bpe": f"Text: tokenizer='bpe:300' needs tokenizers: {TEXT}",
    "hub": f"Text: data='hub:a/b' needs datasets: {TEXT}",
    "ray": "sweep: --ray needs ray: pip install 'polyhead[ray]'",
    "tensorboard": "tracking: tensorboard is not installed: pip install 'polyhead[track]', or leave it out of track",
    "huggingface": "polyhead.compat.huggingface needs transformers: pip install 'polyhead[hf]'",
    "jaxside": "polyhead.jaxside needs jax: pip install 'polyhead[jax]'",
}


def test_every_feature_names_the_extra_it_needs(tmp_path):
    command = [sys.executable, "-W", "ignore", "-c", FEATURES, str(tmp_path)]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    messages = json.loads(process.stdout)
    assert messages.keys() == LINES.keys()
    assert {name: line.partition(": ")[2].replace(f"{tmp_path}/", "") for name, line in messages.items()} == LINES
    created = {path.name for path in tmp_path.iterdir()} - {"x.txt", "x.model", "train", "val"}
    assert created == {"s"}  # refused before anything is made, but for a sweep, which tries whether it can write


def test_extras_that_are_named_exist():
    known = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    files = (*ROOT.glob("src/**/*.py"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.py"), ROOT / "README.md")
    named = {
        extra
        for path in files
        for names in re.findall(r"(?:polyhead|\.)\[([a-z,]+)\]'", path.read_text(encoding="utf-8"))
        for extra in names.split(",")
    }
    assert {"report", "hf", "jax"} <= named <= known.keys()


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("nowhere", "x needs nowhere: pip install 'y'"),
        ("json.nowhere", "x needs json: pip install 'y' (No module named 'json.nowhere')"),  # of another version
    ],
)
def test_a_missing_package_is_one_line(module, line):
    with pytest.raises(MissingPackage, match=f"^{re.escape(line)}$"), optional("x", "y"):
        __import__(module)


def test_what_is_ours_or_no_import_is_not_disguised():
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'polyhead.nowhere'$"), optional("x", "y"):
        __import__("polyhead.nowhere")
    inner = pytest.raises(MissingPackage, match=r"^a needs nowhere: pip install 'b'$")
    with inner, optional("x", "y"), optional("a", "b"):
        __import__("nowhere")
