"""Whose request it is: the tenants' file in force, looked up by key.

The file is read again when it changes. One that cannot be used changes nothing: the last good one
stays in force, the log says why, and it is counted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from router.base.errors import ConfigError, Unauthorized
from router.base.watched_file import WatchedFile
from router.tenants.accounts import Account, Accounts
from router.tenants.file import OWN, SHARED, TenantEntry, TenantsFile, read
from router.tenants.keys import DIGEST, digest_of, key_in
from router.tenants.salts import tenant_salt, user_salt

logger = logging.getLogger(__name__)

MAX_LABELS: Final = 100
OTHER: Final = "other"
"""The label of tenants beyond the first `MAX_LABELS` that this process has known."""


class Tenant:
    """One tenant, as requests see it.

    salt: Of its cache; None: it shares its cache with all that send no salt.
    """

    __slots__ = (
        "_users_salt",
        "account",
        "body_bytes",
        "label",
        "models",
        "name",
        "priority",
        "salt",
        "service_class",
        "weight",
    )

    def __init__(
        self, entry: TenantEntry, label: str, secret: str | None, account: Account
    ) -> None:
        salt = _salt(entry, secret)
        shared = tenant_salt(secret, SHARED) if secret is not None else None
        self.name = entry.name
        self.label = label
        self.models = frozenset(entry.models) if entry.models is not None else None
        self.salt = salt
        self._users_salt = salt or shared
        self.body_bytes = entry.body_bytes
        self.service_class = entry.service_class
        self.weight = entry.weight
        self.priority = entry.priority
        self.account = account

    def may_use(self, model: str | None) -> bool:
        """Whether it may use a model; None, a model we cannot see, only if it may use all."""
        return self.models is None or model in self.models

    def salted(self, sent: object) -> str | None:
        """Return the salt of a request whose client sent this one; None: it stays as it is.

        Raises:
            BadRequest: what was sent is not a salt.
        """
        if sent is None or self._users_salt is None:
            return self.salt
        return user_salt(self._users_salt, sent)


class Tenants:
    """The tenants of the file in force.

    Args:
        path: The tenants' file.
        on_reload: Called with `ok` or `bad` for each version of the file that was read.

    Raises:
        ConfigError: the file cannot be used.
    """

    def __init__(
        self, path: Path, *, now_s: float, on_reload: Callable[[str], None] = lambda _: None
    ) -> None:
        self.accounts = Accounts()
        self._path = path
        self._on_reload = on_reload
        self._by_digest: dict[bytes, Tenant] = {}
        self._by_name: dict[str, Tenant] = {}
        self._labels: dict[str, None] = {}  # names that have a label of their own, for good
        self._watched = WatchedFile(path)
        self._apply(read(path), now_s)

    def __len__(self) -> int:
        return len(self._by_name)

    def authenticate(self, headers: Mapping[str, str]) -> Tenant:
        """Find whose key a request carries.

        Raises:
            Unauthorized: it has none, or one that is unknown.
        """
        key = key_in(headers)
        if key is None:
            raise Unauthorized(
                "You didn't provide an API key: send `Authorization: Bearer KEY` or `x-api-key`."
            )
        tenant = self._by_digest.get(digest_of(key))
        if tenant is None:
            raise Unauthorized("Incorrect API key provided.")
        return tenant

    @property
    def names(self) -> tuple[str, ...]:
        """Name all tenants."""
        return tuple(self._by_name)

    def named(self, name: str) -> Tenant | None:
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

    def follow(self, found: TenantsFile | ConfigError | None, now_s: float) -> None:
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
        self._apply(found, now_s)
        self._on_reload("ok")
        logger.info("tenants file read again", extra={"tenants": len(self)})

    def _apply(self, file: TenantsFile, now_s: float) -> None:
        self.accounts.follow({entry.name: entry for entry in file.tenants}, now_s)
        self._by_digest, self._by_name = {}, {}
        for entry in file.tenants:
            label = self._label(entry.name)
            tenant = Tenant(entry, label, file.secret, self.accounts[entry.name])
            self._by_name[entry.name] = tenant
            for digest in entry.keys:
                found = DIGEST.fullmatch(digest)
                assert found is not None
                self._by_digest[bytes.fromhex(found[1])] = tenant

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
    return tenant_salt(secret, f"tenant/{entry.name}" if is_own else f"group/{entry.cache}")
