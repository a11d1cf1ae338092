"""Replicas and the candidates that they offer: what discovery found, without moving state."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msgspec import Struct

from policies.view import CandidateId
from router.base.roles import Role, Transfer
from router.replicas.event_ports import EventPorts


class ServedModel(Struct, frozen=True, kw_only=True):
    """One entry of a replica's `/v1/models`: a base model (no parent) or a LoRA adapter."""

    id: str
    root: str | None = None  # model directory, or the adapter's path
    parent: str | None = None  # base model of an adapter
    max_model_len: int | None = None  # tokens; None: not said


class Replica(Struct, frozen=True, kw_only=True):
    """One vLLM server. None means: not discovered (yet).

    `num_blocks` is the capacity of one rank. `cost_class` names replicas that should take the same
    time for the same work (same model, same hardware); see `router.replicas.speed`.
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
    (router.index.footprint).
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
