"""The engines' own `--api-key`, and which replicas may be sent it.

Configured replicas may. A replica that the admin API or another router added may only if its host
is in `engine.key_hosts`: adding a replica must not reveal the key.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Self

from router.config import Config
from router.config.hosts import HostRules


class EngineKey:
    """A key and the base URLs that may have it.

    Args:
        key: None: there is none.
        urls: Base URLs of the configured replicas.
        hosts: Hosts of other replicas that may also have it.
    """

    __slots__ = ("_hosts", "_key", "_urls")

    def __init__(self, key: str | None, urls: Iterable[str], hosts: HostRules) -> None:
        self._key = key
        self._urls = frozenset(url.rstrip("/") for url in urls)
        self._hosts = hosts

    @classmethod
    def of(cls, config: Config, key: str | None) -> Self:
        """Build it from the replicas and hosts of a configuration."""
        return cls(key, (r.url for r in config.replicas), HostRules(config.engine.key_hosts))

    def configure(self, config: Config) -> None:
        """Apply another list of configured replicas."""
        self._urls = frozenset(replica.url.rstrip("/") for replica in config.replicas)

    def use(self, key: str) -> None:
        """Send another key from the next request on."""
        self._key = key

    def headers(self, url: str) -> Mapping[str, str]:
        """Return the header that authorizes at the replica with base URL `url`; {}: none."""
        if self._key is None:
            return {}
        is_known = url.rstrip("/") in self._urls or self._hosts.refused([url]) is None
        return {"Authorization": f"Bearer {self._key}"} if is_known else {}


NO_KEY = EngineKey(None, (), HostRules(()))
