"""Puts another configuration into effect while the router runs, as far as that can be.

    replicas                     those no longer listed drain and go; new ones are watched
    policy.name, policy.params   from the next decision on
    experiment                   from its `start_at` on, or at once
    log.level                    at once

What else differs needs a restart: then nothing is changed, and the error names the keys. The new
configuration has passed all checks before, and what is applied is applied in one step.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import fields, replace

from policies.registry import create
from router.assembly.observers import check_sections
from router.assembly.read_files import _LOOK_S
from router.assembly.router import Router
from router.base.errors import ConfigError
from router.base.system import WatchedFile
from router.config import Config

logger = logging.getLogger(__name__)

LIVE: Final = ("replicas", "policy.name", "policy.params", "experiment", "log.level")


class Reload:
    """The configuration of a router that runs, and how it is read again.

    Args:
        load: Reads it, with the flags and variables of the start.
        file: Where it is read from, to be watched; None: it is read when that is asked for.
    """

    def __init__(self, load: Callable[[], Config], file: Path | None = None) -> None:
        self._load = load
        self._watched = WatchedFile(file) if file is not None else None
        self._is_wanted = asyncio.Event()

    def want(self) -> None:
        """Read it again soon."""
        self._is_wanted.set()

    async def run(self, router: Router) -> None:
        """Read it whenever that is wanted, or its file has changed, until cancelled."""
        while True:
            try:
                async with asyncio.timeout(_LOOK_S if self._watched is not None else None):
                    await self._is_wanted.wait()
            except TimeoutError:
                if not await self._has_changed(router):
                    continue
            self._is_wanted.clear()
            await self._read(router)

    async def _has_changed(self, router: Router) -> bool:
        assert self._watched is not None
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(router.threads.files, self._watched.has_changed)

    async def _read(self, router: Router) -> None:
        loop = asyncio.get_running_loop()
        try:
            config = await loop.run_in_executor(router.threads.files, self._load)
            changed = apply(router, config)
        except ConfigError as exc:
            reason = {"what": "configuration", "reason": exc.message}
            router.metrics.config_reads.labels("bad").inc()
            logger.error("not reloaded", extra=reason)
            return
        router.metrics.config_reads.labels("ok").inc()
        if changed:
            logger.info("reloaded", extra={"what": "configuration", "changed": ", ".join(changed)})
        else:
            logger.info("nothing to reload")


def apply(router: Router, config: Config) -> list[str]:
    """Apply a configuration; return the keys that changed.

    Raises:
        ConfigError: it needs a restart, or names what is another's; nothing was changed.
    """
    old = router.config
    changed = [key for key, one, other in _leaves(old, config) if one != other]
    fixed = [key for key in changed if key not in LIVE]
    if fixed:
        raise ConfigError(
            f"{', '.join(fixed)}: needs a restart (without one: {', '.join(LIVE)})", param=fixed[0]
        )
    try:
        policy = create(config.policy.name, config.policy.params)
    except ValueError as exc:
        raise ConfigError(f"policy: {exc}", param="policy.name") from exc
    check_sections(router.observers, config)
    if "replicas" in changed:
        router.discovery.watches.configure(config.replicas)
        router.engine_key.configure(config)
    if "policy.name" in changed or "policy.params" in changed:
        router.story.steps.place.use(policy)
    if "log.level" in changed:
        logging.getLogger("router").setLevel(config.log.level.upper())
    for part in router.observers.values():
        if part.configure is not None:
            part.configure(config)
    live = {name: getattr(config, name) for name in ("replicas", "policy", "experiment", "log")}
    router.config = replace(old, **live)
    return changed


def _leaves(one: Struct, other: Struct, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Pair what two trees of sections have under each key."""
    for field in fields(one):
        first, second = getattr(one, field.name), getattr(other, field.name)
        is_section = isinstance(first, Struct) and isinstance(second, Struct)
        if is_section and field.name not in LIVE:
            yield from _leaves(first, second, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", first, second
