"""What a drive measured: one result per turn, and a summary of many."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from msgspec import Struct


class Predicted(Struct, frozen=True, kw_only=True, gc=False):
    """What the router predicted to be cached where it sent the request, in tokens."""

    gpu: int = 0
    cpu: int = 0
    pool: int = 0


class TurnResult(Struct, frozen=True, kw_only=True):
    """One turn as its client saw it; None: not told (no such header, no usage, failed before).

    Times are seconds; `start_s` counts from the start of the drive. `error` is None or one of
    `connect`, `timeout`, `broken` (the answer broke off), `stream` (an error event in it),
    `http_STATUS`. `recomputed` tokens are prompt tokens minus cached ones.
    """

    session_id: str
    number: int
    start_s: float
    total_s: float
    ttft_s: float | None = None
    status: int | None = None
    error: str | None = None
    error_message: str | None = None
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_output_tokens: int | None = None
    replica: str | None = None
    predicted: Predicted | None = None
    policy: str | None = None
    arm: str | None = None
    request_id: str | None = None
    router_ms: float | None = None

    @property
    def num_recomputed_tokens(self) -> int:
        """Count the prompt tokens the engine had to compute; 0 where no usage came."""
        return (self.num_prompt_tokens or 0) - (self.num_cached_tokens or 0)


class Summary(Struct, frozen=True, kw_only=True):
    """A drive in a few numbers; times in seconds over the turns that succeeded."""

    num_turns: int
    num_errors: int
    num_prompt_tokens: int
    num_recomputed_tokens: int
    hit_ratio: float  # cached / prompt tokens
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    total_mean_s: float
    span_s: float  # from the first request to the last answer
    errors: dict[str, int] = {}


def summarize(results: Iterable[TurnResult]) -> Summary:
    """Sum a drive up."""
    turns = list(results)
    good = [turn for turn in turns if turn.error is None]
    errors: dict[str, int] = {}
    for turn in turns:
        if turn.error is not None:
            errors[turn.error] = errors.get(turn.error, 0) + 1
    num_prompt_tokens = sum(turn.num_prompt_tokens or 0 for turn in good)
    num_recomputed_tokens = sum(turn.num_recomputed_tokens for turn in good)
    ttfts = sorted(turn.ttft_s for turn in good if turn.ttft_s is not None)
    return Summary(
        num_turns=len(turns),
        num_errors=len(turns) - len(good),
        num_prompt_tokens=num_prompt_tokens,
        num_recomputed_tokens=num_recomputed_tokens,
        hit_ratio=1 - num_recomputed_tokens / num_prompt_tokens if num_prompt_tokens else 0.0,
        ttft_mean_s=_mean(ttfts),
        ttft_p50_s=_percentile(ttfts, 0.50),
        ttft_p90_s=_percentile(ttfts, 0.90),
        ttft_p99_s=_percentile(ttfts, 0.99),
        total_mean_s=_mean([turn.total_s for turn in good]),
        span_s=max((turn.start_s + turn.total_s for turn in turns), default=0.0)
        - min((turn.start_s for turn in turns), default=0.0),
        errors=errors,
    )


def parse_predicted(header: str | None) -> Predicted | None:
    """Read an `x-warmroute-cached` header: `gpu=N;cpu=N;pool=N`, None where it is missing."""
    if not header:
        return None
    pairs = (pair.partition("=") for pair in header.split(";"))
    return msgspec.convert({key.strip(): value for key, _, value in pairs}, Predicted, strict=False)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _percentile(ordered: list[float], share: float) -> float:
    """Pick the nearest-rank percentile of sorted values, 0.0 of none."""
    if not ordered:
        return 0.0
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
