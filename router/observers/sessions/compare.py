"""Compare a prompt with an earlier one that its client names.

A thread has its last prompt only. That of an earlier request is its beginning, if history was only
added since.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace

from router.api.diagnostics import Comparison
from router.api.parts import Parts
from router.contracts import BlockKey, HashContract
from router.observers.sessions.threads import Asked, Match, Thread, difference_of, num_shared

_MOST_ENDING: Final = 2
"""Blocks. What asks a model for its answer ends a prompt, and is written otherwise in the next: no
change of the client's."""

_MOST_ASKED: Final = 4


def add_asked(thread: Thread, match: Match, answer: int) -> None:
    """Add to a new thread its own request, and the earlier ones that it goes on from.

    Args:
        thread: The new thread.
        match: Of its prompt.
        answer: Digest of the id of its answer.
    """
    before, change = match.thread, match.change
    earlier: tuple[Asked, ...] = ()
    if before is not None and not match.is_unknown and before.space == thread.space:
        size, offset = _size(thread), change.offset if change is not None else None
        earlier = tuple(
            each
            for each in before.asked
            if offset is None or each.num_tokens // size * size <= offset
        )
    num_messages = len(thread.parts.messages) if thread.parts is not None else 0
    own = Asked(answer, thread.num_tokens, num_messages)
    thread.asked = (own, *earlier[: _MOST_ASKED - 1])


def as_of(thread: Thread, answer: int) -> Thread | None:
    """Return a thread as it was after an earlier answer; None: that is not known."""
    asked = next((each for each in thread.asked if each.answer == answer), None)
    if asked is None or asked is thread.asked[0]:
        return thread if asked is not None else None
    parts = thread.parts
    if parts is not None:
        parts = replace(parts, messages=parts.messages[: asked.num_messages])
    keys = thread.keys[: asked.num_tokens // _size(thread)]
    return replace(thread, keys=keys, num_tokens=asked.num_tokens, parts=parts)


def _size(thread: Thread) -> int:
    return thread.contract.block_size if thread.contract is not None else 1


def compare(
    before: Thread,
    *,
    space: int,
    model: str,
    keys: Sequence[BlockKey],
    contract: HashContract | None,
    num_tokens: int,
    parts: Parts | None,
) -> Comparison:
    """Find the first difference of a prompt from the last one of a thread; O(log blocks).

    Without known tokens by its parts alone.

    Args:
        before: The thread.
        space: See `Thread`.
        model: As the request names it.
        keys: Of the prompt's full blocks; empty: not known.
        contract: How they are named.
        num_tokens: Of the prompt.
        parts: Of the prompt; None: not known.
    """
    if before.space != space:
        is_model = before.model != model
        return Comparison(difference="model" if is_model else "salt", num_missed=before.num_tokens)
    is_known = bool(keys and before.keys) and contract == before.contract
    num_common = 0
    if is_known and contract is not None:
        num_blocks = num_shared(keys, before.keys)
        num_common = num_blocks * contract.block_size
        if num_blocks >= min(len(keys), len(before.keys)):
            return Comparison(num_common=num_common)
    num_missed = max(0, before.num_tokens - num_common)
    if before.parts is None or parts is None:
        return Comparison(difference="unknown", num_common=num_common, num_missed=num_missed)
    part, _, _ = difference_of(before, parts, num_tokens)
    if part == "template" and (not is_known or _is_ending(num_missed, contract)):
        return Comparison(num_common=num_common)
    return Comparison(difference=part, num_common=num_common, num_missed=num_missed)


def _is_ending(num_missed: int, contract: HashContract | None) -> bool:
    return contract is not None and num_missed < _MOST_ENDING * contract.block_size
