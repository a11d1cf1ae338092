"""Continuous batching as vLLM's scheduler does it: which tokens run in the next step.

What must live here: the running batch, the waiting queue, the token budget, preemption, and what
a finished step changes. What must not: clocks, sleeping, sockets. Source of the rules:
vllm/v1/core/sched/scheduler.py, 0.32.0, first come first served, chunked prefill:

1. Running requests first, in order of admission, each as many tokens as it lacks and the budget
   gives. Where blocks are lacking, the last admitted request is preempted: it loses its blocks
   and goes to the front of the waiting queue.
2. Then, if none was preempted, waiting requests, as long as budget, seats and blocks last. One is
   admitted only if its whole prompt fits; what the cache holds of it is not computed again.
3. A request that has caught up with its tokens gets its next one when the step ends.
"""

from __future__ import annotations

from collections import deque

from msgspec import Struct

from loadtest.emulator.block_manager import BlockManager, CachedSequence
from loadtest.emulator.bounds import BETWEEN_TOKENS_S
from loadtest.emulator.time_model import StepWork
from router.contracts import ExtraKeys, HashContract
from router.metrics.counting import Distribution


class Request:
    """One generation: its sequence, the tokens it is going to say, how far it is.

    `reply_ids` is what the model says, known beforehand; `num_output_tokens` counts how many of
    them are out. `num_cached_tokens` and `num_created_tokens` are set at the first admission.
    """

    __slots__ = (
        "arrival_s",
        "extra",
        "finished",
        "first_token_s",
        "last_token_s",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_created_tokens",
        "num_output_tokens",
        "num_pooled_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "reply_ids",
        "sequence",
    )

    def __init__(
        self,
        sequence: CachedSequence,
        reply_ids: list[int],
        *,
        extra: ExtraKeys,
        arrival_s: float,
        num_pooled_tokens: int = 0,
    ) -> None:
        assert sequence.token_ids
        assert reply_ids
        self.sequence = sequence
        self.reply_ids = reply_ids
        self.extra = extra
        self.arrival_s = arrival_s
        self.num_prompt_tokens = len(sequence.token_ids)
        self.num_computed_tokens = 0
        self.num_output_tokens = 0
        self.num_cached_tokens = 0
        self.num_created_tokens = 0
        self.num_pooled_tokens = num_pooled_tokens  # leading ones that were fetched for it
        self.num_preemptions = 0
        self.first_token_s: float | None = None
        self.last_token_s = 0.0
        self.finished = False


class Step(Struct, gc=False):
    """One forward pass: what it computes and for whom."""

    work: StepWork
    chunks: list[tuple[Request, int]]  # request, number of its tokens


class SchedulerStats:
    """Running totals, as the metrics show them."""

    __slots__ = (
        "between_tokens_s",
        "num_cache_hits",
        "num_cache_queries",
        "num_generation_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_steps",
    )

    def __init__(self) -> None:
        self.between_tokens_s = Distribution(BETWEEN_TOKENS_S)
        self.num_cache_queries = 0  # tokens
        self.num_cache_hits = 0  # tokens
        self.num_preemptions = 0
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self.num_steps = 0


class Scheduler:
    """The batch of one data-parallel rank."""

    __slots__ = (
        "_blocks",
        "_caching",
        "_contract",
        "_max_num_batched_tokens",
        "_max_num_seqs",
        "prefilled",
        "running",
        "stats",
        "waiting",
    )

    def __init__(
        self,
        blocks: BlockManager,
        contract: HashContract,
        *,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        caching: bool = True,
    ) -> None:
        self._blocks = blocks
        self._contract = contract
        self._caching = caching
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_num_seqs = max_num_seqs
        self.running: list[Request] = []
        self.prefilled: list[CachedSequence] = []  # since the owner last looked
        self.waiting: deque[Request] = deque()
        self.stats = SchedulerStats()

    def has_requests(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, request: Request) -> None:
        """Queue a request; its arrival is not before that of any queued earlier."""
        self.waiting.append(request)

    def abort(self, request: Request) -> None:
        """Drop a request wherever it is and free its blocks; nothing happens if it is done."""
        if request.finished:
            return
        request.finished = True
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self._blocks.free(request.sequence)

    def next_arrival_s(self) -> float | None:
        """Return when the first waiting request came; None: none waits."""
        return self.waiting[0].arrival_s if self.waiting else None

    def schedule(self, now_s: float) -> Step | None:
        """Fill the next step from what has arrived by `now_s`; None: nothing can run."""
        step = Step(StepWork(), [])
        budget, preempted = self._schedule_running(step)
        if not preempted:
            self._schedule_waiting(step, budget, now_s)
        return step if step.chunks else None

    def complete(self, step: Step, now_s: float) -> list[Request]:
        """End a step: return the requests that got a token; finished ones leave the batch."""
        answered: list[Request] = []
        any_finished = False
        for request, num_tokens in step.chunks:
            if request.finished or not request.sequence.blocks:
                continue  # aborted or preempted while the step ran
            request.num_computed_tokens += num_tokens
            sequence = request.sequence
            if request.num_computed_tokens < len(sequence.token_ids):
                continue
            if request.first_token_s is None:
                self._note_first_token(request, now_s)
            else:
                self.stats.between_tokens_s.observe(now_s - request.last_token_s)
            request.last_token_s = now_s
            sequence.token_ids.append(request.reply_ids[request.num_output_tokens])
            request.num_output_tokens += 1
            answered.append(request)
            if request.num_output_tokens == len(request.reply_ids):
                request.finished = any_finished = True
                self._blocks.free(sequence)
            elif self._caching:
                num_blocks = self._contract.num_blocks(len(sequence.token_ids))
                if num_blocks > len(sequence.digests):
                    self._hash_last_block(request)
        if any_finished:
            self.running = [request for request in self.running if not request.finished]
        self.stats.num_steps += 1
        self.stats.num_generation_tokens += len(answered)
        return answered

    def reset_prefix_cache(self, *, preempt: bool = False) -> bool:
        """Forget the cached blocks; with requests running only if they may be preempted."""
        if preempt:
            while self.running:
                self._preempt(self.running.pop())
        return self._blocks.reset()

    def _schedule_running(self, step: Step) -> tuple[int, bool]:
        """Schedule tokens of running requests; return the budget left and whether one lost."""
        budget = self._max_num_batched_tokens
        size = self._contract.block_size
        preempted = False
        index = 0
        running = self.running
        work = step.work
        while index < len(running) and budget > 0:
            request = running[index]
            computed = request.num_computed_tokens
            num_tokens = min(len(request.sequence.token_ids) - computed, budget)
            is_decode = num_tokens == 1 and computed >= request.num_prompt_tokens
            # A decode in the middle of a block needs no block and completes none.
            in_block = 0 < computed % size < size - 1 and not self._contract.lookahead
            if not (is_decode and in_block):
                fits = self._blocks.allocate(request.sequence, computed + num_tokens)
                while not fits:
                    victim = running.pop()
                    self._preempt(victim)
                    preempted = True
                    if victim is request:
                        return budget, True
                    fits = self._blocks.allocate(request.sequence, computed + num_tokens)
            step.chunks.append((request, num_tokens))
            budget -= num_tokens
            if is_decode:
                work.num_decodes += 1
                work.num_decode_context_tokens += computed
            else:
                work.num_prefill_tokens += num_tokens
                work.num_prefill_pairs += num_tokens * (computed + num_tokens / 2)
            index += 1
        return budget, preempted

    def _schedule_waiting(self, step: Step, budget: int, now_s: float) -> None:
        blocks = self._blocks
        size = self._contract.block_size
        while self.waiting and budget > 0 and len(self.running) < self._max_num_seqs:
            request = self.waiting[0]
            if request.arrival_s > now_s:
                return
            sequence = request.sequence
            hit = blocks.match(sequence) if self._caching else []
            num_hit_tokens = max(len(hit) * size, request.num_pooled_tokens)
            num_tokens = min(len(sequence.token_ids) - num_hit_tokens, budget)
            if not blocks.allocate(sequence, num_hit_tokens + num_tokens, hit, whole=True):
                return
            self.waiting.popleft()
            self.running.append(request)
            request.num_computed_tokens = num_hit_tokens
            if request.num_preemptions == 0:
                request.num_cached_tokens = num_hit_tokens
                self.stats.num_cache_queries += len(sequence.token_ids)
                self.stats.num_cache_hits += num_hit_tokens
            step.chunks.append((request, num_tokens))
            budget -= num_tokens
            step.work.num_prefill_tokens += num_tokens
            step.work.num_prefill_pairs += num_tokens * (num_hit_tokens + num_tokens / 2)

    def _preempt(self, request: Request) -> None:
        self._blocks.free(request.sequence)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.stats.num_preemptions += 1
        self.waiting.appendleft(request)

    def _note_first_token(self, request: Request, now_s: float) -> None:
        request.first_token_s = now_s
        self.prefilled.append(request.sequence)
        in_cache = self._blocks.num_cached_tokens(request.sequence)
        request.num_created_tokens = max(in_cache - request.num_cached_tokens, 0)
        self.stats.num_prompt_tokens += request.num_prompt_tokens

    def _hash_last_block(self, request: Request) -> None:
        sequence = request.sequence
        size = self._contract.block_size
        start = len(sequence.digests) * size
        parent = sequence.digests[-1] if sequence.digests else None
        _, digest = self._contract.extend(parent, sequence.token_ids[start:], request.extra)
        assert digest is not None
        sequence.digests.append(digest)
