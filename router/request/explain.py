"""A dry run of a request: everything that its decision would see. It changes nothing."""

from __future__ import annotations

from typing import Any

from msgspec.structs import asdict

from policies.view import ReplicaView
from router.index.cache_view import CacheView
from router.replicas.fleet import Fleet
from router.request.results import Inbound, Plan, Prompt, Split, Tries
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
        await self._story.verify(prompt, Tries())
        plan = self._story.steps.place.plan(prompt, Tries())
        snapshot, decision = plan.snapshot, plan.decision
        explained: dict[str, Any] = {
            "model": prompt.read.model,
            "tenant": prompt.read.inbound.caller.name,
            "num_tokens": prompt.num_tokens,
            "way": prompt.way,
            "policy": plan.policy.name,
            "policy_params": asdict(plan.policy),
            "assignment": prompt.variant.record if prompt.variant is not None else None,
            "decision": decision,
            "request": snapshot.request,
            "num_pool_tokens": plan.view.num_pool_tokens,
            "candidates": [
                {
                    "state": self._caches.state(view.id, prompt.extra),
                    "drops_last_block": view.id in self._caches.index.dropping,
                    "pool": self._pool_of(view),
                    "view": view,
                }
                for view in snapshot.replicas
            ],
        }
        if self._story.steps.queue.takes(prompt, Tries()):
            explained["queue"] = self._queue(prompt, plan)
        if plan.split is not None:
            explained["prefill"] = _split(plan.split, plan.helper)
        if with_tokens and prompt.tokens is not None:
            contract = self._caches.contract(decision.candidate)
            keys = prompt.keys(contract) if contract is not None else []
            explained["contract"] = contract
            explained["token_ids"] = prompt.tokens.ids()
            explained["keys"] = [f"{key:015x}" for key in keys]
        return explained

    def _pool_of(self, view: ReplicaView) -> str | None:
        """Name the pool that was looked up for a candidate. None: none was."""
        name = view.id.partition("#")[0]
        return None if view.num_pool_tokens is None else self._fleet.members.replica(name).pool

    def _queue(self, prompt: Prompt, plan: Plan) -> dict[str, Any]:
        """Return what the queue would do with a request."""
        queue = self._story.steps.queue
        verdict, outlook, tbt_ms = queue.judge(prompt, plan)
        where = (plan.helper or plan).candidate.id
        conversations = self._fleet.conversations
        return {
            "where": where,
            "num_sessions": conversations.at(where).num_sessions,
            "num_session_tokens": conversations.at(where).num_tokens,
            "capacity_tokens": self._fleet.load.room_tokens(where),
            "goes_at_once": verdict.goes,
            "why": verdict.why,
            "class": prompt.service_class,
            "deadline_ms": prompt.deadline_ms,
            "expected_ttft_ms": outlook.ttft_ms,
            "tbt_limit_ms": queue.tbt_limit_ms,
            "expected_tbt_ms": tbt_ms,
            "num_waiting": queue.num_waiting,
        }


def _split(split: Split, helper: Plan | None) -> dict[str, Any]:
    """Return where a prompt would be computed that a decode replica answers."""
    return {
        "where": helper.candidate.id if helper is not None else None,
        "why": split.why,
        "here_ms": split.here_ms,
        "there_ms": split.there_ms,
        "decision": helper.decision if helper is not None else None,
        "candidates": helper.snapshot.replicas if helper is not None else (),
    }
