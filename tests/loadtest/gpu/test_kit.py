"""`python -m loadtest.dev.gpu kit`: packs and installs for real; a folder is the index."""

from __future__ import annotations

import ensurepip
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from loadtest.dev.gpu.__main__ import main

PYTHON = "{}.{}".format(*sys.version_info)
GLIBC = "2.28"
Links = Path
Kit = Path


@pytest.fixture(scope="module")
def links(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Links]:
    """A folder of wheels that uv and pip take for the index; the real one is out of reach."""
    folder = tmp_path_factory.mktemp("links")
    (pip,) = (Path(ensurepip.__file__).parent / "_bundled").glob("pip-*.whl")
    shutil.copy(pip, folder)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "UV_OFFLINE": "1",
            "UV_CACHE_DIR": str(tmp_path_factory.mktemp("uv")),
            "UV_FIND_LINKS": str(folder),
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(folder),
            "PIP_NO_BUILD_ISOLATION": "0",  # pip reads it as the value of isolation: off
        }.items():
            patch.setenv(name, value)
        yield folder


@pytest.fixture(scope="module")
def made(links: Links, tmp_path_factory: pytest.TempPathFactory) -> Kit:
    """A kit of a package that is called vllm, for this Python, in more than one piece."""
    add_wheel(
        links,
        "vllm",
        {"vllm/__init__.py": b"", "vllm/_moe_C.abi3.so": b"x" * 999},
        requires=["click", "flashinfer-python==0.6.14"],
    )

    kit = tmp_path_factory.mktemp("made") / "kit"
    assert make(kit, "--package", "vllm==1.0", "--have", "click,setuptools") == 0
    return kit


@pytest.fixture
def kit(made: Kit, tmp_path: Path) -> Kit:
    """A copy of it, to change."""
    return shutil.copytree(made, tmp_path / "kit")


def test_an_installed_package_lacks_what_was_left_out_and_knows_it(
    kit: Kit, tmp_path: Path
) -> None:
    """RECORD names the files that are there; a variable says that FlashInfer is missing."""
    done = install(kit, tmp_path / "environment")

    assert done.returncode == 0, done.stderr
    assert "note:" not in done.stdout
    code = (
        "import importlib.metadata as m, json, os; "
        "files = m.files('vllm'); "
        "print(json.dumps([sorted(map(str, files)), all(f.locate().is_file() for f in files), "
        "os.environ['VLLM_USE_FLASHINFER_SAMPLER']]))"
    )
    names, are_there, sampler = json.loads(
        run(str(tmp_path / "environment/bin/python"), "-c", code).stdout
    )
    assert "vllm/__init__.py" in names
    assert "vllm/_moe_C.abi3.so" not in names
    assert are_there
    assert sampler == "0"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--package", "absent==1.0"], "absent was not found"),
        (["--package", "arm==1.0"], "arm"),
        (["--package", "needy==1.0", "--have", "click==7.0"], "click>=8"),
        (["--package", "./nowhere"], "nowhere: neither a wheel nor a folder"),
        (["--have", "torch=2.11.0,click"], "'torch=2.11.0' is not NAME or NAME==RELEASE"),
        (["--have", "no-such-file.txt"], "no-such-file.txt: cannot be read"),
        (["--python", "3"], "--python 3: a release like 3.12"),
        (["--glibc", "new"], "--glibc new: a release like 2.39"),
        (["--piece-mib", "0"], "--piece-mib 0: at least 1"),
    ],
)
def test_a_kit_that_cannot_be_made_says_why_in_one_line(
    links: Links, tmp_path: Path, capfd: pytest.CaptureFixture[str], options: list[str],
    expected: str,
) -> None:  # fmt: skip
    """Nothing is packed, and the exit status is 1."""
    add_wheel(links, "arm", {"arm.py": b""}, tag="py3-none-manylinux_2_17_aarch64")
    add_wheel(links, "needy", {"needy.py": b""}, requires=["click>=8"])

    assert make(tmp_path / "kit", *options) == 1

    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("kit: ")
    assert expected in line
    assert not list((tmp_path / "kit").glob("piece-*"))


def test_a_piece_that_is_missing_or_damaged_is_named(kit: Kit, tmp_path: Path) -> None:
    """Nothing is installed from a kit that is not whole."""
    first, second, *_ = sorted(kit.glob("piece-*"))
    whole = first.read_bytes()

    first.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    refuse(kit, tmp_path, f"{first} is damaged")
    first.write_bytes(whole[:-1])
    refuse(kit, tmp_path, f"{first} is damaged")
    first.write_bytes(whole)
    second.unlink()
    refuse(kit, tmp_path, f"missing in {kit}: {second.name}")


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"python": "3.1"}, "for Python 3.1, and this is"),
        ({"glibc": "2.999"}, "for glibc 2.999 or newer"),
        ({"have": {"torch-of-another": "1.0"}}, "this Python lacks: torch-of-another"),
        ({"unpacked_bytes": 1 << 60}, "MiB are free"),
        ({"pieces": []}, "the pieces end within"),
    ],
)
def test_a_target_that_does_not_fit_is_refused(
    kit: Kit, tmp_path: Path, changed: dict[str, Any], expected: str
) -> None:
    """One line says what the kit is for and what is here; no folder is left behind."""
    (kit / "kit.json").write_text(json.dumps(manifest(kit) | changed))

    refuse(kit, tmp_path, expected)


def test_a_folder_in_use_is_left_as_it_is(kit: Kit, tmp_path: Path) -> None:
    """Another name is asked for."""
    (tmp_path / "environment").mkdir()
    (tmp_path / "environment/mine.txt").write_text("mine")

    done = install(kit, tmp_path / "environment")

    assert done.returncode == 1
    assert done.stderr == f"install: {tmp_path}/environment exists: name a new folder\n"
    assert (tmp_path / "environment/mine.txt").read_text() == "mine"


def make(out: Path, *options: str) -> int:
    """Make a kit for this Python, in pieces of 1 MiB unless the options say otherwise."""
    standard = ["--piece-mib", "1", "--python", PYTHON, "--glibc", GLIBC, "--have", "nothing"]
    return main(["kit", "--out", str(out), *standard, *options])


def install(kit: Kit, folder: Path) -> subprocess.CompletedProcess[str]:
    """Install a kit with this Python, as the target would."""
    return run(sys.executable, str(kit / "install.py"), str(folder))


def refuse(kit: Kit, tmp_path: Path, expected: str) -> None:
    """Require that a kit is refused in one line, and that nothing is installed."""
    done = install(kit, tmp_path / "environment")

    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert expected in line
    assert not (tmp_path / "environment").exists()


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd="/")


def manifest(kit: Kit) -> dict[str, Any]:
    decoded: dict[str, Any] = json.loads((kit / "kit.json").read_text())
    return decoded


def add_wheel(
    folder: Path,
    name: str,
    files: dict[str, bytes],
    *,
    requires: Sequence[str] = (),
    tag: str = "py3-none-any",
) -> None:
    """Write release 1.0 of a package."""
    info = f"{name}-1.0.dist-info"
    needs = "".join(f"Requires-Dist: {need}\n" for need in requires)
    files = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{needs}".encode(),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n".encode(),
    }
    lines = [f"{path},,{len(data)}\n" for path, data in files.items()]
    with zipfile.ZipFile(folder / f"{name}-1.0-{tag}.whl", "w") as wheel:
        for path, data in files.items():
            wheel.writestr(path, data)
        wheel.writestr(f"{info}/RECORD", "".join(lines) + f"{info}/RECORD,,\n")
