"""Native code runs on PyTorch's own threads."""

import ctypes
import os
from pathlib import Path

import torch


def threads() -> int:
    """The number of PyTorch's threads."""
    return torch.get_num_threads()


def pool() -> int | None:
    """The address of GOMP_parallel in the OpenMP library that PyTorch has loaded, or None."""
    if not _POOL:
        libraries = sorted((Path(torch.__file__).parent / "lib").glob("lib*omp*"))
        _POOL.append(next((at for path in (*map(str, libraries), None) if (at := _address(path))), None))
    return _POOL[0]


_POOL: list[int | None] = []


def _address(path: str | None) -> int | None:
    try:
        library = ctypes.CDLL(path, mode=os.RTLD_NOW | (os.RTLD_NOLOAD if path else 0))
        return ctypes.cast(library.GOMP_parallel, ctypes.c_void_p).value
    except (OSError, AttributeError):
        return None
