"""Optional libraries, imported late, so that `--help` needs none of them.

A command that needs one asks for it here before it begins.
"""

from __future__ import annotations

import importlib
from typing import Any

from router.base.system import install_hint


class MissingExtra(Exception):
    """A library of an extra is not installed; the message says how to get it."""


def need(name: str) -> Any:
    """Import a module of the extra `experiments`.

    Raises:
        MissingExtra: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as exc:
        package = name.partition(".")[0]
        raise MissingExtra(f"{package} is not installed. {install_hint('experiments')}") from exc
