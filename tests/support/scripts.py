"""Scripts of the repository as modules: benchmarks, examples and extensions of the pages are no packages."""

import importlib.util
import pathlib

ROOT = pathlib.Path(__file__).parents[2]


def loaded(*place):
    """The module in the file `place` of the repository, anew in each call."""
    path = ROOT.joinpath(*place)
    found = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module
