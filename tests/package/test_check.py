"""What `make package` refuses, on wheels made for it."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest

from tests.package.check import Commands, Failed, require_equal, require_packed, run


def _wheel(folder: Path, **files: str) -> Path:
    folder.mkdir()
    path = folder / "x-1.whl"
    record = "".join(f"{name},sha256={len(text)},1\n" for name, text in files.items())
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in {**files, "x-1.dist-info/RECORD": record}.items():
            archive.writestr(name, text)
    return path


def test_a_wheel_with_every_tracked_file_is_good(tmp_path: Path) -> None:
    wheel = _wheel(tmp_path / "a", **{"router/a.py": "", "router/a.lua": "x"})

    require_packed(wheel, {"router/a.py", "router/a.lua"})
    require_equal(wheel, _wheel(tmp_path / "b", **{"router/a.py": "", "router/a.lua": "x"}))


def test_a_data_file_that_is_not_packed_is_named(tmp_path: Path) -> None:
    """Code works without it in a checkout, and nowhere else."""
    wheel = _wheel(tmp_path / "a", **{"router/a.py": ""})

    with pytest.raises(Failed, match=r"not in the wheel.*router/a\.lua"):
        require_packed(wheel, {"router/a.py", "router/a.lua"})


def test_a_stray_file_in_the_wheel_is_named(tmp_path: Path) -> None:
    wheel = _wheel(tmp_path / "a", **{"router/a.py": "", "router/notes.py": ""})

    with pytest.raises(Failed, match=r"not tracked.*router/notes\.py"):
        require_packed(wheel, {"router/a.py"})


@pytest.mark.parametrize("other", [{"a.py": "22"}, {"a.py": "1", "b.py": "1"}, {}])
def test_a_wheel_that_differs_is_refused(tmp_path: Path, other: dict[str, str]) -> None:
    """In a file's bytes, by one file more, by one less."""
    wheel = _wheel(tmp_path / "a", **{"a.py": "1"})

    with pytest.raises(Failed, match=r"the wheel from the sdist differs in: \['[ab]\.py'"):
        require_equal(wheel, _wheel(tmp_path / "b", **other))


def test_a_program_that_fails_says_what_it_printed(tmp_path: Path) -> None:
    """With its status; one that is started and ends early says so, too."""
    program = [sys.executable, "-c", "import sys; print('reason'); sys.exit(3)"]

    with pytest.raises(Failed, match=r"(?s)ended with 3.*reason"):
        run(program)
    commands = Commands(Path(sys.executable), tmp_path, {})
    with (
        pytest.raises(Failed, match=r"(?s)nothing answers 200 at .*no-such-file"),
        commands.running("no-such-file", ready="http://127.0.0.1:1/health"),
    ):
        pass
