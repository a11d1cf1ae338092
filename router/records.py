"""The decision record: one JSON line per request, enough to decide again and to audit.

No prompt text, no key, no session id: sessions are digests, prompts are counts. `schema` changes
when a field changes its meaning; readers ignore fields they do not know.
"""

from __future__ import annotations

from msgspec import Struct

from policies.view import Decision, Snapshot

SCHEMA = 1


class Try(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One attempt: where, and how it failed (None: it did not)."""

    candidate: str
    failure: str | None = None


class DecisionRecord(Struct, frozen=True, kw_only=True):
    """What was known, what was decided, what happened. Times in milliseconds."""

    schema: int = SCHEMA
    request_id: str
    at: float  # unix seconds, wall clock
    api: str
    model: str
    policy: str
    state: str  # exact | degraded | blind: how well the chosen replica's cache was known
    snapshot: Snapshot
    decision: Decision
    tries: tuple[Try, ...]
    outcome: str
    status: int
    num_prompt_tokens: int
    num_predicted_cached_tokens: int
    num_reported_cached_tokens: int | None
    num_completion_tokens: int | None
    router_ms: float
    predicted_ttft_ms: float | None
    ttft_ms: float | None
    total_ms: float
