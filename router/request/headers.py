"""The headers of a request as its engine gets them, and of an answer as its client does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from multidict import CIMultiDict

from router.api.body import PREFIX, Withheld
from router.api.clients import FORWARDED
from router.api.sessions import engine_name
from router.base.caller import ANYBODY
from router.replicas.registry import EngineKey
from router.request.observer import NO_OBSERVERS, Observers
from router.request.plan import Placement
from router.request.results import Prompt, Read, Tries, Wait
from router.upstream import Answer, end_to_end

_NOT_FORWARDED: Final = frozenset({"host", "content-length", "expect"}) | FORWARDED
_NOT_RETURNED: Final = frozenset({"content-length"})  # of streams: one that breaks gets an event


class RequestHeaders:
    """Writes the headers for engines.

    Args:
        key: What replicas are sent in place of a caller's key.
        withheld: What clients may not set.
        observers: May add headers, such as the context of a trace.
    """

    def __init__(
        self, key: EngineKey, withheld: Withheld, observers: Observers = NO_OBSERVERS
    ) -> None:
        self._key = key
        self._observers = observers
        self._drop = _NOT_FORWARDED | withheld.headers

    def of(
        self,
        prompt: Prompt,
        placement: Placement,
        *,
        engine_id: str | None = None,
    ) -> CIMultiDict[str]:
        """Pass the client's headers on, and add those that an engine reads from a router.

        A caller's key is for the router: the engine gets its own, if there is one.

        Args:
            prompt: The request.
            placement: Where it goes.
            engine_id: The request's name at engines that match both halves by it. None: its own.
        """
        read = prompt.read
        headers = end_to_end(read.inbound.headers.items(), drop=self._drop, drop_prefix=PREFIX)
        if read.inbound.caller is not ANYBODY:
            for name in ("Authorization", "x-api-key"):
                headers.popall(name, None)
            headers.update(self._key.headers(placement.candidate.replica.url))
        headers["Accept-Encoding"] = "identity"  # compressed answers cannot be read on their way
        headers["X-Request-Id"] = engine_id or read.request_id
        headers.popall("X-Session-ID", None)
        if read.whose.session_hash is not None:  # engines name it in their events
            headers["X-Session-ID"] = engine_name(read.whose.session_hash)
        if placement.candidate.rank is not None:
            headers["X-data-parallel-rank"] = str(placement.candidate.rank)
        if read.inbound.client is not None:
            read.inbound.client.write(headers)
        self._observers.sent(prompt, placement, headers)
        return headers


def answer_headers(
    prompt: Prompt, tries: Tries, placement: Placement, answer: Answer
) -> CIMultiDict[str]:
    """Pass an engine's headers on, and add the decision."""
    drop = _NOT_RETURNED if answer.is_event_stream else frozenset[str]()
    headers = end_to_end(answer.headers.items(), drop=drop, drop_prefix=PREFIX)
    headers["x-warmroute-request-id"] = prompt.read.request_id
    # On a refused request they would show what others had sent, at no cost to the client.
    client = prompt.read.inbound.client
    if answer.status < 400 and client is not None and client.sees_details:
        _explain_in(headers, prompt, tries, placement)
    return headers


def early_headers(
    prompt: Prompt, tries: Tries, waits: Mapping[str, Any] | None
) -> Mapping[str, str]:
    """Return headers of a stream that begins before its answer does.

    Args:
        prompt: The request.
        tries: Its tries.
        waits: How it waits, see `WaitingRoom.describe`. None: it does not.
    """
    client = prompt.read.inbound.client
    if client is None or not client.sees_details:
        return {}
    if waits is None:
        return _waited(tries.wait)
    return {"x-warmroute-waits": f"for={waits['for'] or 'turn'};before={waits['before']}"}


def counted_headers(read: Read) -> CIMultiDict[str]:
    """Return the headers of an answer that no engine was asked for."""
    headers: CIMultiDict[str] = CIMultiDict()
    headers["Content-Type"] = "application/json"
    headers["x-warmroute-request-id"] = read.request_id
    return headers


def _explain_in(
    headers: CIMultiDict[str], prompt: Prompt, tries: Tries, placement: Placement
) -> None:
    headers["x-warmroute-replica"] = placement.lease.candidate
    headers["x-warmroute-policy"] = placement.plan.policy.name
    if prompt.variant is not None:
        headers["x-warmroute-variant"] = prompt.variant.record.label
    if tries.helped is not None:
        is_remote = tries.helped.result == "remote"
        headers["x-warmroute-prefill"] = tries.helped.where if is_remote else "local"
    held = placement.predicted
    if not placement.plan.is_guess:
        headers["x-warmroute-cached"] = (
            f"gpu={held.num_gpu_tokens};cpu={held.num_cpu_only_tokens}"
            f";pool={held.num_fetched_tokens}"
        )
    waited_ms = tries.wait.waited_ms
    router_ms = (placement.placed_s - prompt.read.inbound.arrived_s) * 1000 - waited_ms
    headers["x-warmroute-ms"] = f"{router_ms:.2f}"
    headers.update(_waited(tries.wait))


def _waited(wait: Wait) -> dict[str, str]:
    if wait.released is None:
        return {}
    headers = {"x-warmroute-waited-ms": f"{wait.waited_ms:.1f}"}
    if wait.held_by is not None:
        headers["x-warmroute-waited-for"] = wait.held_by
    return headers
