"""The user's home folder, which a container or a service may not have: no HOME, and no entry for the user."""

import os
from pathlib import Path


def cache(name: str, variable: str) -> Path:
    """The folder of the cache `name`: `polyhead/NAME` in XDG_CACHE_HOME, or in ~/.cache.

    Args:
        variable: The environment variable that the error suggests beside HOME.

    Raises:
        RuntimeError: In one line, for a user with neither XDG_CACHE_HOME nor a home folder.
    """
    shared = os.environ.get("XDG_CACHE_HOME")
    return Path(shared or home(variable) / ".cache") / "polyhead" / name


def home(variable: str) -> Path:
    """The user's home folder; RuntimeError as from `cache`."""
    try:
        return Path.home()
    except RuntimeError:
        raise RuntimeError(f"this user has no home folder (set HOME or {variable})") from None


def located(folder: str) -> str:
    """The absolute path of `folder`, for caches: a relative path means another folder in another working directory.

    Raises:
        ValueError: For a path in the home folder of a user who has none.
    """
    expanded = os.path.expanduser(folder)
    # Without a home folder `~` stays as it is, and a folder of that name would be created.
    if expanded == folder and (folder == "~" or folder.startswith("~" + os.sep)):
        raise ValueError(f"folder {folder}: this user has no home folder (set HOME)")
    return os.path.abspath(expanded)
