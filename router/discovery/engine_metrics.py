"""A replica's `/metrics` page, read by metric: values in range out.

What must live here: finding and decoding samples, and their limits. What must not: I/O. A replica
may be broken or hostile. A figure that makes no sense (no number, negative, larger than any
engine's) is None, as if it were missing.
"""

from __future__ import annotations

import math
import re
from typing import Final, Literal

from router.base.contracts import MAX_BLOCK_SIZE

MAX_RANKS: Final = 256
"""Most ranks of one replica; each costs three sockets, and is a candidate of its own."""

MAX_COUNT: Final = 1 << 40  # of blocks, tokens, requests

_MAX_RANK: Final = 65_535  # two bytes in vLLM (v1/engine/core_client.py); global, of many replicas
_MAX_LINES: Final = 2 * MAX_RANKS  # of one metric
_MAX_LINE_CHARS: Final = 4_096

_LABELS: Final = re.compile(r'\b(\w+)="((?:[^"\\]|\\.)*)"', re.ASCII)

SleepState = Literal["awake", "asleep", "emptied", "paused"]
"""Emptied: asleep, and it lost its KV cache. Paused: whether it lost it is not known."""


class EngineMetrics:
    """A page. Lines are searched for: a full parse of a page takes 20 ms of the loop."""

    __slots__ = ("_page",)

    def __init__(self, body: bytes) -> None:
        self._page = "\n" + body.decode(errors="replace")

    def cache_config(self) -> dict[str, str]:
        """Read the labels of vllm:cache_config_info (rank 0 speaks for all)."""
        return next((_labels(line) for line in self._samples("vllm:cache_config_info")), {})

    def cache_shapes(self) -> frozenset[tuple[str, ...]]:
        """Read what stays the same while a process lives: its ranks' blocks and their names."""
        names = ("block_size", "num_gpu_blocks", "prefix_caching_hash_algo", "cache_dtype")
        found = [_labels(line) for line in self._samples("vllm:cache_config_info")]
        return frozenset(tuple(labels.get(name, "") for name in names) for labels in found)

    def by_rank(self, name: str) -> dict[int, int]:
        """Read a gauge with an `engine` label: global rank -> value, summed over models."""
        ranks: dict[int, int] = {}
        for line in self._samples(name):
            rank = rank_of(_labels(line).get("engine", "0"))
            if rank is not None:
                value = in_range(round(_value(line) or 0.0), MAX_COUNT) or 0
                ranks[rank] = ranks.get(rank, 0) + value
        return ranks

    def sums_by_rank(self, name: str) -> dict[int, float]:
        """Read the same with fractions; only values that a rank can have."""
        ranks: dict[int, float] = {}
        for line in self._samples(name):
            rank, value = rank_of(_labels(line).get("engine", "0")), _value(line)
            if rank is not None and value is not None and 0.0 <= value <= MAX_COUNT:
                ranks[rank] = ranks.get(rank, 0.0) + value
        return ranks

    def sleep(self) -> SleepState:
        """Read whether the engine sleeps; all its ranks do, or none."""
        found = {
            _labels(line).get("sleep_state"): _value(line)
            for line in self._samples("vllm:engine_sleep_state")
        }
        if found.get("awake") != 0.0:
            return "awake"
        return "emptied" if found.get("weights_offloaded") or found.get("discard_all") else "asleep"

    def started_s(self) -> float | None:
        """Read when the process started, unix seconds."""
        return next((_value(line) for line in self._samples("process_start_time_seconds")), None)

    def mentions(self, prefix: str) -> bool:
        """Return whether there is a metric with this prefix."""
        return prefix in self._page

    def _samples(self, name: str) -> list[str]:
        """Find the lines of one metric."""
        lines: list[str] = []
        page, start = self._page, 0
        while len(lines) < _MAX_LINES and (at := page.find(f"\n{name}", start)) >= 0:
            end = page.find("\n", at + 1)
            end = len(page) if end < 0 else end
            behind = page[at + 1 + len(name) : at + 2 + len(name)]
            if end - at <= _MAX_LINE_CHARS and behind in ("{", " "):
                lines.append(page[at + 1 : end])
            start = at + 1
        return lines


NO_METRICS: Final = EngineMetrics(b"")


def block_size(text: str | None) -> int | None:
    """Read the tokens of a block."""
    return in_range(_int(text), MAX_BLOCK_SIZE) or None


def count(text: str | None) -> int | None:
    """Read a number of blocks or tokens."""
    return in_range(_int(text), MAX_COUNT)


def flag(text: str | None) -> bool | None:
    """Read what Python printed of a bool."""
    return {"True": True, "False": False}.get(text or "")


def rank_of(text: str) -> int | None:
    """Read a global rank."""
    return in_range(_int(text), _MAX_RANK)


def in_range(number: int | None, limit: int) -> int | None:
    """Return a number in [0, limit]; None for any other."""
    return number if number is not None and 0 <= number <= limit else None


def _labels(line: str) -> dict[str, str]:
    return dict(_LABELS.findall(line))


def _value(line: str) -> float | None:
    """Read a sample's value; None: it is no finite number."""
    try:
        value = float(line.rpartition(" ")[2])
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _int(text: str | None) -> int | None:
    """Read a plain decimal number, of at most 18 digits."""
    if text is None or len(text) > 18 or not (text.isascii() and text.isdigit()):
        return None
    return int(text)
