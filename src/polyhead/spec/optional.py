"""Optional packages: one line of error where a feature needs one that is not installed.

with optional("probe", "polyhead[report]"):
    from sklearn.linear_model import LogisticRegression

probe needs scikit-learn: pip install 'polyhead[report]'
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata

DISTRIBUTIONS = {"sklearn": "scikit-learn", "PIL": "Pillow", "yaml": "PyYAML"}
"""Names of packages that are installed under another name."""


class MissingPackage(ModuleNotFoundError, ValueError):
    """An optional package is not installed.  A ValueError, too, so that the command line prints its one line."""


@contextmanager
def optional(who: str, install: str) -> Iterator[None]:
    """Imports inside that fail raise MissingPackage: `who` asked for them, and pip installs `install` to mend it."""
    try:
        yield
    except MissingPackage:
        raise
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package == "polyhead":
            raise
        name = DISTRIBUTIONS.get(package, package) or "a package"
        absent = isinstance(error, ModuleNotFoundError) and error.name == package
        reason = "" if absent else f" ({' '.join(str(error).split())})"
        if name != "torch" and _without_torch():
            install = install.replace("polyhead[", "polyhead-jax[")
        raise MissingPackage(f"{who} needs {name}: pip install '{install}'{reason}", name=package) from None


def _without_torch() -> bool:
    """Is it polyhead-jax that is installed here?"""
    try:
        return bool(metadata.version("polyhead-jax"))
    except metadata.PackageNotFoundError:
        return False
