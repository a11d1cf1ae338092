"""Replicas and the candidates that they offer: what discovery found, without moving state.

An `Entry` is a replica as a source found it, and as the registry says that it should be.

Replicas of one model may take requests of different lengths. An engine refuses a prompt that leaves
no room for an answer, and cuts an answer that would exceed its length. So a request goes to a
replica with room for its prompt and the answer that it asks for. Source: vLLM 0.32
v1/engine/input_processor.py, entrypoints/serve/utils/api_utils.py `get_max_tokens`.

`EventPorts`: are a replica's event endpoints its own engine's? An endpoint that is copied from
another replica leads to a working publisher: its events look right, and predictions are wrong. An
endpoint that is configured twice is refused (router.config.checks). `EventOwners` compares what
engines report (`/kv_event_sources`). Pure.

    foreign    it is another replica's: its events are not followed
    doubtful   the engine reports another port: a port mapping of its container, or a mistake
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from math import inf
from typing import Any, Literal, NamedTuple, Self

from msgspec import Struct

from policies.view import CandidateId
from router.base.addresses import endpoint_place
from router.base.engines import Role, Transfer
from router.base.messages import Evacuation
from router.config import ReplicaConfig


class EventPorts(Struct, frozen=True):
    """A replica's event endpoints by field, `events[RANK]` and `replay[RANK]`, as places."""

    replica: str
    used: Mapping[str, str] = {}  # where a router connects to
    reported: Mapping[str, str] = {}  # by its engine, at the replica's own host; {}: none are

    @classmethod
    def of(
        cls,
        replica: str,
        url: str,
        used: Mapping[int, tuple[str, str | None]],
        reported: Mapping[int, tuple[str, str | None]],
    ) -> Self:
        """Build it from each rank's event and replay endpoint."""
        return cls(replica, _places(url, used), _places(url, reported))

    def why_doubtful(self) -> str | None:
        """Return how a configured endpoint differs from the reported one; None: it does not."""
        for field, place in self.used.items():
            own, port = _port(self.reported.get(field, "")), _port(place)
            if own and port and own != port:
                return f"{field} is {place}, and its engine reports port {own}"
        return None


class EventOwners:
    """Which replicas use and report which endpoints."""

    __slots__ = ("_ports", "_reporting", "_using")

    def __init__(self, all_ports: Iterable[EventPorts]) -> None:
        self._ports = {ports.replica: ports for ports in all_ports}
        self._using: defaultdict[str, set[str]] = defaultdict(set)
        self._reporting: defaultdict[str, set[str]] = defaultdict(set)
        for name, ports in self._ports.items():
            for place in ports.used.values():
                self._using[place].add(name)
            for place in ports.reported.values():
                self._reporting[place].add(name)

    def why_foreign(
        self, replica: str, rank: int, counts: Callable[[str], bool] = lambda _: True
    ) -> str | None:
        """Return why a rank's events are not to be followed; None: nothing speaks against it.

        Args:
            counts: Whether another replica of that name does: one that is gone has no endpoint.
        """
        ports = self._ports.get(replica)
        for field in (f"events[{rank}]", f"replay[{rank}]"):
            place = ports.used.get(field) if ports is not None else None
            if ports is None or place is None:
                continue
            own, others = self._reporting[place], {replica}
            if replica in own:
                others |= self._using[place] - own  # it is ours; those are wrong
            for other in sorted(self._using[place] - others):
                if counts(other):
                    return f"{field}: {place} is an event endpoint of {other}, too"
            if replica not in own and self._is_exchanged(ports):
                for other in sorted(own):
                    if counts(other):
                        return f"{field}: {place} is an event endpoint of {other}"
        return None

    def _is_exchanged(self, ports: EventPorts) -> bool:
        """Return whether another one uses what a replica's own engine reports.

        That others report what a replica uses proves nothing alone: the ports of its container may
        be mapped to these.
        """
        return any(self._using[place] - {ports.replica} for place in ports.reported.values())


def _places(url: str, endpoints: Mapping[int, tuple[str, str | None]]) -> dict[str, str]:
    places: dict[str, str] = {}
    for rank, (events, replay) in endpoints.items():
        places[f"events[{rank}]"] = endpoint_place(events, url)
        if replay is not None:
            places[f"replay[{rank}]"] = endpoint_place(replay, url)
    return places


def _port(place: str) -> str:
    """Return the port of a place; empty: it is a path, or none."""
    return "" if "://" in place else place.rpartition(":")[2]


class Lengths(Struct, frozen=True):
    """The lengths that a model's replicas take, by name; inf: any, or it is not known."""

    by_replica: dict[str, float]
    longest: int | None  # None: it is not known
    are_equal: bool

    @classmethod
    def of(cls, model: str, replicas: Iterable[Replica]) -> Self:
        """Collect the lengths of a model's replicas, of which there is at least one."""
        reported = {each.name: each.max_len(model) for each in replicas}
        found = {name: inf if length is None else length for name, length in reported.items()}
        longest = max(found.values())
        return cls(found, None if longest == inf else int(longest), len(set(found.values())) == 1)

    def fitting(self, candidates: tuple[Candidate, ...], num_tokens: int) -> tuple[Candidate, ...]:
        """Leave out candidates that are too short; if all are, keep the longest."""
        lengths = [self.by_replica[each.replica.name] for each in candidates]
        least = min(num_tokens, max(lengths, default=0.0))
        return tuple(
            each for each, length in zip(candidates, lengths, strict=True) if length >= least
        )


class ServedModel(Struct, frozen=True, kw_only=True):
    """One entry of a replica's `/v1/models`: a base model (no parent) or a LoRA adapter."""

    id: str
    root: str | None = None  # model directory, or the adapter's path
    parent: str | None = None  # base model of an adapter
    max_model_len: int | None = None  # tokens; None: not said


class Replica(Struct, frozen=True, kw_only=True):
    """One vLLM server. None means: not discovered (yet).

    `num_blocks` is the capacity of one rank. `cost_class` names replicas that should take the same
    time for the same work (same model, same hardware); see `router.replicas.cost_fit`.
    """

    name: str
    url: str
    models: tuple[ServedModel, ...] = ()
    num_ranks: int = 1
    block_size: int | None = None
    num_blocks: int | None = None
    num_cache_tokens: int | None = None  # of a rank's cache, as the engine reports it
    kv_dtype: str | None = None  # of its KV cache, as its flag names it; `auto`: the model's own
    version: str | None = None
    publishes_events: bool = False
    caches_prefixes: bool = True  # else each prompt is computed from its first token on
    cost_class: str = "default"
    cost_per_hour: float | None = None  # of all its GPUs; None: not configured
    weight: float = 1.0  # its largest share of requests in flight, relative to an equal share
    draining: bool = False
    asleep: bool = False
    paused: bool = False
    role: Role = "both"
    transfer: Transfer = "store"  # of a prefill or decode replica
    bootstrap: str | None = None  # base URL; None: it has none
    seems: Role | None = None  # the role that its metrics show; None: none
    event_ports: EventPorts | None = None  # None: it has no events
    pool: str | None = None  # name of its Mooncake pool, "" of the only one; None: it is in none

    def __post_init__(self) -> None:
        if not self.name or "#" in self.name:
            raise ValueError(f"replica name must be non-empty and without '#': {self.name!r}")
        if self.num_ranks < 1:
            raise ValueError(f"replica {self.name!r}: num_ranks must be >= 1: {self.num_ranks}")

    @property
    def is_offered(self) -> bool:
        """Whether orders and its own state allow new requests."""
        return self.is_awake and not self.draining

    @property
    def is_awake(self) -> bool:
        """Whether it neither sleeps nor is paused, as far as is known."""
        return not (self.asleep or self.paused)

    @property
    def base_model(self) -> str:
        """Name the model behind all adapters; "" while no model is known."""
        bases = [model.id for model in self.models if model.parent is None]
        return bases[0] if bases else ""

    def serves(self, model: str) -> bool:
        """Return whether it has a model or adapter of this name."""
        return any(served.id == model for served in self.models)

    def max_len(self, model: str) -> int | None:
        """Return the tokens of a model's longest request; None: it does not say.

        An adapter's is its base model's.
        """
        lengths = {served.id: served.max_model_len for served in self.models}
        parents = {served.id: served.parent for served in self.models}
        length = lengths.get(model)
        return length if length is not None else lengths.get(parents.get(model) or "")

    def adapter_path(self, name: str) -> str | None:
        """Return the path of an adapter, by which its blocks are named; None: it has none."""
        for served in self.models:
            if served.id == name and served.parent is not None:
                return served.root or ""
        return None


class Candidate(Struct, frozen=True, kw_only=True):
    """One place a request can be sent to: a replica, or one of its data-parallel ranks.

    `rank` is None where the replica has a single rank: no `X-data-parallel-rank` is sent.
    """

    id: CandidateId
    replica: Replica
    rank: int | None = None
    base_model: str = ""  # of its replica
    capacity_tokens: int | None = None  # that its cache holds; None: not known


def candidate_id(name: str, rank: int | None) -> CandidateId:
    return CandidateId(name if rank is None else f"{name}#{rank}")


def candidates_of(replica: Replica) -> tuple[Candidate, ...]:
    """List a replica's candidates, ranks in order."""
    ranks = [None] if replica.num_ranks == 1 else list(range(replica.num_ranks))
    return tuple(
        Candidate(
            id=candidate_id(replica.name, rank),
            replica=replica,
            rank=rank,
            base_model=replica.base_model,
            capacity_tokens=_capacity_tokens(replica),
        )
        for rank in ranks
    )


def _capacity_tokens(replica: Replica) -> int | None:
    """Return how many tokens the cache of a rank holds; None: not known.

    With several KV groups only the engine's own figure counts: blocks are shared by the groups
    (router.index.hit_length).
    """
    if replica.num_cache_tokens is not None:
        return replica.num_cache_tokens
    if replica.block_size is None or replica.num_blocks is None:
        return None
    return replica.block_size * replica.num_blocks


def model_entries(replicas: Iterable[Replica]) -> list[dict[str, Any]]:
    """List the union of served models as entries of `/v1/models`, the first replica's first.

    The length of a model is the shortest of its replicas: a request of that length fits all.
    """
    union: dict[str, ServedModel] = {}
    shortest: dict[str, int] = {}
    for replica in replicas:
        for model in replica.models:
            union.setdefault(model.id, model)
            if (length := model.max_model_len) is not None:
                shortest[model.id] = min(length, shortest.get(model.id, length))
    return [
        {
            "id": model.id,
            "object": "model",
            "created": 0,
            "owned_by": "vllm",
            "root": model.root,
            "parent": model.parent,
            "max_model_len": shortest.get(model.id),
        }
        for model in union.values()
    ]


class Found(Struct, frozen=True, kw_only=True):
    """A replica as a source found it."""

    replica: ReplicaConfig
    is_ready: bool = True


class Ordered(NamedTuple):
    """An order that a replica confirmed. `is_lost`: it lost its cache.

    `state` None: it was ordered to sleep or to wake up, and its metrics say the rest.
    """

    replica: str
    state: Literal["paused", "awake"] | None
    is_lost: bool = False


class Entry(Struct, frozen=True, kw_only=True):
    """A replica as it should be. A leaving one drains, and is removed when it is idle."""

    name: str  # in this router's metrics and headers
    identity: str  # among routers
    replica: ReplicaConfig
    draining: bool = False
    evacuation: Evacuation | None = None  # while it drains; None: nothing stays there
    leaving: bool = False
    source: str | None = None  # which found it; None: it is configured, or was added by an order
    is_ready: bool = True  # by its source

    @property
    def is_offered(self) -> bool:
        """Whether it may have new requests."""
        return self.is_ready and not (self.draining or self.leaving)
