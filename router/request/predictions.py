"""The audit of predictions: cached tokens as predicted, against those that the engine reports."""

from __future__ import annotations

from typing import Literal

from router.index.cache_view import CacheView
from router.metrics import Metrics
from router.metrics.instruments import CandidateTable
from router.request.audit import TokenAudit
from router.request.fetch import Fetches
from router.request.observer import Facts, Observer
from router.request.plan import Placement
from router.request.results import Prompt
from router.request.send import Sent

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
