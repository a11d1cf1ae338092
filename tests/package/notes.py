"""Print what the changelog says of a release, if its tag is the version of pyproject.toml.

    python3 tests/package/notes.py v0.2.0 https://HOST/OWNER/warmroute

The release workflow runs it first, with its own address: a tag that names another version, or a
checkout that names another address, publishes nothing.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def notes(tag: str, version: str, changelog: str) -> str:
    """Return the section of a release.

    Raises:
        ValueError: the tag is not that of the version, or the changelog has nothing on it.
    """
    if tag != f"v{version}":
        raise ValueError(f"the tag is {tag!r}, but pyproject.toml has version {version!r}")
    sections = re.split(r"^## ", changelog, flags=re.MULTILINE)[1:]
    for section in sections:
        head, _, text = section.partition("\n")
        if head.startswith(f"[{version}] - ") and text.strip():
            return text.strip()
    raise ValueError(f"CHANGELOG.md has no section '## [{version}] - DATE' with text")


def check_address(named: str, actual: str) -> None:
    """Compare the address in pyproject.toml with the repository that is released.

    Raises:
        ValueError: it is another one, or still the placeholder.
    """
    if named != actual:
        raise ValueError(
            f"pyproject.toml has the address {named!r}, but this is {actual!r}; "
            f"run `python -m loadtest.dev.docs --address {actual}`"
        )


def main() -> int:
    """Print the notes; return the exit status."""
    if len(sys.argv) not in (2, 3):
        print("usage: notes.py TAG [ADDRESS]", file=sys.stderr)
        return 2
    tag, *addresses = sys.argv[1:]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    try:
        for address in addresses:
            check_address(project["urls"]["Repository"], address)
        print(notes(tag, project["version"], (ROOT / "CHANGELOG.md").read_text()))
    except ValueError as error:
        print(f"notes.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
