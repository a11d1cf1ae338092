"""Files that are read again while the router runs: each has one rule.

    listen.tls_…, admin.tls_…        from the next handshake
    forward.ca_file, client_cert, …  from the next connection to a replica
    engine.api_key_file              from the next probe
    admin.token_file                 from the next request to the admin port
    redis.password_file, ca_file     from the next connection to Redis
    tokens.chat_templates            as soon as the model's templates are compiled again
    discovery.kubernetes_credentials at each question (router.discovery.kubernetes_api)
    tenants.file                     at once (router.tenants)
    log.decisions                    is written, not read

Each is looked at once a second, and at once on SIGHUP. If a changed file cannot be used, the last
good one stays in force, and the log says why.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

from msgspec import Struct

from router.assembly.parts import Parts
from router.base.errors import ConfigError
from router.base.system import WatchedFile
from router.cluster.redis_store import RedisStore
from router.config import redis_password
from router.config.secrets import read_secret
from router.discovery.prompter_loader import PrompterLoader
from router.http.admin import Guard

logger = logging.getLogger(__name__)

_LOOK_S: Final = 1.0

Put = Callable[[], None]
"""Puts into force what was read; on the event loop."""


class ReadFile(Struct, frozen=True, kw_only=True):
    """A file, or several that are of use only together.

    read: Reads them again, outside of the event loop.
    """

    files: dict[str, Path]  # by key
    read: Callable[[], Put]


class ReadFiles:
    """Reads files again that have changed."""

    def __init__(
        self, parts: Parts, *, guard: Guard, store: RedisStore | None, loader: PrompterLoader
    ) -> None:
        self._executor = parts.threads.files
        self._is_wanted = asyncio.Event()
        self._each = [
            (each, {key: WatchedFile(file) for key, file in each.files.items()})
            for each in _read_files(parts, guard, store, loader)
        ]

    def want(self) -> None:
        """Look at all files soon, and say so if none has changed."""
        self._is_wanted.set()

    async def run(self) -> None:
        """Look at all files, again and again, until cancelled."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._is_wanted.wait()
            is_wanted = self._is_wanted.is_set()
            self._is_wanted.clear()
            found = [await self._look(*each, is_wanted) for each in self._each]
            if is_wanted and not any(found):
                logger.info("no file to read again")

    async def _look(self, each: ReadFile, watched: dict[str, WatchedFile], at_once: bool) -> bool:
        """Read a file again that has changed; `at_once`: though it may be being written."""
        loop = asyncio.get_running_loop()
        changed = await loop.run_in_executor(self._executor, _changed, watched, at_once)
        if not changed:
            return False
        fields = {"what": ", ".join(changed)}
        try:
            put = await loop.run_in_executor(self._executor, each.read)
        except ConfigError as exc:  # half written, mostly
            logger.error("file not read again", extra=fields | {"reason": exc.message})
        else:
            put()
            logger.info("file read again", extra=fields)
        return True


def _changed(watched: dict[str, WatchedFile], at_once: bool) -> list[str]:
    return [key for key, file in watched.items() if file.has_changed(at_once=at_once)]


def _read_files(
    parts: Parts, guard: Guard, store: RedisStore | None, loader: PrompterLoader
) -> Iterator[ReadFile]:
    """List the files of a router that are read again."""
    config = parts.config
    for tls in (*parts.certificates.values(), parts.client_tls):
        if tls is not None:
            yield ReadFile(files=dict(tls.files), read=tls.read)
    secrets = (
        ("engine.api_key_file", config.engine.api_key_file, parts.engine_key.use),
        ("admin.token_file", config.admin.token_file, guard.use),
    )
    for key, file, use in secrets:
        if file is not None:
            yield ReadFile(files={key: file}, read=partial(_secret, key, file, use))
    file = config.redis.password_file
    if store is not None and file is not None:
        read = partial(redis_password, config.redis, {})
        yield ReadFile(
            files={"redis.password_file": file}, read=lambda: partial(store.use_password, read())
        )
    for model, template in config.tokens.chat_templates.items():
        yield ReadFile(
            files={f"tokens.chat_templates.{model}": template},
            read=partial(_readable, f"tokens.chat_templates.{model}", template,
                         partial(loader.reload, model)),
        )  # fmt: skip


def _secret(key: str, file: Path, use: Callable[[str], None]) -> Put:
    secret = read_secret(file, key)
    assert secret is not None
    return partial(use, secret)


def _readable(key: str, file: Path, put: Put) -> Put:
    try:
        file.read_bytes()
    except OSError as exc:
        raise ConfigError(f"{key}: {file}: {exc.strerror}", param=key) from exc
    return put
