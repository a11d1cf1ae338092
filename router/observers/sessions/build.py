"""Builds the ledger of sessions, what it learns, and what is asked of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from router.http.part import ObserverPart
from router.observers.sessions.admin import SessionPages
from router.observers.sessions.bookkeeper import Bookkeeper, Findings, SessionNames, SessionTitles
from router.observers.sessions.describe import SessionRows, costs
from router.observers.sessions.finish import FinishRoute
from router.observers.sessions.session_ledger import SessionLedger
from router.observers.sessions.turn_share import Over, share_turns
from router.observers.sessions.turns import SPENDING

if TYPE_CHECKING:
    from router.assembly.router import Router


def build(router: Router) -> ObserverPart:
    """Build the part."""
    ledger, findings, names = SessionLedger(), Findings(), SessionNames()
    reads = router.config.session.read
    finish = FinishRoute(ledger, router.fleet, reads, router.metrics)
    rows = SessionRows(ledger, findings, names)
    bookkeeper = Bookkeeper(
        ledger,
        caches=router.caches,
        fetches=router.fetches,
        findings=findings,
        names=names,
        metrics=router.metrics,
        titles=SessionTitles(reads) if router.config.session.show_ids else None,
    )
    router.metrics.watch(SPENDING, ledger.own_by_model)
    cluster = router.cluster
    if cluster.outbox is not None and cluster.peers is not None:
        finish.tell = cluster.outbox.tell_later
        cluster.peers.notes.register(Over, lambda note, *_: finish.receive(note))
        share_turns(
            ledger,
            index=router.caches.index,
            names=cluster.names,
            outbox=cluster.outbox,
            peers=cluster.peers,
        )
    pages = SessionPages(ledger, findings, names, router.tenants, router.story.steps.queue)
    return ObserverPart(
        observers=[bookkeeper],
        pages=[pages],
        own_routes=finish.routes(),
        sections={
            "sessions": rows.describe,
            "findings": rows.describe_findings,
            "costs": lambda: costs(ledger),
        },
    )
