"""Errors of Redis, as ours: redis-py's exceptions end here."""

from __future__ import annotations

import ssl
from typing import Final

from redis import exceptions as errors

from router.base.errors import StoreError, StoreFull, StoreRefused, StoreUnavailable

# Redis says so while it starts or fails over: it passes.
_PASSING: Final = ("LOADING", "MASTERDOWN", "BUSY")

CLUSTER: Final = (
    "it is a node of a Redis Cluster, which routers cannot use: use a Redis of its own, for "
    "fail-over with redis.sentinels"
)

HINTS: Final = {
    "NOAUTH": "it requires a password: set WARMROUTE_REDIS_PASSWORD or redis.password_file",
    "WRONGPASS": "wrong password, or user: see WARMROUTE_REDIS_PASSWORD, redis.password_file and "
    "redis.username",
    "NOPERM": "the ACL user lacks a right: it needs ~{wr:* &{wr:*, and +@read +@write +@scripting "
    "+@connection +@pubsub +info +time",
    "READONLY": "this is a replica: name its master in redis.url, or use redis.sentinels",
    "OOM": "it is full: raise maxmemory (its policy should be noeviction)",
    "MISCONF": "it cannot save to disk and therefore refuses writes: see its log",
    "WRONGTYPE": "a key of the namespace has other contents: choose another redis.namespace or "
    "database, or delete that key",
    **dict.fromkeys(("MOVED", "ASK", "CLUSTERDOWN"), CLUSTER),
}


def is_out_of_memory(error: Exception) -> bool:
    """Return whether a reply means that Redis is full; from inside a script it is wrapped."""
    return "OOM command not allowed" in str(error) or isinstance(error, errors.OutOfMemoryError)


def store_error(exc: Exception, where: str) -> StoreError:
    """Name what redis-py raised, or what Redis replied; most telling first."""
    if isinstance(exc, StoreError):
        return exc
    if isinstance(exc, TimeoutError | errors.TimeoutError):
        return StoreUnavailable(f"Redis at {where} did not answer in time")
    text = str(exc)
    code = getattr(exc, "status_code", None) or text.partition(" ")[0]
    if isinstance(exc, errors.AuthenticationError):
        if "without any password" in text or "no password" in text:
            return StoreRefused(f"Redis at {where} has no password, but one is configured")
        is_missing = "required" in text or "already authenticated" in text
        return StoreRefused(
            f"Redis at {where} refused us: {HINTS['NOAUTH' if is_missing else 'WRONGPASS']}"
        )
    for hint_code, hint in HINTS.items():
        if code == hint_code or f"{hint_code} " in text:
            kind = StoreFull if hint_code == "OOM" else StoreRefused
            return kind(f"Redis at {where}: {hint} ({text})")
    if isinstance(exc, errors.InvalidResponse) or "Protocol error" in text:
        return StoreRefused(f"what answers at {where} is not Redis")
    if code in _PASSING or isinstance(exc, errors.ConnectionError | OSError):
        return _broken_link(exc, text, where)
    if isinstance(exc, errors.ResponseError):
        return _bad_reply(text, where)
    return StoreUnavailable(f"Redis at {where}: {text or type(exc).__name__}")


def _broken_link(exc: BaseException, text: str, where: str) -> StoreError:
    cause: BaseException | None = exc
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return StoreRefused(
                f"Redis at {where}: certificate not trusted ({cause.verify_message}): "
                "see redis.ca_file"
            )
        if isinstance(cause, ssl.SSLError):
            return StoreRefused(f"Redis at {where} does not speak TLS: write redis://")
        cause = cause.__cause__ or cause.__context__
    return StoreUnavailable(f"Redis at {where}: {text or type(exc).__name__}")


def _bad_reply(text: str, where: str) -> StoreError:
    lower = text.lower()
    if "db index" in lower:
        return StoreRefused(f"Redis at {where} has no such database: see redis.url ({text})")
    if "unknown command" in lower:
        return StoreRefused(f"what answers at {where} is no Redis of version 6.2 or later ({text})")
    return StoreRefused(f"Redis at {where}: {text}")
