"""Wheel and sdist: built from this tree without a network, installed into an empty environment, and used there."""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile

import pytest
import yaml
from scripts import PACKAGE, ROOT

import polyhead

BUILD = "import sys, hatchling.build as b; print(getattr(b, sys.argv[1])(sys.argv[2]))"
PROJECTS = ("pyproject.toml", "packaging/jax/pyproject.toml")
needs_builder = pytest.mark.skipif(importlib.util.find_spec("hatchling") is None, reason="hatchling is not installed")


def call(*words, cwd, **environment):
    """What a command prints; its errors, if it fails."""
    done = subprocess.run(words, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout.strip()


def built(what, source, folder):
    """The file that hatchling builds of `source`."""
    folder.mkdir(exist_ok=True)
    return folder / call(sys.executable, "-c", BUILD, f"build_{what}", str(folder), cwd=source).splitlines()[-1]


@needs_builder
def test_sdist_and_wheel(tmp_path):
    """One test, as each step needs the one before: the wheel is built of the sdist, the environment has the wheel."""
    sdist = built("sdist", ROOT, tmp_path / "dist")
    assert sdist.stat().st_size < 2e6
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    unpacked = tmp_path / f"polyhead-{polyhead.__version__}"
    check_that_the_sdist_is_all_but_tests_and_measurements(unpacked)
    wheel = built("wheel", unpacked, tmp_path / "dist")
    check_that_the_wheel_has_every_file_of_the_package_and_nothing_else(wheel)
    check_that_it_works_from_another_folder(wheel, tmp_path)


def check_that_the_sdist_is_all_but_tests_and_measurements(unpacked):
    told = {"src/polyhead", "docs", "examples", "benchmarks", "Makefile", "constraints.txt", "CITATION.cff"}
    told |= {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "pyproject.toml", "docs/conf.py", "PKG-INFO"}
    assert not [name for name in told if not (unpacked / name).exists()]
    assert not list(unpacked.rglob("__pycache__"))
    away = (".venv", "runs", "data", "docs/_build", ".git", "tests", "docs/results/small")
    assert not [name for name in away if (unpacked / name).exists()]


def check_that_the_wheel_has_every_file_of_the_package_and_nothing_else(wheel):
    assert wheel.name == f"polyhead-{polyhead.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        about = next(name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = archive.read(about).decode()
    there = {p.relative_to(PACKAGE.parent).as_posix() for p in PACKAGE.rglob("*") if p.is_file()}
    there = {name for name in there if "__pycache__" not in name}
    assert {name for name in names if not name.startswith("polyhead-")} == there
    kinds = {pathlib.PurePath(name).suffix for name in there}
    assert {".py", ".css", ".js", ".html", ".json", ".typed"} <= kinds
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert re.search(r"^Requires-Python: >=3.11$", metadata, re.M)
    assert "\nProvides-Extra: docs\n" in metadata
    check_that_the_readme_works_on_a_package_index(metadata)


def check_that_the_readme_works_on_a_package_index(metadata):
    readme, text = (ROOT / "README.md").read_text(encoding="utf-8"), metadata.partition("\n# polyhead")[2]
    [source] = re.findall(r"^Project-URL: Source, (\S+)$", metadata, re.M)
    raw = source.replace("github.com", "raw.githubusercontent.com") + f"/v{polyhead.__version__}/"
    page, link = f"{source}/blob/v{polyhead.__version__}/", re.compile(r"\]\(([^)\s]+)\)")
    assert f"]({raw}docs/figures/softmax-and-hyla.svg)" in text
    assert f"]({page}docs/design.md)" in text
    outside = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    assert all(place.startswith("https://") for place in link.findall(outside))
    assert text.replace(raw, "").replace(page, "") == readme.partition("# polyhead")[2]  # and nothing else is changed


def check_that_it_works_from_another_folder(wheel, tmp_path):
    fresh, elsewhere = tmp_path / "fresh", tmp_path / "elsewhere"
    elsewhere.mkdir()
    call(sys.executable, "-m", "venv", "--without-pip", str(fresh), cwd=tmp_path)
    python = fresh / "bin" / "python"
    install = ("-m", "pip", "--disable-pip-version-check", "--python", str(python), "install")
    call(sys.executable, *install, "-q", "--no-deps", "--no-index", "--no-compile", str(wheel), cwd=tmp_path)
    packages = call(str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path)
    # What polyhead needs is borrowed; .pth files there, such as that of an editable install, are not followed.
    pathlib.Path(packages, "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    clean = {"PYTHONPATH": "", "JAXTYPING_DISABLE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    told = "import polyhead, sys; print(polyhead.__version__, polyhead.__file__, 'torch' in sys.modules)"
    version, home, torch = call(str(python), "-c", told, cwd=elsewhere, **clean).split()
    assert (version, torch) == (polyhead.__version__, "False")
    assert pathlib.Path(home).is_relative_to(fresh)
    said = call(str(fresh / "bin" / "polyhead"), "list", "mechanisms", cwd=elsewhere, **clean)
    assert "Hyla" in said
    assert "Relational" in said
    assert not list(elsewhere.iterdir())


# ------------------------------------------------------------------------------------------------------------- citation
def test_the_citation_is_valid_and_cites_the_papers():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(cited)  # what version 1.2.0 requires
    assert cited["cff-version"] == "1.2.0"
    assert cited["version"] == polyhead.__version__
    assert cited["license"] == "Apache-2.0"
    readme = (ROOT / "README.md").read_text()
    for paper in cited["references"]:
        assert {"type", "title", "authors", "year", "url"} <= set(paper)
        assert all(set(author) == {"family-names", "given-names"} for author in paper["authors"])
        assert f"({paper['url']})" in readme
    assert [paper["url"][-10:] for paper in cited["references"]] == ["2406.05816", "2405.16727"]


# ------------------------------------------------------------------------------------------------------ without torch
def test_polyhead_for_jax_has_no_torch_and_the_same_bounds():
    """What it imports is tested in tests/jaxside."""
    ours, theirs = (tomllib.loads((ROOT / name).read_text(encoding="utf-8"))["project"] for name in PROJECTS)
    named = {re.split(r"[>=]", need)[0]: need for need in ours["dependencies"]}
    named |= {re.split(r"[>=]", need)[0]: need for need in ours["optional-dependencies"]["jax"]}
    wanted = theirs["dependencies"]
    assert not [need for need in wanted if named[re.split(r"[>=]", need)[0]] != need]
    assert "torch" not in str(wanted)
    imported = {
        name.partition(".")[0]
        for part in ("spec", "jaxside")
        for path in (PACKAGE / part).rglob("*.py")
        for name in re.findall(r"^(?:import|from) (\w+)", path.read_text(encoding="utf-8"), re.M)
    }
    foreign = imported - set(sys.stdlib_module_names) - {"polyhead", "__future__"}
    assert foreign <= {re.split(r"[>=]", need)[0] for need in wanted}
