"""The state of the router as one line of the live feed, described at most once a second."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from heapq import nlargest
from itertools import islice
from typing import Any, Final

import msgspec

from router.api.sessions import engine_name
from router.discovery.status import Status
from router.experiments.runner import ExperimentRunner
from router.live.degraded import degraded
from router.metrics import Metrics
from router.replicas.fleet import Fleet
from router.request.queue import WaitingRoom
from router.request.results import Prompt
from router.scheduling.waiting import Waiting
from router.sessions.describe import session_fields
from router.sessions.findings import Findings
from router.sessions.ledger import Ledger, Session
from router.tenants import Tenants
from router.tokens import Prompters

FRESH_S: Final = 0.9
MAX_SESSIONS: Final = 12
MAX_RECENT: Final = 24  # turns of a session
MAX_WAITING: Final = 20
MAX_FINDINGS: Final = 5
MAX_EXPERIMENTS: Final = 5
MAX_TENANTS: Final = 20

_SORT_AGAIN_S: Final = 5.0  # 20,000 sessions take 5 ms

Section = Callable[[], Any]


class LiveState:
    """Describes the router by sections, once for all who ask at the same time."""

    def __init__(self, sections: Mapping[str, Section]) -> None:
        self._sections = sections
        self._line = b""
        self._made_s = -FRESH_S

    async def line(self, now_s: float) -> bytes:
        """Return the state as JSON; requests have their turn between the sections."""
        if now_s - self._made_s >= FRESH_S:
            fields: dict[str, Any] = {"kind": "state", "at": round(time.time(), 3)}
            for name, section in self._sections.items():
                fields[name] = section()  # 1,000 replicas: 5 ms
                await asyncio.sleep(0)
            fields["degraded"] = degraded(fields)
            self._line = msgspec.json.encode(fields)
            self._made_s = now_s
        return self._line


class SessionRows:
    """The sessions that cost most, and what is wrong with prompts."""

    def __init__(self, ledger: Ledger, findings: Findings) -> None:
        self._ledger = ledger
        self._findings = findings
        self._keys: list[int] = []
        self._sorted_s = 0.0

    def describe(self) -> dict[str, Any]:
        """Describe the sessions with the most engine-seconds."""
        now_s = time.monotonic()
        if len(self._keys) < MAX_SESSIONS or now_s - self._sorted_s >= _SORT_AGAIN_S:
            top = nlargest(MAX_SESSIONS, self._ledger, key=lambda each: each.totals.engine_s)
            self._keys, self._sorted_s = [each.key for each in top], now_s
        found = [self._ledger.get(key) for key in self._keys]
        return {
            "total": len(self._ledger),
            "forgotten": self._ledger.num_forgotten,
            "shown": [_session_row(each) for each in found if each is not None],
        }

    def describe_findings(self) -> list[dict[str, Any]]:
        """Describe prompts that change near their beginning in every turn, the newest first."""
        return [
            {
                "tenant": each.tenant,
                "session": each.session,
                "part": each.part,
                "tokens": each.num_again,
                "text": each.text,
            }
            for each in islice(self._findings, MAX_FINDINGS)
        ]


def _session_row(session: Session) -> dict[str, Any]:
    """Describe a session and where the tokens of its last turns came from."""
    recent = [
        [
            turn.candidate,
            turn.num_gpu,
            turn.num_cpu,
            turn.num_pool,
            max(0, turn.num_tokens - turn.num_gpu - turn.num_cpu - turn.num_pool),
        ]
        for turn in session.last_turns(MAX_RECENT)
    ]
    return {**session_fields(session), "recent": recent}


def queue_fields(room: WaitingRoom, *, is_on: bool) -> dict[str, Any]:
    """Describe the queue, and the requests that have waited for longest."""
    now_s = time.monotonic()
    return {
        "on": is_on,
        "waiting": room.num_waiting,
        "batch": sum(waiting.is_batch for waiting, _ in room),
        "for": Counter([waiting.held_by or "its turn" for waiting, _ in room]),
        "shown": [_waiting_fields(*each, now_s) for each in islice(room, MAX_WAITING)],
    }


def _waiting_fields(waiting: Waiting, prompt: Prompt, now_s: float) -> dict[str, Any]:
    read, whose = prompt.read, prompt.read.whose
    return {
        "request": read.request_id,
        "session": engine_name(whose.conversation) if whose.conversation is not None else None,
        "tenant": read.tenant.name if read.tenant is not None else None,
        "model": read.model,
        "class": prompt.service_class,
        "tokens": waiting.num_tokens,
        "waited_s": round(now_s - waiting.since_s, 1),
        "for": waiting.held_by,
    }


def experiment_fields(runner: ExperimentRunner) -> list[dict[str, Any]]:
    """Describe the first experiments: variants, shares, and what stopped them."""
    now = time.time()
    described = (
        runner.describe(trial.state.definition.name, now)
        for trial in islice(runner.trials, MAX_EXPERIMENTS)
    )
    return [
        {
            "name": each["name"],
            "standing": each["standing"],
            "arms": [
                {name: arm[name] for name in ("name", "policy", "is_control", "share", "stopped")}
                for arm in each["arms"]
            ],
        }
        for each in described
    ]


def tokenizer_fields(fleet: Fleet, prompters: Prompters) -> list[dict[str, str]]:
    """Describe the models whose prompts have no tokens here, or others than a replica's."""
    bases = (m.id for replica in fleet.replicas for m in replica.models if m.parent is None)
    return [
        {"model": model, "reason": why}
        for model in dict.fromkeys(bases)
        for why in _why_not_tokenized(model, prompters)
    ]


def _why_not_tokenized(model: str, prompters: Prompters) -> Iterator[str]:
    prompter = prompters.get(model)
    if prompter is None:
        if model in prompters.loading():
            yield "it is being loaded; until then prompts are routed without their tokens"
    elif prompter.engine_only is not None:
        yield f"it cannot be used, so the engine tokenizes each prompt: {prompter.engine_only}"
    else:
        for replica, what in prompter.trust.differences():
            yield f"its token ids differ from those of {replica}: {what}"


def source_fields(status: Status) -> list[dict[str, str]]:
    """Describe the sources of replicas whose last answer is not followed."""
    return [{"name": each.name, "reason": each.reason} for each in status.sources() if each.reason]


def pool_fields(status: Status) -> list[dict[str, Any]]:
    """Describe the shared pools."""
    return [
        {
            "name": each.name,
            "up": each.is_up,
            "blocks": sum(each.num_blocks.values()),
            "allocated_bytes": each.allocated_bytes,
            "capacity_bytes": each.capacity_bytes,
            "listing_age_s": each.listing_age_s,
        }
        for each in status.pool_states()
    ]


def tenant_fields(tenants: Tenants | None, metrics: Metrics) -> dict[str, Any] | None:
    """Describe the tenants that had the most tokens computed; None: there is no tenants file."""
    if tenants is None:
        return None
    rows: dict[str, dict[str, float]] = {}
    for (label, _), number in metrics.tenant_requests.values().items():
        _add(rows, label, "requests", number)
    for (label, kind), number in metrics.tenant_tokens.values().items():
        _add(rows, label, kind, number)
    for (label,), seconds in metrics.tenant_waits.values().items():
        _add(rows, label, "waited_s", round(seconds, 1))
    top = nlargest(MAX_TENANTS, rows.items(), key=lambda pair: pair[1].get("uncached", 0.0))
    return {"total": len(tenants), "shown": [{"name": label, **row} for label, row in top]}


def _add(rows: dict[str, dict[str, float]], label: str, name: str, number: float) -> None:
    row = rows.setdefault(label, {})
    row[name] = row.get(name, 0.0) + number
