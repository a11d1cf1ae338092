"""Make another release's Python run on the engines' interpreter: its files over the CPU build's.

    build/venv/bin/python -m tests.engines.overlay           the newest release of `vllm`
    build/venv/bin/python -m tests.engines.overlay SOURCE    a wheel, or a folder that has `vllm/`

A release comes as a CUDA wheel days before there is a CPU build. Hash functions, the KV cache
manager, renderers and request models are Python, so they run with the compiled parts of the
installed CPU build. No engine starts. Prints the directory for the front of PYTHONPATH; it is
made again only for another source. The wheel is some 340 MB and is not kept.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
ENGINES: Final = ROOT / ".engines"
PYTHON: Final = Path(os.environ.get("WARMROUTE_VLLM_PYTHON", ENGINES / "venv" / "bin" / "python"))
NEWEST: Final = ROOT / "build" / "newest"

_DOWNLOAD_S: Final = 600.0
_ADDED: Final = ("orjson",)  # what a newer release imports, from this interpreter's packages
_KEPT: Final = frozenset({".py", ".json"})  # of the release; the rest is the CPU build's


def overlay(source: Path | None, into: Path = NEWEST) -> Path:
    """Put a release's Python files over the installed vLLM's; return where.

    Args:
        source: A wheel, or a directory that has `vllm/`; None: the newest wheel of the package
            index that pip is set up for.
        into: Is replaced, unless it was made from this source.
    """
    if source is None:
        version = _newest_version()
        if _made_from(into) == version:
            return into
        with tempfile.TemporaryDirectory() as directory:
            wheel = _download(version, Path(directory))
            return _make(wheel, into, version)
    named = f"{source.resolve()} {source.stat().st_mtime_ns}"
    return into if _made_from(into) == named else _make(source, into, named)


def version_of(sources: Path | None) -> str:
    """Read a release's version from its files; None: the installed one's."""
    package = _installed() if sources is None else sources / "vllm"
    found = re.search(r"__version__ = version = '([^']+)'", (package / "_version.py").read_text())
    if found is None:
        raise ValueError(f"{package}/_version.py has no version")
    return found[1]


def environment(sources: Path | None) -> dict[str, str]:
    """Return the environment variables to run a release's Python with; None: the installed one."""
    environ = dict(os.environ)
    if sources is not None:
        environ["PYTHONPATH"] = str(sources)
        environ["VLLM_TARGET_DEVICE"] = "cpu"
    return environ


def _made_from(into: Path) -> str | None:
    stamp = into / "source"
    return stamp.read_text() if stamp.exists() else None


def _make(source: Path, into: Path, named: str) -> Path:
    installed = _installed()
    making = into.with_name(f"{into.name}.{os.getpid()}")
    shutil.rmtree(making, ignore_errors=True)
    ignored = shutil.ignore_patterns("__pycache__", "*.py", "*.pyc")
    shutil.copytree(installed, making / "vllm", ignore=ignored, copy_function=_link)
    for name, content in _files(source):
        path = making / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # it may be a link to the installed one
        path.write_bytes(content)
    for name in _ADDED:
        found = importlib.util.find_spec(name)
        if found is not None and found.submodule_search_locations:
            _link(next(iter(found.submodule_search_locations)), str(making / name))
    (making / "source").write_text(named)
    shutil.rmtree(into, ignore_errors=True)
    making.rename(into)
    return into


def _files(source: Path) -> Iterator[tuple[str, bytes]]:
    """List the files of a release that its Python consists of."""
    if source.is_dir():
        for path in sorted((source / "vllm").rglob("*")):
            if path.suffix in _KEPT:
                yield str(path.relative_to(source)), path.read_bytes()
        return
    with zipfile.ZipFile(source) as wheel:
        for name in wheel.namelist():
            parts = PurePosixPath(name)
            if parts.suffix in _KEPT and parts.parts[0] == "vllm" and ".." not in parts.parts:
                yield name, wheel.read(name)


def _link(source: str, target: str) -> None:
    os.symlink(source, target)


def _installed() -> Path:
    """Find the installed vLLM without importing it."""
    code = "import importlib.util as u; print(u.find_spec('vllm').submodule_search_locations[0])"
    answer = subprocess.run(
        [PYTHON, "-P", "-c", code], stdout=subprocess.PIPE, check=True, cwd=ROOT
    )
    return Path(answer.stdout.decode().strip())


def _newest_version() -> str:
    """Ask pip for the newest release of `vllm`, by its own package index."""
    answer = subprocess.run(
        [sys.executable, "-m", "pip", "index", "versions", "vllm", "--disable-pip-version-check"],
        stdout=subprocess.PIPE,
        check=True,
        timeout=_DOWNLOAD_S,
    )
    first = answer.stdout.decode().splitlines()[0]  # vllm (0.33.0)
    return first.partition("(")[2].rstrip(")")


def _download(version: str, into: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
    ]
    command += ["--disable-pip-version-check", "--dest", str(into), f"vllm=={version}"]
    subprocess.run(command, check=True, timeout=_DOWNLOAD_S)
    [wheel] = into.glob("*.whl")
    return wheel


if __name__ == "__main__":
    print(overlay(Path(sys.argv[1]) if len(sys.argv) > 1 else None))
