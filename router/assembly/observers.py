"""Puts the observers to a router. A folder of `router.observers` that is not there is left out."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Final

from router.assembly.own_observers import own_observers
from router.base.errors import ConfigError
from router.config import Config
from router.http.part import ObserverPart

if TYPE_CHECKING:
    from router.assembly.router import Router

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


def add_observers(router: Router) -> None:
    """Build the parts of all folders, in their order, and add their observers to the router.

    Raises:
        ConfigError: a section is set whose folder is not there, or one of its values is wrong.
    """
    steps = router.story.steps
    for name, part in _built(router):
        router.observers[name] = part
        for observer in part.observers:
            steps.observers.add(observer)
        if part.choose is not None:
            steps.prompts.choose = part.choose
    check_sections(router, router.config)
    for observer in own_observers(router.config.observers):
        steps.observers.add(observer)


def check_sections(router: Router, config: Config) -> None:
    """Refuse a section whose folder is not there.

    Raises:
        ConfigError: the message names section and folder.
    """
    for name, sections in FOLDERS.items():
        for section in sections if name not in router.observers else ():
            if getattr(config, section) != getattr(Config(), section):
                raise ConfigError(
                    f"{section}: this warmroute has no router/observers/{name}; remove the section",
                    param=section,
                )


def _built(router: Router) -> Iterator[tuple[str, ObserverPart]]:
    for name in FOLDERS:
        module_name = f"router.observers.{name}"
        try:
            import_module(module_name)
        except ModuleNotFoundError as exc:
            if exc.name not in (module_name, "router.observers"):
                raise
            continue
        build = import_module(f"{module_name}.build").build
        yield name, build(router)
