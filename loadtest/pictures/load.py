"""Load per replica over time: how many requests were in flight at each, as the client saw it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import ceil
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from loadtest.pictures.look import SOFT, Rounds, draw, looks
from loadtest.results import TurnResult

Floats = NDArray[np.float64]

_BINS: Final = 120
_SMOOTH: Final = 7  # about a twentieth
_COLUMNS: Final = 3
_FEW: Final = 8  # replicas that can be drawn one by one


def load(arms: Rounds) -> bytes | None:
    """Draw a panel per arm, of its first round. None: no answer names its replica."""
    found: dict[str, dict[str, Floats]] = {}
    end_s = max((_end_s(rounds[0]) for rounds in arms.values() if rounds), default=0.0)
    for label, rounds in arms.items():
        if rounds and (series := in_flight(rounds[0], end_s)):
            found[label] = series
    if not found:
        return None
    num_columns = 2 if len(found) == 4 else min(len(found), _COLUMNS)
    num_rows = ceil(len(found) / num_columns)

    def paint(figure: Any) -> None:
        axes = np.atleast_1d(
            figure.subplots(num_rows, num_columns, sharex=True, sharey=True, squeeze=False)
        ).ravel()
        look_of = looks(arms)
        at = (np.arange(_BINS) + 0.5) * end_s / _BINS
        for axis, (label, series) in zip(axes, found.items(), strict=False):
            _panel(axis, at, series, look_of[label].colour)
            axis.set_title(label)
            axis.text(1.0, 1.02, f"busiest : mean  {imbalance(arms[label][0]):.2f}", fontsize=8.5,
                      color=SOFT, ha="right", va="bottom", transform=axis.transAxes)  # fmt: skip
        axes[0].set_ylim(0, 1.05 * max(line.max() for s in found.values() for line in s.values()))
        for axis in axes[len(found) :]:
            axis.set_visible(False)
        for axis in axes[max(0, len(found) - num_columns) : len(found)]:
            axis.tick_params(labelbottom=True)  # there may be none below it
        figure.supxlabel("seconds from the first turn", fontsize=9, color=SOFT)
        figure.supylabel("requests in flight", fontsize=9, color=SOFT)

    return draw(paint, width=1.0 + 3.2 * num_columns, height=0.8 + 2.1 * num_rows)


def in_flight(turns: Iterable[TurnResult], end_s: float) -> dict[str, Floats]:
    """Average the requests in flight per replica over equal parts of [0, end_s).

    Returns:
        Replica to shape (120,), each the mean of a twentieth of the run around it.
    """
    found: dict[str, Floats] = {}
    width = max(end_s, 1e-9) / _BINS
    edges = np.arange(_BINS + 1) * width
    for turn in turns:
        if turn.replica is None:
            continue
        # time that [start, end) shares with each part, from the integral of the step function
        until = np.clip(edges, turn.start_s, turn.start_s + turn.total_s)
        shared = np.diff(until) / width
        if turn.replica in found:
            found[turn.replica] += shared
        else:
            found[turn.replica] = shared
    return {name: _smoothed(found[name]) for name in sorted(found)}


def _smoothed(series: Floats) -> Floats:
    """Take the mean of each value's neighbours; at the ends of those that there are."""
    window = np.ones(_SMOOTH)
    covered = np.convolve(np.ones(len(series)), window, mode="same")
    return np.asarray(np.convolve(series, window, mode="same") / covered)


def imbalance(turns: Iterable[TurnResult]) -> float:
    """Compare the replica that computed most prompt tokens with the mean; 1.0 is even.

    Where engines do not report what was cached, requests are counted instead.
    """
    known = [turn for turn in turns if turn.replica is not None and turn.error is None]
    is_known = all(turn.num_cached_tokens is not None for turn in known)
    work: dict[str, float] = {}
    for turn in known:
        assert turn.replica is not None
        part = float(turn.num_recomputed_tokens) if is_known else 1.0
        work[turn.replica] = work.get(turn.replica, 0.0) + part
    mean = sum(work.values()) / len(work) if work else 0.0
    return max(work.values()) / mean if mean else 1.0


def _panel(axis: Any, at: Floats, series: Mapping[str, Floats], colour: str) -> None:
    stacked = np.stack(list(series.values()))
    if len(series) <= _FEW:
        for line in stacked:
            axis.plot(at, line, color=colour, lw=1.1, alpha=0.75)
    else:
        axis.fill_between(at, stacked.min(0), stacked.max(0), color=colour, alpha=0.25, lw=0)
        axis.plot(at, stacked.mean(0), color=colour, lw=1.6)


def _end_s(turns: Sequence[TurnResult]) -> float:
    return max((turn.start_s + turn.total_s for turn in turns), default=0.0)
