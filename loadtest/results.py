"""Measurements: one result per turn, a run of turns, and a summary of many.

Live and simulated runs have the same form, so they are compared in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
from msgspec import Struct


class Predicted(Struct, frozen=True, kw_only=True, gc=False):
    """The router's prediction of cached tokens at the replica that it chose."""

    gpu: int = 0
    cpu: int = 0
    pool: int = 0

    @property
    def total(self) -> int:
        """Count the tokens predicted to be reused, wherever from."""
        return self.gpu + self.cpu + self.pool


class TurnResult(Struct, frozen=True, kw_only=True):
    """One turn as its client saw it; None: not known (no such header, no usage, failed before).

    Times are seconds; `start_s` counts from the start of the drive. `error` is None or one of
    `connect`, `timeout`, `broken` (the answer broke off), `stream` (an error event in it),
    `garbage` (no event stream of this API), `http_STATUS`. `computed` tokens are prompt tokens
    minus cached ones. `due_s` is when an open-loop workload wanted the turn sent. Times count from
    there, so a late driver hides no queue (no coordinated omission). `late_s` is the delay of the
    driver; in a closed loop it is the delay of the driver's own timers.
    """

    session_id: str  # of the workload
    number: int  # of the turn in its session, from 0
    start_s: float  # when it was sent, from the start of the run
    total_s: float  # until its answer ended, from `due_s` where there is one, else `start_s`
    ttft_s: float | None = None  # until its first token, from the same start
    status: int | None = None  # of HTTP
    error: str | None = None  # its kind; null: none
    error_message: str | None = None  # what the target or the network said
    num_prompt_tokens: int | None = None  # as the target counted (`usage`)
    num_cached_tokens: int | None = None  # of them found in a cache, as the target says
    num_output_tokens: int | None = None  # as the target counted
    replica: str | None = None  # `x-warmroute-replica`
    prefill: str | None = None  # the replica that computed its prompt, if another one
    predicted: Predicted | None = None  # `x-warmroute-cached`: gpu, cpu and pool tokens
    policy: str | None = None  # `x-warmroute-policy`
    arm: str | None = None  # variant of an experiment, as the router says
    request_id: str | None = None  # `x-warmroute-request-id`
    router_ms: float | None = None  # `x-warmroute-ms`: time spent in the router
    due_s: float | None = None  # open loop: when it was to be sent; null: closed loop
    late_s: float = 0.0  # how late the driver was
    tbt_mean_s: float | None = None  # mean inter-token latency; null: fewer than two events
    tbt_tail_s: float | None = None  # mean of the longest tenth of inter-token latencies
    is_warm_up: bool = False  # sent, but not to be counted

    @property
    def num_computed_tokens(self) -> int:
        """Count the prompt tokens the engine had to compute; 0 where no usage came."""
        return (self.num_prompt_tokens or 0) - (self.num_cached_tokens or 0)


RUN_SCHEMA = "warmroute.run/1"


class RunInfo(Struct, frozen=True, kw_only=True):
    """What a run was; the first line of its file, the turns follow."""

    schema: str = RUN_SCHEMA  # family and version of the file
    label: str  # the variant: a policy, a target
    target: str  # base URL, or "simulated"
    workload: str  # its name: a file, a generator and its parameters
    loop: str  # open | closed
    seed: int = 0  # of what was drawn
    round: int = 0  # of several interleaved ones
    started_at: float = 0.0  # unix seconds; 0.0: simulated
    is_complete: bool = True  # whether everything was sent that was asked for
    note: str = ""  # why it is not, or what was asked to be left out
    settings: dict[str, str | int | float | bool] = {}  # how it was sent; never a key


class Run(Struct, frozen=True, kw_only=True):
    """One workload at one target, from a cold start; turns in order of completion."""

    info: RunInfo
    turns: tuple[TurnResult, ...]


class Summary(Struct, frozen=True, kw_only=True):
    """A run in a few numbers; times in seconds over the turns that succeeded."""

    num_turns: int
    num_errors: int
    num_prompt_tokens: int
    num_computed_tokens: int
    hit_ratio: float  # cached / prompt tokens
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    total_mean_s: float
    span_s: float  # from the first request to the last answer
    errors: dict[str, int] = {}


def summarize(results: Iterable[TurnResult]) -> Summary:
    """Summarize the turns of a run."""
    turns = list(results)
    good = [turn for turn in turns if turn.error is None]
    errors: dict[str, int] = {}
    for turn in turns:
        if turn.error is not None:
            errors[turn.error] = errors.get(turn.error, 0) + 1
    num_prompt_tokens = sum(turn.num_prompt_tokens or 0 for turn in good)
    num_computed_tokens = sum(turn.num_computed_tokens for turn in good)
    ttfts = sorted(turn.ttft_s for turn in good if turn.ttft_s is not None)
    return Summary(
        num_turns=len(turns),
        num_errors=len(turns) - len(good),
        num_prompt_tokens=num_prompt_tokens,
        num_computed_tokens=num_computed_tokens,
        hit_ratio=1 - num_computed_tokens / num_prompt_tokens if num_prompt_tokens else 0.0,
        ttft_mean_s=_mean(ttfts),
        ttft_p50_s=percentile(ttfts, 0.50),
        ttft_p90_s=percentile(ttfts, 0.90),
        ttft_p99_s=percentile(ttfts, 0.99),
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


def percentile(ordered: Sequence[float], share: float) -> float:
    """Pick the nearest-rank percentile of sorted values; 0.0 of none."""
    if not ordered:
        return 0.0
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
