"""Find all that placing a request needs to know: its tokens, its blocks, its session's owner.

`Ahead` does what may wait before a plan: it hashes a long prompt in steps, and asks Redis. Planning
itself is synchronous, so that nothing changes between the look-up and the lease.

A `Lookup` finds matches in Redis (`index.mode: redis`), in one round trip for what is new there. It
is asked about candidates that this router does not know completely: it cannot reach their event
port, or it joined after the engine dropped its history. A late or failed look-up means that the
local view counts. No request waits longer than the deadline.

`Owners`: a request about a response goes to the replica that issued it.

    find     when it is read: which replica that is, as this router or Redis knows
    record   when an answer has begun: the id that it brings. Redis has it before the client does
    found    when an answer has begun to a request that no router knew the replica of

A request about an unknown response is placed like any other, and every replica is asked until one
has it (router.request.retry). With tenants it is refused, since the response may be
another caller's. Redis is asked within a deadline, only for ids that are not known here, and twice
before a request is refused; without Redis a router knows the responses that passed through itself.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from time import monotonic
from typing import Final

from msgspec.structs import asdict, replace

from policies.view import CandidateId
from router.api.responses import issued_in
from router.base.caller import ANYBODY
from router.base.contracts import HashContract
from router.base.errors import ResponseNotFound, RouterError, StoreError
from router.base.loop_turns import Turns
from router.base.messages import StreamId
from router.cluster.candidate_source import CandidateNames
from router.cluster.following import LogTails
from router.cluster.link import Link
from router.cluster.sharing import Sharing
from router.discovery.served_models import ServedModels
from router.index.block_index import BlockMatch
from router.index.cache_view import CacheView
from router.metrics import Metrics
from router.replicas.fleet import Fleet
from router.replicas.registry import Registry
from router.replicas.replica import Candidate
from router.replicas.response_owners import ResponseKey, ResponseOwners, response_key
from router.request.match import same_names
from router.request.queue import WaitingRoom
from router.request.read import extra_keys
from router.request.results import Placement, Prompt, Read, Variant
from router.request.tokenize import Tokenizer
from router.tokens import Tokens
from router.upstream import Answer

logger = logging.getLogger(__name__)


class Lookup:
    """Asks Redis how much of a prompt each candidate holds.

    Args:
        tails: What was read of the blocks in Redis.
        link: Says whether Redis is there. If not, it is not asked.
    """

    def __init__(
        self,
        tails: LogTails,
        *,
        link: Link,
        names: CandidateNames,
        caches: CacheView,
        metrics: Metrics,
    ) -> None:
        self._tails = tails
        self._link = link
        self._names = names
        self._caches = caches
        self._metrics = metrics

    async def find(
        self, prompt: Prompt, candidates: Sequence[Candidate]
    ) -> dict[CandidateId, BlockMatch]:
        """Return the matches of incompletely known candidates, as far as Redis knows them."""
        matches: dict[CandidateId, BlockMatch] = {}
        if prompt.tokens is None or not self._link.is_up:
            return matches
        for contract, candidate_of in self._by_contract(candidates).items():
            started_s = time.monotonic()
            try:
                found = await self._tails.lookup(prompt.keys(contract), tuple(candidate_of))
            except StoreError as exc:
                self._metrics.lookups.labels(exc.code).inc()
                break
            self._metrics.lookups.labels("ok").inc()
            self._metrics.lookup_seconds.observe(time.monotonic() - started_s)
            matches |= {
                candidate: BlockMatch(found[id_, "gpu"], found[id_, "gpu"], found[id_, "cpu"])
                for id_, candidate in candidate_of.items()
            }
        return matches

    def _by_contract(
        self, candidates: Sequence[Candidate]
    ) -> Mapping[HashContract, dict[StreamId, CandidateId]]:
        groups: dict[HashContract, dict[StreamId, CandidateId]] = {}
        for candidate in candidates:
            stream, id_ = self._caches.stream(candidate.id), self._names.stream_id_of(candidate.id)
            if id_ is None or stream is None or self._caches.index.has_groups(candidate.id):
                continue  # a prefix of one of several KV groups is no hit
            if stream.state != "exact":
                groups.setdefault(stream.contract, {})[id_] = candidate.id
        return groups


_HEAVY_TOKENS: Final = 32_768  # hashing them takes 3 ms, and several times that on slow machines


class Ahead:
    """Prepares prompts for planning.

    Args:
        lookup: The index in Redis. None: it is not asked.
        encoders: Where a long chain is hashed.
    """

    def __init__(
        self,
        *,
        fleet: Fleet,
        caches: CacheView,
        lookup: Lookup | None,
        encoders: Executor,
        turns: Turns,
    ) -> None:
        self._fleet = fleet
        self._caches = caches
        self._lookup = lookup
        self._encoders = encoders
        self._turns = turns

    def is_due(self, prompt: Prompt) -> bool:
        """Return whether there is anything to do for a prompt."""
        tokens = prompt.tokens
        if tokens is None:
            return False
        return self._lookup is not None or tokens.num_new_tokens > _HEAVY_TOKENS

    async def prepare(self, prompt: Prompt) -> Prompt:
        """Hash a long new prompt, and ask Redis. If anything fails, the request goes on."""
        tokens = prompt.tokens
        assert tokens is not None
        with suppress(RouterError):  # no replica serves it: the plan says so
            candidates = self._candidates(prompt)
            if tokens.num_new_tokens > _HEAVY_TOKENS:
                await self._hash(prompt, tokens, candidates)
            if self._lookup is not None:
                return replace(prompt, found=await self._lookup.find(prompt, candidates))
        return prompt

    def _candidates(self, prompt: Prompt) -> Sequence[Candidate]:
        """List the candidates for a request, or for its prompt.

        Raises:
            UnknownModel, NoReplicaAvailable: there are none.
        """
        model, now_s = prompt.read.model, monotonic()
        candidates = self._fleet.offers.candidates(model, now_s)
        helpers = self._fleet.offers.prefillers(model, None, now_s)
        return same_names(prompt, (*candidates, *helpers))

    async def _hash(self, prompt: Prompt, tokens: Tokens, candidates: Sequence[Candidate]) -> None:
        """Hash a prompt's chain in steps, off the loop where they are long."""
        loop = asyncio.get_running_loop()
        for contract in self._caches.by_contract([each.id for each in candidates]):
            steps = tokens.hashing(contract, prompt.extra)
            try:
                work = next(steps)
                while True:
                    if work is None:
                        await self._turns.take()
                        work = next(steps)
                    else:
                        work = steps.send(await loop.run_in_executor(self._encoders, work))
            except StopIteration:
                pass


_OK: Final = 200
_ASK_AGAIN_S: Final = 0.1


class Owners:
    """Finds the replicas that issued responses.

    Args:
        sharing: Knows what other routers issued. None: there is no Redis.
        ttl_s: How long Redis keeps what is issued here.
    """

    def __init__(
        self,
        known: ResponseOwners,
        *,
        registry: Registry,
        fleet: Fleet,
        sharing: Sharing | None,
        ttl_s: float,
        metrics: Metrics,
    ) -> None:
        self._known = known
        self._registry = registry
        self._fleet = fleet
        self._sharing = sharing
        self._ttl_s = ttl_s
        self._metrics = metrics

    async def find(self, read: Read) -> str | None:
        """Return the replica that issued the response a request names. None: it may go to any.

        Raises:
            ResponseNotFound: that replica is gone; or the response is not known to be its caller's.
        """
        assert read.response_id is not None
        key = _key(read, read.response_id)
        identity, where = self._known.get(key), "here"
        if identity is None:
            identity, where = await self._ask(key), "redis"
        is_anybody = read.inbound.caller is ANYBODY
        if identity is None and not is_anybody and self._sharing is not None:
            await asyncio.sleep(_ASK_AGAIN_S)  # the router that issued it may be late
            identity = await self._ask(key)
        if identity is None:
            self._metrics.responses_found.labels("unknown").inc()
            if not is_anybody:
                raise ResponseNotFound(read.response_id)
            return None
        entry = self._registry.of_identity(identity)
        if entry is None or not self._fleet.members.listens(entry.name, monotonic()):
            self._metrics.responses_found.labels("gone").inc()
            raise ResponseNotFound(read.response_id)
        self._metrics.responses_found.labels(where).inc()
        return entry.name

    async def _ask(self, key: ResponseKey) -> str | None:
        """Ask Redis; late or failing means unknown."""
        if self._sharing is None or not self._sharing.link.is_up:
            return None
        try:
            identity = await self._sharing.store.records.response_owner(key)
        except StoreError as exc:
            logger.debug("look-up of a response failed", extra={"reason": exc.message})
            return None
        if identity is not None:
            self._known.learn(key, identity)
        return identity

    async def record(self, read: Read, placement: Placement, answer: Answer) -> None:
        """Remember which replica issued the response that an answer brings, in Redis too."""
        if answer.status != _OK:
            return
        response_id = issued_in(answer.readable, is_event_stream=answer.is_event_stream)
        entry = self._registry.find(placement.replica)
        if response_id is None or entry is None:
            return
        key = _key(read, response_id)
        self._known.note(key, entry.identity)
        if self._sharing is None or not self._sharing.link.is_up:
            return
        try:
            await self._sharing.store.records.put_response_owner(key, entry.identity, self._ttl_s)
        except StoreError as exc:  # it is written later, with others
            logger.debug("a response was not stored", extra={"reason": exc.message})
        else:
            self._known.saved({key: entry.identity})

    def found(self, read: Read, placement: Placement, answer: Answer) -> None:
        """Remember which replica had the response that a request names."""
        assert read.response_id is not None
        entry = self._registry.find(placement.replica)
        if answer.outcome_status == _OK and entry is not None:
            self._known.note(_key(read, read.response_id), entry.identity)


def _key(read: Read, response_id: str) -> ResponseKey:
    return response_key(response_id, read.inbound.caller.name or "")


Choose = Callable[[Read], Variant | None]


class Prompts:
    """Turns requests that were read into prompts that can be placed.

    choose: Says how a prompt is placed; it is asked once. None: all are placed in one way.
    """

    def __init__(
        self,
        *,
        fleet: Fleet,
        models: ServedModels,
        owners: Owners,
        tokenizer: Tokenizer,
        ahead: Ahead,
        queue: WaitingRoom,
    ) -> None:
        self._fleet = fleet
        self._models = models
        self._owners = owners
        self.tokenizer = tokenizer
        self._ahead = ahead
        self._queue = queue
        self.choose: Choose | None = None

    async def count(self, read: Read) -> int | None:
        """Count the tokens of a request that asks for that. None: an engine has to."""
        await self._look_for_model(read)
        return await self.tokenizer.count(read)

    async def of(self, read: Read) -> Prompt:
        """Find the tokens of a request, and who must or may answer it.

        Raises:
            RouterError: it is refused.
        """
        await self._look_for_model(read)
        owner = await self._owners.find(read) if read.response_id is not None else None
        if read.request is None or read.inbound.api.counts:
            read = replace(read, request=None)
            return Prompt(read=read, owner=owner, tokenized_s=monotonic())
        tokenized = await self.tokenizer.find(read)
        variant = self.choose(read) if self.choose is not None else None
        service_class, deadline_ms = self._queue.service(read, variant)
        prompt = Prompt(
            **asdict(tokenized),
            read=read.without_content(),
            owner=owner,
            extra=extra_keys(self._fleet, read.model or "", read.salt),
            variant=variant,
            service_class=service_class,
            deadline_ms=deadline_ms,
        )
        if self._ahead.is_due(prompt):
            prompt = await self._ahead.prepare(prompt)
        return replace(prompt, tokenized_s=monotonic())

    async def _look_for_model(self, read: Read) -> None:
        """Ask replicas whether they serve a model that none is known to serve."""
        if read.model and self._fleet.members.served.get(read.model) is None:
            await self._models.look_for(read.model)
