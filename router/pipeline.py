"""The way of a request, told once, top to bottom. Every other module is a tool of this one.

    1 receive    bytes -> JSON -> model, session, prompt            `_receive`
    2 tokenize   the prompt's token ids, only what is new           `_tokenize`
    3 hash       the chain, in each candidate's own contract        `_match`
    4 look up    how much of the chain each candidate holds         `_match`
    5 decide     snapshot -> pure policy -> candidate               `_place`
    6 admit      a lease: its load counts from here                 `_place`
    7 forward    bytes through; before the first byte, fail over    `_forward`
    8 observe    first token, usage, audit, record                  `_observe`

Stages 3 to 6 are one synchronous step: nothing changes between the look-up and the lease. The
lease and the speculation belong to the request and end with it, however it ends.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, Protocol

import orjson
from msgspec import Struct
from multidict import CIMultiDict, CIMultiDictProxy

from policies.policy import Policy
from policies.view import CandidateId, Decision, RequestView, Snapshot
from router.api import openai
from router.api.failures import error_event
from router.api.sessions import session_hash, session_of
from router.api.usage import TAIL_BYTES, Usage, usage_of_body, usage_of_stream
from router.config import Config
from router.contracts import NO_EXTRA, ExtraKeys, HashContract
from router.errors import BadRequest, RouterError, UpstreamError
from router.fleet import Candidate, Fleet, Lease, Outcome
from router.index import Caches
from router.io.decision_log import DecisionLog
from router.io.engine_api import EngineApi
from router.io.upstream import Answer, Upstream, end_to_end
from router.metrics import Metrics
from router.prompt import Prompters, Tokens
from router.records import DecisionRecord, Try

logger = logging.getLogger(__name__)

Api = Literal["chat", "completions", "other"]

RETRYABLE: Final = frozenset({500, 502, 503, 504})
"""An engine's own failures, worth one more replica. 500: Mooncake's connector answers it when a
pool object vanished between look-up and fetch (kv_load_failure_policy `fail`)."""

_NOT_FORWARDED: Final = frozenset({"host", "content-length", "expect"})
_NOT_RETURNED: Final = frozenset({"content-length"})
_SMALL_ANSWER: Final = 1024 * 1024
_BYTES_PER_TOKEN: Final = 4  # where a prompt's tokens cannot be known at all


class Inbound(Struct, frozen=True, kw_only=True):
    """A request as it came in. `target` is path and query, raw."""

    api: Api
    method: str
    path: str
    target: str
    headers: CIMultiDictProxy[str]
    body: bytes | None
    arrived_s: float  # monotonic


class Reply(Protocol):
    """Where the answer goes: the client's connection."""

    async def send(self, status: int, headers: CIMultiDict[str], body: bytes) -> None:
        """Send a whole answer."""
        ...

    async def start(self, status: int, headers: CIMultiDict[str]) -> None:
        """Begin an answer of unknown length."""
        ...

    async def write(self, chunk: bytes) -> None:
        """Send the next piece, at once."""
        ...


class Job(Struct, kw_only=True):
    """One request on its way; the stages fill it in."""

    inbound: Inbound
    request_id: str
    model: str | None = None
    streams: bool = False
    session: str | None = None
    session_hash: int | None = None
    chat: openai.ChatRequest | None = None
    completion: openai.CompletionRequest | None = None
    extra: ExtraKeys = NO_EXTRA
    tokens: Tokens | None = None
    way: str = "unknown"  # local | engine | unknown: where the tokens come from
    num_tokens: int = 0
    tries: list[Try] = []
    tokenized_s: float = 0.0
    placed_s: float = 0.0


class Placement(Struct, kw_only=True):
    """A decision that counts: who, why, and what has to be given back."""

    candidate: Candidate
    decision: Decision
    snapshot: Snapshot
    lease: Lease
    claim: Claim | None
    num_cached_tokens: int
    num_gpu_tokens: int
    num_cpu_tokens: int
    state: str
    predicted_ttft_ms: float | None


class Pipeline:
    """Routes requests. One instance per router; all state it changes sits in its parts."""

    def __init__(
        self,
        *,
        config: Config,
        fleet: Fleet,
        caches: Caches,
        prompters: Prompters,
        policy: Policy,
        fallback_policy: Policy,
        upstream: Upstream,
        engine_api: EngineApi,
        metrics: Metrics,
        decision_log: DecisionLog | None,
        encode_off_loop: Callable[[Callable[[], Any]], Any],
        seed: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._caches = caches
        self._prompters = prompters
        self._policy = policy
        self._fallback_policy = fallback_policy
        self._upstream = upstream
        self._engine_api = engine_api
        self._metrics = metrics
        self._decision_log = decision_log
        self._encode_off_loop = encode_off_loop
        self._seed = seed
        self._clock = clock
        self._number = 0

    # ---------------------------------------------------------------- the story

    async def route(self, inbound: Inbound, reply: Reply, request_id: str) -> None:
        """Answer one request.

        Raises:
            RouterError: nothing was sent yet; the caller answers in the API's own shape.
        """
        job = self._receive(inbound, request_id)
        await self._tokenize(job)
        placement, answer = await self._forward(job)
        outcome = Outcome.CLIENT_GONE  # unless we get to the end
        first_s = self._clock()
        usage: Usage | None = None
        try:
            if job.streams and answer.status == 200:
                self._fleet.first_token(placement.lease, first_s)
            usage = await self._pass_through(job, placement, answer, reply)
            outcome = Outcome.OK if answer.status < 400 else Outcome.CLIENT_ERROR
            if answer.status >= 500:
                outcome = Outcome.REPLICA_FAILED
        except UpstreamError:
            outcome = Outcome.REPLICA_FAILED
            raise
        finally:
            answer.close()
            self._give_back(placement, outcome)
            self._observe(job, placement, answer.status, outcome, usage, first_s)

    # ---------------------------------------------------------------- 1 receive

    def _receive(self, inbound: Inbound, request_id: str) -> Job:
        """Read what routing needs; the body itself stays as it is."""
        job = Job(inbound=inbound, request_id=request_id)
        body = _json_object(inbound)
        if inbound.api == "chat":
            job.chat = openai.parse_chat(_required(body))
            job.model, job.streams = job.chat.model, job.chat.stream
        elif inbound.api == "completions":
            job.completion = openai.parse_completion(_required(body))
            job.model, job.streams = job.completion.model, job.completion.stream
        elif body is not None:
            model = body.get("model")
            job.model = model if isinstance(model, str) else None
            job.streams = body.get("stream") is True
        job.session = session_of(inbound.headers, body, self._config.session.headers)
        if job.session is not None:
            job.session_hash = session_hash(job.session, job.model or "")
        if inbound.api != "other":
            job.model = self._fleet.resolve(job.model)  # None: the only one; unknown: 404
            job.extra = self._extra_keys(job)
        return job

    def _extra_keys(self, job: Job) -> ExtraKeys:
        """Name what besides tokens makes this prompt's blocks its own: salt and adapter."""
        request = job.chat or job.completion
        salt = request.cache_salt if request is not None else None
        lora = self._fleet.lora_of(job.model) if job.model is not None else None
        if salt is None and lora is None:
            return NO_EXTRA
        return ExtraKeys(lora=lora, cache_salt=salt)

    # ---------------------------------------------------------------- 2 tokenize

    async def _tokenize(self, job: Job) -> None:
        """Find the prompt's token ids: locally, else at an engine, else not at all."""
        job.tokenized_s = self._clock()
        if job.inbound.api == "other" or job.model is None:
            return
        prompter = self._prompters.get(job.model)
        way = "unknown"
        if prompter is not None:
            plan = (
                prompter.plan_chat(job.chat)
                if job.chat is not None
                else prompter.plan_completion(job.completion)
            )
            if plan.num_new_chars > self._config.tokens.inline_chars:
                encoded = await self._encode_off_loop(plan.encode)
            else:
                encoded = plan.encode()
            job.tokens = prompter.commit(plan, encoded)
            way = "local"
        self._metrics.tokenized.labels(way).inc()
        if job.tokens is not None:
            job.num_tokens = job.tokens.num_tokens
        else:
            job.num_tokens = len(job.inbound.body or b"") // _BYTES_PER_TOKEN
        job.tokenized_s = self._clock()

    # ---------------------------------------------------------------- 3 hash, 4 look up

    def _match(self, job: Job, candidates: list[Candidate]) -> dict[CandidateId, Match]:
        """Count the leading prompt tokens each candidate can reuse, capped as the engine caps.

        Candidates are grouped by contract: the chain is computed once per contract.
        """
        if job.tokens is None:
            return {}
        matches: dict[CandidateId, Match] = {}
        by_contract: dict[HashContract, list[CandidateId]] = {}
        for candidate in candidates:
            contract = self._caches.contract(candidate.id)
            if contract is not None:
                by_contract.setdefault(contract, []).append(candidate.id)
        for contract, ids in by_contract.items():
            keys = job.tokens.keys(contract, job.extra)
            # The engine recomputes at least the last token, hence a whole block of a full hit.
            reusable = (job.num_tokens - 1) // contract.block_size
            for cid, found in self._caches.match(keys[:reusable], ids).items():
                matches[cid] = Match(
                    num_gpu_tokens=found.num_gpu_blocks * contract.block_size,
                    num_cpu_tokens=found.num_cpu_blocks * contract.block_size,
                )
        return matches

    # ---------------------------------------------------------------- 5 decide, 6 admit

    def _look(self, job: Job, tried: set[str], now_s: float) -> tuple[list[Candidate], Snapshot]:
        """Freeze all that the decision may depend on.

        Raises:
            UnknownModel, NoReplicaAvailable: nobody serves the model, or nobody who does is up.
        """
        candidates = self._fleet.candidates(job.model, now_s, without=tried)
        matches = self._match(job, candidates)
        return candidates, Snapshot(
            now_s=now_s,
            number=self._number,
            seed=self._seed,
            request=RequestView(
                num_tokens=job.num_tokens,
                session_hash=job.session_hash,
                session_candidate=self._fleet.session_candidate(job.session_hash, now_s),
                first_blocks_hash=self._first_blocks(job, candidates),
            ),
            replicas=self._fleet.views(candidates, matches, now_s),
        )

    def _place(self, job: Job, tried: set[str]) -> Placement:
        """Choose a candidate and take it: from here on its load and its blocks count.

        Raises:
            UnknownModel, NoReplicaAvailable: nobody serves the model, or nobody who does is up.
        """
        now_s = self._clock()
        candidates, snapshot = self._look(job, tried, now_s)
        self._number += 1
        policy = self._policy if job.inbound.api != "other" else self._fallback_policy
        decision = policy.decide(snapshot)
        index = next(i for i, c in enumerate(candidates) if c.id == decision.candidate)
        candidate, view = candidates[index], snapshot.replicas[index]
        num_cached = max(view.num_gpu_tokens, view.num_cpu_tokens)
        num_uncached = max(job.num_tokens - num_cached, 0)
        lease = self._fleet.begin(
            candidate.id,
            num_uncached_tokens=num_uncached,
            num_cached_tokens=num_cached,
            num_fetched_tokens=num_cached - view.num_gpu_tokens,
            now_s=now_s,
        )
        contract = self._caches.contract(candidate.id)
        claim = None
        if job.tokens is not None and contract is not None:
            claim = self._caches.claim(
                candidate.id,
                job.tokens.keys(contract, job.extra),
                view.num_gpu_tokens // contract.block_size,
            )
        state = self._caches.state(candidate.id)
        self._metrics.decisions.labels(policy.name, state).inc()
        self._fleet.saw_session(job.session_hash, candidate.id, now_s)
        job.placed_s = self._clock()
        return Placement(
            candidate=candidate,
            decision=decision,
            snapshot=snapshot,
            lease=lease,
            claim=claim,
            num_cached_tokens=num_cached,
            num_gpu_tokens=view.num_gpu_tokens,
            num_cpu_tokens=num_cached - view.num_gpu_tokens,
            state=state,
            predicted_ttft_ms=view.queue_ms + view.cost.prefill_ms(num_uncached, num_cached),
        )

    def _first_blocks(self, job: Job, candidates: list[Candidate]) -> int | None:
        """Digest the prompt's first blocks: the key of the last of them, for it is chained."""
        contract = self._caches.contract(candidates[0].id)
        if job.tokens is None or contract is None:
            return None
        keys = job.tokens.keys(contract, job.extra)
        if not keys:
            return None
        num_blocks = max(1, self._config.policy.first_blocks_tokens // contract.block_size)
        return keys[min(num_blocks, len(keys)) - 1]

    async def explain(self, inbound: Inbound, *, with_tokens: bool) -> dict[str, Any]:
        """Decide as for a request, change nothing, and tell everything the decision saw.

        Raises:
            RouterError: as `route` would.
        """
        job = self._receive(inbound, "explain")
        await self._tokenize(job)
        candidates, snapshot = self._look(job, set(), self._clock())
        decision = self._policy.decide(snapshot)
        explained: dict[str, Any] = {
            "model": job.model,
            "num_tokens": job.num_tokens,
            "way": job.way,
            "policy": self._policy.name,
            "decision": decision,
            "request": snapshot.request,
            "candidates": [
                {"state": self._caches.state(view.id), "view": view} for view in snapshot.replicas
            ],
        }
        if with_tokens and job.tokens is not None:
            contract = self._caches.contract(decision.candidate)
            keys = job.tokens.keys(contract, job.extra) if contract is not None else []
            explained["contract"] = contract
            explained["token_ids"] = list(job.tokens.ids())
            explained["keys"] = [f"{key:015x}" for key in keys]
        return explained

    # ---------------------------------------------------------------- 7 forward

    async def _forward(self, job: Job) -> tuple[Placement, Answer]:
        """Send the request; until an answer's first byte, a failing replica is left behind.

        Never twice to the same replica, never again for the client's own 4xx. The last try's
        answer is the client's, even if it is an error.
        """
        tried: set[str] = set()
        while True:
            placement = self._place(job, tried)
            tried.add(placement.candidate.replica.name)
            answer: Answer | None = None
            error: UpstreamError | None = None
            failure: str | None = None
            try:
                answer = await self._ask(job, placement)
                failure = f"status_{answer.status}" if answer.status in RETRYABLE else None
            except UpstreamError as exc:
                error, failure = exc, exc.code
            except BaseException:  # the client left while we waited
                self._give_back(placement, Outcome.CLIENT_GONE)
                raise
            job.tries.append(Try(candidate=placement.candidate.id, failure=failure))
            may_retry = (
                failure is not None
                and len(tried) < self._config.forward.max_tries
                and self._others(job, tried)
            )
            if answer is not None and not may_retry:
                return placement, answer
            self._give_back(placement, Outcome.REPLICA_FAILED)
            if error is not None and not may_retry:
                raise error
            self._failed_over(job, placement, str(failure))
            if answer is not None:
                answer.close()

    async def _ask(self, job: Job, placement: Placement) -> Answer:
        """Send one try; an answer that is not a stream is read whole, so it can still move on."""
        answer = await self._upstream.open(
            placement.candidate.replica.name,
            placement.candidate.replica.url + job.inbound.target,
            method=job.inbound.method,
            headers=self._upstream_headers(job, placement),
            body=job.inbound.body,
        )
        try:
            if not answer.is_event_stream:
                await answer.gather(_SMALL_ANSWER)
        except BaseException:
            answer.close()
            raise
        return answer

    def _others(self, job: Job, tried: set[str]) -> bool:
        """Say whether anybody is left to try."""
        try:
            return bool(self._fleet.candidates(job.model, self._clock(), without=tried))
        except RouterError:
            return False

    def _failed_over(self, job: Job, placement: Placement, reason: str) -> None:
        name = placement.candidate.replica.name
        self._metrics.failovers.labels(name, reason).inc()
        logger.warning(
            "moved on before the first byte",
            extra={"request": job.request_id, "replica": name, "reason": reason},
        )

    def _upstream_headers(self, job: Job, placement: Placement) -> CIMultiDict[str]:
        """Pass the client's headers on, with what an engine reads from a router added."""
        headers = end_to_end(job.inbound.headers.items(), drop=_NOT_FORWARDED)
        headers["X-Request-Id"] = job.request_id
        if job.session is not None and "X-Session-ID" not in headers:
            headers["X-Session-ID"] = job.session
        if placement.candidate.rank is not None:
            headers["X-data-parallel-rank"] = str(placement.candidate.rank)
        return headers

    async def _pass_through(
        self, job: Job, placement: Placement, answer: Answer, reply: Reply
    ) -> Usage | None:
        """Hand the answer on, byte for byte, and keep what tells its usage.

        Raises:
            UpstreamBroken, UpstreamTimeout: it broke off; a stream's client has been told.
        """
        headers = end_to_end(answer.headers.items(), drop=_NOT_RETURNED)
        self._explain_in(headers, job, placement)
        if answer.complete:
            await reply.send(answer.status, headers, answer.first)
            return usage_of_body(answer.first) if answer.status == 200 else None
        await reply.start(answer.status, headers)
        tail = b""
        try:
            await reply.write(answer.first)
            tail = answer.first
            async for chunk in answer.chunks():
                await reply.write(chunk)
                tail = chunk if len(chunk) >= TAIL_BYTES else (tail + chunk)[-TAIL_BYTES:]
        except UpstreamError as exc:
            if answer.is_event_stream:
                await reply.write(error_event(exc, job.inbound.path))
            raise
        return usage_of_stream(tail) if job.inbound.api != "other" else None

    def _explain_in(self, headers: CIMultiDict[str], job: Job, placement: Placement) -> None:
        headers["x-warmroute-request-id"] = job.request_id
        headers["x-warmroute-replica"] = placement.candidate.id
        headers["x-warmroute-policy"] = self._policy.name
        if job.tokens is not None:
            headers["x-warmroute-cached"] = (
                f"gpu={placement.num_gpu_tokens};cpu={placement.num_cpu_tokens};pool=0"
            )
        headers["x-warmroute-ms"] = f"{(job.placed_s - job.inbound.arrived_s) * 1000:.2f}"

    def _give_back(self, placement: Placement, outcome: Outcome) -> None:
        """End the request's claims: its load, and its blocks' being "computed there"."""
        self._fleet.end(placement.lease, self._clock(), outcome)
        if placement.claim is not None:
            self._caches.release(placement.claim, computed=outcome is Outcome.OK)

    # ---------------------------------------------------------------- 8 observe

    def _observe(
        self,
        job: Job,
        placement: Placement,
        status: int,
        outcome: Outcome,
        usage: Usage | None,
        first_s: float,
    ) -> None:
        """Audit the prediction, count, write the record and the one log line."""
        now_s = self._clock()
        arrived_s = job.inbound.arrived_s
        name = placement.candidate.id
        router_ms = (job.placed_s - arrived_s) * 1000
        ttft_ms = (first_s - job.placed_s) * 1000 if job.streams and status == 200 else None
        metrics = self._metrics
        metrics.requests.labels(job.inbound.api, name, outcome.value).inc()
        metrics.ttft.labels(name).observe(first_s - arrived_s)
        metrics.stage.labels("tokenize").observe(job.tokenized_s - arrived_s)
        metrics.stage.labels("place").observe(job.placed_s - job.tokenized_s)
        metrics.stage.labels("total").observe(job.placed_s - arrived_s)
        if ttft_ms is not None and placement.predicted_ttft_ms is not None:
            metrics.ttft_error.labels(name).observe(
                abs(ttft_ms - placement.predicted_ttft_ms) / 1e3
            )
        num_reported = usage.num_cached_tokens if usage is not None else None
        if usage is not None and job.tokens is not None:
            self._audit(job, placement, usage)
        metrics.tokens.labels(name, "prompt").inc(job.num_tokens)
        metrics.tokens.labels(name, "predicted_cached").inc(placement.num_cached_tokens)
        logger.info(
            "routed",
            extra={
                "request": job.request_id,
                "model": job.model,
                "replica": name,
                "why": placement.decision.reason,
                "tokens": job.num_tokens,
                "cached": placement.num_cached_tokens,
                "reported": num_reported,
                "state": placement.state,
                "tries": len(job.tries),
                "status": status,
                "outcome": outcome.value,
                "router_ms": round(router_ms, 2),
                "ttft_ms": None if ttft_ms is None else round(ttft_ms, 1),
                "total_ms": round((now_s - arrived_s) * 1000, 1),
            },
        )
        if self._decision_log is None:
            return
        self._decision_log.add(
            DecisionRecord(
                request_id=job.request_id,
                at=time.time(),
                api=job.inbound.api,
                model=job.model or "",
                policy=self._policy.name,
                state=placement.state,
                snapshot=placement.snapshot,
                decision=placement.decision,
                tries=tuple(job.tries),
                outcome=outcome.value,
                status=status,
                num_prompt_tokens=job.num_tokens,
                num_predicted_cached_tokens=placement.num_cached_tokens,
                num_reported_cached_tokens=num_reported,
                num_completion_tokens=usage.completion_tokens if usage is not None else None,
                router_ms=router_ms,
                predicted_ttft_ms=placement.predicted_ttft_ms,
                ttft_ms=ttft_ms,
                total_ms=(now_s - arrived_s) * 1000,
            )
        )

    def _audit(self, job: Job, placement: Placement, usage: Usage) -> None:
        """Hold the prediction against what the engine says it did."""
        if job.completion is not None and job.completion.num_prompts > 1:
            return  # usage sums prompts; only the first was predicted
        name = placement.candidate.id
        if usage.prompt_tokens != job.num_tokens:
            self._metrics.token_mismatches.labels(job.model or "", "usage").inc()
        if job.model is not None:
            self._prompters.audit(job.model, job.num_tokens, usage.prompt_tokens)
        reported = usage.num_cached_tokens
        if reported is None:
            return
        error = placement.num_cached_tokens - reported
        result = "exact" if error == 0 else "over" if error > 0 else "under"
        self._metrics.audit.labels(name, result).inc()
        self._metrics.audit_error.labels(name).observe(abs(error))
        self._metrics.tokens.labels(name, "reported_cached").inc(reported)
        self._caches.audit(placement.candidate.id, placement.num_cached_tokens, reported)


def _json_object(inbound: Inbound) -> Mapping[str, Any] | None:
    """Parse the body where routing needs it: always for prompts, if it is JSON for the rest.

    Raises:
        BadRequest: a prompt's body is not a JSON object, or nested too deep.
    """
    if inbound.body is None:
        return None
    try:
        body = orjson.loads(inbound.body)
    except orjson.JSONDecodeError as exc:
        if inbound.api == "other":
            return None
        raise BadRequest(f"the body is not JSON, or nested deeper than 1,024: {exc}") from exc
    if isinstance(body, dict):
        return body
    if inbound.api == "other":
        return None
    raise BadRequest("the body must be a JSON object")


def _required(body: Mapping[str, Any] | None) -> dict[str, object]:
    if body is None:
        raise BadRequest("the body is empty; send a JSON object")
    return dict(body)
