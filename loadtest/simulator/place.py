"""Make the live router's `Place` of simulated inputs: prompts without tokens, an exact pool."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, cast

from multidict import CIMultiDict, CIMultiDictProxy

from loadtest.engine_model.pool import BlockPool
from loadtest.simulator.setup import MODEL, Setup
from policies.policy import Policy
from policies.view import CandidateId
from router.api.apis import CHAT
from router.api.openai import ChatRequest
from router.base.contracts import BlockKey, ExtraKeys, HashContract
from router.config import MooncakeConfig
from router.index.block_index import BlockIndex
from router.index.cache_view import CacheView
from router.metrics import Metrics
from router.pool.readers import PoolReaders
from router.replicas.fleet import Fleet
from router.replicas.replica import Candidate
from router.request.fetch import Fetches
from router.request.match import Matcher
from router.request.place import Place
from router.request.results import Fetchable, Inbound, Prompt, Read, Whose
from router.tokens import Tokens

_INBOUND: Final = Inbound(
    api=CHAT,
    method="POST",
    path="/v1/chat/completions",
    target="/v1/chat/completions",
    headers=CIMultiDictProxy(CIMultiDict()),
    body=None,
    arrived_s=0.0,
)


class _Keys:
    """The block keys of a prompt, in place of its tokens."""

    __slots__ = ("_keys",)

    def __init__(self, keys: Sequence[BlockKey]) -> None:
        self._keys = keys

    def keys(self, contract: HashContract, extra: ExtraKeys) -> Sequence[BlockKey]:
        return self._keys


def prompt_of(keys: Sequence[BlockKey], num_tokens: int, session_hash: int) -> Prompt:
    """Return a simulated request as the router places it; `keys` names its full blocks."""
    read = Read(
        inbound=_INBOUND,
        received=_INBOUND,
        request_id="",
        model=MODEL,
        streams=True,
        request=ChatRequest(model=MODEL, messages=()),
        whose=Whose(session_hash=session_hash),
    )
    return Prompt(
        tokens=cast(Tokens, _Keys(keys)),
        num_tokens=num_tokens,
        read=read,
    )


class ExactPool(Fetches):
    """A shared pool whose contents are known exactly, as verification makes them live."""

    def __init__(self, pool: BlockPool, metrics: Metrics) -> None:
        super().__init__({}, PoolReaders(), MooncakeConfig(), metrics)
        self._pool = pool

    def look(
        self,
        prompt: Prompt,
        candidates: Sequence[Candidate],
        contracts: Mapping[HashContract, Sequence[CandidateId]],
        index: BlockIndex,
    ) -> dict[CandidateId, Fetchable]:
        """Find the blocks of a prompt in the pool, the same for each candidate."""
        found: dict[CandidateId, Fetchable] = {}
        for contract, ids in contracts.items():
            chain = prompt.keys(contract)[: (prompt.num_tokens - 1) // contract.block_size]
            there = Fetchable(
                pool="pool",
                directory="",
                candidates=frozenset(ids),
                contract=contract,
                chain=chain,
                groups=None,
                num_blocks=self._pool.match(chain),
            )
            found |= dict.fromkeys(ids, there)
        return found


def make_place(
    policy: Policy,
    setup: Setup,
    fleet: Fleet,
    caches: CacheView,
    pool: BlockPool | None,
    clock: Callable[[], float],
) -> Place:
    """Make the place of one simulated router; `clock` is virtual."""
    metrics = Metrics()
    return Place(
        fleet=fleet,
        matcher=Matcher(
            caches,
            fetches=None if pool is None else ExactPool(pool, metrics),
        ),
        policy=policy,
        seed=setup.seed,
        outbox=None,
        metrics=metrics,
        clock=clock,
    )
