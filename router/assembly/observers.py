"""Finds what observes requests.

A folder of `router.observers` that is not there is left out. Those that the configuration names are
loaded here, too.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Container, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from router.base.errors import ConfigError
from router.base.supervisor import blamed
from router.config import Config
from router.config.observers import ObserversConfig
from router.http.part import ObserverPart
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


FOLDERS: Final = {
    "counts": (),
    "sessions": (),
    "tracing": ("tracing",),
    "experiments": ("experiment",),
    "log": (),
    "early": ("early",),
    "live": (),
}
"""The folders in the order in which their observers are called, and their sections of the
configuration. What adds to a request's notes comes before what shows them."""


def check_sections(built: Container[str], config: Config) -> None:
    """Refuse a section whose folder is not there; `built`: the folders that are.

    Raises:
        ConfigError: the message names section and folder.
    """
    for name, sections in FOLDERS.items():
        for section in sections if name not in built else ():
            if getattr(config, section) != getattr(Config(), section):
                raise ConfigError(
                    f"{section}: this warmroute has no router/observers/{name}; remove the section",
                    param=section,
                )


def builders() -> Iterator[tuple[str, Callable[[Any], ObserverPart]]]:
    """Yield what builds the part of each folder, from a `Router`; in their order."""
    for name in FOLDERS:
        module_name = f"router.observers.{name}"
        try:
            import_module(module_name)
        except ModuleNotFoundError as exc:
            if exc.name not in (module_name, "router.observers"):
                raise
            continue
        yield name, import_module(f"{module_name}.build").build
