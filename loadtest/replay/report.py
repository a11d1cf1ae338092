"""What a run showed: figures, errors with their times, and what limits the figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from msgspec import Struct
from rich.console import Console

from loadtest.pages import Table, on_terminal
from loadtest.results import Run, TurnResult
from loadtest.runner.display import percentile
from loadtest.words import duration, ratio
from loadtest.workload import TurnKey

LATE_WARNING_S: Final = 0.05
_MAX_LENGTH_GAP: Final = 0.02  # of the prompts' tokens
_SHARES: Final = (0.5, 0.9, 0.99)
_BEGAN_EARLY: Final = "(began while it waited)"  # its headers name no replica


class Asked(Struct, frozen=True, gc=False):
    """How long a turn's prompt and reply should be, in tokens; None: as the model likes."""

    num_input_tokens: int
    num_output_tokens: int | None


class Report(Struct, frozen=True, kw_only=True):
    """A run in tables. Warm-up turns are left out, except for errors and lateness."""

    num_errors: int
    tables: tuple[Table, ...]
    warnings: tuple[str, ...]


def make_report(run: Run, asked: dict[TurnKey, Asked]) -> Report:
    """Sum a run up.

    Args:
        asked: What every turn of the workload should be; missing turns are not compared.
    """
    counted = [turn for turn in run.turns if not turn.is_warm_up]
    good = [turn for turn in counted if turn.error is None]
    failed = [turn for turn in run.turns if turn.error is not None]
    late_p99_s = percentile(sorted(turn.late_s for turn in run.turns), 0.99)
    tables = [_figures(run.turns, counted, good, late_p99_s), _times(good)]
    by_replica = _grouped(good, lambda turn: turn.replica)
    if len(by_replica) > 1:
        by_replica |= _grouped(good, lambda turn: None if turn.replica else _BEGAN_EARLY)
        tables.append(_replicas(by_replica))
    if failed:
        tables.append(_errors(_grouped(failed, lambda turn: turn.error)))
    return Report(
        num_errors=len(failed),
        tables=tuple(tables),
        warnings=tuple(_warnings(run, good, asked, late_p99_s)),
    )


def show(run: Run, report: Report, console: Console) -> None:
    """Print a report: its tables, how the run ended, and warnings."""

    def say(text: str, style: str = "") -> None:
        console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    say(f"\n{run.info.label}: {run.info.workload}, {run.info.loop} loop\n")
    for table in report.tables:
        console.print(on_terminal(table, folds=(4,)))
        console.print()
    if not run.info.is_complete:
        say(f"PARTIAL: {run.info.note}", "bold red")
    elif run.info.note:
        say(run.info.note)
    for warning in report.warnings:
        say(f"Note: {warning}", "yellow")


def _figures(
    turns: Sequence[TurnResult],
    counted: Sequence[TurnResult],
    good: Sequence[TurnResult],
    late_p99_s: float | None,
) -> Table:
    num_warm_up = len(turns) - len(counted)
    num_errors = sum(turn.error is not None for turn in turns)
    duration_s = max((turn.start_s + turn.total_s for turn in counted), default=0.0) - min(
        (turn.start_s for turn in counted), default=0.0
    )
    warm_up = f" (and {num_warm_up} to warm up)" if num_warm_up else ""
    rate = f", {len(good) / duration_s:.3g} a second" if duration_s else ""
    return Table(
        head=("", ""),
        rows=(
            ("turns", f"{len(counted):,}{warm_up}"),
            ("failed", f"{num_errors:,}"),
            ("duration", f"{duration(duration_s)}{rate}"),
            ("prompt tokens", _sum(turn.num_prompt_tokens for turn in good)),
            ("of them cached", ratio(_hit_ratio(good))),
            ("output tokens", _sum(turn.num_output_tokens for turn in good)),
            ("driver late, p99", duration(late_p99_s)),
        ),
        numeric=(1,),
    )


def _times(good: Sequence[TurnResult]) -> Table:
    measures: dict[str, list[float | None]] = {
        "TTFT": [turn.ttft_s for turn in good],
        "inter-token latency, mean": [turn.tbt_mean_s for turn in good],
        "inter-token latency, longest tenth": [turn.tbt_tail_s for turn in good],
        "end to end": [turn.total_s for turn in good],
    }
    return Table(
        head=("", "mean", "p50", "p90", "p99", "turns"),
        rows=tuple(
            (name, *_cells(values), f"{sum(value is not None for value in values):,}")
            for name, values in measures.items()
        ),
        numeric=(1, 2, 3, 4, 5),
    )


def _replicas(by_replica: dict[str, list[TurnResult]]) -> Table:
    return Table(
        head=("replica", "turns", "prompt tokens", "cached", "TTFT mean", "p50", "p90", "p99"),
        rows=tuple(
            (
                name,
                f"{len(turns):,}",
                _sum(turn.num_prompt_tokens for turn in turns),
                ratio(_hit_ratio(turns)),
                *_cells([turn.ttft_s for turn in turns]),
            )
            for name, turns in sorted(by_replica.items())
        ),
        numeric=(1, 2, 3, 4, 5, 6, 7),
    )


def _errors(by_kind: dict[str, list[TurnResult]]) -> Table:
    """List errors by kind; times are from the start of the run to the end of the turn."""
    ends = {kind: [t.start_s + t.total_s for t in turns] for kind, turns in by_kind.items()}
    return Table(
        head=("error", "turns", "first at", "last at", "message of the first"),
        rows=tuple(
            (
                kind,
                f"{len(by_kind[kind]):,}",
                f"{min(ends[kind]):,.1f} s",
                f"{max(ends[kind]):,.1f} s",
                by_kind[kind][0].error_message or "",
            )
            for kind in sorted(by_kind, key=lambda kind: min(ends[kind]))
        ),
        numeric=(1, 2, 3),
    )


def _grouped(
    turns: Sequence[TurnResult], key: Callable[[TurnResult], str | None]
) -> dict[str, list[TurnResult]]:
    groups: dict[str, list[TurnResult]] = {}
    for turn in turns:
        name = key(turn)
        if name is not None:
            groups.setdefault(name, []).append(turn)
    return groups


def _sum(values: Iterable[int | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{sum(known):,}" if known else "-"


def _hit_ratio(turns: Sequence[TurnResult]) -> float | None:
    """Return cached by prompt tokens of the turns that report both; None: none does."""
    reported = [
        (turn.num_cached_tokens, turn.num_prompt_tokens)
        for turn in turns
        if turn.num_cached_tokens is not None and turn.num_prompt_tokens
    ]
    num_prompt_tokens = sum(prompt for _, prompt in reported)
    return sum(cached for cached, _ in reported) / num_prompt_tokens if reported else None


def _cells(values: Iterable[float | None]) -> tuple[str, ...]:
    """Write the mean and the percentiles of the known values, in seconds."""
    known = sorted(value for value in values if value is not None)
    mean_s = sum(known) / len(known) if known else None
    return tuple(duration(value) for value in (mean_s, *(percentile(known, s) for s in _SHARES)))


def _warnings(
    run: Run,
    good: Sequence[TurnResult],
    asked: dict[TurnKey, Asked],
    late_p99_s: float | None,
) -> Iterable[str]:
    if late_p99_s is not None and late_p99_s > LATE_WARNING_S:
        yield (
            f"the driver itself was late (p99 {duration(late_p99_s)}, over "
            f"{duration(LATE_WARNING_S)}): this machine was too busy for this load, and times "
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
