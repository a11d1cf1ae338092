"""Which cause each computed token has: pure, from what was known when the request was placed.

Tokens are told apart by position. From the first one that the engine computed:

    cached by the engine
    fetch_failed, moved, pool_lost, then what became of the rest    an earlier prompt had these, and
                                                                    engines could have shared them
    last_block, changed, new

An earlier prompt below one block had nothing that engines share: its tokens are `last_block`.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from router.records.computed import Cause

Fate = Literal["evicted", "cleared", "unknown"]


class KnownPrompt(Struct, frozen=True, kw_only=True):
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


def causes_of(known: KnownPrompt) -> dict[Cause, int]:
    """Split the tokens that an engine computed by cause; the sum is its own count."""
    num_before = known.num_before
    if known.is_unknown and not num_before:
        num_before = known.num_tokens
    had_blocks = min(num_before, known.num_tokens - 1) >= known.step
    causes: list[tuple[Cause, int]]  # each up to a position, in this order
    if known.is_unknown:
        causes = [("unknown" if had_blocks else "last_block", num_before)]
    elif known.is_apart:
        causes = [("salt_or_model" if had_blocks else "last_block", num_before)]
    else:
        shared = sharable(known)
        causes = [
            ("fetch_failed", min(known.fetch_until, shared)),
            ("moved", min(known.moved_until, shared)),
            ("pool_lost", min(known.pool_until, shared)),
            (known.fate, shared),
            ("last_block", known.num_common),
            ("changed" if known.has_changed and had_blocks else "last_block", num_before),
        ]
    taken: dict[Cause, int] = {}
    at = known.num_cached
    for cause, until in (*causes, ("new", known.num_tokens)):
        end = min(until, known.num_tokens)
        if end > at:
            taken[cause] = taken.get(cause, 0) + end - at
            at = end
    return taken


def sharable(known: KnownPrompt) -> int:
    """Count the leading tokens that an engine can take from a cache at most.

    They are those of whole blocks. Engines compute the last token.
    """
    num_common = min(known.num_common, known.num_tokens - 1)
    return max(0, num_common // known.step * known.step - known.num_dropped)
