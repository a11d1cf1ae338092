"""Who sends a request, and on which terms: the models, the cache, the share and the limit.

`router.tenants` finds the caller by its key. Without a tenants file all requests are `ANYBODY`'s.

Cache salts: whose blocks are whose.

vLLM mixes a request's `cache_salt` into the hash of its first block, and each block's hash into the
next: requests with different salts share no block, on no tier. Salts are secret: a client that
knows one can ask for what is cached under it.

    caller   HMAC(secret of the tenants file, name of its cache), or as configured
    user     HMAC(the caller's salt, the salt that it sent); callers that share one cache have such
             a salt in common

A client chooses the second message only. Whatever it sends, it gets a salt below its own, so users
of one caller can be kept apart, and no caller reaches the cache of another.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from typing import Final

from msgspec import Struct

from router.base.errors import BadRequest, RateLimited, UnknownModel

MAX_CHARS: Final = 128
FORBIDDEN: Final = frozenset("@/\\\0")
"""What vLLM refuses in a salt. Source: vllm/entrypoints/generate/base/protocol.py at 0.32.0."""


def cache_salt(secret: str, cache: str) -> str:
    """Derive the salt of a cache, 43 characters; `cache` names a caller's own, or a group's."""
    return _hmac(secret.encode(), b"warmroute cache\0" + cache.encode())


def user_salt(salt: str, sent: object) -> str:
    """Combine a caller's salt with what was sent as `cache_salt`.

    Raises:
        BadRequest: the engine would refuse what was sent; it must not see it to say so.
    """
    if not isinstance(sent, str) or not 0 < len(sent) <= MAX_CHARS or FORBIDDEN & set(sent):
        raise BadRequest(
            f"`cache_salt` must be a string of 1 to {MAX_CHARS} characters without '@', '/', "
            "'\\' and NUL",
            param="cache_salt",
        )
    return _hmac(salt.encode(), b"user\0" + sent.encode("utf-8", "surrogatepass"))


def _hmac(key: bytes, message: bytes) -> str:
    digest = hmac.digest(key, message, hashlib.sha256)
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


class InFlight:
    """Counts a caller's requests in flight: `num` now, and `most` at a time. None: any number."""

    __slots__ = ("most", "num")

    def __init__(self) -> None:
        self.most: int | None = None
        self.num = 0

    def enter(self) -> None:
        """Count a request that has just come.

        Raises:
            RateLimited: it is one too many.
        """
        if self.most is not None and self.num >= self.most:
            raise RateLimited(
                f"Too many requests at a time: the limit is {self.most} in flight.",
                retry_after_s=1.0,
            )
        self.num += 1

    def leave(self) -> None:
        """End a request that entered."""
        self.num -= 1


class Caller(Struct, frozen=True, kw_only=True):
    """Who sends a request.

    name: None: it has no name of its own.
    label: What metrics call it; several callers may share one. None: it is not counted.
    salt: Of its own cache. None: it shares its cache with all that send no salt.
    users_salt: What a salt that it sends is combined with. None: that one stays as it is.
    models: Names of the models that it may use. None: all.
    body_bytes: Largest body that it may send. None: as large as `limits.body_bytes`.
    is_batch: All that it sends is of class batch.
    weight: Its part of the compute while others of its priority wait.
    priority: Requests of a higher one go first.
    in_flight: Counts its requests that are in flight. None: they are not counted.
    """

    name: str | None = None
    label: str | None = None
    salt: str | None = None
    users_salt: str | None = None
    models: frozenset[str] | None = None
    body_bytes: int | None = None
    is_batch: bool = False
    weight: float = 1.0
    priority: int = 0
    in_flight: InFlight | None = None

    @property
    def owner(self) -> str:
        """What its sessions are hashed with, before a model; "": those of clients without a key."""
        return f"{self.name}\0" if self.name is not None else ""

    def __repr__(self) -> str:  # salts are secret
        return f"Caller(name={self.name!r})"

    def may_use(self, model: str | None) -> bool:
        """Return whether it may use a model; None: one we cannot see, only if it may use all."""
        return self.models is None or model in self.models

    def check_model(self, model: str | None) -> None:
        """Refuse a model that it may not use.

        Raises:
            UnknownModel: it may use others only.
            BadRequest: no model is named.
        """
        if self.may_use(model):
            return
        allowed = ", ".join(sorted(self.models or ()))
        if model is None:
            raise BadRequest(f"name a `model`: {allowed}", param="model")
        raise UnknownModel(
            f"The model `{model}` does not exist or you do not have access to it (yours: "
            f"{allowed}).",
            param="model",
        )

    def salted(self, sent: object) -> str | None:
        """Return the salt of a request that was sent with this one; None: it stays as it is.

        Raises:
            BadRequest: what was sent is not a salt.
        """
        if sent is None or self.users_salt is None:
            return self.salt
        return user_salt(self.users_salt, sent)


ANYBODY: Final = Caller()
