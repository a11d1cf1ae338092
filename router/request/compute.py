"""Compute: have a prompt computed at a prefill replica, and read what its answer says."""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from router.api.answers import Ending
from router.api.engine_bodies import decode_body, is_capped, transfer_params
from router.base.errors import BadRequest, SetAside, UpstreamError, UpstreamUnreachable
from router.records.record import Outcome
from router.request.place import Place
from router.request.plan import Placement
from router.request.results import Prompt
from router.request.send import NO_TRANSFER, RequestHeaders, Transfer
from router.upstream import Upstream

_MOST_BYTES: Final = 1024 * 1024  # of the answer to a prompt: one token


class Done(Struct, frozen=True, kw_only=True):
    """How a prompt's request ended."""

    failure: str | None = None  # None: it was computed
    num_cached_tokens: int | None = None
    is_capped: bool = False  # it ended for its length
    params: dict[str, Any] | None = None  # for the replica that decodes it
    transfer: Transfer = NO_TRANSFER  # made of them


class Compute:
    """Sends prompts to prefill replicas.

    Args:
        timeout_s: Longest time that a prompt may take.
    """

    def __init__(
        self, *, upstream: Upstream, headers: RequestHeaders, place: Place, timeout_s: float
    ) -> None:
        self._upstream = upstream
        self._headers = headers
        self._place = place
        self._timeout_s = timeout_s

    async def run(
        self, prompt: Prompt, placement: Placement, body: bytes, transfer: Transfer
    ) -> Done:
        """Send a prompt to be computed, and end its placement."""
        replica = placement.candidate.replica
        outcome = Outcome.CLIENT_GONE  # unless it gets to the end
        try:
            headers = self._headers.of(prompt, placement, engine_id=transfer.engine_id)
            async with asyncio.timeout(self._timeout_s):
                answer = await self._upstream.open(
                    replica.name,
                    replica.url + prompt.read.inbound.target,
                    method=prompt.read.inbound.method,
                    headers=headers,
                    body=body,
                )
                try:
                    await answer.gather(_MOST_BYTES)
                finally:
                    answer.close()
        except TimeoutError:
            outcome = Outcome.OVERDUE
            return Done(failure="timeout")
        except UpstreamUnreachable as exc:
            outcome = Outcome.REPLICA_UNREACHABLE
            return Done(failure=exc.code)
        except UpstreamError as exc:
            is_well = isinstance(exc, SetAside)
            outcome = Outcome.CLIENT_ERROR if is_well else Outcome.REPLICA_FAILED
            return Done(failure=exc.code)
        else:
            outcome = Outcome.of_status(answer.status)
            if answer.status != 200:
                return Done(failure=f"status_{answer.status}")
            self._place.first_token(placement, monotonic())
            body = answer.readable
            if prompt.read.inbound.api.is_aborted(body):
                outcome = Outcome.REPLICA_FAILED
                return Done(failure=Ending.ABORTED.value)
            usage = prompt.read.inbound.api.usage_of_body(body)
            return Done(
                num_cached_tokens=usage.num_cached_tokens if usage is not None else None,
                is_capped=is_capped(body),
                params=transfer_params(body),
            )
        finally:
            self._place.end(placement, outcome)


def read_from(prompt: Prompt, done: Done, transfer: Transfer) -> Done:
    """Add what goes with a request to how its prompt was computed over NIXL.

    In push mode both halves need one id at their engines. The Responses route makes ids of its own,
    and each of several answers has another.
    """
    if done.params is None:
        return replace(done, failure="no_transfer")
    engine_id, request = None, prompt.read.request
    if done.params.get("transfer_mode") == "push":
        if prompt.read.inbound.api.name == "responses" or request is None or request.n != 1:
            return replace(done, failure="push")
        engine_id = transfer.engine_id
    try:
        body = decode_body(prompt.read.inbound.body or b"", done.params)
    except BadRequest:
        return replace(done, failure="body")
    return replace(done, transfer=Transfer(body=body, engine_id=engine_id))
