"""Print what the changelog says of a release, if its tag is the version of pyproject.toml.

    python3 tests/package/notes.py v0.2.0

The release workflow runs it first: a tag that names another version publishes nothing.
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


def main() -> int:
    """Print the notes; return the exit status."""
    if len(sys.argv) != 2:
        print("usage: notes.py TAG", file=sys.stderr)
        return 2
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    try:
        print(notes(sys.argv[1], version, (ROOT / "CHANGELOG.md").read_text()))
    except ValueError as error:
        print(f"notes.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
