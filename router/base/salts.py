"""Cache salts: whose blocks are whose.

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

from router.base.errors import BadRequest

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
