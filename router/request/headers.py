"""The headers of a request as its engine gets them, and of an answer as its client does."""

from __future__ import annotations

from time import monotonic
from typing import Final

from multidict import CIMultiDict

from router.api.clients import FORWARDED
from router.api.sessions import engine_name
from router.api.withheld import PREFIX, Withheld
from router.replicas.engine_key import EngineKey
from router.request import tenancy
from router.request.job import Job, Placement
from router.upstream import Answer, end_to_end

_NOT_FORWARDED: Final = frozenset({"host", "content-length", "expect"}) | FORWARDED
_NOT_RETURNED: Final = frozenset({"content-length"})  # of streams: one that breaks gets an event


class RequestHeaders:
    """Writes the headers for engines.

    Args:
        key: What replicas are sent in place of a tenant's key.
        withheld: What clients may not set.
    """

    def __init__(self, key: EngineKey, withheld: Withheld) -> None:
        self._key = key
        self._drop = _NOT_FORWARDED | withheld.headers

    def of(self, job: Job, placement: Placement) -> CIMultiDict[str]:
        """Pass the client's headers on, with what an engine reads from a router added.

        A tenant's key is for us: the engine gets its own, if there is one.
        """
        headers = end_to_end(job.inbound.headers.items(), drop=self._drop, drop_prefix=PREFIX)
        if job.tenant is not None:
            for name in ("Authorization", "x-api-key"):
                headers.popall(name, None)
            headers.update(self._key.headers(placement.candidate.replica.url))
        if not job.forwarded[1]:
            headers.popall("Content-Encoding", None)
        headers["Accept-Encoding"] = "identity"  # what is compressed cannot be read on its way
        headers["X-Request-Id"] = job.engine_id or job.request_id
        headers.popall("X-Session-ID", None)
        if job.session_hash is not None:  # engines name it in their events
            headers["X-Session-ID"] = engine_name(job.session_hash)
        if placement.candidate.rank is not None:
            headers["X-data-parallel-rank"] = str(placement.candidate.rank)
        if job.inbound.client is not None:
            job.inbound.client.write(headers)
        return headers


def answer_headers(job: Job, placement: Placement, answer: Answer) -> CIMultiDict[str]:
    """Pass an engine's headers on, with what was decided and what is left of a tenant's limits."""
    drop = _NOT_RETURNED if answer.is_event_stream else frozenset[str]()
    headers = end_to_end(answer.headers.items(), drop=drop, drop_prefix=PREFIX)
    headers["x-warmroute-request-id"] = job.request_id
    # Of a refused request they would show what others had sent, at no cost to the client.
    if answer.status < 400 and job.inbound.client and job.inbound.client.sees_details:
        _explain_in(headers, job, placement)
    tenancy.say_limits(headers, job, monotonic())
    return headers


def explained_headers(job: Job, placement: Placement) -> CIMultiDict[str]:
    """Write the headers of a WebSocket's upgrade."""
    headers: CIMultiDict[str] = CIMultiDict({"x-warmroute-request-id": job.request_id})
    if job.inbound.client and job.inbound.client.sees_details:
        _explain_in(headers, job, placement)
    tenancy.say_limits(headers, job, monotonic())
    return headers


def counted_headers(job: Job) -> CIMultiDict[str]:
    """Write the headers of an answer that no engine was asked for."""
    headers: CIMultiDict[str] = CIMultiDict()
    headers["Content-Type"] = "application/json"
    headers["x-warmroute-request-id"] = job.request_id
    tenancy.say_limits(headers, job, monotonic())
    return headers


def _explain_in(headers: CIMultiDict[str], job: Job, placement: Placement) -> None:
    headers["x-warmroute-replica"] = placement.candidate.id
    headers["x-warmroute-policy"] = placement.policy.name
    if placement.assignment is not None:
        assigned = placement.assignment
        headers["x-warmroute-arm"] = f"{assigned.experiment}/{assigned.arm}"
    if job.prefill is not None:
        is_remote = job.prefill.result == "remote"
        headers["x-warmroute-prefill"] = job.prefill.where if is_remote else "local"
    if not placement.is_guess:
        headers["x-warmroute-cached"] = (
            f"gpu={placement.num_gpu_tokens};cpu={placement.num_cpu_tokens}"
            f";pool={placement.num_pool_tokens}"
        )
    router_ms = (job.placed_s - job.inbound.arrived_s) * 1000 - job.waited_ms
    headers["x-warmroute-ms"] = f"{router_ms:.2f}"
    if job.released is not None:
        headers["x-warmroute-waited-ms"] = f"{job.waited_ms:.1f}"
