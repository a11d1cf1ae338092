"""Which cause each computed token has: pure, from what was known when the request was placed.

Tokens are told apart by position. From the first one that the engine computed:

    cached by the engine
    fetch_failed, moved, pool_lost, then what became of the rest    an earlier prompt had these, and
                                                                    engines could have shared them
    last_block, changed, new
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from router.records.computed import Cause

Fate = Literal["evicted", "cleared", "unknown"]


class Known(Struct, frozen=True, kw_only=True):
    """What is known of a prompt, in tokens from its beginning.

    num_tokens, num_cached: Of the prompt, as the engine reports.
    num_common: That an earlier prompt had, too, in whole blocks.
    num_before: Of the whole earlier prompt of the same thread; 0: there is none.
    has_changed: The earlier prompt had another block behind the common ones.
    is_apart: The earlier prompt's blocks are of another salt, model or adapter.
    is_unknown: It is not known what the conversation had.
    step: A hit is a multiple of so many tokens.
    num_dropped: Of each hit, so many tokens are computed again (EAGLE, MTP).
    fetch_until: Predicted to come from the pool, up to there.
    moved_until: The replica of the turn before has it, up to there.
    pool_until: The pool had it, up to there.
    fate: What became of the rest that is not there.
    """

    num_tokens: int
    num_cached: int
    num_common: int = 0
    num_before: int = 0
    has_changed: bool = False
    is_apart: bool = False
    is_unknown: bool = False
    step: int = 1
    num_dropped: int = 0
    fetch_until: int = 0
    moved_until: int = 0
    pool_until: int = 0
    fate: Fate = "unknown"


def causes_of(known: Known) -> dict[Cause, int]:
    """Split the tokens that an engine computed by cause; the sum is its own count."""
    taken: dict[Cause, int] = {}
    at = known.num_cached

    def take(cause: Cause, until: int) -> None:
        nonlocal at
        until = min(until, known.num_tokens)
        if until > at:
            taken[cause] = taken.get(cause, 0) + until - at
            at = until

    if known.is_unknown:
        take("unknown", known.num_before or known.num_tokens)
    elif known.is_apart:
        take("salt_or_model", known.num_before)
    else:
        shared = sharable(known)
        take("fetch_failed", min(known.fetch_until, shared))
        take("moved", min(known.moved_until, shared))
        take("pool_lost", min(known.pool_until, shared))
        take(known.fate, shared)
        take("last_block", known.num_common)
        take("changed" if known.has_changed else "last_block", known.num_before)
    take("new", known.num_tokens)
    return taken


def sharable(known: Known) -> int:
    """Count the leading tokens that an engine can take from a cache at most."""
    most = min(known.num_common, known.num_tokens - 1)
    return max(0, most // known.step * known.step - known.num_dropped)
