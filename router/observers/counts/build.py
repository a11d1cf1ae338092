"""Builds the counts of requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from router.http.part import ObserverPart
from router.observers.counts import RequestCounts

if TYPE_CHECKING:
    from router.assembly.router import Router


def build(router: Router) -> ObserverPart:
    """Build the part."""
    return ObserverPart(observers=[RequestCounts(router.metrics)])
