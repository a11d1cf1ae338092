"""Client keys: 256 random bits, of which only a digest is kept.

A plain SHA-256 is enough. Slow hashes (scrypt, argon2) protect passwords, which people choose and
attackers guess; nothing guesses 256 random bits, however fast it may try. A key is compared by
looking its digest up: what a client can measure depends on the digest, of which it controls no bit.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Mapping
from typing import Final

DIGEST: Final = re.compile(r"sha256:([0-9a-f]{64})")
"""How a key's digest is written."""

_LONGEST_KEY: Final = 512  # characters; a longer one is not ours


def new_key() -> str:
    """Create a client key: 256 bits of the system's randomness."""
    return f"wr-{secrets.token_urlsafe(32)}"


def digest_of(key: str) -> bytes:
    """Digest a key, shape (32,)."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def written(digest: bytes) -> str:
    """Write a digest as the file has it."""
    return f"sha256:{digest.hex()}"


def key_in(headers: Mapping[str, str]) -> str | None:
    """Find the key a client sent: a bearer token, or Anthropic's `x-api-key`; None: it sent none.

    Args:
        headers: Case-insensitive.
    """
    scheme, _, token = headers.get("Authorization", "").partition(" ")
    key = token.strip() if scheme.lower() == "bearer" else ""
    key = key or headers.get("x-api-key", "").strip()
    return key if 0 < len(key) <= _LONGEST_KEY else None
