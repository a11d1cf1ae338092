"""Whose request it is: the tenants' file in force, looked up by key.

The file is read again when it changes. One that cannot be used changes nothing: the last good one
stays in force, the log says why, and it is counted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from router.base.caller import Caller, InFlight, cache_salt
from router.base.errors import ConfigError, Unauthorized
from router.base.system import WatchedFile
from router.scheduling.classes import BATCH
from router.tenants.file import (
    DIGEST,
    OWN,
    SHARED,
    TenantEntry,
    TenantsFile,
    digest_of,
    key_in,
    read,
)

logger = logging.getLogger(__name__)

MAX_LABELS: Final = 100
OTHER: Final = "other"
"""The label of tenants beyond the first `MAX_LABELS` that this process has known."""


class Tenants:
    """The tenants of the file in force.

    Args:
        path: The tenants' file.
        on_reload: Called with `ok` or `bad` for each version of the file that was read.

    Raises:
        ConfigError: the file cannot be used.
    """

    def __init__(self, path: Path, *, on_reload: Callable[[str], None] = lambda _: None) -> None:
        self._path = path
        self._on_reload = on_reload
        self._by_digest: dict[bytes, Caller] = {}
        self._by_name: dict[str, Caller] = {}
        self._in_flight: dict[str, InFlight] = {}  # by name; they outlive the file's versions
        self._labels: dict[str, None] = {}  # names that have a label of their own, for good
        self._watched = WatchedFile(path)
        self._apply(read(path))

    def __len__(self) -> int:
        return len(self._by_name)

    def authenticate(self, headers: Mapping[str, str]) -> Caller:
        """Find whose key a request carries.

        Raises:
            Unauthorized: it has none, or one that is unknown.
        """
        key = key_in(headers)
        if key is None:
            raise Unauthorized(
                "You didn't provide an API key: send `Authorization: Bearer KEY` or `x-api-key`."
            )
        caller = self._by_digest.get(digest_of(key))
        if caller is None:
            raise Unauthorized("Incorrect API key provided.")
        return caller

    @property
    def names(self) -> tuple[str, ...]:
        """Name all tenants."""
        return tuple(self._by_name)

    def named(self, name: str) -> Caller | None:
        """Find a tenant by its name, for operators."""
        return self._by_name.get(name)

    # -- the file ----------------------------------------------------------------------------

    def look(self) -> TenantsFile | ConfigError | None:
        """Read the file if it has changed, and is not being written; None: nothing new.

        Blocking: not for the event loop. A change counts once two looks have seen the same.
        """
        if not self._watched.has_changed():
            return None
        try:
            return read(self._path)
        except ConfigError as error:
            return error

    def follow(self, found: TenantsFile | ConfigError | None) -> None:
        """Apply what `look` found."""
        if found is None:
            return
        if isinstance(found, ConfigError):
            self._on_reload("bad")
            logger.error(
                "tenants file is invalid; the last one stays in force",
                extra={"reason": found.message},
            )
            return
        self._apply(found)
        self._on_reload("ok")
        logger.info("tenants file read again", extra={"tenants": len(self)})

    def _apply(self, file: TenantsFile) -> None:
        known = self._in_flight
        self._in_flight = {
            entry.name: known.get(entry.name) or InFlight() for entry in file.tenants
        }
        self._by_digest, self._by_name = {}, {}
        for entry in file.tenants:
            caller = self._by_name[entry.name] = self._caller(entry, file.secret)
            for digest in entry.keys:
                found = DIGEST.fullmatch(digest)
                assert found is not None
                self._by_digest[bytes.fromhex(found[1])] = caller

    def _caller(self, entry: TenantEntry, secret: str | None) -> Caller:
        """Return a tenant as requests see it."""
        salt = _salt(entry, secret)
        self._in_flight[entry.name].most = entry.max_in_flight
        shared = cache_salt(secret, SHARED) if secret is not None else None
        return Caller(
            name=entry.name,
            label=self._label(entry.name),
            salt=salt,
            users_salt=salt or shared,
            models=frozenset(entry.models) if entry.models is not None else None,
            body_bytes=entry.body_bytes,
            is_batch=entry.service_class == BATCH,
            weight=entry.weight,
            priority=entry.priority,
            in_flight=self._in_flight[entry.name],
        )

    def _label(self, name: str) -> str:
        """Label a tenant in metrics: by name, as long as there are few."""
        if name not in self._labels and len(self._labels) < MAX_LABELS:
            self._labels[name] = None
        return name if name in self._labels else OTHER


def _salt(entry: TenantEntry, secret: str | None) -> str | None:
    if entry.salt is not None:
        return entry.salt
    if entry.cache == SHARED:
        return None
    assert secret is not None  # the file was checked
    is_own = entry.cache == OWN
    return cache_salt(secret, f"tenant/{entry.name}" if is_own else f"group/{entry.cache}")
