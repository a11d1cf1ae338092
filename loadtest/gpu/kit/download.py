"""The wheels of a kit: pip downloads them, or builds the one of a checkout.

A wheel that is there from an earlier try stays, if it is whole.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from loadtest.gpu.kit.asked import KitError, Target, plain

_PIP: Final = (sys.executable, "-m", "pip", "--disable-pip-version-check")
_OLDEST_GLIBC: Final = 5


def local_wheels(packages: Sequence[str], folder: Path) -> list[Path]:
    """Build or copy the packages that are a folder or a wheel here; return their wheels.

    Raises:
        KitError: one of them is not there, or cannot be built.
    """
    wheels = []
    for package in packages:
        source = Path(package)
        if not is_local(package):
            continue
        if source.is_file():
            wheels.append(Path(shutil.copy(source, folder)))
        else:
            wheels.append(_build(source, folder))
    return wheels


def is_local(package: str) -> bool:
    """Return whether a package is named by its place here."""
    return package.startswith(".") or "/" in package or package.endswith(".whl")


def _build(source: Path, folder: Path) -> Path:
    """Build a wheel from a copy: a build in place would pack what an earlier one left."""
    if not (source / "pyproject.toml").is_file():
        raise KitError(f"{source}: neither a wheel nor a folder with a pyproject.toml")
    print(f"build the wheel of {source}", flush=True)
    with tempfile.TemporaryDirectory(prefix="warmroute-kit-") as scratch:
        copy = Path(scratch) / "source"
        shutil.copytree(source, copy, ignore=shutil.ignore_patterns(".*", "build", "*.egg-info"))
        command = [*_PIP, "wheel", "-q", "--no-deps", "-w", scratch, str(copy)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise KitError(f"{source}: no wheel was built: {_last(done.stderr)}")
        (wheel,) = Path(scratch).glob("*.whl")
        return Path(shutil.copy(wheel, folder))


def download(pins: Sequence[str], target: Target, folder: Path) -> list[Path]:
    """Download what is not there yet, with pip's own progress; return all wheels, in order.

    Raises:
        KitError: a release has no wheel for the target, or the download broke off.
    """
    for wheel in folder.glob("*.whl"):
        if not zipfile.is_zipfile(wheel):  # the disk was full
            wheel.unlink()
    missing = [pin for pin in pins if _find(folder, pin) is None]
    if missing:
        print(f"download {len(missing)} wheels of {len(pins)}", flush=True)
        platforms = [arg for name in _platforms(target.glibc) for arg in ("--platform", name)]
        command = [
            *_PIP, "download", "--no-deps", "--only-binary", ":all:", "--dest", str(folder),
            "--implementation", "cp", "--python-version", target.python, *platforms, *missing,
        ]  # fmt: skip
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as pip:
            assert pip.stderr is not None
            said = pip.stderr.read()
        if pip.returncode != 0:
            raise KitError(f"the download ended early: {_last(said)}")
    found = [_find(folder, pin) for pin in pins]
    if None in found:
        raise KitError(f"pip left no wheel of {pins[found.index(None)]} in {folder}")
    return [wheel for wheel in found if wheel is not None]


def _platforms(glibc: str) -> list[str]:
    """List the platforms whose wheels run with a glibc: pip wants each by its name."""
    newest = int(glibc.partition(".")[2])
    numbered = [f"manylinux_2_{minor}_x86_64" for minor in range(newest, _OLDEST_GLIBC - 1, -1)]
    return [*numbered, *(f"manylinux{name}_x86_64" for name in ("2014", "2010", "1"))]


def _find(folder: Path, pin: str) -> Path | None:
    """Return the wheel of a pin, if it is there."""
    name, _, release = pin.partition("==")
    for wheel in folder.glob("*.whl"):
        parts = wheel.name.split("-")
        if plain(parts[0]) == plain(name) and parts[1] == release:
            return wheel
    return None


def _last(said: str) -> str:
    """Return the last error that pip names."""
    lines = [line for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:") or "No space left" in line]
    return re.sub(r"^ERROR:\s*", "", (errors or lines or ["it said nothing"])[-1])
