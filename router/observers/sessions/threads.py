"""Threads of a conversation: which one a prompt goes on, and where it differs from its last prompt.

Requests that each go on where the one before ended are a *thread*. A client's title generator, or
sub-agents under one session id, are threads of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from msgspec import Struct

from policies.view import CandidateId
from router.api.digests import PartDigests
from router.base.contracts import BlockKey, HashContract
from router.records.record import Change, Part

_LEAST_SHARE: Final = 0.5  # of the shorter prompt: so much in common is the same thread


class Thread(Struct, kw_only=True):
    """The last prompt of requests that go on from each other.

    space: Salt, adapter and model: prompts of two spaces share no block.
    keys: Of its full blocks, as `contract` names them; empty: not known.
    num_emptied: How often the candidate's cache had been emptied.
    at_s: When the last turn ended, monotonic.
    num_computed: Tokens that the candidate had computed by then, ever.
    num_pool_tokens: That the pool had of it.
    change, num_in_row: Where the last turns in a row changed.
    """

    space: int
    contract: HashContract | None
    keys: Sequence[BlockKey]
    num_tokens: int
    parts: PartDigests | None
    candidate: CandidateId
    num_emptied: int
    at_s: float
    num_computed: int = 0
    num_pool_tokens: int = 0
    change: Part | None = None
    num_in_row: int = 0

    @property
    def num_bytes(self) -> int:
        return 8 * (len(self.keys) + (len(self.parts.messages) if self.parts else 0))


class Match(Struct, frozen=True, kw_only=True):
    """What the ledger has of a prompt.

    thread: Whose next turn it is. None: of none.
    source: Had the longest part of it; None: no thread had any.
    num_common: Leading tokens of that part, in whole blocks.
    change: Where it differs from its thread's last prompt.
    is_unknown: The conversation goes on, and what it had is not known.
    """

    thread: Thread | None = None
    source: Thread | None = None
    num_common: int = 0
    change: Change | None = None
    is_unknown: bool = False


def num_shared(one: Sequence[BlockKey], other: Sequence[BlockKey]) -> int:
    """Count the leading blocks that two chains share: a key stands for all before it, too."""
    low, high = 0, min(len(one), len(other))
    if high and one[high - 1] == other[high - 1]:
        return high
    while low < high:
        middle = (low + high) // 2
        if one[middle] == other[middle]:
            low = middle + 1
        else:
            high = middle
    return low


def thread_of(
    threads: Sequence[Thread],
    keys: Sequence[BlockKey],
    num_tokens: int,
    parts: PartDigests | None,
    space: int,
    contract: HashContract | None,
) -> Thread | None:
    """Find the thread that a prompt goes on: by its first message, else by most of its tokens.

    A history that was replaced by a shorter one begins again, behind the same tools and system.
    """
    if parts is not None and parts.messages:
        same = [
            each
            for each in threads
            if each.parts and each.parts.messages and each.parts.messages[0] == parts.messages[0]
        ]
        if same:
            return (
                same[0]
                if len(same) == 1
                else max(same, key=lambda each: num_equal(each.parts, parts))
            )
    for thread in reversed(threads):
        if thread.contract == contract and thread.space == space:
            num_blocks = num_shared(keys, thread.keys)
            if num_blocks and num_blocks >= _LEAST_SHARE * min(len(keys), len(thread.keys)):
                return thread
    if parts is None:
        return None
    for thread in reversed(threads):
        before = thread.parts
        if (
            before is not None
            and (before.tool_set, before.system) == (parts.tool_set, parts.system)
            and before.has_answers
            and num_tokens < thread.num_tokens
        ):
            return thread
    return None


def num_equal(one: PartDigests | None, other: PartDigests) -> int:
    """Count the leading messages that two requests have in common; O(messages), by memory."""
    if one is None:
        return 0
    mine, theirs = one.messages, other.messages
    low, high = 0, min(len(mine), len(theirs))
    if mine[:high] == theirs[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if mine[low:middle] == theirs[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def change_of(
    thread: Thread, parts: PartDigests | None, num_common: int, size: int, num_tokens: int
) -> Change | None:
    """Find the first difference from a thread's last prompt; None: all of its blocks are there."""
    if num_common >= len(thread.keys):
        return None
    part, index, digest = _difference(thread.parts, parts, num_tokens < thread.num_tokens)
    num_in_row = thread.num_in_row + 1 if thread.change == part else 1
    return Change(
        part=part, index=index, digest=digest, offset=num_common * size, num_in_row=num_in_row
    )


def _difference(
    before: PartDigests | None, now: PartDigests | None, is_shorter: bool
) -> tuple[Part, int | None, str]:
    """Find the first part that differs, the message's index, and its digest as it is now."""
    if before is None or now is None:
        return "text", None, ""
    if before.tools != now.tools:
        part: Part = "tool_order" if before.tool_set == now.tool_set else "tools"
        return part, None, f"{now.tools:016x}"
    if before.system != now.system:
        return "system", None, f"{now.system:016x}"
    first = num_equal(before, now)
    if first >= len(before.messages):
        return "later_system" if now.last_system >= first else "template", None, ""
    digest = f"{now.messages[first]:016x}" if first < len(now.messages) else ""
    if is_shorter and len(now.messages) < len(before.messages):
        return "compacted", first + now.num_system, digest
    return "message", first + now.num_system, digest
