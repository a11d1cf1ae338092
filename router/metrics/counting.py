"""Counters and histograms that the event loop adds to, in one step each.

prometheus_client's take a lock, two checks and up to four calls for each addition, since threads
may add there. These have one thread: 0.04 us for a count instead of 0.26, 0.09 for a value instead
of 0.65, 13 us for a request. Registry, gauges and the text format are prometheus_client's.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from math import inf
from typing import Final, Generic, TypeVar

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.utils import floatToGoString

C = TypeVar("C")

_NO_LABELS: Final[tuple[str, ...]] = ()


class Count:
    """One series of a counter."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        """Add to it; never less than 0."""
        self.value += amount


class Distribution:
    """One series of a histogram.

    num_in: Of each bucket, those that are in no smaller one; the last has no bound.
    """

    __slots__ = ("_bounds", "num_in", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.num_in = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, amount: float) -> None:
        """Add a value."""
        self.num_in[bisect_left(self._bounds, amount)] += 1
        self.sum += amount

    def buckets(self) -> list[tuple[str, float]]:
        """List how many values are at most each bound, by bound, as Prometheus wants them."""
        bounds = [str(floatToGoString(bound)) for bound in (*self._bounds, inf)]  # type: ignore[no-untyped-call]
        return list(zip(bounds, map(float, accumulate(self.num_in)), strict=True))


class _Series(Collector, Generic[C]):
    """An instrument's series by the values of its labels, made when first asked for."""

    def __init__(
        self, name: str, text: str, labels: Sequence[str], registry: CollectorRegistry
    ) -> None:
        self._name = name
        self._text = text
        self._labels = tuple(labels)
        self._series: dict[tuple[str, ...], C] = {}
        if not labels:
            self._series[_NO_LABELS] = self._made()
        registry.register(self)

    def labels(self, *values: object) -> C:
        """Return the series of these values, in the table's order.

        Raises:
            ValueError: they are too few or too many.
        """
        series = self._series.get(values)  # type: ignore[arg-type]
        return series if series is not None else self._made_for(values)

    def _made_for(self, values: tuple[object, ...]) -> C:
        if len(values) != len(self._labels):
            raise ValueError(f"{self._name} has the labels {self._labels}, not {values}")
        key = tuple([str(value) for value in values])
        series = self._series.get(key)
        if series is None:
            series = self._series[key] = self._made()
        return series

    def remove_where(self, labels: Mapping[str, str]) -> None:
        """Drop the series with these values of some labels; ones that lack the label stay."""
        if labels.keys() <= set(self._labels):
            wanted = [(self._labels.index(name), value) for name, value in labels.items()]
            for key in [k for k in self._series if all(k[at] == value for at, value in wanted)]:
                del self._series[key]

    def describe(self) -> list[Metric]:
        return [self._family()]

    def _made(self) -> C:
        raise NotImplementedError

    def _family(self) -> Metric:
        raise NotImplementedError


class Counter(_Series[Count]):
    """Sums of what happened; without labels it is its one series itself."""

    def inc(self, amount: float = 1.0) -> None:
        """Add to the one series."""
        self._series[_NO_LABELS].value += amount

    def values(self) -> dict[tuple[str, ...], float]:
        """Return the sums by the values of the labels."""
        return {values: series.value for values, series in self._series.items()}

    def collect(self) -> Iterator[Metric]:
        family = self._family()
        for values, series in self._series.items():
            family.add_metric(values, series.value)
        yield family

    def _made(self) -> Count:
        return Count()

    def _family(self) -> CounterMetricFamily:
        return CounterMetricFamily(self._name, self._text, labels=self._labels)


class Histogram(_Series[Distribution]):
    """How values are distributed over buckets; without labels it is its one series itself."""

    def __init__(
        self,
        name: str,
        text: str,
        labels: Sequence[str],
        registry: CollectorRegistry,
        *,
        buckets: Sequence[float],
    ) -> None:
        self._bounds = tuple(map(float, buckets))
        super().__init__(name, text, labels, registry)

    def observe(self, amount: float) -> None:
        """Add a value to the one series."""
        self._series[_NO_LABELS].observe(amount)

    def collect(self) -> Iterator[Metric]:
        family = self._family()
        for values, series in self._series.items():
            buckets = series.buckets()
            family.add_metric(values, buckets=buckets, sum_value=series.sum)
            if self._bounds[0] < 0:  # which has no sum that only grows: it leaves out both
                labels = dict(zip(self._labels, values, strict=True))
                family.add_sample(f"{self._name}_count", labels, buckets[-1][1])
        yield family

    def _made(self) -> Distribution:
        return Distribution(self._bounds)

    def _family(self) -> HistogramMetricFamily:
        return HistogramMetricFamily(self._name, self._text, labels=self._labels)
