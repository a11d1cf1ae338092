"""loadtest.dev.address: pyproject.toml has the repository's address, all else follows."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from loadtest.dev import address, docs

URL = "https://forge.test/team/warmroute"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A copy of the files that have the address, and of a document that is made from it."""
    for name in (*address.FILES, "README.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(address.ROOT / name, tmp_path / name)
    return tmp_path


def test_no_other_file_has_the_address() -> None:
    """`--address` would miss it."""
    found = subprocess.run(
        ["git", "grep", "-lF", address.repository(), "--", ".", ":!tests"],
        cwd=address.ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip

    made = {name for name in found if name.endswith(".md")}  # from generated parts
    assert set(found) - made == set(address.FILES)


def test_one_command_writes_it_everywhere(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Package, alerts and README; a second address replaces the first."""
    monkeypatch.setattr(docs, "ROOT", root)
    monkeypatch.setattr(address, "ROOT", root)

    for url in (f"{URL}/", "https://other.test/warmroute"):
        assert docs.main(["--address", url]) == 0
        assert address.repository(root) == url.rstrip("/")
        alerts = (root / "docker/prometheus/alerts.yml").read_text()
        links = set(re.findall(r"runbook_url: (.*)/blob/main/docs/operate/alerts.md#", alerts))
        assert links == {url.rstrip("/")}
        assert "pip install warmroute\n" in (root / "README.md").read_text()


@pytest.mark.parametrize("url", ["http://forge.test/a", "forge.test/a", "https://forge.test/"])
def test_an_address_that_is_none_is_refused(
    url: str, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is written."""
    monkeypatch.setattr(docs, "ROOT", root)

    with pytest.raises(SystemExit):
        docs.main(["--address", url])

    assert "https://HOST/OWNER/warmroute" in capsys.readouterr().err
    assert address.repository(root) == address.repository()
