"""Native code that came with the wheel: which of its builds this processor can run.

A wheel has each C++ source compiled for several levels of a processor family (packaging/native_code.py).  The file name
has a digest of the sources, so a build of other sources is never taken.
"""

import hashlib
import platform
from pathlib import Path

FOLDER = Path(__file__).parent / "prebuilt"

NEEDED_FLAGS = {
    "x86-64-v4": "avx2 fma bmi2 f16c abm movbe avx512f avx512bw avx512cd avx512dq avx512vl",
    "x86-64-v3": "avx2 fma bmi2 f16c abm movbe",
}
"""Level -> flags of /proc/cpuinfo that a processor of this level has, the highest level first."""


def source_digest(folder: Path, source: str) -> str:
    """A digest of a C++ source and of all headers in its folder."""
    digest = hashlib.sha256()
    for path in (folder / f"{source}.cpp", *sorted(folder.glob("*.h"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def library_name(source: str, level: str, digest: str) -> str:
    return f"{source}-{level}-{digest}.so"


def levels_of_this_processor() -> list[str]:
    """The levels that this processor can run, the highest first; none on x86 without /proc/cpuinfo."""
    if platform.machine() == "aarch64":
        return ["aarch64"]
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    for line in lines:
        if line.startswith("flags"):
            flags = set(line.partition(":")[2].split())
            return [level for level, needed in NEEDED_FLAGS.items() if flags.issuperset(needed.split())]
    return []


def prebuilt_library(source: str) -> Path | None:
    """The best build of a C++ source for this processor that came with the package, or None."""
    if not FOLDER.is_dir():
        return None
    digest = source_digest(FOLDER.parent, source)
    for level in levels_of_this_processor():
        path = FOLDER / library_name(source, level, digest)
        if path.is_file():
            return path
    return None
