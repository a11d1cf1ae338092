"""Prefill: have a prompt computed elsewhere, then have its answer given where it is decoded.

Only for requests that a replica of role decode answers. If a prefill replica fails, the story
places the request again: with another one, once. Whatever goes wrong after that, the decode replica
computes the prompt itself: a failed prefill is no client's error. Both placements end however the
request ends, and a client that leaves ends both at once.

    store     the prompt; then, when it can be fetched, the request as it came
    nixl      the prompt; the `kv_transfer_params` of its answer go with the request. In push mode
              engines match both by request id, so both get an id that no other request has. A
              response, or a request with several answers (n > 1), has no such id and is not sent on
    mooncake  both at once, with one `transfer_id`: the decode replica waits for the other. If the
              prefill fails or ends early, the decode replica would wait for 480 s. Its try is cut,
              and it computes the prompt

Source: vLLM 0.32.0, distributed/kv_transfer/kv_connector/v1/mooncake/mooncake_connector.py
(`update_state_after_alloc`, `request_finished`), nixl/pull_scheduler.py, nixl/push_worker.py
(`_pop_matching_registration`).

An engine that prefills for others peer to peer has a name, from its bootstrap server. A name
belongs to a process: it is asked again after a while, and after any failure. Source:
vllm/distributed/kv_transfer/kv_connector/v1/mooncake/mooncake_utils.py, 0.32.0.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from time import monotonic
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import asdict, replace

from router.api.answers import Ending
from router.api.engine_bodies import (
    NIXL_ASK,
    decode_body,
    is_capped,
    mooncake_ask,
    mooncake_read,
    prefill_body,
    transfer_params,
)
from router.base.errors import (
    BadRequest,
    ConnectTimeout,
    OutOfConnections,
    SetAside,
    UpstreamBroken,
    UpstreamError,
    UpstreamUnreachable,
)
from router.config import PrefillConfig
from router.discovery.engine_api import EngineApi
from router.metrics import Metrics
from router.records.record import Outcome, PrefillRecord
from router.replicas.replica import Candidate
from router.request.place import Place
from router.request.results import Placement, Plan, Prompt, Sent, Tries
from router.request.retry import PREFILL_BROKE, Retries
from router.request.send import NO_TRANSFER, RequestHeaders, Sender, Transfer
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


_KEPT_S: Final = 10.0
_SILENT_S: Final = 5.0  # one that did not answer is not asked again so soon


class Bootstraps:
    """Asks bootstrap servers, one question for all requests of a while."""

    def __init__(self, api: EngineApi) -> None:
        self._api = api
        self._known: dict[str, tuple[str, float, dict[int, str]]] = {}
        self._silent_until_s: dict[str, float] = {}

    async def engine_id(self, candidate: Candidate) -> str:
        """Find the name of a candidate's engine.

        Raises:
            UpstreamError: its bootstrap server does not answer, or does not know its rank.
        """
        replica, rank = candidate.replica, candidate.rank or 0
        assert replica.bootstrap is not None
        url, until_s, ids = self._known.get(replica.name, ("", 0.0, {}))
        if url != replica.bootstrap or monotonic() >= until_s or rank not in ids:
            ids = await self._ask(replica.name, replica.bootstrap)
            self._known[replica.name] = replica.bootstrap, monotonic() + _KEPT_S, ids
        if rank not in ids:
            raise UpstreamBroken(replica.name, f"{replica.bootstrap}/query has no rank {rank}")
        return ids[rank]

    async def _ask(self, name: str, url: str) -> dict[int, str]:
        if monotonic() < self._silent_until_s.get(name, 0.0):
            raise UpstreamBroken(name, f"{url} did not answer a moment ago")
        try:
            return await self._api.engine_ids(name, url)
        except UpstreamError:
            self._silent_until_s[name] = monotonic() + _SILENT_S
            raise

    def forget(self, replica: str) -> None:
        """Forget a replica's names: it may be another process."""
        self._known.pop(replica, None)


_LOOK_S: Final = 0.005
_ASK_EVERY: Final = 4  # looks: the master is asked; in between events may say so


_LEFT: Final = frozenset(
    {
        UpstreamUnreachable.code,
        ConnectTimeout.code,
        UpstreamBroken.code,
        SetAside.code,
        "bootstrap",
    }
)
"""Failures of a prefill replica, besides 5xx, after which another one is asked. After a timeout
none is: the decode replica has waited enough."""

_UNREAD: Final = ("status_", "event_")
"""Failures of a decode replica that may come from a failed read of the other's blocks. It is asked
to compute the prompt."""


class Prefill:
    """Sends requests whose prompt may be computed elsewhere."""

    def __init__(
        self,
        config: PrefillConfig,
        *,
        upstream: Upstream,
        headers: RequestHeaders,
        place: Place,
        sender: Sender,
        retries: Retries,
        bootstraps: Bootstraps,
        metrics: Metrics,
    ) -> None:
        self._config = config
        self._place = place
        self._compute = Compute(
            upstream=upstream, headers=headers, place=place, timeout_s=config.timeout_s
        )
        self._sender = sender
        self._retries = retries
        self._bootstraps = bootstraps
        self._metrics = metrics

    async def send(self, prompt: Prompt, tries: Tries, placement: Placement) -> Sent | None:
        """Send one try: its prompt to the helper, if it has one, and the request itself.

        Returns None if the helper failed, and the request is to be placed again: with another
        helper, or with none.

        Raises:
            OutOfConnections: as `Upstream.open`.
        """
        helper, record = placement.helper, _planned(placement)
        tries.failed_helper = None
        if helper is None:
            if tries.helped is None or tries.records:  # else its helper's failure is counted
                self._record(tries, record)
            return await self._sender.send(prompt, tries, placement)
        try:
            record, transfer, sent = await self._try(prompt, tries, placement, helper, record)
            if sent is None and record.result == "failed":
                return self._judge(tries, helper, record)
            if sent is None:
                sent = await self._decode(prompt, tries, placement, record, transfer)
            if record.transfer == "store" or not (sent.failure or "").startswith(_UNREAD):
                return sent
            sent.close()
            self._bootstraps.forget(helper.replica)
            record = replace(record, result="failed", why=sent.failure or "")
            return None
        finally:
            if record.result != "local":  # else its client left before
                self._record(tries, record)

    async def _try(
        self,
        prompt: Prompt,
        tries: Tries,
        placement: Placement,
        helper: Placement,
        record: PrefillRecord,
    ) -> tuple[PrefillRecord, Transfer, Sent | None]:
        """Send a prompt to be computed elsewhere.

        Returns:
            How that went, what goes with the request, and how that went if it was sent, too.
        """
        begun_s = monotonic()
        done, sent = await self._elsewhere(prompt, tries, placement, helper)
        if done.failure:
            self._bootstraps.forget(helper.replica)  # the engine there may be another process
            if done.failure == UpstreamBroken.code or done.failure.startswith("status_5"):
                await self._retries.witness.lost(prompt, tries, helper, done.failure)
        record = replace(
            record,
            result="failed" if done.failure else "remote",
            why=done.failure or record.why,
            ms=(monotonic() - begun_s) * 1000.0,
            num_reported_cached_tokens=done.num_cached_tokens,
        )
        return record, done.transfer, sent

    def _judge(self, tries: Tries, helper: Placement, record: PrefillRecord) -> Sent | None:
        """Decide what follows the failure of a helper. None: the request is placed again."""
        before = tries.helped
        if before is not None and before.result != "failed":
            before = None  # of an earlier try, whose prompt was computed
        have_died = before is not None and before.why == record.why == UpstreamBroken.code
        if have_died or self._retries.witness.refusal(tries) is not None:
            error = UpstreamBroken(helper.replica, f"replica {helper.replica} went down")
            return Sent(error=error, failure=PREFILL_BROKE)
        may_help = record.why in _LEFT or record.why.startswith("status_5")
        if before is None and may_help and self._retries.may_send_again(helper, record.why):
            tries.failed_helper = helper.replica
        return None

    def _record(self, tries: Tries, record: PrefillRecord) -> None:
        """Record where a prompt was computed; of several tries, the last that went elsewhere."""
        self._metrics.prefills.labels(record.result, record.why).inc()
        if record.ms is not None:
            self._metrics.prefill_seconds.labels(record.candidate).observe(record.ms / 1000.0)
        if tries.helped is None or record.candidate is not None:
            tries.helped = record

    async def _decode(
        self,
        prompt: Prompt,
        tries: Tries,
        placement: Placement,
        record: PrefillRecord,
        transfer: Transfer,
    ) -> Sent:
        """Book a request again where it is decoded, now that its prompt is computed; send it."""
        is_sent = record.transfer != "store"
        plan = self._place.look(prompt, placement) if self._place.has(placement) else None
        if plan is not None and not is_sent:
            plan = await self._stored(prompt, placement, plan)
        if plan is None or not self._place.has(placement):
            name = placement.replica
            error = UpstreamUnreachable(name, f"replica {name} was removed")
            return Sent(error=error, failure=error.code)
        self._place.rebook(prompt, placement, plan, is_sent=is_sent)
        return await self._sender.send(prompt, tries, placement, transfer)

    async def _elsewhere(
        self, prompt: Prompt, tries: Tries, placement: Placement, helper: Placement
    ) -> tuple[Done, Sent | None]:
        """Send a prompt to be computed elsewhere, and end that placement.

        Returns:
            How that went, and how the request went if it was sent, too.
        """
        how, body = placement.candidate.replica.transfer, prompt.read.inbound.body or b""
        is_begun = False
        try:
            params: Mapping[str, Any] | None = None
            transfer = NO_TRANSFER
            if how == "nixl":
                params = NIXL_ASK
                transfer = Transfer(engine_id=f"{prompt.read.request_id}-{secrets.token_hex(8)}")
            elif how == "mooncake":
                transfer_id = secrets.token_hex(16)
                params = mooncake_ask(transfer_id)
                engine_id = await self._bootstraps.engine_id(helper.candidate)
                asked = mooncake_read(helper.candidate.replica.bootstrap, engine_id, transfer_id)
                transfer = Transfer(body=decode_body(body, asked))
            own_body = prefill_body(prompt.read.inbound.api.name, body, params)
            is_begun = True
        except UpstreamError:
            return Done(failure="bootstrap"), None
        except BadRequest:
            return Done(failure="body"), None
        finally:
            if not is_begun:
                self._place.end(helper, Outcome.CLIENT_GONE)
        if how == "mooncake":
            return await self._at_once(prompt, tries, placement, helper, own_body, transfer)
        done = await self._compute.run(prompt, helper, own_body, transfer)
        if done.failure is not None or how != "nixl":
            return done, None
        return read_from(prompt, done, transfer), None

    async def _at_once(
        self,
        prompt: Prompt,
        tries: Tries,
        placement: Placement,
        helper: Placement,
        body: bytes,
        transfer: Transfer,
    ) -> tuple[Done, Sent | None]:
        """Send a prompt and its request at once; a failure of either cuts the other."""
        done: Done | None = None
        sent: Sent | None = None
        shortage: OutOfConnections | None = None

        async def compute() -> None:
            nonlocal done
            done = await self._compute.run(prompt, helper, body, NO_TRANSFER)
            if done.failure is None and not done.is_capped:
                done = replace(done, failure="ended")
            if done.failure is not None:
                decoding.cancel()

        async def decode() -> None:
            nonlocal sent, shortage
            try:
                sent = await self._sender.send(prompt, tries, placement, transfer)
            except OutOfConnections as exc:
                shortage = exc
            if sent is None or sent.answer is None or sent.answer.outcome_status != 200:
                computing.cancel()

        try:
            async with asyncio.TaskGroup() as tg:
                computing = tg.create_task(compute(), name="prefill")
                decoding = tg.create_task(decode(), name="decode")
        except BaseException:
            if sent is not None:
                sent.close()
            raise
        finally:
            if done is None:  # cut, perhaps before it began
                self._place.end(helper, Outcome.CLIENT_GONE)
        if shortage is not None:
            raise shortage
        if done is None:
            done = Done(failure="cut")
        elif done.failure is not None and sent is not None:
            sent.close()
            sent = None
        return done, sent

    async def _stored(self, prompt: Prompt, placement: Placement, plan: Plan) -> Plan:
        """Wait until all of a prompt that was computed can be fetched, but not for long.

        An engine answers before it has stored all of it.
        """
        fetches = self._place.fetches
        until_s = monotonic() + self._config.store_wait_s
        num_looks = 0
        while fetches is not None and plan.fetchable is not None and not plan.fetchable.is_whole:
            num_looks += 1
            due = fetches.due(plan, is_stored=True) if num_looks % _ASK_EVERY == 0 else None
            if due is not None:
                await fetches.verify(prompt, due)
            else:
                await asyncio.sleep(_LOOK_S)
            plan = self._place.look(prompt, placement)
            if monotonic() >= until_s:
                break
        return plan


def _planned(placement: Placement) -> PrefillRecord:
    """Write down a plan, before anything of it has happened."""
    split, helper = placement.plan.split, placement.helper
    assert split is not None
    record = PrefillRecord(
        result="local",
        why=split.why,
        here_ms=split.here_ms,
        there_ms=split.there_ms,
        transfer=placement.candidate.replica.transfer,
    )
    if helper is None:
        return record
    plan = helper.plan
    [cost] = [cost for cost in plan.costs() if cost.id == plan.candidate.id]
    return replace(
        record,
        candidate=plan.candidate.id,
        cost=cost,
        predicted_ms=helper.lease.predicted_ms,
        num_predicted_cached_tokens=helper.predicted.num_cached_tokens,
        policy=plan.policy.name,
        policy_params=asdict(plan.policy),
        snapshot=plan.snapshot,
        decision=plan.decision,
    )
