"""Builds the ledger of sessions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from router.http.hook_pages import HookPages
from router.http.part import Part
from router.http.session_pages import SessionPages
from router.observers.sessions.rows import SessionRows

if TYPE_CHECKING:
    from router.assembly.router import Router


def build(router: Router) -> Part:
    """Build the part."""
    rows = SessionRows(router.ledger, router.findings)
    return Part(
        observers=[router.bookkeeper],
        pages=[
            SessionPages(router.ledger, router.findings, router.tenants),
            HookPages(router.hooks, router.tenants, router.metrics),
        ],
        sections={"sessions": rows.describe, "findings": rows.describe_findings},
    )
