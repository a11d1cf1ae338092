"""Release notes: one section of the changelog, for the tag of the version alone."""

from __future__ import annotations

import tomllib

import pytest

from tests.package.notes import ROOT, check_address, notes

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
CHANGELOG = """# Changelog

## [Unreleased]

## [1.1.0] - 2026-12-01

### Added

- A thing.

## [1.0.0] - 2026-11-01

## [0.9.0] - 2026-10-01

- Another.
"""


def test_the_notes_of_a_release_are_its_section() -> None:
    assert notes("v1.1.0", "1.1.0", CHANGELOG) == "### Added\n\n- A thing."
    assert notes("v0.9.0", "0.9.0", CHANGELOG) == "- Another."


@pytest.mark.parametrize(
    ("tag", "version", "said"),
    [
        ("v1.1.1", "1.1.0", "the tag is 'v1.1.1', but pyproject.toml has version '1.1.0'"),
        ("1.1.0", "1.1.0", "the tag is '1.1.0'"),
        ("v1.2.0", "1.2.0", "no section '## [1.2.0] - DATE'"),
        ("v1.0.0", "1.0.0", "no section '## [1.0.0] - DATE' with text"),
        ("vUnreleased", "Unreleased", "no section"),
    ],
)
def test_a_tag_without_a_release_is_refused(tag: str, version: str, said: str) -> None:
    """Another version, no section, an empty one."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - its text is looked at
        notes(tag, version, CHANGELOG)

    assert said in str(caught.value)


def test_another_address_is_refused() -> None:
    """The placeholder too, with the command that writes the right one."""
    check_address("https://forge.test/o/w", "https://forge.test/o/w")

    with pytest.raises(ValueError, match=r"docs --address https://forge\.test/o/w"):
        check_address("https://repository.example/warmroute", "https://forge.test/o/w")
