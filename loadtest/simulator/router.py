"""One simulated router: the live one's fleet, caches, sessions and queue, in virtual time.

The objects are the live router's own; only their inputs are simulated: events, readings of metrics,
notes of other routers. What must not live here: decisions (place), engines, the order of events.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from loadtest.engine_model.pool import BlockPool
from loadtest.simulator.place import make_place
from loadtest.simulator.setup import MODEL, Setup
from loadtest.simulator.stream import SimulatedStream
from policies.policy import Policy
from policies.view import CandidateId
from router.base.contracts import BlockKey, HashContract
from router.index.behind import Behind
from router.index.block_index import BlockIndex
from router.index.cache_view import CacheView
from router.index.candidate_stream import Claim
from router.records.record import Outcome
from router.replicas.candidate_state import EngineLoad
from router.replicas.fleet import Fleet
from router.replicas.ledger import Booking, Lease
from router.replicas.replica import Replica, ServedModel
from router.request.results import Placement, Plan, Prompt, Tries, Wait
from router.scheduling.queue import Queue
from router.scheduling.waiting import ANYWHERE, NOTHING, InFront, Where

_EXPIRE_EVERY_S = 1.0  # as router.run does
_PEERS: Final = "nixl"
"""The simulated transfer from replica to replica: the prompt first, then its request."""


class Note(Struct, frozen=True, gc=False):
    """A placement as other routers learn of it: `router.base.messages.Began`."""

    keys: Sequence[BlockKey]
    candidate: CandidateId
    booking: Booking
    num_held_blocks: int | None  # None: it claims no blocks


class Router:
    """Places requests by a policy, and follows engines and other routers."""

    def __init__(
        self, policy: Policy, setup: Setup, block_size: int, pool: BlockPool | None
    ) -> None:
        self._block_size = block_size
        self._index = BlockIndex()
        self._pool = pool
        self._fleet = Fleet(behind=self._behind)
        self._caches = CacheView(self._index)
        self._expire_s = self._now_s = 0.0
        self._contract = HashContract(algorithm="warmroute", block_size=block_size)
        self.streams = [self._add(setup, number) for number in range(len(setup.roles))]
        self._numbers = {stream.candidate: n for n, stream in enumerate(self.streams)}
        self._place = make_place(
            policy, setup, self._fleet, self._caches, pool, lambda: self._now_s
        )
        self.queue: Queue[Plan] | None = None
        if setup.queue is not None:
            self.queue = Queue(
                setup.queue,
                self._fleet.conversations,
                self._fleet.load,
                lambda waiting, plan: self._place.has_room(waiting.item.prompt, plan),
            )

    def _add(self, setup: Setup, number: int) -> SimulatedStream:
        """Add a replica to the fleet; return the stream of its events."""
        name, role = setup.roles[number]
        num_blocks = setup.cache_blocks(self._block_size)
        replica = Replica(
            name=name,
            url=f"http://{name}",
            role=role,
            transfer=_PEERS if setup.moves_by_peers else "store",
            models=(ServedModel(id=MODEL),),
            block_size=self._block_size,
            num_blocks=num_blocks,
            publishes_events=True,
        )
        self._fleet.members.add(replica)
        stream = SimulatedStream(
            CandidateId(name),
            self._index,
            contract=self._contract,
            capacity_blocks=num_blocks + 1,  # the null block among them
        )
        self._caches.add(stream.candidate, stream)
        return stream

    def _behind(self, candidate: CandidateId) -> Behind:
        if self._pool is None:
            return self._caches.behind(candidate)
        pool = self._pool
        return Behind(len(pool), is_full=pool.num_evicted > 0, sharers=tuple(self._numbers))

    def number_of(self, placement: Placement) -> int:
        """Return the number of the replica that a request goes to."""
        return self._numbers[placement.lease.candidate]

    def keys_of(self, prompt: Prompt) -> Sequence[BlockKey]:
        """Return the keys of a prompt's full blocks."""
        return prompt.keys(self._contract)

    def plan(
        self,
        prompt: Prompt,
        now_s: float,
        in_front_ms: InFront = NOTHING,
        where: Where = ANYWHERE,
    ) -> Plan:
        """Decide where a request goes now."""
        self._catch_up(now_s)
        return self._place.plan(prompt, Tries(), in_front_ms, where)

    def commit(self, prompt: Prompt, plan: Plan, now_s: float, why: str | None = None) -> Placement:
        """Carry out a plan: from here on the request's load and blocks count."""
        self._now_s = now_s
        return self._place.commit(prompt, Tries(wait=Wait(released=why)), plan)

    def rebook(self, prompt: Prompt, placement: Placement, now_s: float) -> None:
        """Book a request again at its decode replica: its prompt is computed by now."""
        self._catch_up(now_s)
        is_sent = placement.candidate.replica.transfer != "store"
        plan = self._place.look(prompt, placement)
        self._place.rebook(prompt, placement, plan, is_sent=is_sent)

    def first_token(self, placement: Placement, now_s: float) -> None:
        """Record a first token, and learn from its time."""
        self._place.first_token(placement, now_s)

    def end(self, placement: Placement, now_s: float) -> None:
        """Release a request's load and claims."""
        self._now_s = now_s
        self._place.end(placement, Outcome.OK)

    def note_load(self, number: int, load: EngineLoad) -> None:
        """Record a reading of an engine's metrics."""
        self._fleet.load.note_engine_load(self.streams[number].candidate, load)

    def _catch_up(self, now_s: float) -> None:
        self._now_s = now_s
        for stream in self.streams:
            stream.catch_up(now_s)
        if now_s >= self._expire_s:
            self._caches.expire_claims(now_s)
            self._expire_s = now_s + _EXPIRE_EVERY_S

    # -- other routers' requests ---------------------------------------------------------------

    def note_of(self, prompt: Prompt, placement: Placement) -> Note:
        """Return what other routers learn of a placement."""
        lease, num_held_blocks = placement.lease, None
        if placement.claim is not None:
            num_held_blocks = placement.predicted.num_gpu_tokens // self._block_size
        return Note(
            keys=self.keys_of(prompt),
            candidate=lease.candidate,
            booking=replace(lease.booking, is_ours=False),
            num_held_blocks=num_held_blocks,
        )

    def began_elsewhere(self, note: Note, now_s: float) -> tuple[Lease, Claim | None]:
        """Book a request of another router, as `router.cluster.peers` does."""
        lease, claim = self._fleet.load.admit(note.candidate, note.booking, now_s), None
        if note.num_held_blocks is not None:
            claim = self._caches.claim(note.candidate, note.keys, note.num_held_blocks)
        return lease, claim

    def answered_elsewhere(self, lease: Lease, ttft_s: float, now_s: float) -> None:
        """Record the first token of another router's request."""
        self._fleet.load.first_token(lease, now_s, 1e3 * ttft_s)

    def ended_elsewhere(self, lease: Lease, claim: Claim | None, now_s: float) -> None:
        """Release another router's lease and claim."""
        self._fleet.load.end(lease, now_s, None)
        if claim is not None:
            self._caches.release(claim, computed=True, now_s=now_s)
