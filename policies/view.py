"""What a policy sees and what it answers: immutable, made of numbers, JSON-safe.

The live router and the simulator fill the same objects, so a policy cannot tell where it runs.
Everything a policy may depend on is in the `Snapshot`: time, decision number and seed included.
Token counts are tokens, not blocks; times are milliseconds unless a name ends in `_s`.
"""

from __future__ import annotations

from typing import NewType

from msgspec import Struct

CandidateId = NewType("CandidateId", str)
"""One (replica, data-parallel rank) a request can be sent to: `r1`, or `r1#2` for rank 2."""


class CostModel(Struct, frozen=True, kw_only=True, gc=False):
    """Learned time parameters of one replica class; all non-negative.

    prefill(u, c) = base_ms + ms_per_token * u + ms_per_mtoken2 * u * (c + u / 2) / 1e6
    for u uncached tokens behind c cached ones: linear layers cost by token, attention by
    (token, context) pair. Source of the shape: FAST'25 Mooncake, Eq. 1 (a*n^2*d + b*n*d^2).
    """

    base_ms: float = 20.0
    ms_per_token: float = 0.1
    ms_per_mtoken2: float = 0.5
    ms_per_running: float = 0.0  # what each request that already decodes adds to a first token
    ms_per_fetched_token: float = 0.01  # reading a token's KV from the shared pool
    ms_per_cpu_token: float = 0.01  # reading it from the replica's own cpu tier
    ms_per_fetch: float = 5.0  # what one read from the pool takes beside its tokens
    ms_per_disk_token: float = 0.04  # reading a token's KV that the pool has on SSD only
    error_ms: float = 0.0  # mean absolute error of recent predictions; 0.0 before the first
    fetch_error_ms: float = 0.0  # the same of requests that read from the pool
    fetched_token_error_ms: float = 0.01  # standard error of `ms_per_fetched_token`
    disk_token_error_ms: float = 0.04  # and of `ms_per_disk_token`

    def prefill_ms(self, num_uncached_tokens: int, num_cached_tokens: int) -> float:
        """Predict the time to compute `num_uncached_tokens` behind `num_cached_tokens`."""
        u = num_uncached_tokens
        return (
            self.base_ms
            + self.ms_per_token * u
            + self.ms_per_mtoken2 * u * (num_cached_tokens + 0.5 * u) * 1e-6
        )

    def fetch_ms(self, num_tokens: int, *, from_pool: bool, num_on_disk: int = 0) -> float:
        """Predict a read of `num_tokens`: all from the pool, or all from the own cpu tier.

        An engine never mixes them: it reads behind its GPU match, where more can be had. Of the
        pool's it reads `num_on_disk` from SSD, in the same read.
        """
        if not from_pool:
            return self.ms_per_cpu_token * num_tokens
        if not num_tokens:
            return 0.0
        return (
            self.ms_per_fetch
            + self.ms_per_fetched_token * (num_tokens - num_on_disk)
            + self.ms_per_disk_token * num_on_disk
        )

    def fetch_margin_ms(self, num_tokens: int, num_on_disk: int = 0) -> float:
        """Return by how much a read of `num_tokens` from the pool may be mispredicted.

        A prompt should leave a cache that holds it for a read elsewhere only if it gains more. 0.0
        without tokens to read.
        """
        if not num_tokens:
            return 0.0
        unsure_ms = (
            self.fetched_token_error_ms * (num_tokens - num_on_disk)
            + self.disk_token_error_ms * num_on_disk
        )
        return unsure_ms if unsure_ms > self.fetch_error_ms else self.fetch_error_ms


class RequestView(Struct, frozen=True, kw_only=True, gc=False):
    """The request to place.

    Each hash has 64 bits. `first_blocks_hash` is that of the prompt's first blocks, None if its
    tokens are not known. `parent_session_hash` is of the session whose sub-agent this is.
    """

    num_tokens: int
    session_hash: int | None = None
    session_candidate: CandidateId | None = None  # where the session's last turn ran
    first_blocks_hash: int | None = None
    parent_session_hash: int | None = None


class Holding(Struct, frozen=True, gc=False):
    """The leading prompt tokens that a candidate need not compute, by where they are.

    Counts are nested, 0 <= gpu <= cpu. gpu includes tokens that a request in flight there is
    computing right now. An engine recomputes the last token of a full hit: counts are already
    capped to what it can reuse. The same numbers go from the index to the decision record.
    """

    num_gpu_tokens: int = 0
    num_cpu_tokens: int = 0  # on its GPU or in its CPU memory: >= num_gpu_tokens
    num_pool_tokens: int | None = None  # in its shared pool; None: no pool asked
    num_disk_tokens: int = 0  # of those that it would read from the pool, on SSD only
    reads_pool: bool = True  # is counted on to fetch from the pool what it lacks itself

    @property
    def num_own_tokens(self) -> int:
        """Count the tokens that it holds itself."""
        return max(self.num_gpu_tokens, self.num_cpu_tokens)

    @property
    def num_cpu_only_tokens(self) -> int:
        """Count the tokens in its CPU memory, beyond those on its GPU."""
        return max(0, self.num_cpu_tokens - self.num_gpu_tokens)

    @property
    def num_fetched_tokens(self) -> int:
        """Count the tokens that it would fetch from the pool, beyond its own."""
        if self.num_pool_tokens is None or not self.reads_pool:
            return 0
        return max(0, self.num_pool_tokens - max(self.num_gpu_tokens, self.num_cpu_tokens))

    @property
    def num_cached_tokens(self) -> int:
        """Count the tokens that it need not compute."""
        num_own = max(self.num_gpu_tokens, self.num_cpu_tokens)
        if self.num_pool_tokens is None or not self.reads_pool:
            return num_own
        return max(num_own, self.num_pool_tokens)

    def sources(self, num_cached_tokens: int) -> tuple[int, int, int]:
        """Split the tokens that an engine reused by where they were: GPU, CPU memory, pool."""
        num_gpu, num_own = self.num_gpu_tokens, max(self.num_gpu_tokens, self.num_cpu_tokens)
        num_pool = min(self.num_fetched_tokens, max(0, num_cached_tokens - num_own))
        num_left = num_cached_tokens - num_pool
        num_cpu = min(num_own - num_gpu, max(0, num_left - num_gpu))
        return num_left - num_cpu, num_cpu, num_pool


NOTHING_HELD = Holding()


class ReplicaView(Holding, frozen=True, kw_only=True, gc=False):
    """One candidate at the time of this request, and its holding. Ineligible ones are not offered.

    The remaining work of requests in flight is in `queue_ms`. `num_free_tokens` and `tbt_ms` are
    of replicas of role decode, as far as they are known.
    """

    id: CandidateId
    num_requests: int = 0  # in flight, from dispatch to last byte
    num_waiting: int = 0  # of those, before their first token
    num_queued_tokens: int = 0  # uncached tokens of the waiting ones
    queue_ms: float = 0.0  # predicted time until the prefills ahead are done
    busy_ratio: float = 0.0  # share of the last minute with a prefill at work, in [0, 1]
    num_free_tokens: int | None = None  # of its cache, beside what requests in flight use
    tbt_ms: float | None = None  # predicted inter-token latency, with one request more
    cost: CostModel = CostModel()


class Snapshot(Struct, frozen=True, kw_only=True, gc=False):
    """All a decision may depend on.

    `number` counts this router's decisions from 0; `seed` is fixed for the process. `replicas`
    is non-empty and ordered by configuration, ranks in order.
    """

    now_s: float
    number: int
    seed: int
    request: RequestView
    replicas: tuple[ReplicaView, ...]
    # Conversations with room at each replica, in the same order, the request's own left out.
    num_sessions: tuple[int, ...] = ()  # empty: not known
    arrivals_per_s: float = 0.0  # requests to all of them, in the last minute or so


class CandidateCost(Struct, frozen=True, kw_only=True, gc=False):
    """What sending the request to one candidate is predicted to cost, in milliseconds.

    ttft_ms = queue_ms + fetch_ms + prefill_ms; `others_ms` is the policy's price for the delay
    of everyone else; `total_ms` is what the policy compares (lower wins).
    """

    id: CandidateId
    num_uncached_tokens: int
    num_fetched_tokens: int
    queue_ms: float
    fetch_ms: float
    prefill_ms: float
    others_ms: float
    total_ms: float

    @property
    def ttft_ms(self) -> float:
        """Predict the time to the first token, without the network."""
        return self.queue_ms + self.fetch_ms + self.prefill_ms


class Decision(Struct, frozen=True, kw_only=True, gc=False):
    """Where the request goes, and why in a few words (no prompt text).

    `costs` holds one entry per candidate for policies that compare costs, else it is empty.
    """

    candidate: CandidateId
    reason: str
    costs: tuple[CandidateCost, ...] = ()
