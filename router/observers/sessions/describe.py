"""Sessions and turns as the admin API and the live page show them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from heapq import nlargest
from itertools import islice
from typing import Any, Final

import msgspec

from router.api.sessions import engine_name
from router.observers.sessions.bookkeeper import Findings, SessionNames
from router.observers.sessions.session_ledger import Session, SessionLedger
from router.observers.sessions.turns import Totals, Turn
from router.records.record import Cause, advice_in_words, causes_in_words

COLUMNS: Final = (
    "session", "parent", "tenant", "model", "home", "begun", "last", "turns", "prompt_tokens",
    "output_tokens", "gpu", "cpu", "pool", "computed", "moves", "waited_s", "engine_s", "saved_s",
    "engine_ms_per_turn", "decode_s", "gpu_s", "cost", "cost_saved",
)  # fmt: skip
"""The columns of the table of sessions; behind them one for each cause."""

GROUPS: Final = ("tenant", "model")
"""What turns can be summed by, whatever their session."""

SUM_COLUMNS: Final = (
    "name", "turns", "prompt_tokens", "output_tokens", "gpu", "cpu", "pool", "computed", "waited_s",
    "engine_s", "saved_s", "decode_s", "gpu_s", "cost", "cost_saved",
)  # fmt: skip
"""The columns of the table of such sums; behind them one for each cause."""

MAX_SUMS_SHOWN: Final = 10  # on the live page


def session_fields(session: Session) -> dict[str, Any]:
    """Describe a session without its turns; times in unix seconds."""
    totals = session.totals
    return {
        "session": engine_name(session.key),
        "title": session.title or None,
        "parent": engine_name(session.parent) if session.parent is not None else None,
        "tenant": session.tenant,
        "model": session.model,
        "home": session.home,
        "ended": session.has_ended,
        "begun": session.begun,
        "last": session.last,
        **_sums(totals),
        "moves": totals.num_moves,
        "engine_ms_per_turn": round(1000 * totals.engine_s / totals.num_turns, 1)
        if totals.num_turns
        else 0.0,
    }


def sum_rows(ledger: SessionLedger, group: str) -> list[dict[str, Any]]:
    """Describe all turns of each tenant or model since the start, the most expensive first."""
    found: dict[str | None, Totals] = {}
    for key, totals in ledger.sums.items():
        name = key.tenant if group == "tenant" else key.model
        found.setdefault(name, Totals()).include(totals)
    ordered = sorted(found.items(), key=lambda each: each[1].spent, reverse=True)
    return [{"name": name, **_sums(totals)} for name, totals in ordered]


def costs(ledger: SessionLedger) -> dict[str, Any]:
    """Describe what tenants and models cost, for the live page."""
    return {group: sum_rows(ledger, group)[:MAX_SUMS_SHOWN] for group in GROUPS}


def _sums(totals: Totals) -> dict[str, Any]:
    num_cached = totals.num_gpu + totals.num_cpu + totals.num_pool
    return {
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
        "waited_s": round(totals.waited_s, 3),
        "engine_s": round(totals.engine_s, 3),
        "saved_s": round(totals.saved_s, 3),
        "decode_s": round(totals.decode_s, 3),
        "gpu_s": round(totals.gpu_s, 3),
        "cost": _money(totals.cost),
        "cost_saved": _money(totals.cost_saved),
    }


def _money(amount: float | None) -> float | None:
    return None if amount is None else round(amount, 9)


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


def as_row(
    fields: dict[str, Any], columns: tuple[str, ...], causes: tuple[str, ...]
) -> Iterator[Any]:
    """Yield the cells of a session or a sum, as the columns and the causes name them."""
    flat = {**fields, **fields["sources"]}
    yield from (flat[name] for name in columns)
    yield from (fields["causes"].get(cause, 0) for cause in causes)


MAX_SESSIONS: Final = 12
MAX_RECENT: Final = 24  # turns of a session
MAX_FINDINGS: Final = 5
MAX_TITLES: Final = 100

_SORT_AGAIN_S: Final = 5.0  # 20,000 sessions take 5 ms


class SessionRows:
    """The sessions that cost most, and what is wrong with prompts."""

    def __init__(self, ledger: SessionLedger, findings: Findings, names: SessionNames) -> None:
        self._ledger = ledger
        self._findings = findings
        self._names = names
        self._keys: list[int] = []
        self._sorted_s = 0.0

    def describe(self) -> dict[str, Any]:
        """Describe the sessions that cost most, in this order."""
        now_s = time.monotonic()
        if len(self._keys) < MAX_SESSIONS or now_s - self._sorted_s >= _SORT_AGAIN_S:
            top = nlargest(MAX_SESSIONS, self._ledger, key=_spent)
            self._keys, self._sorted_s = [each.key for each in top], now_s
        found = filter(None, map(self._ledger.get, self._keys))
        return {
            "total": len(self._ledger),
            "forgotten": self._ledger.num_forgotten,
            "shown": [_session_row(each) for each in sorted(found, key=_spent, reverse=True)],
            "titles": self._titles(),
        }

    def _titles(self) -> dict[str, str]:
        """Return the clients' own ids of the sessions that were active last, by ours."""
        active = islice(self._ledger, MAX_TITLES)
        return {engine_name(each.key): each.title for each in active if each.title}

    def describe_findings(self) -> list[dict[str, Any]]:
        """Describe sessions without names, then prompts that change in every turn, newest first."""
        unnamed = self._names.found
        rows = [{**unnamed.row, "tokens": 0}] if unnamed is not None else []
        return rows + [
            {
                "tenant": each.tenant,
                "session": each.session,
                "part": each.part,
                "tokens": each.num_again,
                "text": each.text,
            }
            for each in islice(self._findings, MAX_FINDINGS)
        ]


def _spent(session: Session) -> tuple[float, float]:
    return session.totals.spent


def _session_row(session: Session) -> dict[str, Any]:
    """Describe a session, and where the tokens of its last turns came from, or why not."""
    recent = [
        [turn.candidate, turn.num_gpu, turn.num_cpu, turn.num_pool, _by_cause(turn)]
        for turn in session.last_turns(MAX_RECENT)
    ]
    return {**session_fields(session), "recent": recent}


def _by_cause(turn: Turn) -> dict[Cause, int]:
    """Return the tokens that a turn had computed, as new ones if their causes are not known."""
    if turn.computed is not None:
        return turn.computed.tokens
    num_computed = turn.num_tokens - turn.num_gpu - turn.num_cpu - turn.num_pool
    return {"new": num_computed} if num_computed > 0 else {}
