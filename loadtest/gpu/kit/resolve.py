"""Which releases a kit needs beside what the target has: uv resolves for another machine.

What the target has in a known release takes part in the resolution as an empty package of that
release. What it has in an unknown release, and what is dropped, is no requirement at all.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from loadtest.gpu.kit.asked import KitError, Target, plain

_NEVER: Final = "sys_platform == 'never'"
_LOCAL: Final = "onthetarget"


def resolve(
    packages: Sequence[str], target: Target, dropped: Iterable[str], scratch: Path
) -> list[str]:
    """Return the pinned requirements, without what the target has and what is local.

    Raises:
        KitError: uv is missing, or the requirements do not go together.
    """
    stubs = scratch / "stubs"
    stubs.mkdir(parents=True)
    pins = [_stub(stubs, name, release) for name, release in target.have.items() if release]
    (scratch / "constraints.txt").write_text("\n".join(pins))
    absent = {name for name, release in target.have.items() if not release} | set(dropped)
    (scratch / "overrides.txt").write_text("".join(f"{name} ; {_NEVER}\n" for name in absent))
    (scratch / "asked.txt").write_text("\n".join(packages))
    command = [
        *find_uv(), "pip", "compile", "--quiet", "--no-header", "--no-annotate",
        "--only-binary", ":all:",
        "--python-version", target.python,
        "--python-platform", f"x86_64-manylinux_{target.glibc.replace('.', '_')}",
        "--constraint", str(scratch / "constraints.txt"),
        "--override", str(scratch / "overrides.txt"),
        str(scratch / "asked.txt"),
    ]  # fmt: skip
    links = ",".join(filter(None, (os.environ.get("UV_FIND_LINKS"), str(stubs))))
    variables = {**os.environ, "UV_FIND_LINKS": links}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
    if done.returncode != 0:
        raise KitError(f"these packages do not go together: {_reason(done.stderr)}")
    lines = (line.strip() for line in done.stdout.splitlines())
    return [line for line in lines if "==" in line and _LOCAL not in line and not _is_local(line)]


def find_uv() -> list[str]:
    """Return the command that starts uv.

    Raises:
        KitError: it is not installed.
    """
    beside = Path(sys.executable).with_name("uv")
    found = str(beside) if beside.is_file() else shutil.which("uv")
    if found is None:
        raise KitError("uv is not installed, and it resolves what the kit needs: pip install uv")
    return [found]


def _stub(folder: Path, name: str, release: str) -> str:
    """Write an empty wheel in place of a package that the target has; return its pin."""
    separator = "." if "+" in release else "+"
    version = f"{release}{separator}{_LOCAL}"
    stem = f"{plain(name).replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return f"{name}=={version}"


def _is_local(line: str) -> bool:
    """Return whether a pin is a folder or a file: its wheel is made here, not downloaded."""
    return " @ file:" in line or line.startswith((".", "/", "file:"))


def _reason(said: str) -> str:
    """Shorten what uv says to its last sentence of reasons."""
    text = " ".join(said.replace(f"+{_LOCAL}", "").replace(f".{_LOCAL}", "").split())
    text = text.partition(" hint: ")[0]
    return text if len(text) < 600 else f"{text[:250]} … {text[-300:]}"
