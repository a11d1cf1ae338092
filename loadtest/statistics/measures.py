"""The measures: a value of each turn, and what of many turns is compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal

from msgspec import Struct

from loadtest.results import TurnResult

Unit = Literal["s", "tokens", "share"]


class Measure(Struct, frozen=True, kw_only=True):
    """One figure of a variant.

    `value` is a turn's part in it; None: unknown, and the turn is left out with its pair.
    `percentile`, in (0, 1), is compared; None: the mean. With `counts_failures` a turn has a value
    too if it failed, or never came because an earlier one failed. Without `value` the times of
    whole sessions are compared (`loadtest.whole_sessions`).
    """

    name: str
    unit: Unit
    value: Callable[[TurnResult], float | None] | None
    percentile: float | None = None
    better: Literal["less", "more"] = "less"
    is_time: bool = True  # means nothing where the driver was late or the machine busy
    counts_failures: bool = False


def is_good(turn: TurnResult, ttft_s: float | None, tbt_s: float | None) -> bool:
    """Return whether a turn kept the SLO: it succeeded within each given bound.

    A reply of one token has no inter-token latency and keeps that bound. A success without a
    first-token time does not keep a bound on it.
    """
    if turn.error is not None:
        return False
    if ttft_s is not None and (turn.ttft_s is None or turn.ttft_s > ttft_s):
        return False
    return tbt_s is None or turn.tbt_mean_s is None or turn.tbt_mean_s <= tbt_s


def within_slo(ttft_s: float | None, tbt_s: float | None) -> Measure:
    """Return the measure of goodput: the share of turns that kept the SLO, failures included."""
    return Measure(
        name="within SLO",
        unit="share",
        value=lambda turn: float(is_good(turn, ttft_s, tbt_s)),
        better="more",
        counts_failures=True,
    )


def _computed(turn: TurnResult) -> float | None:
    if turn.num_prompt_tokens is None or turn.num_cached_tokens is None:
        return None  # no report of cached tokens does not mean that all were computed
    return float(turn.num_computed_tokens)


_ALL: Final = (
    Measure(name="mean TTFT", unit="s", value=lambda turn: turn.ttft_s),
    Measure(name="TTFT P50", unit="s", value=lambda turn: turn.ttft_s, percentile=0.5),
    Measure(name="TTFT P90", unit="s", value=lambda turn: turn.ttft_s, percentile=0.9),
    Measure(name="TTFT P99", unit="s", value=lambda turn: turn.ttft_s, percentile=0.99),
    Measure(name="mean ITL", unit="s", value=lambda turn: turn.tbt_mean_s),
    Measure(name="ITL tail P90", unit="s", value=lambda turn: turn.tbt_tail_s, percentile=0.9),
    Measure(name="mean turn", unit="s", value=lambda turn: turn.total_s),
    Measure(name="mean session", unit="s", value=None),
    Measure(name="computed tokens", unit="tokens", value=_computed, is_time=False),
)
MEASURES: Final[dict[str, Measure]] = {measure.name: measure for measure in _ALL}
