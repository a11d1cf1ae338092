"""An instrument's children, looked up once: by labels it is a lock, a tuple and text each time."""

from __future__ import annotations

from prometheus_client import Counter


class Children(dict[tuple[str, ...], Counter]):
    """A counter's children by their labels' values, in the table's order; made when asked for.

    For labels from closed sets: a child stays here though its series is dropped.
    """

    def __init__(self, counter: Counter) -> None:
        self._counter = counter

    def __missing__(self, labels: tuple[str, ...]) -> Counter:
        child = self[labels] = self._counter.labels(*labels)
        return child
