"""Settings of the Redis that routers share, its password, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from msgspec import Meta, Struct

from router.base.errors import ConfigError
from router.config.ranges import Seconds

REDIS_PASSWORD = "WARMROUTE_REDIS_PASSWORD"
"""The variable with the password of Redis. No flag, no key: both are read by others."""


class RedisConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What several routers share. The password is no part of this tree: see `redis_password`."""

    url: Annotated[
        str | None,
        Meta(
            description="Redis or Valkey that routers share: redis://HOST:PORT/DB, rediss:// (TLS) "
            "or unix://PATH?db=DB; no Redis Cluster",
            extra={"flag": "redis", "metavar": "URL"},
        ),
    ] = None
    username: Annotated[str | None, Meta(description="ACL user; default: Redis's default user")] = (
        None
    )
    password_file: Annotated[
        Path | None,
        Meta(description="file with the password; or set WARMROUTE_REDIS_PASSWORD"),
    ] = None
    ca_file: Annotated[Path | None, Meta(description="CA bundle for rediss://")] = None
    sentinels: Annotated[
        tuple[str, ...],
        Meta(description="Sentinels, HOST:PORT each; redis.url then gives only scheme and DB"),
    ] = ()
    sentinel_service: Annotated[
        str | None, Meta(description="name of the master at the Sentinels")
    ] = None
    namespace: Annotated[
        str,
        Meta(
            pattern="^[A-Za-z0-9._-]{1,64}$",
            description="namespace of the keys; routers of one namespace share state. Letters, "
            "digits, '.', '_', '-'",
        ),
    ] = "default"
    timeout_s: Annotated[Seconds, Meta(description="deadline of one operation")] = 2.0
    lookup_timeout_s: Annotated[
        Seconds,
        Meta(
            description="deadline of a look-up in index.mode redis; after it the local index is "
            "used"
        ),
    ] = 0.02
    lease_s: Annotated[
        float,
        Meta(ge=0.5, description="time without a message after which a router counts as dead"),
    ] = 3.0

    @property
    def is_configured(self) -> bool:
        """Whether there is a Redis at all."""
        return self.url is not None or bool(self.sentinels)


def redis_password(redis: RedisConfig, environ: Mapping[str, str]) -> str | None:
    """Read the password of Redis, from its file or else its variable; None: there is none.

    It never becomes a part of the tree, so nothing that shows the tree can show it.

    Raises:
        ConfigError: the file cannot be read, or is empty.
    """
    if redis.password_file is None:
        return environ.get(REDIS_PASSWORD) or None
    key = "redis.password_file"
    try:
        password = redis.password_file.read_text(encoding="utf-8").rstrip("\r\n")
    except OSError as exc:
        raise ConfigError(f"{key}: {redis.password_file}: {exc.strerror}", param=key) from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{key}: {redis.password_file}: not UTF-8", param=key) from exc
    if not password:
        raise ConfigError(f"{key}: {redis.password_file} is empty", param=key)
    return password


def check_redis(redis: RedisConfig) -> None:
    """Refuse addresses that name no Redis, and Sentinels without their service.

    Raises:
        ConfigError: the message and `param` name the field.
    """
    if redis.url is not None:
        _check_redis_url(redis.url)
        if redis.ca_file is not None and redis.url.startswith("redis:"):
            raise ConfigError(
                "redis.ca_file: not used, redis:// is not encrypted; use rediss://",
                param="redis.ca_file",
            )
    for sentinel in redis.sentinels:
        if not re.fullmatch(r"(\[[0-9A-Fa-f:]+\]|[^\s:/@]+):\d{1,5}", sentinel):
            raise ConfigError(
                f"redis.sentinels: {sentinel!r} is not HOST:PORT", param="redis.sentinels"
            )
    if bool(redis.sentinels) != (redis.sentinel_service is not None):
        raise ConfigError(
            "redis.sentinels and redis.sentinel_service: set both or none",
            param="redis.sentinel_service",
        )


def _check_redis_url(text: str) -> None:
    """Refuse what names no Redis; never repeat a password that is in it."""
    key = "redis.url"
    try:
        url = urlsplit(text)
        has_user, host, _ = "@" in url.netloc, url.hostname, url.port
    except ValueError:
        has_user, host, url = "@" in text, None, urlsplit("")
    if has_user or "password=" in url.query:
        raise ConfigError(
            f"{key}: no user or password allowed; set the password in {REDIS_PASSWORD} or "
            "redis.password_file, and the user in redis.username",
            param=key,
        )
    if url.scheme == "unix":
        query = re.fullmatch(r"(db=\d+)?", url.query)
        is_right = len(url.path) > 1 and not host and query is not None
    else:
        path = re.fullmatch(r"/?\d*", url.path)
        is_scheme = url.scheme in ("redis", "rediss")
        is_right = is_scheme and bool(host) and not url.query and path is not None
    if not is_right or url.fragment:
        raise ConfigError(
            f"{key}: {text!r} is not redis://HOST:PORT/DB, rediss://HOST:PORT/DB or "
            "unix://PATH?db=DB",
            param=key,
        )
