"""Say to an agent's user why prompt tokens were computed, and what can be done about it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from router.records.computed import Cause, Change, Computed, Part

CAUSE_WORDS: Final[dict[Cause, str]] = {
    "new": "new in this turn",
    "changed": "the prompt changed",
    "evicted": "evicted",
    "moved": "sent to another replica",
    "cleared": "the replica's cache was emptied",
    "pool_lost": "the pool no longer has it",
    "fetch_failed": "the read from the pool failed",
    "salt_or_model": "another salt, model or adapter",
    "last_block": "rest of a block",
    "unknown": "unknown",
}

_ADVICE: Final[dict[Cause, str]] = {
    "evicted": "Add replicas or KV cache, or fewer agents at a time.",
    "moved": "The router expected this to be sooner than to wait there.",
    "cleared": "A restart, a sleep or a reset empties the cache.",
    "pool_lost": "The pool is too small for all conversations.",
    "fetch_failed": "See the engine's log for errors of its KV connector.",
    "salt_or_model": "Keep cache_salt and model the same within a session.",
    "unknown": "The router does not know what this session had: it began before the router did, "
    "was forgotten, or its tokens are not known here.",
}

_CHANGES: Final[dict[Part, tuple[str, str]]] = {
    "tools": ("the tools changed", "Send the same tools in every request of a session."),
    "tool_order": ("the tools came in another order", "Sort the tools before sending them."),
    "system": (
        "the system prompt changed",
        "Move what changes (a time, an id) to the last message.",
    ),
    "message": ("an earlier message changed", "Append to the history; do not edit it."),
    "compacted": ("the history was compacted", "Expected: the shorter history is computed once."),
    "template": (
        "the chat template wrote earlier messages otherwise",
        "Usual for reasoning models, whose templates drop earlier reasoning.",
    ),
    "text": ("the prompt changed", "Keep the beginning of prompts the same."),
}


def causes_in_words(computed: Computed) -> list[str]:
    """Say each cause but `new` in one line, the largest first."""
    causes = sorted(computed.tokens.items(), key=lambda pair: -pair[1])
    return [_line(cause, num, computed) for cause, num in causes if cause != "new"]


def advice_for(cause: Cause, change: Change | None) -> str:
    """Say what can be done; "": nothing."""
    if cause == "changed" and change is not None:
        return _CHANGES[change.part][1]
    return _ADVICE.get(cause, "")


def _line(cause: Cause, num_tokens: int, computed: Computed) -> str:
    tell = _TELL.get(cause)
    what = tell(computed) if tell is not None else CAUSE_WORDS[cause]
    return f"{num_tokens:,} tokens: {what}"


def _changed(computed: Computed) -> str:
    change = computed.change
    if change is None:
        return CAUSE_WORDS["changed"]
    what = _CHANGES[change.part][0]
    where = f", messages[{change.index}]" if change.index is not None else ""
    often = f", in {change.num_in_row} turns in a row" if change.num_in_row > 1 else ""
    return f"{what} at token {change.offset:,}{where}{often}"


def _moved(computed: Computed) -> str:
    move = computed.move
    if move is None:
        return CAUSE_WORDS["moved"]
    if move.has_left:
        return f"replica {move.origin}, which has them, could not be used"
    if move.ttft_here_ms is None or move.ttft_there_ms is None:
        return f"moved away from replica {move.origin}"
    return (
        f"moved away from replica {move.origin}: first token expected after "
        f"{move.ttft_here_ms:,.0f} ms here, {move.ttft_there_ms:,.0f} ms there"
    )


def _lost(computed: Computed) -> str:
    loss = computed.loss
    if loss is None:
        return CAUSE_WORDS["evicted"]
    when = f" {loss.ago_s:,.1f} s before" if loss.ago_s is not None else ""
    return (
        f"replica {loss.replica} evicted them{when}; it computed {loss.num_between_tokens:,} other "
        f"tokens in the {loss.since_s:,.1f} s since the last turn"
    )


def _cleared(computed: Computed) -> str:
    return (
        f"the cache of replica {computed.loss.replica} was emptied"
        if computed.loss
        else (CAUSE_WORDS["cleared"])
    )


_TELL: Final[dict[Cause, Callable[[Computed], str]]] = {
    "changed": _changed,
    "moved": _moved,
    "evicted": _lost,
    "cleared": _cleared,
}
