"""One simulated replica: the engine model in virtual time, many steps at once.

What must live here: when steps start and end, reads from the pool or from other replicas. What must
not: what a step contains (engine_model.scheduler), who sends what where (simulation).

Steps of a batch that only decodes are joined: most of the time nothing happens in them. What comes
from outside, `arrive` and `read_done`, cuts them short after the step under way.

Reads follow vLLM's asynchronous load. A read from a replica that computed the prompt has all of its
tokens but the last, which is computed to get the answer's first (nixl/pull_scheduler.py,
`get_num_new_matched_tokens`; Scheduler, `_update_waiting_for_remote_kv`). That replica keeps the
blocks until they are read.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from loadtest.engine_model import scheduler
from loadtest.engine_model.blocks import Blocks, Change
from loadtest.engine_model.cpu_tier import CpuTier, Dropped, Offloaded
from loadtest.engine_model.pool import BlockPool
from loadtest.engine_model.scheduler import Scheduler, SchedulerStats, Step
from loadtest.simulator.reads import Reads
from loadtest.simulator.setup import Setup
from router.base.contracts import BlockKey
from router.replicas.candidate_state import EngineLoad

_MAX_STEPS = 1 << 30


class Request(scheduler.Request):
    """One generation; `owner` is the caller's.

    Args:
        num_sent_tokens: Leading ones that another replica keeps for it.
    """

    __slots__ = ("num_read_tokens", "num_sent_tokens", "owner")

    def __init__(
        self,
        keys: Sequence[BlockKey],
        num_prompt_tokens: int,
        num_reply_tokens: int,
        owner: object = None,
        num_sent_tokens: int = 0,
    ) -> None:
        super().__init__(keys, num_prompt_tokens, num_reply_tokens)
        self.owner = owner
        self.num_read_tokens = 0  # from pool, tier or another replica, of the cached ones
        self.num_sent_tokens = num_sent_tokens


class _Loader:
    """Reads for one engine what pool, CPU tier or another replica have beyond its cache."""

    def __init__(self, number: int, block_size: int, pool: BlockPool | None, reads: Reads) -> None:
        self._number = number
        self._size = block_size
        self._pool = pool
        self._reads = reads
        self.now_s = 0.0

    def num_tokens(self, request: scheduler.Request) -> int:
        assert isinstance(request, Request)
        num_tokens = request.num_sent_tokens
        if self._pool is not None:
            reusable = request.keys[: (request.num_tokens - 1) // self._size]
            num_tokens = max(num_tokens, self._pool.leading(reusable) * self._size)
        return num_tokens

    def begin(self, request: scheduler.Request, num_missing: int) -> None:
        assert isinstance(request, Request)
        if not request.num_preemptions:
            request.num_read_tokens = num_missing
        self._reads.begin(self._number, request, num_missing, self.now_s)


class Engine:
    """One replica.

    Call `arrive` for each request, then `wake` when everything of that moment has happened; from
    then on `end_s` says when to call `complete`, and again. A call of `arrive` or `read_done`
    in between may bring `end_s` forward.

    Args:
        setup: The fleet.
        number: Which replica of it this is.
        block_size: Tokens in a block.
        pool: None: there is no shared pool.
        reads: From the pool, the CPU tier, or other replicas. None: there is nothing to read.
        on_first_token, on_finish: Called with the request and the time, in the order of the batch.

    Raises:
        ValueError: The batch is larger than the token budget of a step.
    """

    def __init__(
        self,
        setup: Setup,
        number: int,
        block_size: int,
        pool: BlockPool | None,
        reads: Reads | None,
        on_first_token: Callable[[Request, float], None],
        on_finish: Callable[[Request, float], None],
    ) -> None:
        max_num_seqs, max_num_tokens = setup.max_num_seqs, setup.max_num_batched_tokens
        if max_num_seqs > max_num_tokens:
            raise ValueError(
                f"max_num_seqs {max_num_seqs} is above max_num_batched_tokens {max_num_tokens}: "
                "a batch of decodes must fit into one step"
            )
        saves = setup.roles[number][1] != "decode"  # vLLM's `kv_consumer` does not
        blocks = Blocks(setup.cache_blocks(block_size) + 1, block_size)
        tier = CpuTier(setup.tier.num_blocks, block_size) if setup.tier is not None else None
        self.number = number
        self.blocks = blocks
        self.tier = tier
        self.end_s: float | None = None  # of the steps under way; None: idle
        self.first_step_s = 0.0  # when the first of them ends: its events come then
        self.busy_s = 0.0
        self.prefill_s = 0.0  # of this, steps with a prefill in them
        self._time_model = setup.times
        self._on_first_token = on_first_token
        self._on_finish = on_finish
        self._saved_to = pool if saves else None
        self._loader = _Loader(number, blocks.block_size, pool, reads) if reads else None
        self._scheduler = Scheduler(
            blocks,
            max_num_batched_tokens=max_num_tokens,
            max_num_seqs=max_num_seqs,
            loader=self._loader,
            tier=tier,
        )
        self._step: Step | None = None
        self._start_s = 0.0

    @property
    def stats(self) -> SchedulerStats:
        return self._scheduler.stats

    @property
    def is_empty(self) -> bool:
        """Whether it has no request."""
        return not (self._scheduler.running or self._scheduler.waiting)

    def take_changes(self) -> list[Change | Offloaded | Dropped]:
        """Return what its cache and its CPU tier stored and evicted since the last call."""
        changes: list[Change | Offloaded | Dropped] = [*self.blocks.take_changes()]
        if self.tier is not None:
            changes += self.tier.take_changes()
        return changes

    def arrive(self, request: Request, now_s: float) -> None:
        """Queue a request."""
        self._scheduler.add(request)
        self._cut(now_s)

    def read_done(self, request: Request, now_s: float) -> None:
        """End the read of a request."""
        request.num_sent_tokens = 0
        self._scheduler.loaded(request)
        self._cut(now_s)

    def release(self, request: Request, now_s: float) -> None:
        """Free what a finished request has kept for another replica; once more has no effect."""
        if request.keeps_blocks:
            request.keeps_blocks = False
            self.blocks.free(request)
            self._cut(now_s)

    def wake(self, now_s: float) -> None:
        """Begin to step, if there is something to do and nothing under way."""
        if self.end_s is None:
            self._begin(now_s)

    def complete(self, now_s: float) -> None:
        """End the steps under way, and begin the next; `now_s` is `end_s`."""
        step = self._step
        assert step is not None
        took_s = now_s - self._start_s
        self.busy_s += took_s
        if step.work.num_prefill_tokens:
            self.prefill_s += took_s
        for request in self._scheduler.complete(step, now_s):
            assert isinstance(request, Request)
            if request.num_output_tokens == 1:
                if self._saved_to is not None:
                    num_blocks = request.num_prompt_tokens // self.blocks.block_size
                    self._saved_to.put(request.keys[:num_blocks])
                self._on_first_token(request, now_s)
            if request.finished:
                self._on_finish(request, now_s)
        self._begin(now_s)

    def load(self, now_s: float) -> EngineLoad:
        """Show what the engine's `/metrics` would, at this moment."""
        stats, step = self.stats, self._step
        num_between, between_s = stats.num_between_tokens, stats.between_tokens_s
        if step is not None:  # tokens of finished steps are out already
            num_steps = self._step_at(step, now_s)
            if self._end_of(step, num_steps) > now_s:
                num_steps -= 1
            num_between += step.work.num_decodes * num_steps
            between_s += step.work.num_decodes * self._time_model.steps_s(step.work, num_steps)
        return EngineLoad(
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            at_s=now_s,
            kv_usage=self.blocks.usage,
            token_s=between_s,
            num_tokens=num_between,
        )

    def _begin(self, now_s: float) -> None:
        if self._loader is not None:
            self._loader.now_s = now_s
        self._start_s = now_s
        self._step = step = self._scheduler.schedule(now_s, _MAX_STEPS)
        if step is None:
            self.end_s = None
        else:
            self.first_step_s = self._end_of(step, 1)
            self.end_s = self._end_of(step, step.num_steps)

    def _cut(self, now_s: float) -> None:
        """Cut the steps short after the one that is under way at `now_s`."""
        step = self._step
        if step is not None and step.num_steps > 1:
            step.num_steps = self._step_at(step, now_s)
            self.end_s = self._end_of(step, step.num_steps)

    def _end_of(self, step: Step, num_steps: int) -> float:
        """Return when step `num_steps` of those under way ends."""
        return self._start_s + self._time_model.steps_s(step.work, num_steps)

    def _step_at(self, step: Step, now_s: float) -> int:
        """Return which of the steps is under way, or ends, at `now_s`; the first is 1."""
        before = bisect_left(
            range(1, step.num_steps), now_s, key=lambda number: self._end_of(step, number)
        )
        return before + 1


def between_tokens(request: scheduler.Request) -> tuple[float, float] | None:
    """Return a finished request's mean inter-token latency, and that of its longest tenth.

    None: it had one token. Steps that were joined count as equally long.
    """
    num_gaps = request.num_output_tokens - 1
    if num_gaps < 1:
        return None
    left = num_tail = max(1, num_gaps // 10)
    tail_s = 0.0
    for gap_s, count in sorted(request.gaps, reverse=True):
        taken = min(count, left)
        tail_s += gap_s * taken
        left -= taken
        if not left:
            break
    return sum([gap_s * count for gap_s, count in request.gaps]) / num_gaps, tail_s / num_tail
