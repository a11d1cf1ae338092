"""Builds the counts of requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from router.http.part import Part
from router.observers.counts import RequestCounts

if TYPE_CHECKING:
    from router.assembly.router import Router


def build(router: Router) -> Part:
    """Build the part."""
    return Part(observers=[RequestCounts(router.metrics)])
