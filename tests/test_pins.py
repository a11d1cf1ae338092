"""The files of pins: enough for every Python that the project takes, not only for today's."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PYTHONS = ("3.11.0", "3.11.2", "3.11.3", "3.12.0", "3.13.0", "3.14.0")
_PIN = re.compile(r"^([a-z0-9-]+)(?:\[[a-z]+\])?==[^ ;]+(?: ; (.*?))? \\$", re.MULTILINE)


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("file", ["requirements.txt", "requirements-demo.txt"])
def test_what_a_pin_needs_is_pinned_for_every_python(file: str, python: str) -> None:
    """Debian 12 has Python 3.11.2, for which redis needs one package more: pip refused all."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert python in SpecifierSet(project["requires-python"])
    environment = {
        **default_environment(),
        "extra": "",
        "python_full_version": python,
        "python_version": python.rpartition(".")[0],
    }
    pins = {
        name
        for name, marker in _PIN.findall((ROOT / file).read_text())
        if not marker or Requirement(f"x ; {marker}").marker.evaluate(environment)
    }
    missing = []
    for name in sorted(pins):
        try:
            needs = metadata.requires(name) or []
        except metadata.PackageNotFoundError:  # for another Python than this
            continue
        for need in map(Requirement, needs):
            if need.marker is None or need.marker.evaluate(environment):
                if canonicalize_name(need.name) not in pins:
                    missing.append(f"{name} needs {need}")

    assert len(pins) > 20
    assert not missing


def test_a_pin_has_the_extras_that_others_ask_for() -> None:
    """As Debian 12's pip (23.0.1) takes `coverage[toml]` for pinned only if it is so written."""
    pinned = (ROOT / "requirements-dev.txt").read_text()

    assert re.search(r"^coverage\[toml\]==", pinned, flags=re.MULTILINE)
    assert re.search(r"^redis\[hiredis\]==", pinned, flags=re.MULTILINE)
