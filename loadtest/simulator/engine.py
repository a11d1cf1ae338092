"""One simulated replica in motion: the emulator's scheduler, with decode steps leapt over.

What must live here: the running batch, the waiting queue, the token budget, preemption, reads from
the pool or from other replicas, and how long it all takes. What must not: who sends what where
(simulation), what is cached (blocks).

The rules are those of `loadtest.emulator.scheduler`, and tests/loadtest/simulator/test_engine.py
holds one against the other, request by request. What makes it fast is that nothing happens in
most steps: a batch that only decodes gets one token each, and its time is a quadratic in the
number of steps. A leap ends with the step in which

    a request gets its last token         (`_finishes`, a heap by step)
    a block is begun or filled next       (`_fills`, likewise: before that step)
    something came from outside           `arrive`, `read_done`: the step under way then

Two facts of the rules are relied on. The budget is larger than the batch, so every decode gets
its token. And at most one running request is in the middle of its prefill, the last: it got what
was left of the budget, so no request was admitted behind it.

Reads from the pool follow vLLM's asynchronous load (Scheduler.schedule, WAITING_FOR_REMOTE_KVS):
when the scheduler first reaches a request for which the pool has more than the cache, it gives it
blocks and begins the read; meanwhile those behind it are admitted; when it is done the request is
first in line. A read from a replica that computed the prompt is alike, but has all of its tokens
beside the last, which is computed to get the answer's first (nixl/pull_scheduler.py,
`get_num_new_matched_tokens`; Scheduler, `_update_waiting_for_remote_kv`). That replica keeps the
blocks until they are read.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from math import ceil, sqrt

from loadtest.emulator.time_model import TimeModel
from loadtest.simulator.blocks import Blocks, Held
from loadtest.simulator.pool import Pool, Reads
from router.contracts import BlockKey
from router.replicas.fleet import EngineLoad

_MIN_SPANS = 1024


class Request(Held):
    """One generation: what it holds, and how far it is. `owner` is the caller's."""

    __slots__ = (
        "admission",
        "finished",
        "first_step",
        "first_token_s",
        "is_read",
        "is_reading",
        "keeps_blocks",
        "last_token_s",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_output_tokens",
        "num_pooled_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_sent_tokens",
        "origin",
        "owner",
        "second_step",
    )

    def __init__(
        self,
        keys: list[BlockKey],
        num_prompt_tokens: int,
        num_output_tokens: int,
        owner: object = None,
    ) -> None:
        super().__init__(keys, num_prompt_tokens)
        self.owner = owner
        self.num_prompt_tokens = num_prompt_tokens
        self.num_output_tokens = num_output_tokens
        self.num_computed_tokens = 0  # of the prefill; see `origin`
        self.num_cached_tokens = 0  # at its first admission, the pool's among them
        self.num_pooled_tokens = 0  # of these
        self.num_preemptions = 0
        self.first_token_s: float | None = None
        self.first_step = 0  # that brought its first token
        self.last_token_s = 0.0  # before it was preempted
        self.finished = False
        self.is_reading = False  # from the pool
        self.is_read = False  # its blocks are here, it is to be admitted
        self.num_sent_tokens = 0  # leading ones that another replica keeps for it
        self.keeps_blocks = False  # it does so, for another: `release` ends it
        # While it decodes: `origin + step` tokens are computed before `step`.
        self.admission = 0  # orders the batch; 0: not in it
        self.origin = 0
        self.second_step = 0  # the first step after its prefill


class EngineStats:
    """Running totals."""

    __slots__ = (
        "between_tokens_s",
        "busy_s",
        "num_between_tokens",
        "num_computed_tokens",
        "num_finished",
        "num_preemptions",
        "num_steps",
        "prefill_s",
    )

    def __init__(self) -> None:
        self.busy_s = 0.0
        self.prefill_s = 0.0  # of this, steps with a prefill in them
        self.num_steps = 0
        self.num_preemptions = 0
        self.num_computed_tokens = 0  # prompt tokens, those of preempted requests again
        self.num_finished = 0
        self.num_between_tokens = 0  # times from one token of an answer to its next, and
        self.between_tokens_s = 0.0  # their sum


class Engine:
    """One replica.

    Call `arrive` for each request, then `wake` when all that happens at that moment has happened;
    from then on `end_s` says when to call `complete`, and again. A call of `arrive` or `read_done`
    in between may bring `end_s` forward.

    Args:
        number: Which replica of the fleet it is; names it to `reads`.
        pool: None: there is no shared pool.
        reads: From the pool, or from other replicas. None: there is neither.
        saves: Whether it writes prompts to the pool. vLLM's `kv_consumer` does not.
        on_first_token, on_finish: Called with the request and the time, in the order of the batch.
    """

    def __init__(
        self,
        blocks: Blocks,
        time_model: TimeModel,
        *,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        on_first_token: Callable[[Request, float], None],
        on_finish: Callable[[Request, float], None],
        number: int = 0,
        pool: Pool | None = None,
        reads: Reads[Request] | None = None,
        saves: bool = True,
    ) -> None:
        if max_num_seqs > max_num_batched_tokens:
            raise ValueError(
                f"max_num_seqs {max_num_seqs} is above max_num_batched_tokens "
                f"{max_num_batched_tokens}: a batch of decodes must fit into one step"
            )
        self.number = number
        self.blocks = blocks
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.stats = EngineStats()
        self.end_s: float | None = None  # of the leap under way; None: idle
        self.first_step_s = 0.0  # when the first step of the last leap ends: its events come then
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_num_seqs = max_num_seqs
        self._on_first_token = on_first_token
        self._on_finish = on_finish
        self._pool = pool
        self._reads = reads
        self._saved_to = pool if saves else None
        # the batch
        self._step = 0  # steps done
        self._num_decodes = 0
        self._num_context_tokens = 0  # of the decodes, before the next step
        self._partial: Request | None = None  # in the middle of its prefill: the last of `running`
        self._num_admissions = 0
        self._finishes: list[tuple[int, int, Request]] = []  # step, admission
        self._fills: list[tuple[int, int, Request]] = []
        # the leap under way
        self._chunks: list[tuple[Request, int]] = []
        self._start_s = 0.0
        self._num_steps = 0
        self._first_ms = 0.0  # its first step; each further takes `_more_ms` more
        self._more_ms = 0.0
        # spans of steps that took alike, for times between tokens
        self._span_ends: list[int] = []  # last step of each
        self._span_step_s: list[float] = []  # mean duration of a step in it
        self._max_spans = _MIN_SPANS
        # time model
        self._base_ms = time_model.base_ms
        self._ms_per_prefill_token = time_model.ms_per_prefill_token
        self._ms_per_pair = time_model.ms_per_mtoken2 * 1e-6
        self._ms_per_decode = time_model.ms_per_decode
        self._ms_per_context_token = time_model.ms_per_mtoken_context * 1e-6

    # -- from outside ------------------------------------------------------------------------

    def arrive(self, request: Request, now_s: float) -> None:
        """Queue a request."""
        self.waiting.append(request)
        self._cut(now_s)

    def read_done(self, request: Request, now_s: float) -> None:
        """What was to be read for a request is here."""
        request.is_reading = False
        request.is_read = True
        self.blocks.cache(request, request.num_computed_tokens)
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
        """End the leap under way, and begin the next; `now_s` is `end_s`."""
        num_steps = self._num_steps
        took_s = now_s - self._start_s
        self._step += num_steps
        self._num_context_tokens += self._num_decodes * num_steps
        self._span_ends.append(self._step)
        self._span_step_s.append(took_s / num_steps)
        if len(self._span_ends) > self._max_spans:
            self._drop_old_spans()
        stats = self.stats
        stats.busy_s += took_s
        stats.num_steps += num_steps
        stats.num_between_tokens += self._num_decodes * num_steps
        stats.between_tokens_s += self._num_decodes * took_s
        chunks = self._chunks
        if chunks:
            stats.prefill_s += took_s
        finishes = self._finishes
        while finishes and finishes[0][0] <= self._step:
            _, admission, request = heappop(finishes)
            if request.admission == admission:
                self._finish(request, now_s)
        for request, num_tokens in chunks:
            self._computed(request, num_tokens, now_s)
        self._begin(now_s)

    def load(self, now_s: float) -> EngineLoad:
        """Show what the engine's `/metrics` would, at this moment."""
        stats, blocks = self.stats, self.blocks
        num_between, between_s = stats.num_between_tokens, stats.between_tokens_s
        if self.end_s is not None:  # tokens of the leap under way are out already
            num_steps = self._step_at(now_s)
            if self._end_of(num_steps) > now_s:
                num_steps -= 1
            num_between += self._num_decodes * num_steps
            between_s += self._num_decodes * (self._end_of(num_steps) - self._start_s)
        return EngineLoad(
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            at_s=now_s,
            kv_usage=1.0 - blocks.num_free_blocks / blocks.num_usable_blocks,
            token_s=between_s,
            num_tokens=num_between,
        )

    def between_tokens(self, request: Request) -> tuple[float, float] | None:
        """Return a finished request's mean time between tokens, and that of its longest tenth.

        None: it had one token. Steps of one leap count as equally long: they differ by the
        reading of one token's KV each.
        """
        num = self._step - request.first_step
        if num < 1:
            return None
        ends, step_s = self._span_ends, self._span_step_s
        first = bisect_right(ends, request.first_step)
        counts: list[tuple[float, int]] = []
        before = request.first_step
        for index in range(first, len(ends)):
            counts.append((step_s[index], ends[index] - before))
            before = ends[index]
        total = sum([duration * count for duration, count in counts])
        left = num_tail = max(1, num // 10)
        tail = 0.0
        for duration, count in sorted(counts, reverse=True):
            taken = min(count, left)
            tail += duration * taken
            left -= taken
            if not left:
                break
        # A preempted request waits between tokens: its steps without it are in these, too.
        return total / max(1, request.num_output_tokens - 1), tail / num_tail

    # -- a step's end ------------------------------------------------------------------------

    def _computed(self, request: Request, num_tokens: int, now_s: float) -> None:
        """Note a chunk of a prefill; behind the last one comes a token."""
        self.stats.num_computed_tokens += num_tokens
        request.num_computed_tokens += num_tokens
        if request.num_computed_tokens < request.num_tokens:
            self._partial = request
            return
        request.num_tokens += 1
        num_outputs = request.num_tokens - request.num_prompt_tokens
        is_first = request.first_token_s is None
        if is_first:
            request.first_token_s = now_s
            request.first_step = self._step
        else:
            self.stats.num_between_tokens += 1
            self.stats.between_tokens_s += now_s - request.last_token_s
        if num_outputs == request.num_output_tokens:
            self._leave(request, now_s)
        else:
            self._decode(request, num_outputs)
        if is_first:
            if self._saved_to is not None:
                size = self.blocks.block_size
                self._saved_to.store(request.keys[: request.num_prompt_tokens // size])
            self._on_first_token(request, now_s)
        if request.finished:
            self._on_finish(request, now_s)

    def _decode(self, request: Request, num_outputs: int) -> None:
        """From the next step on the request gets a token each."""
        step = self._step
        request.second_step = step + 1
        request.origin = request.num_computed_tokens - step - 1
        self._num_decodes += 1
        self._num_context_tokens += request.num_computed_tokens
        last_step = step + request.num_output_tokens - num_outputs
        heappush(self._finishes, (last_step, request.admission, request))
        self._plan_fill(request, step + 1)

    def _plan_fill(self, request: Request, step: int) -> None:
        """Find the next step from `step` on in which the request begins or fills a block."""
        size = self.blocks.block_size
        within = (request.origin + step) % size
        if within:
            step += size - 1 - within
        heappush(self._fills, (step, request.admission, request))

    def _finish(self, request: Request, now_s: float) -> None:
        """Remove a decode that has its last token."""
        self._num_decodes -= 1
        self._num_context_tokens -= request.origin + self._step + 1
        request.num_tokens = request.num_prompt_tokens + request.num_output_tokens
        self._leave(request, now_s)
        self._on_finish(request, now_s)

    def _leave(self, request: Request, now_s: float) -> None:
        request.finished = True
        request.admission = 0
        self.running.remove(request)
        if not request.keeps_blocks:
            self.blocks.free(request)
        self.stats.num_finished += 1

    # -- a step's beginning ------------------------------------------------------------------

    def _begin(self, now_s: float) -> None:
        """Fill the next step, and leap as far as nothing else happens."""
        self._chunks = []
        self._start_s = now_s
        num_prefill_tokens = 0
        num_pairs = 0.0
        num_late_decodes = num_late_context = 0
        preempted = self._fill_blocks()
        budget = self._max_num_batched_tokens - self._num_decodes
        partial, self._partial = self._partial, None
        if partial is not None and partial.admission:  # not preempted for a decode's block
            computed = partial.num_computed_tokens
            num_tokens = min(partial.num_tokens - computed, budget)
            if not self.blocks.allocate(partial, computed + num_tokens):
                self._preempt(partial)
                preempted = True
            else:
                self._chunks.append((partial, num_tokens))
                budget -= num_tokens
                if num_tokens == 1 and computed >= partial.num_prompt_tokens:
                    num_late_decodes, num_late_context = 1, computed
                else:
                    num_prefill_tokens += num_tokens
                    num_pairs += num_tokens * (computed + num_tokens / 2)
        if not preempted:
            while budget > 0:
                admitted = self._admit(budget, now_s)
                if admitted is None:
                    break
                num_tokens = admitted[1]
                self._chunks.append(admitted)
                budget -= num_tokens
                num_prefill_tokens += num_tokens
                num_pairs += num_tokens * (admitted[0].num_computed_tokens + num_tokens / 2)
        if not self._chunks and not self._num_decodes:
            self.end_s = None
            if self.waiting and not preempted and self._make_room():
                self._begin(now_s)
            elif preempted:
                self._begin(now_s)
            return
        num_decodes = self._num_decodes + num_late_decodes
        self._first_ms = (
            self._base_ms
            + self._ms_per_prefill_token * num_prefill_tokens
            + self._ms_per_pair * num_pairs
            + self._ms_per_decode * num_decodes
            + self._ms_per_context_token * (self._num_context_tokens + num_late_context)
        )
        self._more_ms = self._ms_per_context_token * self._num_decodes
        self._num_steps = 1 if self._chunks or preempted else self._num_quiet_steps()
        self.first_step_s = now_s + 1e-3 * self._first_ms
        self.end_s = self._end_of(self._num_steps)

    def _num_quiet_steps(self) -> int:
        """Count the steps up to the next last token, or before the next block."""
        finishes, fills = self._finishes, self._fills
        while finishes[0][2].admission != finishes[0][1]:
            heappop(finishes)
        while fills and fills[0][2].admission != fills[0][1]:
            heappop(fills)
        num_steps = finishes[0][0] - self._step
        if fills:
            num_steps = min(num_steps, fills[0][0] - self._step - 1)
        return num_steps

    def _fill_blocks(self) -> bool:
        """Allocate the blocks that decodes begin in this step, cache those that they fill.

        Returns whether a request was preempted for it: the last admitted, again and again.
        """
        step, fills = self._step + 1, self._fills
        preempted = False
        while fills and fills[0][0] <= step:
            _, admission, request = heappop(fills)
            if request.admission != admission:
                continue  # finished or preempted
            num_computed = request.origin + step
            request.num_tokens = num_computed + 1
            while not self.blocks.allocate(request, num_computed + 1):
                self._preempt(self.running[-1])
                preempted = True
                if not request.admission:
                    break
            else:
                self._plan_fill(request, step + 1)
        return preempted

    def _admit(self, budget: int, now_s: float) -> tuple[Request, int] | None:
        """Admit the next request that can run, with its first chunk; None: none can.

        On the way reads from the pool are begun.
        """
        skipped: list[Request] = []
        admitted: tuple[Request, int] | None = None
        while self.waiting and admitted is None and len(self.running) < self._max_num_seqs:
            request = self.waiting[0]
            if request.is_reading:
                skipped.append(self.waiting.popleft())
                continue
            hit: list[int] = []
            if request.is_read:
                num_held = request.num_computed_tokens
            else:
                hit = self.blocks.match(request)
                if self._begins_read(request, hit, now_s):
                    if not request.is_reading:
                        break  # no room for it
                    skipped.append(self.waiting.popleft())
                    continue
                num_held = len(hit) * self.blocks.block_size
            num_tokens = min(request.num_tokens - num_held, budget)
            if not self.blocks.allocate(request, num_held + num_tokens, hit, whole=True):
                break
            self.waiting.popleft()
            self._join(request, num_held)
            admitted = request, num_tokens
        self.waiting.extendleft(reversed(skipped))
        return admitted

    def _join(self, request: Request, num_held_tokens: int) -> None:
        self._num_admissions += 1
        request.admission = self._num_admissions
        request.num_computed_tokens = num_held_tokens
        self.running.append(request)
        if not request.num_preemptions:
            request.num_cached_tokens = num_held_tokens
        request.is_read = False

    def _begins_read(self, request: Request, hit: list[int], now_s: float) -> bool:
        """Begin to read what the pool, or another replica, has beyond the cache; False: no more.

        True and `request.is_reading` not set: it has, but there are no blocks for it.
        """
        if self._reads is None:
            return False
        size = self.blocks.block_size
        num_tokens = request.num_sent_tokens
        if self._pool is not None:
            num_blocks = self._pool.leading(request.keys[: (request.num_tokens - 1) // size])
            num_tokens = max(num_tokens, num_blocks * size)
        if num_tokens <= len(hit) * size:
            return False
        if self.blocks.allocate(request, num_tokens, hit, whole=True, caches=False):
            num_fetched = num_tokens - len(hit) * size
            if not request.num_preemptions:
                request.num_pooled_tokens = num_fetched
            request.num_computed_tokens = num_tokens
            request.is_reading = True
            self._reads.begin(self.number, request, num_fetched, now_s)
        return True

    def _preempt(self, request: Request) -> None:
        """Take all from the last of the batch; it comes first when there is room again."""
        assert self.running[-1] is request
        self.running.pop()
        if request.second_step:
            self._num_decodes -= 1
            computed = request.origin + self._step + 1
            self._num_context_tokens -= computed
            request.num_tokens = computed + 1
            request.last_token_s = self._start_s
        request.admission = request.second_step = 0
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.num_sent_tokens = 0  # they were read, and are kept no more
        self.stats.num_preemptions += 1
        self.blocks.free(request)
        self.waiting.appendleft(request)

    def _make_room(self) -> bool:
        """Take the blocks from the last request that was read and does not fit any more.

        Only where nothing runs: then no other request will ever free any.
        """
        for request in reversed(self.waiting):
            if request.is_read:
                request.is_read = False
                request.num_computed_tokens = request.num_sent_tokens = 0
                self.blocks.free(request)
                return True
        return False

    # -- time --------------------------------------------------------------------------------

    def _drop_old_spans(self) -> None:
        """Forget spans that no unfinished request has tokens in."""
        unfinished = (*self.running, *self.waiting)
        steps = [r.first_step for r in unfinished if r.first_token_s is not None]
        num_old = bisect_right(self._span_ends, min(steps, default=self._step))
        del self._span_ends[:num_old], self._span_step_s[:num_old]
        self._max_spans = max(_MIN_SPANS, 2 * len(self._span_ends))

    def _end_of(self, num_steps: int) -> float:
        """Return when the leap's step `num_steps` ends."""
        n = num_steps
        return self._start_s + 1e-3 * (n * self._first_ms + 0.5 * n * (n - 1) * self._more_ms)

    def _cut(self, now_s: float) -> None:
        """Cut the leap short after the step that is under way at `now_s`."""
        if self.end_s is None or self._num_steps == 1:
            return
        num_steps = self._step_at(now_s)
        if num_steps < self._num_steps:
            self._num_steps = num_steps
            self.end_s = self._end_of(num_steps)

    def _step_at(self, now_s: float) -> int:
        """Return which step of the leap is under way, or ends, at `now_s`; the first is 1."""
        passed_ms = 1e3 * (now_s - self._start_s)
        # first * n + more * n * (n - 1) / 2 = passed
        half = 0.5 * self._more_ms
        linear = self._first_ms - half
        root = sqrt(linear * linear + 4.0 * half * passed_ms) + linear
        num_steps = max(1, ceil(2.0 * passed_ms / root)) if root > 0.0 else 1
        while num_steps > 1 and self._end_of(num_steps - 1) >= now_s:
            num_steps -= 1
        while num_steps < self._num_steps and self._end_of(num_steps) < now_s:
            num_steps += 1
        return num_steps
