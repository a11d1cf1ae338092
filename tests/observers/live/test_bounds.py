"""The live feed of a large fleet: rows are bounded, and what is left out is counted."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from policies import CandidateId, Decision
from router.api.sessions import engine_name
from router.base.host_names import Names
from router.config import MooncakeConfig
from router.discovery.status import Status
from router.index.block_index import BlockIndex
from router.index.cache_view import CacheView
from router.metrics import Metrics
from router.observers.live.recent import MAX_COSTS, decision_line
from router.observers.live.state import MAX_ROWS, replica_fields
from router.observers.sessions.bookkeeper import Findings, SessionNames
from router.observers.sessions.describe import MAX_RECENT, MAX_SESSIONS, SessionRows
from router.observers.sessions.session_ledger import SessionLedger, Thread
from router.observers.sessions.turns import Turn
from router.pool.pools import Pools, PoolStatus
from router.replicas.registry import Registry
from router.upstream.session import Strays
from tests.policies.snapshots import replica as view
from tests.policies.snapshots import snapshot
from tests.replicas.work import fleet_of, send
from tests.samples import decision_record

SOME = CandidateId("r7")


@pytest.fixture(name="ledger", scope="module")
def _ledger() -> SessionLedger:
    """Ten thousand sessions of one turn; the number of each is its cost."""
    ledger = SessionLedger()
    for number in range(1, 10_001):
        _book(ledger, number, f"q{number}")
    return ledger


def _book(ledger: SessionLedger, number: int, request_id: str, cost: float | None = None) -> None:
    thread = Thread(
        space=0,
        contract=None,
        keys=(),
        num_tokens=10,
        parts=None,
        candidate=SOME,
        num_emptied=0,
        at_s=0.0,
    )
    ledger.remember(number, None, thread, num_computed=10)
    turn = Turn(
        request_id=request_id,
        at=time.time(),
        candidate=SOME,
        model="m",
        outcome="ok",
        num_tokens=10,
        num_gpu=4,
        engine_ms=float(number),
        cost=cost,
    )
    ledger.add(number, turn)


def test_of_a_thousand_replicas_those_in_trouble_come_first() -> None:
    """Then those with the most work ahead."""
    fleet = fleet_of(*(f"r{number}" for number in range(1_000)))
    fleet.members.drain("r500")
    send(fleet, "r900", time.monotonic(), tokens=50_000)
    waiting = {f"new{number}": "refused the connection" for number in range(200)}
    caches = CacheView(BlockIndex())
    pools = Pools(MooncakeConfig(), (), metrics=Metrics(), names=Names(), strays=Strays(print))
    status = Status(
        Registry(()),
        fleet=fleet,
        caches=caches,
        waiting=waiting,
        pools=PoolStatus(pools, fleet),
        sharing=None,
    )
    rows = replica_fields(status, fleet, caches, waiting, Metrics())

    assert (rows["total"], rows["num_missing"]) == (1_000, 200)
    assert len(rows["shown"]) == len(rows["missing"]) == MAX_ROWS
    assert [row["id"] for row in rows["shown"][:2]] == ["r500", "r900"]
    assert rows["shown"][0]["state"] == "draining"
    assert rows["by_state"] == {"up": 999, "draining": 1}
    assert rows["by_cache"] == {"blind": 1_000}


def test_of_ten_thousand_sessions_those_that_cost_most_are_shown(ledger: SessionLedger) -> None:
    rows = SessionRows(ledger, Findings(), SessionNames()).describe()

    costliest = [engine_name(number) for number in range(10_000, 10_000 - MAX_SESSIONS, -1)]
    assert rows["total"] == 10_000
    assert [row["session"] for row in rows["shown"]] == costliest
    assert rows["shown"][0]["recent"] == [["r7", 4, 0, 0, {"new": 6}]]


def test_sessions_are_sorted_by_what_the_card_shows() -> None:
    """By cost where replicas have prices; the order is never older than the figures."""
    ledger = SessionLedger()
    for number in range(1, 21):
        _book(ledger, number, f"q{number}")
    sessions = SessionRows(ledger, Findings(), SessionNames())
    sessions.describe()
    _book(ledger, 15, "again", cost=2.0)
    _book(ledger, 19, "again", cost=1.0)
    rows = sessions.describe()

    first = [row["session"] for row in rows["shown"][:3]]
    assert first == [engine_name(number) for number in (15, 19, 20)]


def test_a_river_has_the_last_turns(ledger: SessionLedger) -> None:
    for number in range(40):
        _book(ledger, 10_000, f"again-{number}")
    rows = SessionRows(ledger, Findings(), SessionNames()).describe()

    assert rows["shown"][0]["turns"] == 41
    assert len(rows["shown"][0]["recent"]) == MAX_RECENT


def test_a_line_has_the_lowest_costs_and_the_chosen_ones() -> None:
    """A policy may choose a replica that is not among the lowest."""

    def views() -> Iterator[object]:
        for number in range(1_000):
            yield view(f"r{number}", queue_ms=float(number))

    asked = snapshot(*views())  # type: ignore[arg-type]
    chosen = Decision(candidate=CandidateId("r999"), reason="by its hash")
    line = decision_line(replace(decision_record(), snapshot=asked, decision=chosen))

    assert line["num_costs"] == 1_000
    names = [cost["replica"] for cost in line["costs"]]
    assert names == [*(f"r{number}" for number in range(MAX_COSTS)), "r999"]
    assert [cost["replica"] for cost in line["costs"] if cost["chosen"]] == ["r999"]
