"""Record: audit an answer, tell observers what became of its request, complete its decision record.

tokens       each answer's count proves local tokens. A sample of prompts is encoded whole, by
             `tokenizers`: that checks the pieces, the memory of prefixes and fastokens. What an
             engine made of ids that it was handed proves nothing
predictions  cached tokens as predicted, against those that the engine reports
settling     `Settling` is the one place that waits for the block events of answers
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from time import monotonic, time
from typing import Final, Literal

import orjson
from msgspec.structs import asdict

from router.api.answers import Usage
from router.api.apis import Request
from router.api.sessions import engine_name
from router.base.supervisor import described
from router.index.cache_view import CacheView
from router.metrics import Metrics
from router.metrics.instruments import CandidateTable
from router.records.record import DecisionRecord, Outcome
from router.request.fetch import Fetches
from router.request.observer import Facts, Observer, Observers
from router.request.results import Inbound, Placement, Plan, Prompt, Read, Sent, Tries
from router.tokens import Prompter, Prompters
from router.tokens.hand_over import HandOver
from router.tokens.trust import FLAGS

Verdict = Literal["exact", "over", "under", "evicted", "partial"]


class PredictionAudit(Observer):
    """Compares predictions with usage, and tells those who made them how good they were."""

    def __init__(
        self,
        *,
        caches: CacheView,
        tokens: TokenAudit,
        fetches: Fetches | None,
        metrics: Metrics,
    ) -> None:
        self._caches = caches
        self._tokens = tokens
        self._fetches = fetches
        self._instruments = CandidateTable(metrics)

    def ended(self, facts: Facts) -> None:
        prompt, placement, usage = facts.prompt, facts.placement, facts.usage
        if usage is None or placement is None or prompt.read.num_prompts > 1:
            return  # usage sums the prompts; only the first was predicted
        self._tokens.audit(prompt, placement, facts.sent or Sent(), usage.prompt_tokens)
        reported = facts.num_reported_cached_tokens
        if reported is None or prompt.tokens is None or not _is_here(facts, placement):
            return
        name = placement.lease.candidate
        metrics = self._instruments[name]
        predicted = facts.num_predicted_cached_tokens
        verdict = self._verdict(prompt, placement, predicted, reported)
        metrics.audit[verdict].inc()
        metrics.reported_tokens.inc(reported)
        if verdict == "partial":
            return
        error = predicted - reported
        metrics.audit_error.observe(abs(error))
        could_fetch = self._fetches is not None and self._fetches.audit(placement, reported)
        if verdict != "evicted" and (not could_fetch or error == 0):
            self._record(prompt, placement, predicted, reported)

    def _verdict(
        self, prompt: Prompt, placement: Placement, predicted: int, reported: int
    ) -> Verdict:
        """Judge one prediction; "partial" says nothing about what is known of the cache."""
        name = placement.lease.candidate
        if placement.plan.is_guess:
            return "partial"
        if prompt.has_media and reported > predicted:
            contract = self._caches.contract(name)
            size = contract.block_size if contract is not None else 1
            if predicted > prompt.num_head_tokens - size:
                return "partial"  # an item is unknown, or the engine has another name for it
        if self._caches.is_unknown(name, prompt.extra):
            return "partial"
        if predicted <= reported:
            return "exact" if predicted == reported else "under"
        claim = placement.claim
        if claim is not None and self._caches.audit.was_overtaken(claim, reported, predicted):
            return "evicted"  # between decision and schedule: no fault of what we know
        return "over"

    def _record(self, prompt: Prompt, placement: Placement, predicted: int, reported: int) -> None:
        name = placement.lease.candidate
        self._caches.audit.record(
            name,
            predicted,
            reported,
            placement.claim,
            num_cpu_tokens=placement.predicted.num_cpu_only_tokens,
        )


def _is_here(facts: Facts, placement: Placement) -> bool:
    """Return whether the engine that answered looked for the prompt in the cache predicted."""
    helped = facts.tries.helped
    if helped is not None and helped.is_peer_to_peer:
        return False  # all of it came from elsewhere
    return facts.prompt.is_placed_at(placement.candidate)


logger = logging.getLogger(__name__)


class TokenAudit:
    """Compares our tokens with the engines', and reports differences to `trust` and `hand_over`.

    Args:
        hand_over: Gets the evidence for and against handing ids over.
        prove_ratio: Share of prompts that are encoded whole.
        encoders: Where that is done.
    """

    def __init__(
        self,
        prompters: Prompters,
        *,
        hand_over: HandOver,
        prove_ratio: float,
        encoders: Executor,
        metrics: Metrics,
    ) -> None:
        self._prompters = prompters
        self._hand_over = hand_over
        self._prove_ratio = prove_ratio
        self._encoders = encoders
        self._metrics = metrics
        self._num_requests = 0
        self._proof_runs = False
        self._next_proof_s = 0.0

    def audit(
        self, prompt: Prompt, placement: Placement, sent: Sent, num_engine_tokens: int
    ) -> None:
        """Compare our count of a prompt with that of the replica it was sent to."""
        prompter = self._prompters.get(prompt.read.model) if prompt.read.model is not None else None
        if prompter is not None and prompt.way == "media":
            self._audit_media(prompt, prompter, num_engine_tokens)
            return
        if prompter is None or not (prompt.is_refused_here or prompt.way == "local"):
            return
        encoder = prompter.encoder
        if encoder.failure is not None:
            self._note_fallback(prompt, "failed", encoder.failure)
            encoder.failure = None
        replica = placement.replica
        if sent.has_ids:  # the engine counted our ids
            if num_engine_tokens != prompt.num_tokens:
                self._metrics.token_mismatches.labels(prompt.read.model or "", "handed_over").inc()
                self._hand_over.suspend(prompt.read.model or "", "count", monotonic())
            else:
                self._sample(prompt, prompter)
            return
        disagreed = prompter.trust.disagrees(replica)
        is_match = prompter.trust.observe_usage(
            replica,
            0 if prompt.is_refused_here else prompt.num_tokens,
            num_engine_tokens,
            has_others=placement.had_others,
            now_s=asyncio.get_running_loop().time(),
        )
        if prompt.is_refused_here:  # but not by the engine: our template is not the engine's
            self._mismatch(prompt, "template", prompter, replica, is_new=not disagreed)
            return
        chat = prompt.read.chat
        if is_match and chat is not None and prompter.trust.reason is None:
            prompter.trust.proven.add((prompt.read.inbound.api.name, chat.has_tool_choice))
        if not is_match:
            self._mismatch(prompt, "usage", prompter, replica, is_new=not disagreed)
            if prompter.encoder.is_fast and self._may_prove():
                self._prove(prompt, prompter)  # it may be fastokens' fault
            return
        if sent.kind is not None:
            self._hand_over.observe_match(prompt.read.model or "", sent.kind)
        self._sample(prompt, prompter)

    def _audit_media(self, prompt: Prompt, prompter: Prompter, num_engine_tokens: int) -> None:
        """Compare the count of a prompt with media; a difference ends these alone, for a while.

        Not where a client named items: it may give two the same name, and the engine has one.
        """
        is_same = num_engine_tokens == prompt.num_tokens
        if not prompt.has_named_media:
            prompter.media.observe_count(is_same, monotonic())
        if not is_same:
            self._metrics.token_mismatches.labels(prompt.read.model or "", "media").inc()
        if not is_same and not prompt.has_named_media:
            logger.error(
                "prompts with media differ from the engine's; tokens after an item are not matched",
                extra={"model": prompt.read.model, "request": prompt.read.request_id},
            )

    def _sample(self, prompt: Prompt, prompter: Prompter) -> None:
        """Prove one of many prompts."""
        self._num_requests += 1
        ratio = self._prove_ratio
        is_sampled = ratio > 0 and (self._num_requests - 1) % max(1, round(1 / ratio)) == 0
        if is_sampled and self._may_prove():  # every n-th, the first among them
            self._prove(prompt, prompter)

    def _may_prove(self) -> bool:
        """Return whether no proof runs, and those before have not had their share of the time."""
        now_s = asyncio.get_running_loop().time()
        return self._prove_ratio > 0 and not self._proof_runs and now_s >= self._next_proof_s

    def _prove(self, prompt: Prompt, prompter: Prompter) -> None:
        """Encode the prompt whole, off the loop; one at a time, and no larger a share of the time.

        One of a hundred long prompts encoded whole is a fifth of the CPU of all of them: after a
        proof that took t there is none for t / ratio.
        """
        assert prompt.tokens is not None
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        self._proof_runs = True
        read = partial(_read_again, prompt.read.inbound)
        tokens, is_chat = prompt.tokens, prompt.read.chat is not None
        proves = prompter.reference.proves
        proof = loop.run_in_executor(self._encoders, lambda: proves(read(), tokens))

        def note(done: asyncio.Future[bool]) -> None:
            self._proof_runs = False
            now_s = loop.time()
            self._next_proof_s = now_s + (now_s - started_s) * (1 / self._prove_ratio - 1)
            if done.cancelled() or done.exception() is not None:
                return  # suspect meanwhile, or refused: no proof of anything
            verdict = prompter.observe_proof(
                tokens, is_chat=is_chat, is_same=done.result(), now_s=now_s
            )
            if verdict == "fast":
                self._note_fallback(prompt, "sample", "other ids for a prompt")
                self._hand_over.suspend(prompt.read.model or "", "tokens", monotonic())
            elif verdict == "pieces":
                self._mismatch(prompt, "full_encode", prompter)

        proof.add_done_callback(note)

    def _note_fallback(self, prompt: Prompt, reason: str, detail: str) -> None:
        self._metrics.encoder_fallbacks.labels(prompt.read.model or "", reason).inc()
        logger.error(
            "fastokens is replaced by tokenizers",
            extra={"model": prompt.read.model, "reason": detail},
        )

    def _mismatch(
        self,
        prompt: Prompt,
        against: str,
        prompter: Prompter,
        replica: str | None = None,
        *,
        is_new: bool = True,
    ) -> None:
        """Count it; log once what is suspect from now on."""
        self._metrics.token_mismatches.labels(prompt.read.model or "", against).inc()
        self._hand_over.suspend(prompt.read.model or "", "tokens", monotonic())
        said = {"model": prompt.read.model, "request": prompt.read.request_id, "replica": replica}
        reason = prompter.trust.reason
        if reason is not None:
            logger.error(
                "tokens differ from the engine's; the engine tokenizes for a while",
                extra={**said, "reason": reason, "hint": FLAGS},
            )
        elif is_new:
            logger.error("replica counts other tokens than the rest; it is ignored", extra=said)


def _read_again(inbound: Inbound) -> Request:
    """Parse a body again: its parsed content was dropped."""
    assert inbound.api.parse is not None
    return inbound.api.parse(orjson.loads(inbound.body or b""))


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
