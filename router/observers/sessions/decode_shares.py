"""The share of each answer in the time that its replica decodes.

An engine decodes all its answers in one step. So each second of decoding is divided equally among
them. The time that the cost model gives to the prompts there is theirs and is not divided. So the
requests of a replica together get about the time that it worked.

Answers of other routers take their part if routers share their load. Those of direct clients do
not. An answer that is not streamed is decoded once the prompts there have had their time.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from msgspec import Struct

from policies.view import CandidateId
from router.records.outcome import Outcome
from router.request.observer import Observer
from router.request.plan import Placement
from router.request.results import Prompt


class _Clock(Struct):
    """The decoding of one candidate while a request of ours is there.

    at_s: Until when it is known, monotonic.
    decode_s: What an answer that was decoded all the time would have got.
    prefill_s: Compute of prompts that is still to be done.
    num_ours, num_others: Answers that share the time: of this router; of others, when one of ours
        began.
    num_here, num_computing: Requests of ours; of these, without a first token.
    """

    at_s: float
    decode_s: float = 0.0
    prefill_s: float = 0.0
    num_ours: int = 0
    num_others: int = 0
    num_here: int = 0
    num_computing: int = 0


class DecodeShare(Struct):
    """A request at a candidate.

    since_s: The clock's `decode_s` when its answer began. None: its prompt is computed.
    is_computed: Its first token has come.
    decode_s: Its share, once it has ended.
    """

    since_s: float | None
    is_computed: bool = False
    decode_s: float = 0.0


class DecodeShares(Observer):
    """Measures each request's share: a `DecodeShare` in `placement.slots`.

    Args:
        num_decoding: Returns how many requests of all routers have their first token at a
            candidate, and have not ended.
    """

    def __init__(
        self,
        num_decoding: Callable[[CandidateId], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._num_known = num_decoding
        self._now_s = clock
        self._clocks: dict[CandidateId, _Clock] = {}

    def __len__(self) -> int:
        """Count the candidates that have requests of ours."""
        return len(self._clocks)

    def leased(self, prompt: Prompt, placement: Placement) -> None:
        lease, cost, now_s = placement.lease, placement.plan.view.cost, placement.placed_s
        clock = self._clocks.get(lease.candidate)
        if clock is None:
            clock = self._clocks[lease.candidate] = _Clock(at_s=now_s)
        # A prompt that is computed elsewhere first is no answer yet.
        streams = lease.booking.streams or (placement.helper is not None and prompt.read.streams)
        self._advance(clock, now_s, 0 if streams else 1)
        prefill_ms = cost.ms_per_token * lease.booking.num_uncached_tokens
        clock.prefill_s += (prefill_ms + cost.ms_per_mtoken2 * lease.num_mtoken2) / 1000.0
        clock.num_here += 1
        clock.num_computing += 1
        placement.slots[self] = DecodeShare(since_s=None if streams else clock.decode_s)

    def first_token(self, placement: Placement, at_s: float) -> None:
        share, id_ = placement.slots.get(self), placement.lease.candidate
        clock = self._clocks.get(id_)
        if share is None or share.is_computed or clock is None:
            return
        is_new = share.since_s is None
        self._advance(clock, at_s, 1 if is_new else 0, is_computed=True)
        share.is_computed = True
        clock.num_others = max(0, self._num_known(id_) - clock.num_ours)
        if is_new:
            share.since_s = clock.decode_s

    def released(self, placement: Placement, outcome: Outcome) -> None:
        share, id_ = placement.slots.get(self), placement.lease.candidate
        clock = self._clocks.get(id_)
        if share is None or clock is None:
            return
        num_more = 0 if share.since_s is None else -1
        self._advance(clock, self._now_s(), num_more, is_computed=not share.is_computed)
        share.is_computed = True
        if share.since_s is not None:
            share.decode_s = clock.decode_s - share.since_s
        clock.num_here -= 1
        if not clock.num_here:
            del self._clocks[id_]

    def _advance(
        self, clock: _Clock, now_s: float, num_more: int, *, is_computed: bool = False
    ) -> None:
        """Divide the time that has passed: prompts get theirs first, then answers.

        Args:
            clock: Of a candidate.
            now_s: Now, monotonic.
            num_more: Answers of ours that share the time from now on.
            is_computed: A prompt is done. After the last one, nothing is left of their time.
        """
        passed_s = max(0.0, now_s - clock.at_s)
        of_prompts_s = min(clock.prefill_s, passed_s)
        clock.prefill_s -= of_prompts_s
        clock.at_s = max(clock.at_s, now_s)
        num_decoding = clock.num_ours + clock.num_others
        if num_decoding:
            clock.decode_s += (passed_s - of_prompts_s) / num_decoding
        if is_computed:
            clock.num_computing -= 1
            if not clock.num_computing:
                clock.prefill_s = 0.0
        clock.num_ours += num_more
