"""Continuous batching as vLLM's scheduler does it: which tokens run in the next step.

What must live here: the running batch, the waiting queue, the token budget, preemption, and what
a finished step changes. What must not: clocks, sleeping, sockets. Source of the rules:
vllm/v1/core/sched/scheduler.py, 0.32.0, first come first served, chunked prefill:

1. Running requests first, in order of admission, each as many tokens as it lacks and the budget
   gives. If blocks are lacking, the last admitted request is preempted: it loses its blocks
   and goes to the front of the waiting queue, behind those that hold blocks (rule 4).
2. Then, if none was preempted, waiting requests, as long as budget, seats and blocks last. One is
   admitted only if its whole prompt fits; its cached tokens are not computed again.
3. A request that has caught up with its tokens gets its next one when the step ends.
4. A waiting request with tokens that can be loaded from elsewhere gets blocks for them, and waits
   until they are loaded (WAITING_FOR_REMOTE_KVS). Requests behind it are admitted meanwhile.
5. A CPU tier is offered the blocks of each step; see `loadtest.engine_model.cpu_tier`.

A batch that only decodes does the same in every step until a request ends, or begins or fills a
block. `schedule` joins up to `max_steps` such steps to one `Step`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Literal, Protocol

from msgspec import Struct

from loadtest.engine_model.blocks import Blocks, KvSequence
from loadtest.engine_model.cpu_tier import CpuTier
from loadtest.engine_model.time_model import StepWork


class Request(KvSequence):
    """One generation: its tokens, and how far it is.

    Args:
        keys: Of the full blocks of prompt and reply; fewer are never cached.
        num_prompt_tokens: At least 1.
        num_reply_tokens: Tokens that the model is going to say; at least 1.
        arrival_s: No step that starts earlier has it.
    """

    __slots__ = (
        "arrival_s",
        "finished",
        "first_token_s",
        "gaps",
        "keeps_blocks",
        "last_token_s",
        "load",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_created_tokens",
        "num_given_tokens",
        "num_preemptions",
        "num_reply_tokens",
    )

    def __init__(
        self,
        keys: Sequence[Any],
        num_prompt_tokens: int,
        num_reply_tokens: int,
        *,
        arrival_s: float = 0.0,
    ) -> None:
        assert num_prompt_tokens > 0
        assert num_reply_tokens > 0
        super().__init__(keys, num_prompt_tokens)
        self.num_reply_tokens = num_reply_tokens
        self.arrival_s = arrival_s
        self.num_computed_tokens = 0
        self.num_given_tokens = 0  # leading ones that were loaded before it arrived
        self.num_cached_tokens = 0  # at its first admission, loaded ones among them
        self.num_created_tokens = 0  # in the cache at its first token, and not before
        self.num_preemptions = 0
        self.load: Literal["under way", "done"] | None = None  # from elsewhere
        self.keeps_blocks = False  # when it is finished, until another replica has read them
        self.finished = False
        self.first_token_s: float | None = None
        self.last_token_s = 0.0
        self.gaps: list[tuple[float, int]] = []  # seconds between tokens, and how often

    @property
    def num_output_tokens(self) -> int:
        """Count the tokens of the reply so far."""
        return self.num_tokens - self.num_prompt_tokens


class Step(Struct, gc=False):
    """One forward pass, or several equal ones: what the first of them computes and for whom."""

    work: StepWork
    chunks: list[tuple[Request, int]]  # request, number of its tokens in each pass
    num_steps: int = 1


class Loader(Protocol):
    """Loads KV from a pool, from another replica, or from the CPU tier."""

    def num_tokens(self, request: Request) -> int:
        """Count the leading tokens that can be loaded; not asked if there is a CPU tier."""

    def begin(self, request: Request, num_missing: int) -> None:
        """Begin to load the last `num_missing` of these tokens; `Scheduler.loaded` ends it."""


class SchedulerStats:
    """Running totals."""

    __slots__ = (
        "between_tokens_s",
        "num_between_tokens",
        "num_cache_hits",
        "num_cache_queries",
        "num_computed_tokens",
        "num_finished",
        "num_generation_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_steps",
    )

    def __init__(self) -> None:
        self.num_cache_queries = 0  # tokens
        self.num_cache_hits = 0  # tokens
        self.num_preemptions = 0
        self.num_prompt_tokens = 0
        self.num_computed_tokens = 0  # prompt tokens, those of preempted requests again
        self.num_generation_tokens = 0
        self.num_between_tokens = 0  # gaps between two tokens of a reply
        self.between_tokens_s = 0.0  # their sum
        self.num_finished = 0
        self.num_steps = 0


class Scheduler:
    """The batch of one data-parallel rank.

    Args:
        loader: None: there is nothing to load from.
        tier: Takes the blocks that are computed, and gives them back through the loader.
    """

    def __init__(
        self,
        blocks: Blocks,
        *,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        loader: Loader | None = None,
        tier: CpuTier | None = None,
    ) -> None:
        assert tier is None or loader is not None
        self._blocks = blocks
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_num_seqs = max_num_seqs
        self._loader = loader
        self._tier = tier
        self._ended: list[tuple[Request, int]] = []  # since the last step, with their tokens
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.stats = SchedulerStats()

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
        self._blocks.free(request)
        if self._tier is not None and request.load != "under way":
            self._ended.append((request, 0 if request.load else request.num_computed_tokens))

    def loaded(self, request: Request) -> None:
        """End the load of a request: its blocks can be hit, and it can be admitted."""
        if self._tier is not None:
            self._tier.end_read(request)
            if request.finished:  # its client has left meanwhile
                self._tier.finish(request)
                return
        request.load = "done"
        self._blocks.cache(request, request.num_computed_tokens)
        if request.num_computed_tokens == request.num_tokens:
            request.num_computed_tokens -= 1  # the last one is computed for its answer

    def next_arrival_s(self) -> float | None:
        """Return when the first waiting request came; None: none waits."""
        return self.waiting[0].arrival_s if self.waiting else None

    def schedule(self, now_s: float, max_steps: int = 1) -> Step | None:
        """Fill the next step from the requests that arrived by `now_s`; None: nothing can run."""
        if self._tier is not None and self._tier.is_writing:
            max_steps = 1  # the next step's end is when the blocks are there
        while True:
            step = Step(StepWork(), [], max_steps)
            budget, preempted = self._schedule_running(step)
            if not preempted:
                self._schedule_waiting(step, budget, now_s)
            else:
                step.num_steps = 1
            if step.chunks:
                self._offer(step)
                return step
            if not preempted and not self._take_loaded_blocks() and not self._settle():
                return None

    def complete(self, step: Step, now_s: float) -> list[Request]:
        """End a step: return the requests that got a token; finished ones leave the batch."""
        answered: list[Request] = []
        any_finished = False
        stats, num_steps = self.stats, step.num_steps
        for request, num_tokens in step.chunks:
            if request.finished or not request.blocks:
                continue  # aborted or preempted while the step ran
            request.num_computed_tokens += num_tokens * num_steps
            if request.num_computed_tokens < request.num_tokens:
                continue
            num_more = request.num_computed_tokens + 1 - request.num_tokens
            request.num_tokens += num_more
            if request.first_token_s is None:
                self._begin_reply(request, now_s)
            else:
                gap_s = now_s - request.last_token_s
                request.gaps.append((gap_s / num_more, num_more))
                stats.between_tokens_s += gap_s
                stats.num_between_tokens += num_more
            request.last_token_s = now_s
            stats.num_generation_tokens += num_more
            answered.append(request)
            if request.num_output_tokens == request.num_reply_tokens:
                request.finished = any_finished = True
                stats.num_finished += 1
                if not request.keeps_blocks:
                    self._blocks.free(request)
                if self._tier is not None:
                    self._ended.append((request, request.num_tokens - 1))
        if any_finished:
            self.running = [request for request in self.running if not request.finished]
        if self._tier is not None:
            self._tier.end_step()
        stats.num_steps += num_steps
        stats.num_computed_tokens += step.work.num_prefill_tokens
        return answered

    def reset_prefix_cache(self, *, preempt: bool = False, with_tier: bool = False) -> bool:
        """Clear the cache, and the CPU tier; with requests running only if they may be preempted.

        Source: `reset_prefix_cache` in vllm/v1/core/sched/scheduler.py, 0.32.0.
        """
        if preempt:
            while self.running:
                self._preempt(self.running.pop())
        is_clear = self._blocks.reset()
        if self._tier is not None and with_tier:
            self._tier.reset()
        return is_clear

    def _schedule_running(self, step: Step) -> tuple[int, bool]:
        """Schedule tokens of running requests; return the budget left and whether one lost."""
        budget = self._max_num_batched_tokens
        size, lookahead = self._blocks.block_size, self._blocks.lookahead
        preempted = False
        index = num_decodes = num_context = 0
        running, chunks, num_steps = self.running, step.chunks, step.num_steps
        while index < len(running) and budget > 0:
            request = running[index]
            computed = request.num_computed_tokens
            num_tokens = request.num_tokens - computed
            if num_tokens > budget:
                num_tokens = budget
            is_decode = num_tokens == 1 and computed >= request.num_prompt_tokens
            # A decode in the middle of a block needs no block and completes none.
            in_block = 0 < computed % size < size - 1 and not lookahead
            if not (is_decode and in_block):
                fits = self._blocks.allocate(request, computed + num_tokens)
                while not fits:
                    victim = running.pop()
                    self._preempt(victim)
                    preempted = True
                    if victim is request:
                        break
                    fits = self._blocks.allocate(request, computed + num_tokens)
                if not fits:
                    break
            chunks.append((request, num_tokens))
            budget -= num_tokens
            if is_decode:
                num_decodes += 1
                num_context += computed
                if num_steps > 1:
                    num_steps = min(num_steps, self._num_equal_steps(request))
            else:
                num_steps = 1
                _add_prefill(step, computed, num_tokens)
            index += 1
        step.work.num_decodes = num_decodes
        step.work.num_decode_context_tokens = num_context
        step.num_steps = num_steps
        return budget, preempted

    def _num_equal_steps(self, request: Request) -> int:
        """Count the steps from this one on in which a decode neither ends nor needs a block."""
        if request.num_computed_tokens + 1 < request.num_tokens:
            return 1  # it was preempted, and is still catching up
        size = self._blocks.block_size
        within = request.num_tokens % size  # tokens in the last block after this step
        num_left = request.num_reply_tokens - request.num_output_tokens
        return min(num_left, size - within if within else 1)

    def _schedule_waiting(self, step: Step, budget: int, now_s: float) -> None:
        blocks = self._blocks
        loading: list[Request] = []  # they have blocks, and go before all others
        later: list[Request] = []
        while self.waiting and budget > 0 and len(self.running) < self._max_num_seqs:
            request = self.waiting[0]
            if request.arrival_s > now_s:
                break
            hit: list[int] = []
            if request.load is None:
                hit = blocks.match(request)
                num_tokens = self._num_loadable(request, hit)
                if num_tokens is None:
                    later.append(self.waiting.popleft())
                    continue
                if num_tokens and not self._begin_load(request, hit, num_tokens):
                    break
            if request.load == "under way":
                loading.append(self.waiting.popleft())
                continue
            num_held = request.num_computed_tokens
            if request.load is None:
                num_held = max(len(hit) * blocks.block_size, request.num_given_tokens)
            num_tokens = min(request.num_tokens - num_held, budget)
            if not blocks.allocate(request, num_held + num_tokens, hit, whole=True):
                break
            self.waiting.popleft()
            self._admit(request, num_held)
            step.chunks.append((request, num_tokens))
            step.num_steps = 1
            budget -= num_tokens
            _add_prefill(step, num_held, num_tokens)
        self.waiting.extendleft(reversed([*loading, *later]))

    def _admit(self, request: Request, num_held_tokens: int) -> None:
        self.running.append(request)
        request.load = None
        request.num_computed_tokens = num_held_tokens
        if request.num_preemptions == 0:  # what was loaded counts, even if the last one is computed
            request.num_cached_tokens = max(num_held_tokens, request.num_cached_tokens)
            self.stats.num_cache_queries += request.num_tokens
            self.stats.num_cache_hits += num_held_tokens

    def _num_loadable(self, request: Request, hit: Sequence[int]) -> int | None:
        """Count the leading tokens to have after a load; 0: there is none. None: ask again."""
        if self._loader is None:
            return 0
        size, num_held = self._blocks.block_size, len(hit)
        if self._tier is None:
            num_tokens = self._loader.num_tokens(request)
        else:
            num_blocks = self._tier.num_leading(request, num_held)
            if num_blocks is None:
                return None
            num_tokens = num_blocks * size
        return num_tokens if num_tokens > num_held * size else 0

    def _begin_load(self, request: Request, hit: Sequence[int], num_tokens: int) -> bool:
        """Begin to load the tokens that the cache lacks; False: there are no blocks for them."""
        assert self._loader is not None
        size = self._blocks.block_size
        if not self._blocks.allocate(request, num_tokens, hit, whole=True, caches=False):
            return False
        request.num_computed_tokens = num_tokens
        request.load = "under way"
        if not request.num_preemptions:
            request.num_cached_tokens = num_tokens
        if self._tier is not None:
            self._tier.begin_read(request, len(hit), num_tokens // size)
        self._loader.begin(request, num_tokens - len(hit) * size)
        return True

    def _offer(self, step: Step) -> None:
        """Offer the tier the blocks of a step, and those of requests that have ended."""
        if self._tier is not None:
            for request, num_tokens in step.chunks:
                self._tier.offer(request, request.num_computed_tokens + num_tokens)
            self._end_uses(self._tier)

    def _settle(self) -> bool:
        """Write to the tier what is left: nothing runs. False: nothing was.

        vLLM makes empty steps for it.
        """
        if self._tier is None:
            return False
        self._end_uses(self._tier)
        if not self._tier.is_writing:
            return False
        self._tier.end_step()
        self._tier.end_step()
        return True

    def _end_uses(self, tier: CpuTier) -> None:
        for request, num_tokens in self._ended:
            tier.offer(request, num_tokens)
        for request, _ in self._ended:
            tier.finish(request)
        self._ended = []

    def _preempt(self, request: Request) -> None:
        self._blocks.free(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.stats.num_preemptions += 1
        self.waiting.insert(sum(each.load is not None for each in self.waiting), request)

    def _take_loaded_blocks(self) -> bool:
        """Free the blocks of the last request that was loaded and cannot be admitted.

        Called when nothing runs: no other request will ever free a block.
        """
        for request in reversed(self.waiting):
            if request.load == "done":
                request.load = None
                request.num_computed_tokens = 0
                if not request.num_preemptions:
                    request.num_cached_tokens = 0
                self._blocks.free(request)
                return True
        return False

    def _begin_reply(self, request: Request, now_s: float) -> None:
        request.first_token_s = now_s
        in_cache = request.num_cached_blocks * self._blocks.block_size
        request.num_created_tokens = max(in_cache - request.num_cached_tokens, 0)
        self.stats.num_prompt_tokens += request.num_prompt_tokens


def _add_prefill(step: Step, num_context_tokens: int, num_tokens: int) -> None:
    step.work.num_prefill_tokens += num_tokens
    step.work.num_prefill_pairs += num_tokens * (num_context_tokens + num_tokens / 2)
