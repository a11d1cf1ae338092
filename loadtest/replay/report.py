"""What a run showed: figures, errors with their times, and what limits the figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from msgspec import Struct
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from loadtest.results import Run, TurnResult
from loadtest.runner.tally import percentile
from loadtest.words import duration, ratio
from loadtest.workload import TurnKey

LATE_WARNING_S: Final = 0.05
_MAX_LENGTH_GAP: Final = 0.02  # of the prompts' tokens
_SHARES: Final = (0.5, 0.9, 0.99)


class Times(Struct, frozen=True, kw_only=True):
    """One measure over all turns that have it, seconds."""

    name: str
    count: int
    mean_s: float | None
    percentiles_s: tuple[float | None, ...]  # of 50, 90, 99


class ReplicaRow(Struct, frozen=True, kw_only=True):
    """What one replica did, by the router's headers."""

    name: str
    num_turns: int
    num_prompt_tokens: int
    hit_ratio: float | None
    ttft: Times


class ErrorRow(Struct, frozen=True, kw_only=True):
    """Errors of one kind; times from the start of the run."""

    kind: str
    count: int
    first_s: float
    last_s: float
    message: str  # of the first


class Report(Struct, frozen=True, kw_only=True):
    """A run in figures. Warm-up turns are left out, but for errors and lateness."""

    run: Run
    num_turns: int
    num_warm_up: int
    num_errors: int
    duration_s: float
    requests_per_s: float | None
    num_prompt_tokens: int | None  # None: not reported
    num_output_tokens: int | None
    hit_ratio: float | None
    times: tuple[Times, ...]
    late_p99_s: float | None
    replicas: tuple[ReplicaRow, ...]
    errors: tuple[ErrorRow, ...]
    warnings: tuple[str, ...]


class Asked(Struct, frozen=True, gc=False):
    """How long a turn's prompt and reply should be, in tokens; None: as the model likes."""

    num_input_tokens: int
    num_output_tokens: int | None


def make_report(
    run: Run, asked: dict[TurnKey, Asked], *, late_warning_s: float = LATE_WARNING_S
) -> Report:
    """Sum a run up.

    Args:
        asked: What every turn of the workload should be; those that are missing are not compared.
        late_warning_s: A driver whose 99th percentile is later than this gets a warning.
    """
    counted = [turn for turn in run.turns if not turn.is_warm_up]
    good = [turn for turn in counted if turn.error is None]
    lates = sorted(turn.late_s for turn in run.turns)
    duration_s = max((turn.start_s + turn.total_s for turn in counted), default=0.0) - min(
        (turn.start_s for turn in counted), default=0.0
    )
    late_p99_s = percentile(lates, 0.99)
    return Report(
        run=run,
        num_turns=len(counted),
        num_warm_up=len(run.turns) - len(counted),
        num_errors=sum(turn.error is not None for turn in run.turns),
        duration_s=duration_s,
        requests_per_s=len(good) / duration_s if duration_s else None,
        num_prompt_tokens=_sum(turn.num_prompt_tokens for turn in good),
        num_output_tokens=_sum(turn.num_output_tokens for turn in good),
        hit_ratio=_hit_ratio(good),
        times=(
            _times("TTFT", (turn.ttft_s for turn in good)),
            _times("inter-token latency, mean", (turn.tbt_mean_s for turn in good)),
            _times("inter-token latency, longest tenth", (turn.tbt_tail_s for turn in good)),
            _times("end to end", (turn.total_s for turn in good)),
        ),
        late_p99_s=late_p99_s,
        replicas=_by_replica(good),
        errors=_errors(run.turns),
        warnings=tuple(_warnings(run, good, asked, late_p99_s, late_warning_s)),
    )


def show(report: Report, console: Console) -> None:
    """Print a report: a table per measure, per replica and per kind of error; then warnings."""
    run = report.run
    _say(console, f"\n{run.info.label}: {run.info.workload}, {run.info.loop} loop")
    console.print(_figures(report))
    console.print(_times_table(report.times))
    if len(report.replicas) > 1:
        console.print(_replica_table(report.replicas))
    if report.errors:
        console.print(_error_table(report.errors))
    if not run.info.is_complete:
        _say(console, f"PARTIAL: {run.info.note}", style="bold red")
    elif run.info.note:
        _say(console, run.info.note)
    for warning in report.warnings:
        _say(console, f"Note: {warning}", style="yellow")


# -- figures ---------------------------------------------------------------------------------------


def _times(name: str, values: Iterable[float | None]) -> Times:
    known = sorted(value for value in values if value is not None)
    return Times(
        name=name,
        count=len(known),
        mean_s=sum(known) / len(known) if known else None,
        percentiles_s=tuple(percentile(known, share) for share in _SHARES),
    )


def _sum(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _hit_ratio(turns: Sequence[TurnResult]) -> float | None:
    """Return cached by prompt tokens of the turns that report both; None: none does."""
    reported = [
        (turn.num_cached_tokens, turn.num_prompt_tokens)
        for turn in turns
        if turn.num_cached_tokens is not None and turn.num_prompt_tokens
    ]
    num_prompt_tokens = sum(prompt for _, prompt in reported)
    return sum(cached for cached, _ in reported) / num_prompt_tokens if reported else None


def _by_replica(turns: Sequence[TurnResult]) -> tuple[ReplicaRow, ...]:
    groups: dict[str, list[TurnResult]] = {}
    for turn in turns:
        if turn.replica is not None:
            groups.setdefault(turn.replica, []).append(turn)
    return tuple(
        ReplicaRow(
            name=name,
            num_turns=len(group),
            num_prompt_tokens=sum(turn.num_prompt_tokens or 0 for turn in group),
            hit_ratio=_hit_ratio(group),
            ttft=_times("TTFT", (turn.ttft_s for turn in group)),
        )
        for name, group in sorted(groups.items())
    )


def _errors(turns: Sequence[TurnResult]) -> tuple[ErrorRow, ...]:
    groups: dict[str, list[TurnResult]] = {}
    for turn in turns:
        if turn.error is not None:
            groups.setdefault(turn.error, []).append(turn)
    rows = []
    for kind, group in groups.items():
        ends = [turn.start_s + turn.total_s for turn in group]
        message = group[0].error_message or ""
        rows.append(
            ErrorRow(kind=kind, count=len(group), first_s=min(ends), last_s=max(ends),
                     message=message)
        )  # fmt: skip
    return tuple(sorted(rows, key=_by_first))


def _by_first(row: ErrorRow) -> float:
    return row.first_s


# -- what limits them ------------------------------------------------------------------------------


def _warnings(
    run: Run,
    good: Sequence[TurnResult],
    asked: dict[TurnKey, Asked],
    late_p99_s: float | None,
    late_warning_s: float,
) -> Iterable[str]:
    if late_p99_s is not None and late_p99_s > late_warning_s:
        yield (
            f"the driver itself was late (p99 {duration(late_p99_s)}, over "
            f"{duration(late_warning_s)}): this machine was too busy for this load, and times "
            "contain it. Send less, or drive from another machine."
        )
    if good and all(turn.num_prompt_tokens is None for turn in good):
        yield "the target reports no usage (stream_options.include_usage): tokens are unknown."
    elif good and all(turn.num_cached_tokens is None for turn in good):
        yield (
            "the target does not report cached tokens; vLLM does with "
            "--enable-prompt-tokens-details."
        )
    yield from _wrong_lengths(good, asked)
    if not run.turns:
        yield "no turn was measured."


def _wrong_lengths(good: Sequence[TurnResult], asked: dict[TurnKey, Asked]) -> Iterable[str]:
    """Report where the target counted other tokens than the workload has."""
    pairs = [
        (turn, asked[key]) for turn in good if (key := (turn.session_id, turn.number)) in asked
    ]
    replies = [
        (turn.num_output_tokens, wanted.num_output_tokens)
        for turn, wanted in pairs
        if turn.num_output_tokens is not None and wanted.num_output_tokens is not None
    ]
    num_wrong = sum(got != wanted for got, wanted in replies)
    if num_wrong:
        yield (
            f"{num_wrong} of {len(replies)} replies are not as long as asked for ("
            f"{sum(got for got, _ in replies):,} of {sum(wanted for _, wanted in replies):,} "
            "tokens): does the target understand ignore_eos?"
        )
    prompts = [
        (turn.num_prompt_tokens, wanted.num_input_tokens)
        for turn, wanted in pairs
        if turn.num_prompt_tokens is not None
    ]
    got, wanted_tokens = sum(got for got, _ in prompts), sum(wanted for _, wanted in prompts)
    if wanted_tokens and abs(got / wanted_tokens - 1) > _MAX_LENGTH_GAP:
        yield (
            f"the target counted {got:,} prompt tokens, the workload has {wanted_tokens:,}: "
            "another tokenizer, or a chat template that adds to them."
        )


# -- tables ----------------------------------------------------------------------------------------


def _figures(report: Report) -> Table:
    table = Table.grid(padding=(0, 3, 0, 0))
    table.add_column()
    table.add_column(justify="right")
    warm_up = f" (and {report.num_warm_up} to warm up)" if report.num_warm_up else ""
    rate = "" if report.requests_per_s is None else f", {report.requests_per_s:.3g} a second"
    rows = [
        ("turns", f"{report.num_turns:,}{warm_up}"),
        ("failed", f"{report.num_errors:,}"),
        ("duration", f"{duration(report.duration_s)}{rate}"),
        ("prompt tokens", _count(report.num_prompt_tokens)),
        ("of them cached", ratio(report.hit_ratio)),
        ("output tokens", _count(report.num_output_tokens)),
        ("driver late, p99", duration(report.late_p99_s)),
    ]
    for row in rows:
        table.add_row(*row)
    return table


def _times_table(times: Sequence[Times]) -> Table:
    table = _table("", "mean", "p50", "p90", "p99", "turns")
    for row in times:
        table.add_row(row.name, *_cells(row), f"{row.count:,}")
    return table


def _replica_table(rows: Sequence[ReplicaRow]) -> Table:
    table = _table("replica", "turns", "prompt tokens", "cached", "TTFT mean", "p50", "p90", "p99")
    for row in rows:
        counts = f"{row.num_turns:,}", f"{row.num_prompt_tokens:,}", ratio(row.hit_ratio)
        table.add_row(Text(row.name), *counts, *_cells(row.ttft))
    return table


def _error_table(rows: Sequence[ErrorRow]) -> Table:
    table = _table("error", "turns", "first at", "last at")
    table.add_column("message of the first", overflow="fold")
    for row in rows:
        first, last = (f"{value:,.1f} s" for value in (row.first_s, row.last_s))
        table.add_row(row.kind, f"{row.count:,}", first, last, Text(row.message))
    return table


def _table(first: str, *others: str) -> Table:
    table = Table(box=SIMPLE_HEAD, header_style="bold", pad_edge=False)
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _cells(times: Times) -> tuple[str, ...]:
    return tuple(duration(value) for value in (times.mean_s, *times.percentiles_s))


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _say(console: Console, text: str, *, style: str = "") -> None:
    say: Callable[..., None] = console.print
    say(text, style=style, markup=False, highlight=False, soft_wrap=True)
