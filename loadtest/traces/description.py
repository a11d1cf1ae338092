"""A workload in the figures by which traces are compared."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final

from msgspec import Struct
from rich.table import Table

from loadtest.results import percentile
from loadtest.workload import Turn, Workload

CAPACITIES_TOKENS: Final = tuple(
    512 * num_blocks for num_blocks in (1_000, 5_859, 10_000, 30_000, 50_000, 100_000)
)
"""Sizes of the one cache whose hit ratio is given: those of Mooncake's papers, in its blocks."""

LATE_TURN: Final = 30
"""The turn at which agents' contexts are compared."""


class Spread(Struct, frozen=True, kw_only=True):
    """How a quantity is spread; nearest-rank percentiles."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class Description(Struct, frozen=True, kw_only=True):
    """A workload in figures."""

    name: str
    block_size: int
    num_requests: int
    num_skipped: int
    num_sessions: int
    num_single: int  # sessions of one turn
    num_sub_agents: int  # sessions that start after another's turn
    span_s: float
    largest_burst: int  # requests that arrive at the same moment
    turns: Spread  # of a session
    input_tokens: Spread
    output_tokens: Spread
    input_per_output: float
    late_context_tokens: float | None  # median prompt of the 30th turns; None: there are none
    wait_s: Spread | None  # None: no turn waits for another
    num_blocks: int  # uses
    num_unique_blocks: int
    ideal_hit_ratio: float  # of prompt tokens, in a cache that forgets nothing
    lru_hit_ratios: dict[int, float]  # by capacity in blocks, of one LRU cache


def describe(workload: Workload, *, capacities: Sequence[int] | None = None) -> Description:
    """Count; `capacities` in blocks, None: `CAPACITIES_TOKENS`."""
    turns = workload.turns
    if capacities is None:
        capacities = [max(1, tokens // workload.block_size) for tokens in CAPACITIES_TOKENS]
    sessions = Counter(turn.session_id for turn in turns)
    late = sorted(turn.num_input_tokens for turn in turns if turn.number == LATE_TURN - 1)
    waits = [turn.wait_s for turn in turns if turn.after]
    num_output_tokens = sum(turn.num_output_tokens for turn in turns)
    return Description(
        name=workload.name,
        block_size=workload.block_size,
        num_requests=len(turns),
        num_skipped=workload.num_skipped,
        num_sessions=len(sessions),
        num_single=sum(1 for count in sessions.values() if count == 1),
        num_sub_agents=sum(1 for turn in turns if turn.number == 0 and turn.after),
        span_s=workload.span_s,
        largest_burst=max(Counter(turn.arrival_s for turn in turns).values(), default=0),
        turns=spread_of(sessions.values()),
        input_tokens=spread_of(turn.num_input_tokens for turn in turns),
        output_tokens=spread_of(turn.num_output_tokens for turn in turns),
        input_per_output=workload.num_input_tokens / max(1, num_output_tokens),
        late_context_tokens=late[len(late) // 2] if late else None,
        wait_s=spread_of(waits) if waits else None,
        num_blocks=sum(len(turn.hash_ids) for turn in turns),
        num_unique_blocks=len({block for turn in turns for block in turn.hash_ids}),
        ideal_hit_ratio=lru_hit_ratio(workload, None),
        lru_hit_ratios={size: lru_hit_ratio(workload, size) for size in capacities},
    )


def lru_hit_ratio(workload: Workload, num_blocks: int | None) -> float:
    """Send the turns through one LRU cache, in order of arrival, each done at once.

    Args:
        workload: What to send.
        num_blocks: Capacity; None: without end.

    Returns:
        Share of prompt tokens that leading blocks in the cache held. Of one prompt the last block
        goes first, as in vLLM.
    """
    cache: OrderedDict[int, None] = OrderedDict()
    num_hit_tokens = 0
    for turn in workload.turns:
        num_hit_tokens += min(_match(turn, cache) * workload.block_size, turn.num_input_tokens)
        for block in reversed(turn.hash_ids):
            cache[block] = None
            cache.move_to_end(block)
        while num_blocks is not None and len(cache) > num_blocks:
            cache.popitem(last=False)
    return num_hit_tokens / max(1, workload.num_input_tokens)


def _match(turn: Turn, cache: OrderedDict[int, None]) -> int:
    for count, block in enumerate(turn.hash_ids):
        if block not in cache:
            return count
    return len(turn.hash_ids)


def spread_of(values: Iterable[float]) -> Spread:
    """Summarize values; all 0 if there are none."""
    ordered = sorted(values) or [0.0]
    p50, p90, p99 = (percentile(ordered, share) for share in (0.5, 0.9, 0.99))
    return Spread(mean=sum(ordered) / len(ordered), p50=p50, p90=p90, p99=p99, max=ordered[-1])


def table_of(d: Description) -> Table:
    """Lay a description out for a terminal."""
    table = Table(title=d.name, show_header=True)
    table.add_column("", no_wrap=True)
    for column in ("mean", "P50", "P90", "P99", "max"):
        table.add_column(column, justify="right")
    rows = [("input tokens", d.input_tokens), ("output tokens", d.output_tokens)]
    rows.append(("turns of a session", d.turns))
    for label, spread in rows:
        table.add_row(label, *_cells(spread, 0))
    if d.wait_s is not None:
        table.add_row("wait before a turn, s", *_cells(d.wait_s, 1))
    table.add_section()
    for label, value in _facts(d):
        table.add_row(label, value)
    return table


def _cells(spread: Spread, digits: int) -> list[str]:
    values = (spread.mean, spread.p50, spread.p90, spread.p99, spread.max)
    return [f"{value:,.{digits}f}" for value in values]


def _facts(d: Description) -> Iterable[tuple[str, str]]:
    yield "requests", f"{d.num_requests:,}"
    if d.num_skipped:
        yield "bad lines left out", f"{d.num_skipped:,}"
    yield "sessions", f"{d.num_sessions:,}"
    yield "  of one turn", f"{d.num_single:,}"
    yield "  sub-agents", f"{d.num_sub_agents:,}"
    yield "span", f"{d.span_s:,.0f} s"
    yield "largest burst", f"{d.largest_burst:,}"
    yield "input : output", f"{d.input_per_output:,.1f} : 1"
    if d.late_context_tokens is not None:
        yield f"context at turn {LATE_TURN}, P50", f"{d.late_context_tokens:,}"
    yield f"blocks of {d.block_size}", f"{d.num_blocks:,}"
    yield "  unique", f"{d.num_unique_blocks:,}"
    yield "ideal hit, of tokens", f"{100 * d.ideal_hit_ratio:.1f} %"
    for capacity, ratio in d.lru_hit_ratios.items():
        yield f"LRU of {capacity:,} blocks", f"{100 * ratio:.1f} %"
