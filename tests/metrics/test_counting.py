from __future__ import annotations

from collections.abc import Callable
from typing import Any

import prometheus_client
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from router.metrics.counting import Counter, Histogram

BUCKETS = (-1, 0, 0.0025, 0.5, 16, 4096, 65_536, 1e9)
VALUES = st.floats(min_value=-5, max_value=1e10) | st.sampled_from(BUCKETS)


def page(registry: CollectorRegistry) -> list[str]:
    """The text format, without the times of making that prometheus_client adds."""
    text = generate_latest(registry).decode()
    return sorted(line for line in text.splitlines() if "_created" not in line)


def filled(make: Callable[[str, list[str]], Any], ops: list[tuple[str, str, float]]) -> None:
    """Put values into an instrument with two labels, and into one without."""
    labelled, single = make("with_labels", ["one", "other"]), make("without", [])
    for one, other, value in ops:
        for series in (labelled.labels(one, other), single):
            getattr(series, "observe" if hasattr(series, "observe") else "inc")(value)


LABELS = st.sampled_from(["a", 'quo"te', "back\\slash", "new\nline", ""])


@given(st.lists(st.tuples(LABELS, LABELS, st.floats(0, 1e10))))
def test_counters_are_shown_as_prometheus_client_shows_its_own(
    ops: list[tuple[str, str, float]],
) -> None:
    """The same series and values, of the same name and type."""
    ours, theirs = CollectorRegistry(), CollectorRegistry()

    filled(lambda name, labels: Counter(name, "what", labels, ours), ops)
    filled(
        lambda name, labels: prometheus_client.Counter(name, "what", labels, registry=theirs), ops
    )

    assert page(ours) == page(theirs)


@given(st.lists(st.tuples(LABELS, LABELS, VALUES)))
def test_histograms_are_shown_as_prometheus_client_shows_its_own(
    ops: list[tuple[str, str, float]],
) -> None:
    """The same buckets, counts and sums, at their bounds, too."""
    ours, theirs = CollectorRegistry(), CollectorRegistry()

    filled(lambda name, labels: Histogram(name, "what", labels, ours, buckets=BUCKETS), ops)
    filled(
        lambda name, labels: prometheus_client.Histogram(
            name, "what", labels, registry=theirs, buckets=BUCKETS
        ),
        ops,
    )

    assert page(ours) == page(theirs)


def test_a_series_is_one_whatever_its_values_are_given_as() -> None:
    """A number and its text name the same series."""
    counter = Counter("answers", "what", ["status"], CollectorRegistry())

    counter.labels(404).inc()
    counter.labels("404").inc(2)

    [family] = counter.collect()
    assert [(s.labels, s.value) for s in family.samples] == [({"status": "404"}, 3.0)]


def test_wrong_labels_are_refused() -> None:
    """Too few or too many values make no series."""
    counter = Counter("answers", "what", ["api", "status"], CollectorRegistry())

    for values in [(), ("chat",), ("chat", "200", "more")]:
        with pytest.raises(ValueError, match="has the labels"):
            counter.labels(*values)

    assert list(next(counter.collect()).samples) == []


def test_series_are_dropped_by_some_of_their_labels() -> None:
    """All with these values, no others; nothing where a label is not the instrument's."""
    counter = Counter("tokens", "what", ["replica", "kind"], CollectorRegistry())
    for replica in ("r1", "r2"):
        for kind in ("prompt", "cached"):
            counter.labels(replica, kind).inc()

    counter.remove_where({"replica": "r1"})
    counter.remove_where({"replica": "r2", "tenant": "t"})

    [family] = counter.collect()
    assert {s.labels["replica"] for s in family.samples} == {"r2"}
    assert len(family.samples) == 2


def test_a_name_is_taken_once() -> None:
    """A second instrument of a name is refused, by the name of a sample, too."""
    registry = CollectorRegistry()
    Counter("answers", "what", [], registry)

    with pytest.raises(ValueError, match="Duplicated"):
        prometheus_client.Gauge("answers_total", "what", registry=registry)
