"""Optional packages: a one-line error if a feature needs a package that is not installed.

with optional("probe", "polyhead[report]"):
    from sklearn.linear_model import LogisticRegression

probe needs scikit-learn: pip install 'polyhead[report]'
"""

import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from polyhead.spec.values import one_line

DISTRIBUTIONS = {"sklearn": "scikit-learn", "yaml": "PyYAML"}
"""Name of a module -> name under which pip installs it, if they differ."""


class MissingPackage(ModuleNotFoundError, ValueError):
    """An optional package is not installed.  It is also a ValueError, so that the command line prints one line."""


def is_installed(name: str) -> bool:
    """Is the package `name` installed?  A plain folder of that name, which Python would import too, is no package."""
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None


def _is_folder_here(name: str) -> bool:
    """Is the imported module `name` a plain folder of the current folder, such as the files of earlier trackings?"""
    module = sys.modules[name]
    if "." in name or getattr(module, "__file__", None) is not None or not hasattr(module, "__path__"):
        return False
    return os.path.realpath(name) in map(os.path.realpath, module.__path__)


@contextmanager
def optional(feature: str, install: str) -> Iterator[None]:
    """Context manager: a failed import inside raises MissingPackage for the feature `feature`; `install` is for pip."""
    before = set(sys.modules)
    try:
        yield
        # Python imports any folder of that name as an empty package, and the feature would fail later.
        for name in set(sys.modules) - before:
            if _is_folder_here(name):
                del sys.modules[name]
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    except MissingPackage:
        raise
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        # A fault in our own modules is no missing package, so nobody is told to install one.
        if package == "polyhead":
            raise
        name = DISTRIBUTIONS.get(package, package) or "a package"
        reason = ""
        if not isinstance(error, ModuleNotFoundError) or error.name != package:
            reason = f" ({one_line(error)})"
        if name != "torch" and _without_torch():
            install = install.replace("polyhead[", "polyhead-jax[")
        raise MissingPackage(f"{feature} needs {name}: pip install '{install}'{reason}", name=package) from None


def _without_torch() -> bool:
    """Is the distribution polyhead-jax installed, which has no torch?"""
    from importlib import metadata  # its import takes a fifth of the time of `polyhead --help`

    try:
        return bool(metadata.version("polyhead-jax"))
    except metadata.PackageNotFoundError:
        return False
