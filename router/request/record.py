"""Record: tell observers what became of a request, and complete its decision record.

`Settling` is the one place that waits for the block events of answers.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable
from time import monotonic, time
from typing import Final

from msgspec.structs import asdict

from router.api.answers import Usage
from router.api.sessions import engine_name
from router.base.supervisor import described
from router.index.cache_view import CacheView
from router.records.record import DecisionRecord, Outcome
from router.request.observer import Facts, Observers
from router.request.plan import Placement, Plan
from router.request.results import Prompt, Read, Tries
from router.request.send import Sent

logger = logging.getLogger(__name__)

EVENTS_S: Final = 0.5  # events take 0.1 s
MAX_WAITING: Final = 4096

Settle = Callable[[bool], bool]
"""Is asked whether all has come; true: it waits no longer. Its argument: no more is waited for."""


class Settling:
    """What waits for events, each with a deadline of its own."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[float, Settle]] = deque()

    def add(self, settle: Settle, until_s: float) -> None:
        """Ask again until `until_s`, monotonic; at once and for the last time if too many wait."""
        if len(self._waiting) >= MAX_WAITING:
            _settled(settle, True)
        else:
            self._waiting.append((until_s, settle))

    def sweep(self, now_s: float) -> None:
        """Ask all that wait."""
        for _ in range(len(self._waiting)):
            until_s, settle = self._waiting.popleft()
            if not _settled(settle, now_s >= until_s):
                self._waiting.append((until_s, settle))

    def close(self) -> None:
        """Wait no longer."""
        self.sweep(math.inf)


def _settled(settle: Settle, is_last: bool) -> bool:
    """Ask one; what it raises ends neither the round nor a request. It would raise again."""
    try:
        return settle(is_last)
    except Exception as exc:
        logger.error("an answer was not settled", extra={"reason": described(exc)})
        return True


class Recorder:
    """Tells observers what became of requests; never fails one.

    Args:
        settling: Waits for the events of answers.
    """

    def __init__(
        self,
        *,
        caches: CacheView,
        observers: Observers,
        settling: Settling,
    ) -> None:
        self._caches = caches
        self._observers = observers
        self._settling = settling

    def finished(
        self,
        prompt: Prompt,
        tries: Tries,
        placement: Placement,
        *,
        status: int,
        outcome: Outcome,
        sent: Sent | None = None,
        usage: Usage | None = None,
        first_s: float | None = None,
    ) -> None:
        """Record the end of a request that was placed; `first_s` None: no byte of an answer came.

        `sent` is None if it was never answered.
        """
        arrived_s, placed_s, ended_s = (
            prompt.read.inbound.arrived_s,
            placement.placed_s,
            monotonic(),
        )
        is_answered = first_s is not None and status == 200
        ttft_ms = None
        if first_s is not None and prompt.read.streams and is_answered:
            ttft_ms = (first_s - placed_s) * 1000
        self._end(
            Facts(
                prompt=prompt,
                read=prompt.read,
                tries=tries,
                plan=placement.plan,
                placement=placement,
                state=placement.state,
                status=status,
                outcome=outcome,
                sent=sent,
                usage=usage,
                first_s=first_s,
                ttft_ms=ttft_ms,
                router_ms=(placed_s - arrived_s) * 1000 - tries.wait.waited_ms,
                total_ms=(ended_s - arrived_s) * 1000,
                is_answered=is_answered,
                num_predicted_cached_tokens=placement.predicted.num_cached_tokens,
                num_reported_cached_tokens=usage.num_cached_tokens if usage is not None else None,
                placed_s=placed_s,
                ended_s=ended_s,
                at=time(),
            )
        )

    def left(self, prompt: Prompt, tries: Tries, plan: Plan, *, status: int) -> None:
        """Record a request whose client left while it waited; it was never sent."""
        now_s = monotonic()
        total_ms = (now_s - prompt.read.inbound.arrived_s) * 1000
        self._end(
            Facts(
                prompt=prompt,
                read=prompt.read,
                tries=tries,
                plan=plan,
                placement=None,
                state=self._caches.state(plan.candidate.id, prompt.extra),
                status=status,
                outcome=Outcome.CLIENT_GONE,
                router_ms=total_ms - tries.wait.waited_ms,
                total_ms=total_ms,
                num_predicted_cached_tokens=plan.prediction.num_cached_tokens,
                placed_s=now_s,
                ended_s=now_s,
                at=time(),
            )
        )

    def counted(self, read: Read, num_tokens: int) -> None:
        """Record a request that was answered with the number of its prompt's tokens."""
        self._observers.counted(read, num_tokens)

    def _end(self, facts: Facts) -> None:
        self._observers.ended(facts)
        reported = facts.num_reported_cached_tokens
        is_less = reported is not None and reported < facts.num_predicted_cached_tokens
        if facts.is_answered and is_less:  # events that say why may be on the way
            self._settling.add(
                lambda is_last: self._settle(facts, is_last), facts.ended_s + EVENTS_S
            )
        else:
            self._settle(facts, True)

    def _settle(self, facts: Facts, is_last: bool) -> bool:
        """Complete a request once its events have had their time."""
        if not is_last:
            return False
        observers = self._observers
        observers.settled(facts)
        if observers.recorded:
            observers.recorded(record_of(facts))
        return True


def record_of(facts: Facts) -> DecisionRecord:
    """Return the decision record of a request, with what is known of it so far."""
    prompt, tries, plan, usage = facts.prompt, facts.tries, facts.plan, facts.usage
    read, placement, wait = prompt.read, facts.placement, tries.wait
    return DecisionRecord(
        request_id=read.request_id,
        at=facts.at,
        api=read.inbound.api.name,
        model=read.model or "",
        tenant=read.inbound.caller.name,
        session=engine_name(whose) if (whose := read.whose.conversation) is not None else None,
        policy=plan.policy.name,
        policy_params=asdict(plan.policy),
        assignment=prompt.variant.record if prompt.variant is not None else None,
        state=facts.state,
        snapshot=plan.snapshot,
        decision=plan.decision,
        prefill=tries.helped,
        tries=tuple(tries.records),
        outcome=facts.outcome.value,
        status=facts.status,
        num_prompt_tokens=prompt.num_tokens,
        num_predicted_cached_tokens=facts.num_predicted_cached_tokens,
        num_reported_cached_tokens=facts.num_reported_cached_tokens,
        num_completion_tokens=usage.completion_tokens if usage is not None else None,
        router_ms=facts.router_ms,
        service_class=prompt.service_class,
        deadline_ms=prompt.deadline_ms,
        expected_ttft_ms=wait.expected_ttft_ms,
        expected_tbt_ms=wait.expected_tbt_ms,
        waited_ms=wait.waited_ms,
        waited_for=wait.held_by,
        released=wait.released,
        predicted_ttft_ms=placement.predicted_ttft_ms if placement is not None else None,
        ttft_ms=facts.ttft_ms,
        total_ms=facts.total_ms,
        computed=facts.notes.get("computed"),
    )
