"""Sessions and turns as the admin API shows them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from router.api.sessions import engine_name
from router.observers.sessions.session_ledger import Session
from router.observers.sessions.turns import Turn
from router.records.words import advice_in_words, causes_in_words

COLUMNS = (
    "session", "parent", "tenant", "model", "home", "begun", "last", "turns", "prompt_tokens",
    "output_tokens", "gpu", "cpu", "pool", "computed", "moves", "waited_s", "engine_s", "saved_s",
    "engine_ms_per_turn",
)  # fmt: skip
"""The columns of the table of sessions; behind them one for each cause."""


def session_fields(session: Session) -> dict[str, Any]:
    """Describe a session without its turns; times in unix seconds."""
    totals = session.totals
    num_cached = totals.num_gpu + totals.num_cpu + totals.num_pool
    return {
        "session": engine_name(session.key),
        "parent": engine_name(session.parent) if session.parent is not None else None,
        "tenant": session.tenant,
        "model": session.model,
        "home": session.home,
        "ended": session.has_ended,
        "begun": session.begun,
        "last": session.last,
        "turns": totals.num_turns,
        "prompt_tokens": totals.num_tokens,
        "output_tokens": totals.num_output,
        "sources": {
            "gpu": totals.num_gpu,
            "cpu": totals.num_cpu,
            "pool": totals.num_pool,
            "computed": totals.num_tokens - num_cached,
        },
        "causes": totals.by_cause,
        "moves": totals.num_moves,
        "waited_s": round(totals.waited_s, 3),
        "engine_s": round(totals.engine_s, 3),
        "saved_s": round(totals.saved_s, 3),
        "engine_ms_per_turn": round(1000 * totals.engine_s / totals.num_turns, 1)
        if totals.num_turns
        else 0.0,
    }


def turn_fields(turn: Turn) -> dict[str, Any]:
    """Describe a turn; `text` and `advice` say to a user why tokens were computed."""
    fields: dict[str, Any] = {
        name: getattr(turn, name) for name in turn.__struct_fields__ if name != "computed"
    }
    computed = turn.computed
    fields["computed"] = msgspec.to_builtins(computed) if computed is not None else None
    fields["text"] = causes_in_words(computed) if computed is not None else []
    fields["advice"] = advice_in_words(computed) if computed is not None else []
    return fields


def as_row(fields: dict[str, Any], causes: tuple[str, ...]) -> Iterator[Any]:
    """Yield a session's cells, as `COLUMNS` and the causes name them."""
    flat = {**fields, **fields["sources"]}
    yield from (flat[name] for name in COLUMNS)
    yield from (fields["causes"].get(cause, 0) for cause in causes)
