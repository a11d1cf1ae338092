"""The conversation that a request names. Optional: without it content decides.

Source of the names: Claude Code (`x-claude-code-session-id`), Codex (`session_id`,
`prompt_cache_key`), Responses API (`previous_response_id`), Anthropic (`metadata.user_id`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import xxhash

_BODY_FIELDS = ("prompt_cache_key", "previous_response_id")
_LONGEST = 16_384  # characters; a longer "session id" is something else
_LONGEST_HEADER = 512
_HEADER_SAFE = re.compile(r"[\x21-\x7e]([\x20-\x7e]*[\x21-\x7e])?")


def session_of(
    headers: Mapping[str, str], body: Mapping[str, object] | None, names: Iterable[str]
) -> str | None:
    """Find the session id: the configured headers in order, then the body's fields."""
    for name in names:
        value = headers.get(name)
        if value and len(value) <= _LONGEST:
            return value
    if body is None:
        return None
    for field in _BODY_FIELDS:
        candidate = body.get(field)
        if isinstance(candidate, str) and 0 < len(candidate) <= _LONGEST:
            return candidate
    metadata = body.get("metadata")
    if isinstance(metadata, Mapping):
        user = metadata.get("user_id")
        if isinstance(user, str) and 0 < len(user) <= _LONGEST:
            return user
    return None


def session_hash(session: str, model: str) -> int:
    """Digest a session id (63 bits): what is kept, compared and logged instead of the id."""
    # A header's bytes that are no UTF-8 arrive as surrogates.
    return xxhash.xxh3_64_intdigest(f"{model}\0{session}".encode(errors="surrogatepass")) >> 1


def session_header(session: str) -> str:
    """Write a session id as a header's value: itself, or a digest where it is long or odd."""
    if len(session) <= _LONGEST_HEADER and _HEADER_SAFE.fullmatch(session):
        return session
    return f"{session_hash(session, ''):016x}"
