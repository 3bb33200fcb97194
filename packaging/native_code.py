"""Compiles the C++ sources into the wheel, for each level of the processor family, when the wheel is built.

`pip install -e .` compiles for this machine alone.  Without a compiler nothing is compiled: native code is then built
at its first use, or PyTorch tiles take its place.  POLYHEAD_CROSS_COMPILER=aarch64-linux-gnu-g++ builds for aarch64.
"""

import concurrent.futures
import importlib.util
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import tempfile
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi", "-pipe")
LEVEL_FLAGS = {
    "x86-64-v3": ("-march=x86-64-v3",),
    "x86-64-v4": ("-march=x86-64-v4", "-mprefer-vector-width=512"),
    "aarch64": ("-march=armv8-a",),
}


class NativeCode(BuildHookInterface):
    """Called by hatchling, for wheels and for editable installations."""

    temporary: pathlib.Path | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        folder = pathlib.Path(self.root, "src", "polyhead", "ops", "native")
        prebuilt = _module(folder / "prebuilt.py")
        compiler = os.environ.get("POLYHEAD_CROSS_COMPILER") or shutil.which("g++") or shutil.which("clang++")
        if compiler is None or os.environ.get("POLYHEAD_NATIVE") == "0" or not sys.platform.startswith("linux"):
            return  # the wheel is the same for every system
        machine = "aarch64" if "aarch64" in pathlib.Path(compiler).name else platform.machine()
        levels = [level for level in LEVEL_FLAGS if level.startswith(machine.replace("_", "-"))]
        if version == "editable":
            levels = prebuilt.levels_of_this_processor()[:1]
        self.app.display_waiting("polyhead: compiling native code once (about half a minute)")

        # Old builds of changed sources are removed; each source and level is compiled by a process of its own.
        # A wheel's builds are temporary: they may be for another processor than this one.
        target = folder / "prebuilt"
        if version == "editable":
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir()
        else:
            self.temporary = target = pathlib.Path(tempfile.mkdtemp())
        commands = {}
        for source in sorted(path.stem for path in folder.glob("*.cpp")):
            for level in levels:
                library = target / prebuilt.library_name(source, level, prebuilt.source_digest(folder, source))
                flags = (*FLAGS, *LEVEL_FLAGS[level])
                commands[library] = [compiler, *flags, str(folder / f"{source}.cpp"), "-o", str(library)]
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            results = dict(zip(commands, pool.map(_run, commands.values()), strict=True))

        for library, compiled in results.items():
            if compiled:
                build_data["force_include"][str(library)] = f"polyhead/ops/native/prebuilt/{library.name}"
            else:
                self.app.display_warning(f"polyhead: {library.name} could not be compiled; it is built at first use")
        if any(results.values()):
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-linux_{machine}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Called when the wheel is complete."""
        if self.temporary is not None:
            shutil.rmtree(self.temporary)


def _run(command: list[str]) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _module(path: pathlib.Path) -> Any:
    """A module by its file: the package itself needs torch, which is not there when the wheel is built."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
