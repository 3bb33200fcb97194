"""Places in the repository, its documents, and its scripts as modules: those are in no package."""

import importlib.util
import pathlib

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "polyhead"
PAGES = [path for path in sorted((ROOT / "docs").rglob("*.md")) if "_build" not in path.parts]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *PAGES]


def short_name(path):
    return str(path.relative_to(ROOT))


def loaded(*parts):
    """The module in a file of the repository, whose path has these parts, anew in each call."""
    path = ROOT.joinpath(*parts)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
