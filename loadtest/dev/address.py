"""Where warmroute is published: `[project.urls]` of pyproject.toml has the address.

    python -m loadtest.dev.docs --address https://HOST/OWNER/warmroute

The command writes it there and into the alerts, and makes the documents again. Before the first
release the address is a placeholder, and the documents say how to install from a checkout.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

ROOT: Final = Path(__file__).resolve().parent.parent.parent
FILES: Final = ("pyproject.toml", "docker/prometheus/alerts.yml")
"""The files that have it. Alerts are read where nothing generates them."""

_PLACEHOLDER: Final = ".example"  # a reserved top-level domain: RFC 2606


def repository(root: Path | None = None) -> str:
    """Return the repository's address."""
    text = ((root or ROOT) / "pyproject.toml").read_text(encoding="utf-8")
    return str(tomllib.loads(text)["project"]["urls"]["Repository"])


def is_published(url: str) -> bool:
    """Return whether an address is more than the placeholder."""
    return not (urlsplit(url).hostname or "").endswith(_PLACEHOLDER)


def badges(url: str) -> str:
    """Return the badges of README.md; empty before the first release."""
    if not is_published(url):
        return ""
    tests = f"{url}/actions/workflows/ci.yml"
    return f"[![tests]({tests}/badge.svg)]({tests}) [Releases]({url}/releases)"


def install(url: str) -> str:
    """Return how to install warmroute: the line that works today."""
    said, what = "warmroute is not published yet. Install it in a checkout:", "."
    if is_published(url):
        said, what = f"Install warmroute. Its source is at <{url}>.", "warmroute"
    line = f"python3 -m venv .venv && . .venv/bin/activate && pip install {what}"
    return f"{said}\n\n<!-- not run: installs from a package index -->\n```sh\n{line}\n```"


def move(new: str, root: Path) -> None:
    """Write another address into `FILES`.

    Raises:
        ValueError: it is not the https address of a repository.
    """
    parts = urlsplit(new)
    if parts.scheme != "https" or not parts.hostname or not parts.path.strip("/"):
        raise ValueError(f"the address must be https://HOST/OWNER/warmroute, not {new!r}")
    old = repository(root)
    for name in FILES:
        file = root / name
        text = file.read_text(encoding="utf-8").replace(old, new.rstrip("/"))
        file.write_text(text, encoding="utf-8")
