"""Where a request says which conversation it belongs to. Optional: content decides without it.

Source of the names: Claude Code (`x-claude-code-session-id`), Codex (`session_id`,
`prompt_cache_key`), Responses API (`previous_response_id`), Anthropic (`metadata.user_id`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import xxhash

_BODY_FIELDS = ("prompt_cache_key", "previous_response_id")
_LONGEST = 512  # characters; a longer "session id" is something else


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
    return xxhash.xxh3_64_intdigest(f"{model}\0{session}".encode()) >> 1
