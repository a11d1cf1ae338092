"""A dry run of a request: everything that its decision would see. It changes nothing."""

from __future__ import annotations

from typing import Any

from policies.naming import params_of
from router.index.cache_view import CacheView
from router.replicas.fleet import Fleet
from router.request.results import Inbound, Tries
from router.request.story import Story


class Explainer:
    """Plans as the story does, and commits nothing."""

    def __init__(self, story: Story, caches: CacheView, fleet: Fleet) -> None:
        self._story = story
        self._caches = caches
        self._fleet = fleet

    async def explain(self, inbound: Inbound, *, with_tokens: bool) -> dict[str, Any]:
        """Return the decision on a request, with the costs of every candidate.

        Raises:
            RouterError: as `Story.serve` would.
        """
        prompt = await self._story.prepare(inbound, "explain")
        plan = await self._story.plan(prompt, Tries())
        snapshot, decision = plan.snapshot, plan.decision
        explained: dict[str, Any] = {
            "model": prompt.model,
            "tenant": prompt.tenant.name if prompt.tenant is not None else None,
            "num_tokens": prompt.num_tokens,
            "way": prompt.way,
            "policy": plan.policy.name,
            "policy_params": params_of(plan.policy),
            "assignment": plan.assignment,
            "decision": decision,
            "request": snapshot.request,
            "num_pool_tokens": plan.view.num_pool_tokens,
            "candidates": [
                {
                    "state": self._caches.state(view.id),
                    "drops_last_block": self._caches.index.drops_last(view.id),
                    "pool": pool.pool if (pool := plan.pools.get(view.id)) else None,
                    "view": view,
                }
                for view in snapshot.replicas
            ],
        }
        queue = self._story.steps.queue
        if queue.takes(prompt, Tries()):
            verdict, outlook, tbt_ms = queue.judge(prompt, plan)
            where = (plan.prefill or plan).candidate.id
            working_sets = self._fleet.working_sets
            explained["queue"] = {
                "where": where,
                "num_sessions": working_sets.at(where).num_sessions,
                "num_session_tokens": round(working_sets.num_tokens_at(where)),
                "capacity_tokens": self._fleet.capacity_tokens(where),
                "goes_at_once": verdict.goes,
                "why": verdict.why,
                "class": prompt.service_class,
                "deadline_ms": prompt.deadline_ms,
                "expected_ttft_ms": outlook.ttft_ms,
                "tbt_limit_ms": queue.tbt_limit_ms,
                "expected_tbt_ms": tbt_ms,
                "num_waiting": queue.num_waiting,
            }
        if plan.halves is not None:
            elsewhere = plan.prefill
            explained["prefill"] = {
                "where": elsewhere.candidate.id if elsewhere is not None else None,
                "why": plan.halves.why,
                "here_ms": plan.halves.here_ms,
                "there_ms": plan.halves.there_ms,
                "decision": elsewhere.decision if elsewhere is not None else None,
                "candidates": elsewhere.snapshot.replicas if elsewhere is not None else (),
            }
        if with_tokens and prompt.tokens is not None:
            contract = self._caches.contract(decision.candidate)
            keys = prompt.keys(contract) if contract is not None else []
            explained["contract"] = contract
            explained["token_ids"] = prompt.tokens.ids()
            explained["keys"] = [f"{key:015x}" for key in keys]
        return explained
