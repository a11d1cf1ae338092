"""Loads the observers that the configuration names."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

from router.base.errors import ConfigError
from router.base.supervisor import blamed
from router.config.observers import ObserversConfig
from router.request.observer import Observer


def own_observers(config: ObserversConfig) -> Iterator[Observer]:
    """Make the observers of `observers.load`.

    Raises:
        ConfigError: one cannot be imported, is no observer, or cannot be made.
    """
    for number, name in enumerate(config.load):
        field = f"observers.load[{number}]"
        try:
            yield _made(name)
        except ValueError as exc:
            raise ConfigError(f"{field}: {exc}", param=field) from exc


def _made(name: str) -> Observer:
    """Import and make one observer.

    Raises:
        ValueError: it cannot be had; the message says why.
    """
    module_name, colon, class_name = name.partition(":")
    if not (module_name and colon and class_name):
        raise ValueError(f"{name!r} is not MODULE:CLASS, such as my_observer:Turns")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except Exception as exc:  # whatever the module does
        raise ValueError(f"cannot import {module_name!r}: {_why(exc)}") from exc
    made = getattr(module, class_name, None)
    if not (isinstance(made, type) and issubclass(made, Observer)):
        what = "has no class" if made is None else "is not an Observer:"
        raise ValueError(f"{module_name} {what} {class_name}; see router.request.observer")
    try:
        return made()
    except Exception as exc:
        raise ValueError(f"{class_name}() failed: {_why(exc)}") from exc


def _why(exc: Exception) -> str:
    return str(exc) if isinstance(exc, ImportError) else blamed(exc)
