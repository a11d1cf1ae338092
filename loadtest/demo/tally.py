"""Running numbers of one policy's run, for the display: cheap enough to update at every turn."""

from __future__ import annotations

from bisect import insort

from msgspec import Struct

from loadtest.results import TurnResult, percentile


class ReplicaLoad(Struct, frozen=True, kw_only=True):
    """What a replica's own `/metrics` said at one moment; token counts since its start."""

    num_running: int = 0
    num_waiting: int = 0
    num_prompt_tokens: int = 0  # looked up in its cache
    num_cached_tokens: int = 0  # found there

    @property
    def num_recomputed_tokens(self) -> int:
        return self.num_prompt_tokens - self.num_cached_tokens


class Tally:
    """Counts turns as they complete. `loads` is set by whoever asks the replicas."""

    __slots__ = ("_ttfts", "elapsed_s", "loads", "num_cached_tokens", "num_errors",
                 "num_prompt_tokens", "num_turns", "policy", "total_turns")  # fmt: skip

    def __init__(self, policy: str, total_turns: int, num_replicas: int) -> None:
        self.policy = policy
        self.total_turns = total_turns
        self.num_turns = 0
        self.num_errors = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.elapsed_s = 0.0
        self.loads: tuple[ReplicaLoad, ...] = (ReplicaLoad(),) * num_replicas
        self._ttfts: list[float] = []

    def add(self, result: TurnResult) -> None:
        """Count one turn."""
        self.num_turns += 1
        if result.error is not None:
            self.num_errors += 1
            return
        self.num_prompt_tokens += result.num_prompt_tokens or 0
        self.num_cached_tokens += result.num_cached_tokens or 0
        if result.ttft_s is not None:
            insort(self._ttfts, result.ttft_s)

    @property
    def num_recomputed_tokens(self) -> int:
        return self.num_prompt_tokens - self.num_cached_tokens

    @property
    def hit_ratio(self) -> float | None:
        """Cached tokens among prompt tokens; None before the first answer."""
        if not self.num_prompt_tokens:
            return None
        return self.num_cached_tokens / self.num_prompt_tokens

    def ttft_s(self, share: float) -> float | None:
        """Pick a nearest-rank percentile of the first-token times; None before the first."""
        return percentile(self._ttfts, share) if self._ttfts else None
