"""Install a kit without a package index: python3.12 install.py FOLDER

Checks this Python and the pieces, makes a virtual environment in FOLDER and installs the wheels
into it. Packages of the Python that runs this stay visible there. Needs the standard library
alone; the pieces and kit.json lie beside this file.

Exit status: 0 installed; 1 something is wrong, in one line, and nothing is installed. A requirement
that a package of this Python does not meet is a note.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

_CHUNK_BYTES = 1 << 20


class Refused(Exception):
    """The kit cannot be installed here; the message is one line for a person."""


def parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    asked = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    asked.add_argument("folder", type=Path, help="new folder for the virtual environment")
    asked.add_argument(
        "--check", action="store_true", help="check Python and pieces, and install nothing"
    )
    return asked


def main() -> int:
    """Check, join, install; return the exit status."""
    args = parser().parse_args()
    here = Path(__file__).resolve().parent
    try:
        kit = read_manifest(here)
        check_python(kit)
        note_packages(kit)
        check_pieces(here, kit)
        if args.check:
            return 0
        return install(here, kit, args.folder.resolve())
    except Refused as refused:
        print(f"install: {refused}", file=sys.stderr)
    except OSError as error:
        print(f"install: {error}", file=sys.stderr)
    return 1


def read_manifest(here: Path) -> dict[str, Any]:
    """Read kit.json.

    Raises:
        Refused: it is missing or damaged.
    """
    try:
        kit = json.loads((here / "kit.json").read_text())
    except (OSError, ValueError) as error:
        raise Refused(f"{here / 'kit.json'}: cannot be read: {error}") from error
    if not isinstance(kit, dict) or "pieces" not in kit:
        raise Refused(f"{here / 'kit.json'}: not the manifest of a kit")
    return kit


def check_python(kit: dict[str, Any]) -> None:
    """Require the Python, the processor and the C library that the wheels are for.

    Raises:
        Refused: one of them is another.
    """
    mine = "{}.{}".format(*sys.version_info)
    if mine != kit["python"]:
        raise Refused(f"the kit is for Python {kit['python']}, and this is Python {mine}")
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise Refused(
            f"the kit is for Linux x86_64, and this is {platform.system()} {platform.machine()}"
        )
    library, release = platform.libc_ver()
    if library != "glibc" or _numbers(release) < _numbers(kit["glibc"]):
        raise Refused(
            f"the kit is for glibc {kit['glibc']} or newer, and this is {library} {release}"
        )


def note_packages(kit: dict[str, Any]) -> None:
    """Say which packages that the kit counts on are here in another release.

    Raises:
        Refused: one is not here.
    """
    found = {name: _release(name) for name in kit["have"]}
    missing = sorted(name for name, release in found.items() if not release)
    if missing:
        raise Refused(f"the kit counts on packages that this Python lacks: {', '.join(missing)}")
    for name, expected in sorted(kit["have"].items()):
        if expected and found[name].partition("+")[0] != expected.partition("+")[0]:
            print(f"note: {name} {expected} was expected, {found[name]} is here")


def check_pieces(here: Path, kit: dict[str, Any]) -> None:
    """Require every piece, whole.

    Raises:
        Refused: some are missing, or one is damaged.
    """
    missing = [piece["name"] for piece in kit["pieces"] if not (here / piece["name"]).is_file()]
    if missing:
        raise Refused(f"missing in {here}: {', '.join(missing)}")
    for piece in kit["pieces"]:
        print(f"check {piece['name']}", flush=True)
        file = here / piece["name"]
        digest = hashlib.sha256()
        with file.open("rb") as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                digest.update(chunk)
        if digest.hexdigest() != piece["sha256"]:
            raise Refused(f"{file} is damaged: copy it again")


def install(here: Path, kit: dict[str, Any], folder: Path) -> int:
    """Make the environment and install the wheels; a failure leaves no folder behind.

    Raises:
        Refused: the folder is in use, the disk is full, or pip failed.
    """
    if folder.exists():
        raise Refused(f"{folder} exists: name a new folder")
    folder.mkdir(parents=True)
    wheels = folder / "wheels"
    try:
        size = sum(wheel["size_bytes"] for wheel in kit["wheels"]) + kit["unpacked_bytes"]
        free = shutil.disk_usage(folder).free
        if free < size:
            raise Refused(f"{folder}: {size >> 20:,} MiB are needed, {free >> 20:,} MiB are free")
        wheels.mkdir()
        pip = Pip(make_environment(folder, kit["environment"]), list(join(here, kit, wheels)))
        before = pip.complaints()
        print(f"install {len(pip.wheels)} wheels", flush=True)
        pip.install()
        broken = [line for line in pip.complaints() if line not in before]
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(wheels)
    print(f"installed: {', '.join(kit['packages'])}; programs are in {folder / 'bin'}")
    dropped = tuple(f" requires {name}, which is not installed." for name in kit["dropped"])
    for line in broken:
        if not line.lower().endswith(dropped):
            print(f"note: {line}")
    return 0


def join(here: Path, kit: dict[str, Any], folder: Path) -> Iterator[Path]:
    """Write the wheels of the stream into a folder, one after the other.

    Raises:
        Refused: a wheel is not what the manifest says.
    """
    stream = read_stream([here / piece["name"] for piece in kit["pieces"]])
    rest = b""
    for wheel in kit["wheels"]:
        digest = hashlib.sha256()
        missing = wheel["size_bytes"]
        with (folder / wheel["name"]).open("wb") as file:
            while missing:
                chunk = rest or next(stream, b"")
                if not chunk:
                    raise Refused(f"the pieces end within {wheel['name']}")
                part, rest = chunk[:missing], chunk[missing:]
                missing -= len(part)
                digest.update(part)
                file.write(part)
        if digest.hexdigest() != wheel["sha256"]:
            raise Refused(f"{wheel['name']} is damaged, though its pieces are not")
        yield folder / wheel["name"]


def read_stream(files: list[Path]) -> Iterator[bytes]:
    """Yield the bytes of all pieces in order."""
    for file in files:
        with file.open("rb") as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                yield chunk


def make_environment(folder: Path, variables: dict[str, str]) -> Path:
    """Make a virtual environment that sees the packages of this Python; return its Python.

    Every Python that starts there gets the variables, unless they are set already.
    """
    venv.create(folder, system_site_packages=True, with_pip=False, symlinks=True)
    lines = [
        f"import os; os.environ.setdefault({name!r}, {value!r})\n"
        for name, value in variables.items()
    ]
    if sys.prefix != sys.base_prefix:  # an environment itself: the new one sees only its base
        mine = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
        lines += [f"import site; site.addsitedir({path!r})\n" for path in mine]
    packages = folder / "lib" / "python{}.{}".format(*sys.version_info) / "site-packages"
    (packages / "zz_kit.pth").write_text("".join(lines))
    return folder / "bin" / "python"


class Pip:
    """The pip of the kit, run from its wheel: the target may have none."""

    def __init__(self, python: Path, wheels: list[Path]) -> None:
        self.wheels = wheels
        (program,) = (wheel for wheel in wheels if wheel.name.startswith("pip-"))
        self._command = [str(python), str(program / "pip"), "--disable-pip-version-check"]

    def install(self) -> None:
        """Install all wheels, without an index.

        Raises:
            Refused: pip failed; the message has its last line.
        """
        options = ["-q", "--no-index", "--no-deps", "--no-compile", "--ignore-installed"]
        done = self._run(["install", *options, *map(str, self.wheels)])
        if done.returncode != 0:
            said = done.stderr.strip().splitlines() or ["it said nothing"]
            raise Refused(f"pip failed: {said[-1]}")

    def complaints(self) -> list[str]:
        """List the requirements that are not met, as `pip check` writes them."""
        return self._run(["check"]).stdout.splitlines()

    def _run(self, arguments: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self._command, *arguments],
            capture_output=True,
            text=True,
            check=False,
        )


def _release(name: str) -> str:
    """Return the release of a package of this Python, and nothing if it is not here."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.split(".") if part.isdigit())


if __name__ == "__main__":
    sys.exit(main())
