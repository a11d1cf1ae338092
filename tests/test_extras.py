"""Extras: what they install, and what a user is told when one is missing."""

from __future__ import annotations

import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from router.base.system import install_hint

ROOT = Path(__file__).parent.parent


def _project() -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project


@pytest.mark.parametrize("extra", ["harmony", "kimi", "mistral", "experiments"])
def test_a_hint_names_the_libraries_of_the_extra(extra: str) -> None:
    """The shell reads the command as pip and the requirements of pyproject.toml."""
    said, _, command = install_hint(extra).partition(": ")

    assert said == f"Install the extra `{extra}`"
    assert shlex.split(command)[:2] == ["pip", "install"]
    assert set(shlex.split(command)[2:]) == set(_project()["optional-dependencies"][extra])


def test_a_hint_for_an_extra_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(ValueError, match="no extra 'plot'"):
        install_hint("plot")


def test_nothing_tells_users_to_install_warmroute_from_an_index() -> None:
    """The name is not published: docs say `pip install .`, messages name the libraries."""
    found = subprocess.run(
        ["git", "grep", "-nE", r"pip install[^`|]*['\" ]warmroute\b", "--", ".", ":!tests"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert found.returncode == 1, found.stdout + found.stderr
