"""Builds what writes requests down: log lines, and the file of decision records."""

from __future__ import annotations

from typing import TYPE_CHECKING

from router.base.errors import ConfigError
from router.http.part import ObserverPart
from router.observers.log import RequestLog
from router.observers.log.decisions import DecisionLog

if TYPE_CHECKING:
    from router.assembly.router import Router


def build(router: Router) -> ObserverPart:
    """Build the part.

    Raises:
        ConfigError: the file of decision records cannot be written.
    """
    file = router.config.log.decisions
    if file is None:
        return ObserverPart(observers=[RequestLog()])
    try:
        file.open("ab").close()
    except OSError as exc:
        raise ConfigError(
            f"log.decisions: {str(file)!r} cannot be written: {exc.strerror}", param="log.decisions"
        ) from exc
    decisions = DecisionLog(file, router.metrics.records_dropped.inc)
    return ObserverPart(
        observers=[RequestLog(), decisions],
        loops={"records": decisions.run},
        sections={"records": decisions.describe},
    )
