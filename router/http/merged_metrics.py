"""One page of metrics of several workers: each sample has its worker."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field
from prometheus_client import CollectorRegistry, generate_latest

from router.metrics.families import WORKER, Families


class _MetricFamily(Struct):
    """Lines of one metric."""

    about: list[str] = field(default_factory=list)  # HELP and TYPE
    samples: list[str] = field(default_factory=list)


def merged_metrics(pages: Mapping[int, bytes], total: int) -> bytes:
    """Merge pages in Prometheus' text format.

    Args:
        pages: By the number of the worker.
        total: Workers there should be, from 1 on.
    """
    families: dict[str, _MetricFamily] = {}
    for number, page in pages.items():
        _add(families, page.decode(), f'worker="{number}"')
    registry = CollectorRegistry()
    answered = {number: number in pages for number in range(1, total + 1)}
    registry.register(Families(WORKER, lambda: [answered]))
    lines = [line for each in families.values() for line in (*each.about, *each.samples)]
    return generate_latest(registry) + "".join(f"{line}\n" for line in lines).encode()


def _add(families: dict[str, _MetricFamily], page: str, label: str) -> None:
    family, is_known = _MetricFamily(), False
    for line in page.splitlines():
        if line.startswith("# HELP "):
            name = line.split(" ", 3)[2]
            is_known = name in families
            family = families.setdefault(name, family if is_known else _MetricFamily())
        if line.startswith("#"):
            if not is_known:
                family.about.append(line)
        elif line:
            family.samples.append(_labelled(line, label))


def _labelled(sample: str, label: str) -> str:
    """Add a label to a sample; its name ends with a brace or a space."""
    name, brace, rest = sample.partition("{")
    if brace and " " not in name:
        return f"{name}{{{label},{rest}"
    name, _, value = sample.partition(" ")
    return f"{name}{{{label}}} {value}"
