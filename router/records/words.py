"""Explain to an agent's user why prompt tokens were computed, and what can be done about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from msgspec import Struct

from router.records.record import Cause, Computed, Part

CAUSE_WORDS: Final[dict[Cause, str]] = {
    "new": "new in this turn",
    "changed": "the prompt changed",
    "evicted": "the replica evicted them to make room for other prompts",
    "moved": "the router sent the turn to another replica",
    "cleared": "the replica's cache was emptied",
    "pool_lost": "the shared pool no longer has them",
    "fetch_failed": "the read from the shared pool failed",
    "salt_or_model": "the turn has another model, adapter or cache_salt",
    "last_block": "the rest of a block: engines share whole blocks only",
    "unknown": "the router does not know what this session had before",
}

_ADVICE: Final[dict[Cause, str]] = {
    "evicted": "Add replicas or KV cache, or run fewer agents at a time.",
    "moved": "Nothing to do: the router expected the first token sooner there.",
    "cleared": "Nothing to do: a restart, a sleep or a reset empties the cache.",
    "pool_lost": "The pool is too small for all sessions: give it more memory.",
    "fetch_failed": "See the engine's log for errors of its KV connector.",
    "salt_or_model": "Keep cache_salt and model the same within a session.",
    "unknown": "The session began before the router did, was silent for too long, or its tokens "
    "are not known here (`warmroute check`).",
}
_LEFT: Final = "See `warmroute replicas list` for why the replica could not be used."

_CHANGES: Final[dict[Part, tuple[str, str]]] = {
    "tools": ("the tools changed", "Send the same tools in every request of a session."),
    "tool_order": (
        "the same tools came in another order",
        "Sort the tools by name before sending them.",
    ),
    "system": (
        "the system prompt changed",
        "Move what changes (a time, an id) into the last message.",
    ),
    "later_system": (
        "the client adds a system message to each turn, and the chat template moves it to the "
        "front",
        'Send system messages in front only. Claude Code: "totalTokensReminder": "off" in its '
        "settings. Or set forward.later_system_as_user.",
    ),
    "message": ("an earlier message changed", "Append to the history; do not edit it."),
    "compacted": (
        "the history was compacted",
        "Nothing to do: the shorter history is computed once.",
    ),
    "template": (
        "the chat template writes earlier messages differently now",
        "Usual for reasoning models, whose templates drop earlier reasoning.",
    ),
    "text": ("the prompt changed", "Keep the beginning of prompts the same."),
}


_END: Final = 0.1
"""Share of a prompt that is its end: computing it again costs little."""
_ONLY_THE_END: Final = "Nothing to do: only the end of the prompt changed."

LEAST_IN_ROW: Final = 3
"""Turns in a row in which a part changes, before that is worth a word."""


class Reason(Struct, frozen=True, kw_only=True):
    """Why tokens of several turns were computed.

    part: Where the prompts changed, for the cause `changed`.
    num_turns: That have it.
    """

    cause: Cause
    part: Part | None
    num_tokens: int
    num_turns: int
    text: str
    advice: str


def causes_in_words(computed: Computed) -> list[str]:
    """Describe each cause but `new` in one line, the largest first."""
    causes = sorted(computed.tokens.items(), key=lambda pair: -pair[1])
    return [_line(cause, num, computed) for cause, num in causes if cause != "new"]


def change_in_words(part: Part) -> str:
    """Describe a change of a part."""
    return _CHANGES[part][0]


def advice_on(part: Part) -> str:
    """Return what can be done about changes of a part."""
    return _CHANGES[part][1]


def advice_for(cause: Cause, computed: Computed | None = None) -> str:
    """Return what can be done about a cause, here in a turn; "": nothing."""
    if computed is None:
        return _ADVICE.get(cause, "")
    change, move = computed.change, computed.move
    if cause == "changed" and change is not None:
        num_changed = computed.tokens.get("changed", 0)
        if num_changed <= _END * (change.offset + num_changed):
            return _ONLY_THE_END
        return _CHANGES[change.part][1]
    if cause == "moved" and move is not None and move.has_left:
        return _LEFT
    return _ADVICE.get(cause, "")


def advice_in_words(computed: Computed) -> list[str]:
    """Return what can be done about the causes of a turn, each advice once."""
    every = (advice_for(cause, computed) for cause in computed.tokens)
    return list(dict.fromkeys(filter(None, every)))


def reasons(every: Iterable[Computed | None], signs: Mapping[Part, str]) -> list[Reason]:
    """Sum the causes of a session's turns, the largest first; `new` and `last_block` are left out.

    Args:
        every: What was computed in each turn.
        signs: What changes in a part in every turn, as far as that was found.
    """
    sums: dict[tuple[Cause, Part | None], tuple[int, int, Computed]] = {}
    in_row: dict[Part, int] = {}
    for computed in every:
        if computed is None:
            continue
        if (change := computed.change) is not None:
            in_row[change.part] = max(change.num_in_row, in_row.get(change.part, 0))
        for cause, num in computed.tokens.items():
            if cause not in ("new", "last_block"):
                key = cause, change.part if change and cause == "changed" else None
                num_tokens, num_turns, _ = sums.get(key, (0, 0, computed))
                sums[key] = num_tokens + num, num_turns + 1, computed
    said = []
    for (cause, part), (num_tokens, num_turns, last) in sums.items():
        what = CAUSE_WORDS[cause] if part is None else _CHANGES[part][0]
        if part is not None and in_row.get(part, 0) >= LEAST_IN_ROW:
            what = signs.get(part, what)
        turns = "1 turn" if num_turns == 1 else f"{num_turns:,} turns"
        said.append(
            Reason(
                cause=cause,
                part=part,
                num_tokens=num_tokens,
                num_turns=num_turns,
                text=f"{num_tokens:,} tokens in {turns}: {what}",
                advice=advice_for(cause, last),
            )
        )
    return sorted(said, key=lambda reason: -reason.num_tokens)


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
        return f"the router moved the session away from replica {move.origin}"
    return (
        f"the router moved the session away from replica {move.origin}: it expected the first "
        f"token after {move.ttft_here_ms:,.0f} ms here, after {move.ttft_there_ms:,.0f} ms there"
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
    if computed.loss is None:
        return CAUSE_WORDS["cleared"]
    return f"the cache of replica {computed.loss.replica} was emptied"


_TELL: Final[dict[Cause, Callable[[Computed], str]]] = {
    "changed": _changed,
    "moved": _moved,
    "evicted": _lost,
    "cleared": _cleared,
}
