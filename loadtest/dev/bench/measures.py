"""Results of a benchmark: lines of figures, each compared with its budgets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from loadtest.results import percentile

Statistic = Literal["value", "p50", "p99", "max"]


class Budget(Struct, frozen=True):
    """A bound on one statistic of a line: at most `limit`, or at least where `is_floor`."""

    statistic: Statistic
    limit: float
    is_floor: bool = False

    def shortfall(self, measured: float) -> float:
        """Return the factor by which the budget is missed; 1.0 or less: it is met."""
        if self.is_floor:
            return self.limit / measured if measured > 0 else float("inf")
        return measured / self.limit


class Line(Struct, frozen=True, kw_only=True):
    """One row of the table: one figure, or the distribution of many."""

    what: str
    unit: str
    num_samples: int
    value: float | None = None
    p50: float | None = None
    p99: float | None = None
    max: float | None = None
    budgets: tuple[Budget, ...] = ()
    note: str = ""

    def measured(self, statistic: Statistic) -> float:
        """Return a statistic that a budget of this line is about."""
        found: float | None = getattr(self, statistic)
        assert found is not None
        return found

    def verdict(self) -> str:
        """Return `met`, or by how much the worst budget is missed; empty without budgets."""
        if not self.budgets:
            return ""
        worst = self.shortfall()
        return "met" if worst <= 1.0 else f"short by {worst:.3g}x"

    def shortfall(self) -> float:
        """Return the factor by which the worst budget is missed; 0.0 without budgets."""
        missed = [b.shortfall(self.measured(b.statistic)) for b in self.budgets]
        return max(missed, default=0.0)


def distribution(
    what: str, unit: str, samples: Sequence[float], *budgets: Budget, note: str = ""
) -> Line:
    """Make a line of many samples: median, 99th percentile, maximum."""
    ordered = sorted(samples)
    return Line(
        what=what,
        unit=unit,
        num_samples=len(ordered),
        p50=percentile(ordered, 0.50),
        p99=percentile(ordered, 0.99),
        max=ordered[-1],
        budgets=budgets,
        note=note,
    )
