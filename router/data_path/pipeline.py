"""The way of a request, told once, top to bottom. Every other module is a tool of this one.

    1 receive    bytes -> JSON -> model, session, prompt            stages.read, `_receive`
    2 tokenize   the prompt's token ids, only what is new           stages.tokenize
    3 hash       the chain, in each candidate's own contract        `_match`
    4 look up    how much of the chain each candidate holds         `_match`
                 and the shared pool; verified if it matters        stages.pool
    5 decide     snapshot -> pure policy -> candidate               `_decide`
    6 admit      a lease: its load counts from here                 `_take`
    7 forward    bytes through; before the first byte, fail over    `_forward`, `_pass_through`
    8 observe    first token, usage, audit, record                  stages.observe

Stages 3 to 6 are one synchronous step: nothing changes between the look-up and the lease. (Where a
decision would fetch from the pool, the pool is asked, and the step is taken anew.) The
lease and the claim on blocks belong to the request and end with it, however it ends.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, Protocol

from msgspec import Struct
from msgspec.structs import replace
from multidict import CIMultiDict

from policies.cost import candidate_costs
from policies.naming import params_of
from policies.policy import Policy
from policies.view import CandidateId, ReplicaView, RequestView, Snapshot
from router.api import openai
from router.api.body_fields import with_fields
from router.api.clients import FORWARDED
from router.api.failures import error_event
from router.api.opening import MAX_BYTES as MAX_OPENING_BYTES
from router.api.opening import Begun, opening_of
from router.api.outline import Outline
from router.api.sessions import session_hash, session_header, session_of
from router.api.side_effects import has_side_effects
from router.api.usage import TAIL_BYTES, Usage, usage_of_body, usage_of_stream
from router.api.withheld import PREFIX, Withheld
from router.cluster.peers import Alone, Peers
from router.config import Config
from router.contracts import NO_EXTRA, ExtraKeys, HashContract
from router.data_path import tenancy
from router.data_path.assign import assignment_of, enrol, narrowed
from router.data_path.continuation import Continuation, NotContinued, Terms, is_whole, terms_of
from router.data_path.job import Choice, Inbound, Job, Placement, PoolMatch
from router.data_path.lookup import Lookup
from router.data_path.observe import Observer
from router.data_path.read import BodyReader
from router.data_path.tokenize import Tokenizer
from router.data_path.verify import PoolLookup
from router.engine_key import EngineKey
from router.errors import (
    BadRequest,
    ConnectTimeout,
    NoReplicaAvailable,
    OutOfConnections,
    Overdue,
    RouterError,
    UpstreamBroken,
    UpstreamError,
    UpstreamTimeout,
    UpstreamUnreachable,
)
from router.experiments.trials import Trials
from router.index.block_index import NO_BLOCKS
from router.index.cache_view import CacheView
from router.metrics import Metrics
from router.records.outcome import Outcome
from router.records.record import Try
from router.replicas.fleet import NO_MATCH, Fleet, Match
from router.replicas.ledger import Booking, Lease
from router.replicas.replica import Candidate
from router.replicas.retry_budget import RetryBudget
from router.replicas.sessions import Sessions
from router.upstream import Answer, Upstream, end_to_end

logger = logging.getLogger(__name__)

RETRYABLE: Final = frozenset({500, 502, 503, 504})
"""An engine's own failures, worth one more replica. 500: Mooncake's connector answers it when a
pool object vanished between look-up and fetch (kv_load_failure_policy `fail`)."""

_HOLD_PROMPT_S: Final = 1.0
"""How long a stream's beginning without content is kept at most. Of completions and chats: vLLM
begins them with the first token, and an error follows at once."""
_HOLD_OTHER_S: Final = 10.0
"""Of others: the Responses API says that it begins before anything is computed."""

_NOT_SENT: Final = frozenset({UpstreamUnreachable.code, ConnectTimeout.code})
_NOT_PROCESSED: Final = _NOT_SENT | {"status_503"}
"""Failures that say that nothing was computed: the request may move on any number of times."""

_LOOK_AGAIN_S: Final = 1.0  # at an overdue request that was not left

_POOL_MAY_FAIL: Final = frozenset({"status_500", "event_500"})
"""What vLLM makes of a read from the pool that failed."""

CLIENT_LEFT: Final = 499
"""Status in records for a client that did not wait (nginx's number; nobody is sent it)."""

_NOT_FORWARDED: Final = frozenset({"host", "content-length", "expect"}) | FORWARDED
_NOT_RETURNED: Final = frozenset({"content-length"})  # of streams: one that breaks gets an event
_SMALL_ANSWER: Final = 1024 * 1024


class Reply(Protocol):
    """Where the answer goes: the client's connection."""

    async def send(self, status: int, headers: CIMultiDict[str], body: bytes) -> None:
        """Send a whole answer."""

    async def start(self, status: int, headers: CIMultiDict[str]) -> None:
        """Begin an answer of unknown length."""

    async def write(self, chunk: bytes) -> None:
        """Send the next piece, at once."""


class Passage(Struct, kw_only=True):
    """An answer that has begun, and whose it is now; `first_s` is when its first byte came."""

    job: Job
    placement: Placement
    answer: Answer
    first_s: float
    is_released: bool = False  # what it holds of its replica has been given back
    failed: list[tuple[Lease, str]] = []  # what earlier parts of it failed at, and how


class Pipeline:
    """Routes requests. All state it changes sits in its parts.

    Args:
        policy: Places prompts.
        plain_policy: Places what is only passed through.
        trials: Experiments on live traffic.
        engine_key: What replicas are sent in place of a tenant's key.
        seed: For the policies' draws; fixed for the process.
    """

    def __init__(
        self,
        *,
        config: Config,
        fleet: Fleet,
        sessions: Sessions,
        caches: CacheView,
        reader: BodyReader,
        tokenizer: Tokenizer,
        policy: Policy,
        plain_policy: Policy,
        upstream: Upstream,
        observer: Observer,
        pool: PoolLookup | None,
        metrics: Metrics,
        peers: Peers | Alone,
        lookup: Lookup | None,
        trials: Trials,
        engine_key: EngineKey,
        seed: int,
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._sessions = sessions
        self._caches = caches
        self._reader = reader
        self._tokenizer = tokenizer
        self._policy = policy
        self._plain_policy = plain_policy
        self._upstream = upstream
        self._observer = observer
        self._pool = pool
        self._metrics = metrics
        self._peers = peers
        self._lookup = lookup
        self._trials = trials
        self._engine_key = engine_key
        self._withheld = Withheld(config.forward.client_fields)
        self._not_forwarded = _NOT_FORWARDED | self._withheld.headers
        self._seed = seed
        self._retry_budget = RetryBudget(config.forward.retry_ratio)
        self._num_decisions: Counter[str | None] = Counter()  # by model: its policy counts alone

    async def route(self, inbound: Inbound, reply: Reply, request_id: str) -> None:
        """Answer one request.

        Raises:
            RouterError: the caller answers in the API's own shape, if nothing was sent yet.
        """
        job = self._receive(inbound, request_id, await self._reader.read(inbound))
        if job.prompt is not None:
            await self._tokenizer.fill(job)
            await self._hash_ahead(job)
            await self._look_up(job)
        job.enrolment = enrol(self._trials, job)
        job.drop_content()
        job.tokenized_s = time.monotonic()
        tried: set[str] = set()
        try:
            passage = self._answered(job, *await self._forward(job, tried))
        except RouterError:
            if job.charge is not None:
                job.charge.settle(0, time.monotonic())
            raise
        outcome = Outcome.CLIENT_GONE  # unless it gets to the end
        usage: Usage | None = None
        try:
            usage = await self._pass_through(passage, reply, tried)
            outcome = _outcome(passage.answer.outcome_status)
        except UpstreamError:
            outcome = Outcome.REPLICA_FAILED
            raise
        finally:
            passage.answer.close()
            self._release(passage, outcome)
            if passage.job.is_excused:
                self._fleet.absolve(passage.placement.lease, time.monotonic())
            owed = usage if not passage.job.is_continuation else None  # not for our replica's death
            tenancy.settle(
                passage.job, passage.placement, passage.answer.status, owed, time.monotonic()
            )
            self._observer.finished(
                passage.job,
                passage.placement,
                status=passage.answer.status,
                outcome=outcome,
                usage=usage,
                first_s=passage.first_s,
                now_s=time.monotonic(),
            )

    def _answered(self, job: Job, placement: Placement, answer: Answer) -> Passage:
        """Note the first byte of an answer."""
        first_s = answer.first_s
        if job.streams and answer.outcome_status == 200:
            self._fleet.first_token(placement.lease, first_s)
            self._peers.answered(placement.lease, first_s)
            if self._pool is not None and placement.num_pool_tokens:
                self._pool.fetched(placement.candidate.id)
        return Passage(job=job, placement=placement, answer=answer, first_s=first_s)

    # ---------------------------------------------------------------- 1 receive

    def _receive(
        self, inbound: Inbound, request_id: str, read: dict[str, Any] | Outline | None
    ) -> Job:
        """Take what routing needs from what was read; the body itself stays as it is.

        Raises:
            BadRequest: a prompt's body is empty, or a field of it is wrong.
        """
        body: dict[str, Any] | None
        if isinstance(read, Outline):
            body = read.fields
            self._withheld.check_outline(read)
        else:
            body = read
            if body is not None and inbound.body is not None:
                stripped = self._withheld.strip(inbound.body, body)
                if stripped is not inbound.body:
                    inbound = replace(inbound, body=stripped)
        job = Job(inbound=inbound, request_id=request_id, tries=[])
        if isinstance(read, Outline):
            job.outline = read
            if inbound.api == "chat":
                job.chat = openai.outlined_chat(read)
            elif inbound.api == "completions":
                job.completion = openai.outlined_completion(read)
        elif inbound.api == "chat":
            job.chat = openai.parse_chat(_required(body))
        elif inbound.api == "completions":
            job.completion = openai.parse_completion(_required(body))
        if job.prompt is not None:
            job.model = self._model_of(job.prompt.model)
            job.streams = job.prompt.stream
            if job.streams:
                is_on = self._config.forward.continue_streams
                job.terms = (
                    terms_of(_required(body), is_chat=job.chat is not None) if is_on else "off"
                )
            job.extra = self._extra_keys(job.model, job.prompt.cache_salt)
        elif body is not None:
            model = body.get("model")
            job.model = model if isinstance(model, str) else None
            job.streams = body.get("stream") is True
        job.has_side_effects = has_side_effects(inbound.method, inbound.path, body)
        tenancy.admit(job, body)
        job.session = session_of(inbound.headers, body, self._config.session.headers)
        if job.session is not None:
            owner = f"{job.tenant.name}\0" if job.tenant is not None else ""
            job.session_hash = session_hash(job.session, f"{owner}{job.model or ''}")
        return job

    def _model_of(self, named: str | None) -> str:
        """Tell the model of a request that names none: there must be only one.

        Raises:
            BadRequest: there are several to choose from.
        """
        if named is not None:
            return named
        bases = [entry["id"] for entry in self._fleet.models() if entry["parent"] is None]
        if len(bases) > 1:
            raise BadRequest(f"name a `model`: {', '.join(bases)}", param="model")
        return bases[0] if bases else ""

    def _extra_keys(self, model: str, salt: str | None) -> ExtraKeys:
        """Name what besides tokens makes a prompt's blocks its own: salt and adapter."""
        served = self._fleet.model(model)
        lora = (model, served.root or "") if served is not None and served.parent else None
        if lora is None and not salt:
            return NO_EXTRA
        return ExtraKeys(lora=lora, cache_salt=salt or None)

    # ---------------------------------------------------------------- 3 hash, 4 look up

    async def _hash_ahead(self, job: Job) -> None:
        """Hash a long new prompt in steps: placing it is one step, and hashes what is left."""
        if job.tokens is not None and self._tokenizer.is_long(job.tokens):
            with suppress(RouterError):  # nobody serves it: said when it is placed
                candidates = self._fleet.candidates(job.model, time.monotonic())
                await self._tokenizer.hash_ahead(job, self._by_contract(job, candidates))

    async def _look_up(self, job: Job) -> None:
        """Ask Redis itself, where the index is there alone; whatever fails, the request goes on."""
        if self._lookup is not None and job.tokens is not None:
            with suppress(RouterError):  # nobody serves it: said when it is placed
                await self._lookup.fill(job, self._fleet.candidates(job.model, time.monotonic()))

    def _match(self, job: Job, candidates: Sequence[Candidate]) -> dict[CandidateId, Match]:
        """Count the leading prompt tokens each candidate can reuse, capped as the engine caps.

        Candidates are grouped by contract: the chain is computed once per contract.
        """
        matches: dict[CandidateId, Match] = {}
        for contract, ids in self._by_contract(job, candidates).items():
            keys, size = job.keys(contract), contract.block_size
            # The engine recomputes at least the last token, hence a whole block of a full hit.
            reusable = (job.num_tokens - 1) // size
            chain = keys if len(keys) == reusable else keys[:reusable]
            last, match = NO_BLOCKS, NO_MATCH
            for cid, found in self._caches.match(chain, ids, job.found).items():
                if found is not last:  # those who have alike have the same one
                    last = found
                    match = Match(found.num_gpu_blocks * size, found.num_cpu_blocks * size)
                matches[cid] = match
        return matches

    def _by_contract(
        self, job: Job, candidates: Sequence[Candidate]
    ) -> dict[HashContract, list[CandidateId]]:
        """Group candidates by how their blocks are named; those not known at all are left out.

        Empty where the tokens are not known.
        """
        groups: dict[HashContract, list[CandidateId]] = {}
        if job.tokens is None:
            return groups
        last: HashContract | None = None
        ids: list[CandidateId] = []
        for candidate in candidates:
            contract = self._caches.contract(candidate.id)
            if contract is None:
                continue
            if contract != last:  # mostly all have the same
                last, ids = contract, groups.setdefault(contract, [])
            ids.append(candidate.id)
        return groups

    def _first_blocks(self, job: Job, candidates: Sequence[Candidate]) -> int | None:
        """Digest the prompt's first blocks: the key of the last of them, for it is chained."""
        contract = self._caches.contract(candidates[0].id)
        keys = job.keys(contract) if contract is not None else []
        if contract is None or not keys:
            return None
        num_blocks = max(1, self._config.policy.first_blocks_tokens // contract.block_size)
        return keys[min(num_blocks, len(keys)) - 1]

    def _match_pool(self, job: Job, candidates: Sequence[Candidate]) -> PoolMatch | None:
        """Find what the shared pool has of the prompt; None: there is none to count on."""
        if self._pool is None or job.tokens is None:
            return None
        contracts = self._by_contract(job, candidates)
        return self._pool.match(job, candidates[0].replica.base_model, contracts)

    # ---------------------------------------------------------------- 5 decide, 6 admit

    def _decide(self, job: Job, tried: set[str]) -> Choice:
        """Freeze all that the decision may depend on, and choose a candidate.

        Raises:
            UnknownModel, NoReplicaAvailable: nobody serves the model, or nobody who does is up.
        """
        now_s = time.monotonic()
        candidates: Sequence[Candidate]
        candidates = self._fleet.candidates(job.model, now_s, exclude=tried)
        enrolment, assignment = job.enrolment, None
        if enrolment is not None:
            is_beyond = False
            if enrolment.is_narrow:
                candidates, is_beyond = narrowed(enrolment, candidates)
            assignment = assignment_of(enrolment, is_beyond=is_beyond)
        matches = self._match(job, candidates)
        pool = self._match_pool(job, candidates)
        session = (
            self._sessions.get(job.session_hash, now_s) if job.session_hash is not None else None
        )
        views = self._fleet.views(candidates, matches, now_s)
        snapshot = Snapshot(
            now_s=now_s,
            number=self._num_decisions[job.model],
            seed=self._seed,
            request=RequestView(
                num_tokens=job.num_tokens,
                session_hash=job.session_hash,
                session_candidate=session.candidate if session is not None else None,
                first_blocks_hash=self._first_blocks(job, candidates),
            ),
            replicas=views if pool is None else self._with_readers(views, pool),
            num_pool_tokens=pool.num_tokens if pool is not None else None,
        )
        policy = self._policy if job.prompt is not None else self._plain_policy
        if enrolment is not None and enrolment.policy is not None:
            policy = enrolment.policy
        decision = policy.decide(snapshot)
        index = next(i for i, c in enumerate(candidates) if c.id == decision.candidate)
        return Choice(
            candidate=candidates[index],
            view=snapshot.replicas[index],
            decision=decision,
            snapshot=snapshot,
            policy=policy,
            pool=pool,
            assignment=assignment,
        )

    def _with_readers(
        self, views: tuple[ReplicaView, ...], pool: PoolMatch
    ) -> tuple[ReplicaView, ...]:
        """Mark who cannot fetch what was found in the pool: without a connector, or other names."""
        assert self._pool is not None
        reads = self._pool.reads
        if all(reads(v.id) and self._caches.contract(v.id) == pool.contract for v in views):
            return views
        return tuple(
            view
            if reads(view.id) and self._caches.contract(view.id) == pool.contract
            else replace(view, reads_pool=False)
            for view in views
        )

    async def _verified(self, job: Job, tried: set[str]) -> Choice:
        """Decide; where the choice would fetch, see to it that the pool has it, and decide again.

        Also where it could: what another candidate holds the pool has probably been given, too.

        Raises: as `_decide`.
        """
        choice = self._decide(job, tried)
        pool, num_likely_tokens = choice.pool, choice.num_likely_tokens
        if self._pool is None or pool is None:
            return choice
        if not choice.num_pool_tokens and not num_likely_tokens:
            return choice
        num_likely_blocks = num_likely_tokens // pool.contract.block_size
        if not self._pool.is_due(pool, num_likely_blocks):
            return choice
        await self._pool.verify(job, pool, num_likely_blocks)
        return self._decide(job, tried)

    async def _place(self, job: Job, tried: set[str]) -> Placement:
        """Choose a candidate and take it: from here on its load and its blocks count.

        Raises: as `_decide`.
        """
        choice = await self._verified(job, tried)
        tenancy.charge(job, choice, time.monotonic())
        return self._take(job, choice)

    def _take(self, job: Job, choice: Choice) -> Placement:
        now_s = time.monotonic()
        self._num_decisions[job.model] += 1
        candidate, view = choice.candidate, choice.view
        num_own = max(view.num_gpu_tokens, view.num_cpu_tokens)
        num_cached = num_own + choice.num_pool_tokens
        booking = Booking(
            num_uncached_tokens=max(job.num_tokens - num_cached, 0) if job.prompt else 0,
            num_cached_tokens=num_cached,
            num_fetched_tokens=num_cached - view.num_gpu_tokens,
            streams=job.streams and job.prompt is not None,  # else its time teaches nothing
        )
        lease = self._fleet.admit(candidate.id, booking, now_s)
        contract = self._caches.contract(candidate.id)
        claim = None
        num_held_blocks = 0
        if job.tokens is not None and contract is not None:
            num_held_blocks = view.num_gpu_tokens // contract.block_size
            claim = self._caches.claim(candidate.id, job.keys(contract), num_held_blocks)
        self._peers.began(
            lease,
            claim=claim,
            num_held_blocks=num_held_blocks,
            session_hash=job.session_hash,
        )
        if job.session_hash is not None:
            self._sessions.note(job.session_hash, candidate.id, now_s)
        state = self._caches.state(candidate.id)
        self._metrics.decisions.labels(choice.policy.name, state).inc()
        job.placed_s = time.monotonic()
        return Placement(
            candidate=candidate,
            decision=choice.decision,
            snapshot=choice.snapshot,
            policy=choice.policy,
            assignment=choice.assignment,
            lease=lease,
            claim=claim,
            num_gpu_tokens=view.num_gpu_tokens,
            num_cpu_tokens=num_own - view.num_gpu_tokens,
            num_pool_tokens=choice.num_pool_tokens,
            state=state,
        )

    def _give_back(self, placement: Placement, outcome: Outcome) -> None:
        """End the request's claims: its load, and its blocks' being "computed there"."""
        now_s = time.monotonic()
        self._fleet.end(placement.lease, now_s, outcome, jitter=random.random())
        computed = outcome is Outcome.OK
        self._peers.ended(placement.lease, computed=computed)
        if placement.claim is not None:
            self._caches.release(placement.claim, computed=computed, now_s=now_s)

    def _release(self, passage: Passage, outcome: Outcome) -> None:
        """Give back what an answer holds, once."""
        if not passage.is_released:
            passage.is_released = True
            self._give_back(passage.placement, outcome)

    # ---------------------------------------------------------------- 7 forward

    async def _forward(self, job: Job, tried: set[str]) -> tuple[Placement, Answer]:
        """Send the request; until an answer's first byte, a failing replica is left behind.

        Never twice to the same replica, never again for the client's own 4xx, and once more at
        most where a replica may have begun to work on it; once more than that, anywhere, where a
        read from the pool may have failed (`_skip_pool`). The last try's answer is the client's,
        even if it is an error. `tried` is added to.
        """
        self._retry_budget.note_request(time.monotonic())
        failed: list[tuple[Lease, str]] = []
        while True:
            placement = await self._place(job, tried)
            tried.add(placement.candidate.replica.name)
            answer: Answer | None = None
            error: UpstreamError | None = None
            failure: str | None = None
            try:
                may_move_on = partial(self._may_move_on, job, tried, placement)
                answer = await self._ask(job, tried, placement, may_move_on)
                if answer.outcome_status in RETRYABLE:
                    where = "status" if answer.error_status is None else "event"
                    failure = f"{where}_{answer.outcome_status}"
            except UpstreamError as exc:
                error, failure = exc, exc.code
            except OutOfConnections as exc:
                self._give_back(placement, Outcome.ROUTER_FAILED)
                self._note_unanswered(job, placement, exc.status, Outcome.ROUTER_FAILED)
                raise
            except BaseException:  # the client left while we waited
                self._give_back(placement, Outcome.CLIENT_GONE)
                self._note_unanswered(job, placement, CLIENT_LEFT, Outcome.CLIENT_GONE)
                raise
            objection = self._objection(job, tried, placement, failure) if failure else None
            if objection is not None and self._can_skip_pool(job, placement, failure):
                objection = None if self._skip_pool(job, tried) else objection
            job.tries.append(Try(candidate=placement.candidate.id, failure=failure))
            if failure is not None:
                failed.append((placement.lease, failure))
                self._excuse(job, failed, objection)
                if placement.may_fetch and failure in _POOL_MAY_FAIL | {Overdue.code}:
                    assert self._pool is not None
                    self._pool.fetch_failed(placement.candidate.id)
            if answer is not None and (failure is None or objection is not None):
                return placement, answer
            is_refused = isinstance(error, UpstreamUnreachable)
            outcome = Outcome.REPLICA_UNREACHABLE if is_refused else Outcome.REPLICA_FAILED
            if isinstance(error, Overdue):
                outcome = Outcome.POOL_OVERDUE if placement.may_fetch else Outcome.OVERDUE
            self._give_back(placement, outcome)
            if job.is_excused:
                self._fleet.absolve(placement.lease, time.monotonic())
            if error is not None and objection is not None:
                last = _nobody_listens(error) if is_refused else error
                self._note_unanswered(job, placement, last.status, outcome)
                raise last from error
            self._note_failover(job, placement, str(failure))
            if answer is not None:
                answer.close()
            if failure not in _NOT_SENT:
                name = placement.candidate.replica.name
                self._retry_budget.take(name, placement.lease.begun_s, time.monotonic())
            if failure not in _NOT_SENT and not isinstance(error, Overdue):  # it waited enough
                pause_s = self._config.forward.retry_backoff_s * 2.0 ** (len(failed) - 1)
                await asyncio.sleep(random.uniform(0.0, pause_s))

    async def _ask(
        self, job: Job, tried: set[str], placement: Placement, may_move_on: Callable[[], bool]
    ) -> Answer:
        """Send one try and read what can still move on.

        That is an answer that is no stream, and the beginning of one that is.
        """
        overdue_s = self._overdue_s(placement.lease)
        answer = await self._upstream.open(
            placement.candidate.replica.name,
            placement.candidate.replica.url + job.inbound.target,
            method=job.inbound.method,
            headers=self._upstream_headers(job, placement),
            body=job.forwarded[0],
            may_move_on=may_move_on,
            may_resend=not job.has_side_effects,
            patience=partial(self._patience, job, tried, placement) if overdue_s else None,
            patience_s=overdue_s or 0.0,
        )
        try:
            answer.first_s = time.monotonic()
            if not answer.is_event_stream:
                await answer.gather(_SMALL_ANSWER)
                answer.first_s = time.monotonic()
            elif answer.status == 200:
                await self._hold(job, placement, answer)
        except BaseException:
            answer.close()
            raise
        return answer

    async def _hold(self, job: Job, placement: Placement, answer: Answer) -> None:
        """Keep a stream's beginning here until something was generated, or generating failed."""
        until_s = answer.first_s + (_HOLD_PROMPT_S if job.prompt is not None else _HOLD_OTHER_S)
        while (said := opening_of(answer.first)) is Begun.NOT_YET:
            if answer.complete or len(answer.first) >= MAX_OPENING_BYTES:
                return
            if not await answer.read_on(until_s - time.monotonic()):
                return
        if isinstance(said, int):
            answer.error_status = said
            name = placement.candidate.replica.name
            self._metrics.first_event_errors.labels(name, str(said)).inc()

    def _overdue_s(self, lease: Lease) -> float | None:
        """Say after how long a first token is overdue; None: never."""
        forward = self._config.forward
        if not forward.overdue_ratio:
            return None
        return self._fleet.overdue_s(
            lease, ratio=forward.overdue_ratio, floor_s=forward.overdue_floor_s
        )

    def _patience(self, job: Job, tried: set[str], placement: Placement) -> float | None:
        """Say how long to wait on for an overdue first token; None: leave now.

        It is left where the policy's choice elsewhere would be sooner than it is late already: then
        waiting and leaving together cost at most twice the better of both. Where others wait there
        for half as long as this one, it is load, and what moves on would only make more of it.
        """
        objection = self._objection(job, tried, placement, Overdue.code)
        if objection is not None:
            self._metrics.overdue.labels(objection).inc()
            return _LOOK_AGAIN_S
        now_s = time.monotonic()
        try:
            choice = self._decide(job, tried)
        except RouterError:
            return _LOOK_AGAIN_S
        costs = candidate_costs(choice.snapshot)
        [ttft_ms] = [cost.ttft_ms for cost in costs if cost.id == choice.candidate.id]
        waited_s = now_s - placement.lease.begun_s
        late_ms = waited_s * 1000.0 - placement.lease.predicted_ms
        is_late = self._fleet.longest_wait_s(choice.candidate.id, now_s) >= waited_s / 2
        if is_late or ttft_ms >= late_ms:
            self._metrics.overdue.labels("late_elsewhere").inc()
            return _LOOK_AGAIN_S
        self._metrics.overdue.labels("left").inc()
        return None

    def _may_move_on(self, job: Job, tried: set[str], placement: Placement) -> bool:
        """Say whether a try that gets no answer in time may be followed by one more."""
        return self._objection(job, tried, placement, UpstreamTimeout.code) is None

    def _objection(
        self, job: Job, tried: set[str], placement: Placement, failure: str
    ) -> str | None:
        """Say why a failed try may not be followed by one more elsewhere; None: it may."""
        if failure not in _NOT_SENT:
            if job.has_side_effects:
                return "side_effects"
            if len(tried) >= self._config.forward.max_tries:
                return "max_tries"
            if failure not in _NOT_PROCESSED and any(
                t.failure is not None and t.failure not in _NOT_PROCESSED for t in job.tries
            ):
                return "sent_twice"
        now_s = time.monotonic()
        try:
            self._fleet.candidates(job.model, now_s, exclude=tried)
        except RouterError:
            return "no_replica"
        name, begun_s = placement.candidate.replica.name, placement.lease.begun_s
        if failure in _NOT_SENT or self._retry_budget.can_take(name, begun_s, now_s):
            return None
        return "budget"

    def _can_skip_pool(self, job: Job, placement: Placement, failure: str | None) -> bool:
        """Say whether a failure may be the pool's, and computing everything may help."""
        if self._pool is None or job.prompt is None or job.skips_pool:
            return False
        if not any(f in _POOL_MAY_FAIL for f in (failure, *(t.failure for t in job.tries))):
            return False
        name, begun_s = placement.candidate.replica.name, placement.lease.begun_s
        return self._retry_budget.can_take(name, begun_s, time.monotonic())

    def _skip_pool(self, job: Job, tried: set[str]) -> bool:
        """Make of a request one that no cache has anything of; False if its body cannot be one.

        Until the master drops what a dead engine held (10 s), every replica that looks there finds
        the objects and fails to read them (`kv_load_failure_policy: fail`). There is no field to
        forbid a read; under a salt of its own a prompt's blocks have other names.
        """
        salt = secrets.token_hex(8)
        try:
            body = with_fields(job.inbound.body or b"{}", {"cache_salt": salt})
        except BadRequest:  # it has the field too often
            return False
        job.inbound = replace(job.inbound, body=body)
        job.extra, job.chains, job.found = self._extra_keys(job.model or "", salt), {}, {}
        job.skips_pool = job.is_excused = True
        self._metrics.pool_skipped.inc()
        try:
            self._fleet.candidates(job.model, time.monotonic(), exclude=tried)
        except RouterError:
            tried.clear()
        return True

    def _excuse(self, job: Job, failed: Sequence[tuple[Lease, str]], objection: str | None) -> None:
        """Decide whose fault the last failure is, and take back what an earlier one counted.

        What fails at two replicas in the same way is the request's. Where no budget is left to
        try another replica, nothing is proven: else a flood of such requests would still do it.
        """
        if objection is not None:
            self._metrics.not_retried.labels(objection).inc()
        failure, before = failed[-1][1], failed[:-1]
        if failure in _NOT_PROCESSED:
            return
        same = [other for other, its_failure in before if its_failure == failure]
        if same:
            self._fleet.absolve(same[-1], time.monotonic())
        if same or objection == "budget":
            job.is_excused = True
            self._metrics.absolved.labels("same_elsewhere" if same else "unproven").inc()

    def _upstream_headers(self, job: Job, placement: Placement) -> CIMultiDict[str]:
        """Pass the client's headers on, with what an engine reads from a router added.

        A tenant's key is for us: the engine gets its own, if there is one.
        """
        headers = end_to_end(
            job.inbound.headers.items(), drop=self._not_forwarded, drop_prefix=PREFIX
        )
        if job.tenant is not None:
            for name in ("Authorization", "x-api-key"):
                headers.popall(name, None)
            headers.update(self._engine_key.headers(placement.candidate.replica.url))
        if not job.forwarded[1]:
            headers.popall("Content-Encoding", None)
        headers["X-Request-Id"] = job.request_id
        session = headers.get("X-Session-ID") or job.session
        if session is not None:
            headers["X-Session-ID"] = session_header(session)
        if placement.candidate.rank is not None:
            headers["X-data-parallel-rank"] = str(placement.candidate.rank)
        if job.inbound.client is not None:
            job.inbound.client.write(headers)
        return headers

    def _note_failover(self, job: Job, placement: Placement, reason: str) -> None:
        name = placement.candidate.replica.name
        self._metrics.failovers.labels(name, reason).inc()
        logger.warning(
            "moved on before the first byte",
            extra={"request": job.request_id, "replica": name, "reason": reason},
        )

    def _note_unanswered(
        self, job: Job, placement: Placement, status: int, outcome: Outcome
    ) -> None:
        """Record a request that ended without a byte of an answer."""
        if job.is_continuation:
            return  # it has had one, and is recorded with it
        self._observer.finished(
            job,
            placement,
            status=status,
            outcome=outcome,
            usage=None,
            first_s=None,
            now_s=time.monotonic(),
        )

    async def _pass_through(self, passage: Passage, reply: Reply, tried: set[str]) -> Usage | None:
        """Hand the answer on, byte for byte, and keep what tells its usage.

        Raises:
            UpstreamBroken, UpstreamTimeout: it broke off; a stream's client has been told.
        """
        job, placement, answer = passage.job, passage.placement, passage.answer
        drop = _NOT_RETURNED if answer.is_event_stream else frozenset[str]()
        headers = end_to_end(answer.headers.items(), drop=drop, drop_prefix=PREFIX)
        headers["x-warmroute-request-id"] = job.request_id
        # Of a refused request they would tell what others had sent, and cost nothing to ask.
        if answer.status < 400 and job.inbound.client and job.inbound.client.sees_details:
            _explain_in(headers, job, placement)
        tenancy.say_limits(headers, job, time.monotonic())
        terms = job.terms if answer.is_event_stream and answer.outcome_status == 200 else "status"
        is_cut = isinstance(terms, Terms) and not is_whole(answer.first)
        if answer.complete and not is_cut:
            await reply.send(answer.status, headers, answer.first)
            if answer.status != 200 or job.prompt is None:
                return None
            # A short stream is here as a whole, too.
            read = usage_of_stream if answer.is_event_stream else usage_of_body
            return read(answer.first)
        await reply.start(answer.status, headers)
        if isinstance(terms, Terms):
            return await self._stream(passage, reply, Continuation(terms), tried)
        try:
            await reply.write(answer.first)
            tail = bytearray(answer.first)
            async for chunk in answer.chunks():
                await reply.write(chunk)
                tail += chunk
                if len(tail) > 4 * TAIL_BYTES:  # now and then: moving it for each event is dear
                    del tail[:-TAIL_BYTES]
        except UpstreamError as exc:
            if answer.is_event_stream:
                self._metrics.continuations.labels("refused", str(terms)).inc()
                with suppress(ConnectionError):  # the client may be gone as well
                    await reply.write(error_event(exc, job.inbound.path))
            raise
        return usage_of_stream(bytes(tail[-TAIL_BYTES:])) if job.prompt is not None else None

    async def _stream(
        self, passage: Passage, reply: Reply, stream: Continuation, tried: set[str]
    ) -> Usage | None:
        """Hand a stream on; where its engine dies, another replica goes on with it.

        Raises:
            UpstreamBroken, UpstreamTimeout: none does; the client has been told.
        """
        job = passage.job
        broken: UpstreamError | None = None
        failure = b""
        while True:
            try:
                try:
                    await self._hand_on(passage, stream, reply)
                    return stream.usage
                except UpstreamError as exc:
                    broken, failure = exc, stream.failure
                    end = await self._go_on(job, passage, stream, tried, exc)
                if end is not None:
                    await reply.write(end)
                    return stream.usage
            except NotContinued as exc:
                assert broken is not None  # what comes from the first engine is not judged
                self._release(passage, Outcome.CLIENT_GONE)  # unless it is the one that broke off
                self._metrics.continuations.labels("refused", exc.reason).inc()
                with suppress(ConnectionError):  # the client may be gone as well
                    await reply.write(failure or error_event(broken, job.inbound.path))
                raise broken from exc

    async def _hand_on(self, passage: Passage, stream: Continuation, reply: Reply) -> None:
        """Hand on one engine's part of a stream.

        Raises:
            UpstreamError: it broke off, or said itself that it has failed.
            NotContinued: it does not go on with the answer that it was given.
        """
        answer, name = passage.answer, passage.placement.candidate.replica.name
        whole = stream.feed(answer.first)
        if whole:
            await reply.write(whole)
        if not stream.failure:
            async for chunk in answer.chunks():
                whole = stream.feed(chunk)
                if whole:
                    await reply.write(whole)
                if stream.failure:
                    break
        if stream.failure:
            raise UpstreamBroken(name, f"replica {name} reported an error inside its answer")
        if not stream.is_whole:
            raise UpstreamBroken(name, f"replica {name} ended its answer early")
        rest = stream.end()
        if rest:
            await reply.write(rest)

    async def _go_on(
        self,
        job: Job,
        passage: Passage,
        stream: Continuation,
        tried: set[str],
        error: UpstreamError,
    ) -> bytes | None:
        """Have another replica go on with a stream that broke off.

        Returns the stream's end instead, where its client has every token already.

        Raises:
            NotContinued: it ends here.
        """
        placement, name = passage.placement, passage.placement.candidate.replica.name
        passage.answer.close()
        self._release(passage, Outcome.REPLICA_FAILED)
        objection = self._objection(job, tried, placement, error.code)
        job.tries[-1] = Try(candidate=placement.candidate.id, failure=error.code)
        passage.failed.append((placement.lease, error.code))
        self._excuse(passage.job, passage.failed, objection)
        transcript = stream.check()
        if transcript.finish_reason is not None and not stream.lacks_usage:
            return self._concluded(stream.conclusion(), passage, error)
        prompt_ids, ids = await self._tokenizer.lengthen(job, name, transcript, stream.terms)
        if stream.is_spent(len(ids)):
            end = stream.conclusion(num_prompt_tokens=len(prompt_ids), num_text_tokens=len(ids))
            return self._concluded(end, passage, error)
        if objection is not None:
            raise NotContinued(objection)
        self._retry_budget.take(name, placement.lease.begun_s, time.monotonic())
        assert job.inbound.body is not None
        try:
            body = with_fields(job.inbound.body, stream.resume(prompt_ids, ids))
        except BadRequest as exc:  # it repeats a key
            raise NotContinued("field") from exc
        continued = self._tokenizer.continued(job, [*prompt_ids, *ids], len(ids), body)
        try:
            placement, answer = await self._forward(continued, tried)
        except RouterError as exc:
            raise NotContinued("no_replica") from exc
        if answer.outcome_status != 200 or not answer.is_event_stream:
            answer.close()
            self._give_back(placement, _outcome(answer.outcome_status))
            raise NotContinued("status")
        self._note_continuation("continued", passage, error)
        self._answered(continued, placement, answer)  # for the fleet; the client's is long gone by
        passage.job, passage.placement, passage.answer = continued, placement, answer
        passage.is_released = False
        return None

    def _concluded(self, end: bytes, passage: Passage, error: UpstreamError) -> bytes:
        self._note_continuation("concluded", passage, error)
        return end

    def _note_continuation(self, result: str, passage: Passage, error: UpstreamError) -> None:
        self._metrics.continuations.labels(result, error.code).inc()
        logger.warning(
            "went on with a stream that broke off",
            extra={
                "request": passage.job.request_id,
                "replica": passage.placement.candidate.replica.name,
                "reason": error.code,
                "result": result,
            },
        )

    # ---------------------------------------------------------------- dry run

    async def explain(self, inbound: Inbound, *, with_tokens: bool) -> dict[str, Any]:
        """Decide as for a request, change nothing, and tell everything the decision saw.

        Raises:
            RouterError: as `route` would.
        """
        job = self._receive(inbound, "explain", await self._reader.read(inbound))
        await self._tokenizer.fill(job)
        await self._hash_ahead(job)
        await self._look_up(job)
        job.enrolment = enrol(self._trials, job)
        choice = await self._verified(job, set())
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
            "num_pool_tokens": snapshot.num_pool_tokens,
            "candidates": [
                {"state": self._caches.state(view.id), "view": view} for view in snapshot.replicas
            ],
        }
        if with_tokens and job.tokens is not None:
            contract = self._caches.contract(decision.candidate)
            keys = job.keys(contract) if contract is not None else []
            explained["contract"] = contract
            explained["token_ids"] = job.tokens.ids()
            explained["keys"] = [f"{key:015x}" for key in keys]
        return explained


def _required(body: Mapping[str, Any] | None) -> Mapping[str, Any]:
    if body is None:
        raise BadRequest("the body is empty; send a JSON object")
    return body


def _explain_in(headers: CIMultiDict[str], job: Job, placement: Placement) -> None:
    """Add what was decided to the answer's headers."""
    headers["x-warmroute-replica"] = placement.candidate.id
    headers["x-warmroute-policy"] = placement.policy.name
    if placement.assignment is not None:
        assigned = placement.assignment
        headers["x-warmroute-arm"] = f"{assigned.experiment}/{assigned.arm}"
    if job.tokens is not None:
        headers["x-warmroute-cached"] = (
            f"gpu={placement.num_gpu_tokens};cpu={placement.num_cpu_tokens}"
            f";pool={placement.num_pool_tokens}"
        )
    headers["x-warmroute-ms"] = f"{(job.placed_s - job.inbound.arrived_s) * 1000:.2f}"


def _nobody_listens(error: UpstreamError) -> RouterError:
    """Say to a client that it may come back: the last replica it could have is not there."""
    return NoReplicaAvailable(f"No replica can take a request now: {error.message}.")


def _outcome(status: int) -> Outcome:
    if status >= 500:
        return Outcome.REPLICA_FAILED
    return Outcome.CLIENT_ERROR if status >= 400 else Outcome.OK
