"""Pictures of a terminal: what they show, and that they load nothing."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from loadtest.recording import ROOT, draw, main, settled


def test_progress_that_was_overwritten_is_not_shown() -> None:
    """A bar of two lines is drawn, erased and followed by the result."""
    raw = "start\r\n50 %\r\nbusy\r\x1b[2K\x1b[1A\x1b[2K\x1b[?25hdone\r\n"

    assert settled(raw) == "start\ndone"


def test_a_picture_has_every_character_and_loads_nothing() -> None:
    """No line is cut or wrapped, paths are relative, and no font comes from a network."""
    line = "x" * 150 + "end"

    drawn = draw("warmroute demo", f"\x1b[32mgreen\x1b[0m\r\n{line}\r\n{ROOT}/policies\r\n")

    text = "".join(ElementTree.fromstring(drawn).itertext())
    assert line in text
    assert str(ROOT) not in drawn
    assert ">policies<" in drawn
    assert "font-face" not in drawn
    assert set(re.findall(r"https?://[\w.]+", drawn)) <= {
        "http://www.w3.org", "https://www.textualize.io",
    }  # fmt: skip


def test_check_is_recorded_from_a_real_run(tmp_path: Path) -> None:
    """Two emulated replicas are started, and check finds them well."""
    assert main(["check", "--out", str(tmp_path)]) == 0

    text = (tmp_path / "check.svg").read_text().replace("&#160;", " ")
    assert "warmroute check --replica http://127.0.0.1:" in text
    assert "replica r2" in text
    assert "all is well" in text


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """The error names the known ones."""
    with pytest.raises(SystemExit):
        main(["serve"])

    assert "'serve' is none of check, demo" in capsys.readouterr().err
