"""What the extra `experiments` brings, imported late: `--help` needs none of it."""

from __future__ import annotations

import importlib
from typing import Any


class MissingExtra(Exception):
    """A library of the extra is not installed; the message says how to get it."""


def need(name: str) -> Any:
    """Import a module of the extra.

    Raises:
        MissingExtra: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as exc:
        package = name.partition(".")[0]
        raise MissingExtra(
            f"{package} is not installed; say: pip install 'warmroute[experiments]'"
        ) from exc
