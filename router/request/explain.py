"""A dry run of a request: everything that its decision would see. It changes nothing."""

from __future__ import annotations

from typing import Any

from policies.naming import params_of
from router.index.cache_view import CacheView
from router.replicas.fleet import Fleet
from router.request.job import Inbound
from router.request.pipeline import Pipeline


class Explainer:
    """Decides as the pipeline does, and admits nothing."""

    def __init__(self, pipeline: Pipeline, caches: CacheView, fleet: Fleet) -> None:
        self._pipeline = pipeline
        self._caches = caches
        self._fleet = fleet

    async def explain(self, inbound: Inbound, *, with_tokens: bool) -> dict[str, Any]:
        """Return the decision on a request, with the costs of every candidate.

        Raises:
            RouterError: as `Pipeline.route` would.
        """
        job = await self._pipeline.prepare(inbound, "explain")
        choice = await self._pipeline.choose(job)
        snapshot, decision = choice.snapshot, choice.decision
        explained: dict[str, Any] = {
            "model": job.model,
            "tenant": job.tenant.name if job.tenant is not None else None,
            "num_tokens": job.num_tokens,
            "way": job.way,
            "policy": choice.policy.name,
            "policy_params": params_of(choice.policy),
            "assignment": choice.assignment,
            "decision": decision,
            "request": snapshot.request,
            "num_pool_tokens": choice.view.num_pool_tokens,
            "candidates": [
                {
                    "state": self._caches.state(view.id),
                    "drops_last_block": self._caches.index.drops_last(view.id),
                    "pool": pool.pool if (pool := choice.pools.get(view.id)) else None,
                    "view": view,
                }
                for view in snapshot.replicas
            ],
        }
        room = self._pipeline.steps.room
        if room.takes(job):
            verdict, outlook, tbt_ms = room.judge(job, choice)
            where = choice.prompt.candidate.id
            conversations = self._fleet.conversations
            explained["queue"] = {
                "where": where,
                "num_sessions": conversations.at(where).num_sessions,
                "num_session_tokens": round(conversations.num_tokens_at(where)),
                "capacity_tokens": self._fleet.capacity_tokens(where),
                "goes_at_once": verdict.goes,
                "why": verdict.why,
                "class": job.service_class,
                "deadline_ms": job.deadline_ms,
                "expected_ttft_ms": outlook.ttft_ms,
                "tbt_limit_ms": room.tbt_limit_ms,
                "expected_tbt_ms": tbt_ms,
                "num_waiting": room.num_waiting,
            }
        if choice.plan is not None:
            elsewhere = choice.plan.choice
            explained["prefill"] = {
                "where": elsewhere.candidate.id if elsewhere is not None else None,
                "why": choice.plan.why,
                "here_ms": choice.plan.here_ms,
                "there_ms": choice.plan.there_ms,
                "decision": elsewhere.decision if elsewhere is not None else None,
                "candidates": elsewhere.snapshot.replicas if elsewhere is not None else (),
            }
        if with_tokens and job.tokens is not None:
            contract = self._caches.contract(decision.candidate)
            keys = job.keys(contract) if contract is not None else []
            explained["contract"] = contract
            explained["token_ids"] = job.tokens.ids()
            explained["keys"] = [f"{key:015x}" for key in keys]
        return explained
