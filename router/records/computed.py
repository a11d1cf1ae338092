"""Why an engine computed prompt tokens: a cause for each, as records, pages and metrics have it."""

from __future__ import annotations

from typing import Annotated, Final, Literal, get_args

from msgspec import Meta, Struct

Cause = Literal[
    "new", "changed", "evicted", "moved", "cleared", "pool_lost", "fetch_failed", "salt_or_model",
    "last_block", "unknown",
]  # fmt: skip
"""Why a token was computed.

    new            it was never in a prompt of the conversation, or of its parent
    changed        the prompt is another one from some token on, see `Change`
    evicted        the replica needed the room
    moved          the router sent the request to a replica that did not have it
    cleared        the replica's cache was emptied: a restart, sleep, a reset
    pool_lost      the shared pool had it and lost it
    fetch_failed   the pool has it, and the read failed
    salt_or_model  another salt, model or adapter: blocks are not shared
    last_block     engines share full blocks only, and compute at least the last token
    unknown        it is not known what the conversation had before
"""

CAUSES: Final[tuple[Cause, ...]] = get_args(Cause)

_Count = Annotated[int, Meta(ge=0, le=1 << 40)]
_Figure = Annotated[float, Meta(ge=-1e15, le=1e15)]

Part = Literal[
    "tools", "tool_order", "system", "later_system", "message", "compacted", "template", "text"
]
"""Where a prompt changed.

    tools        a tool was added, removed or described otherwise
    tool_order   the same tools in another order
    system       the system prompt
    later_system a system message was added, which the chat template joins to the first
    message      a message that an earlier request had, too
    compacted    the history was replaced by a shorter one
    template     the same messages, which the chat template writes otherwise (reasoning left out)
    text         the prompt has no messages
"""


class Change(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The first difference between a prompt and the one before.

    index: Of the message in the request's list.
    offset: Tokens in front of it, in whole blocks.
    digest: Of the part as it is now, 16 hex digits; "": it has none.
    num_in_row: So many turns of the conversation in a row have changed there.
    """

    part: Part
    offset: _Count
    index: _Count | None = None
    digest: str = ""
    num_in_row: _Count = 1


class Move(Struct, frozen=True, kw_only=True):
    """A turn that went to another replica than the one before; times as predicted.

    has_left: The replica could not be chosen: it is down, drains, or is gone.
    """

    origin: str
    ttft_here_ms: _Figure | None = None
    ttft_there_ms: _Figure | None = None
    has_left: bool = False


class Loss(Struct, frozen=True, kw_only=True):
    """The first block that was there and is lost.

    replica: That had it.
    ago_s: How long before the request it was evicted, if the events of that are remembered.
    since_s: Between the conversation's last turn and this one.
    num_between_tokens: Computed at that replica in between, for other requests.
    """

    replica: str
    since_s: _Figure
    num_between_tokens: _Count
    ago_s: _Figure | None = None


class Computed(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The prompt tokens that an engine computed, by cause.

    tokens: By cause; their sum is the engine's own count. No cause has 0 tokens.
    num_before: Leading tokens, in whole blocks, that an earlier prompt of the conversation had.
    """

    tokens: dict[Cause, _Count]
    num_before: _Count = 0
    change: Change | None = None
    move: Move | None = None
    loss: Loss | None = None

    @property
    def num_tokens(self) -> int:
        """Count all tokens that were computed."""
        return sum(self.tokens.values())

    @property
    def num_again(self) -> int:
        """Count those that the conversation had before."""
        return self.num_tokens - self.tokens.get("new", 0)
