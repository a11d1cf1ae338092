"""The metrics of what sessions cost, read at scrape time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from router.metrics.families import Family
from router.observers.sessions.turns import Totals


class ModelTotals(NamedTuple):
    """The turns of a model that this router booked."""

    model: str
    totals: Totals


def _costs(state: ModelTotals) -> list[tuple[Sequence[str], float]] | None:
    model, totals = state
    if totals.cost is None:
        return None
    return [((model, "spent"), totals.cost), ((model, "saved"), totals.cost_saved or 0.0)]


# fmt: off
SPENDING: Final[list[Family[ModelTotals]]] = [
    Family("warmroute_gpu_seconds_total", "model kind",
        "GPU seconds of sessions' turns, by kind: prompt, answer, saved (by caches)",
        lambda each: [((each.model, "prompt"), each.totals.engine_s),
            ((each.model, "answer"), each.totals.decode_s),
            ((each.model, "saved"), each.totals.saved_s)]),
    Family("warmroute_cost_total", "model kind",
        "Cost of sessions' turns in the currency of cost_per_hour, by kind: spent, saved (by "
        "caches)", _costs),
]
# fmt: on
