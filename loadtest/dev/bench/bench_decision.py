"""The decision alone: chain known, 64 replicas, a prompt of 100,000 tokens in blocks of 16.

It is the synchronous step of a request. It copies the prompt's chain, matches it against all
replicas, and lets the policy (`kv_aware`, the default) decide. Then it books the lease and claims
the blocks. Eight replicas hold prefixes of different lengths, the longest all but 2,000 tokens. The
other replicas hold the shared first 12,000 tokens. Each decision is one sample, in CPU time, so
other processes on the machine do not count.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import orjson

from loadtest.dev.bench.conversations import CONTRACT, growing, tokens_of
from loadtest.dev.bench.fake_engine import BLOCK_SIZE
from loadtest.dev.bench.measures import Budget, Line, distribution
from loadtest.dev.bench.setting import Setting
from loadtest.dev.bench.streams import new_stream
from policies.registry import DEFAULT_POLICY, create
from policies.view import NOTHING_HELD, CandidateId, Holding, RequestView, Snapshot
from router.base.contracts import BlockKey
from router.index.block_index import NO_BLOCKS, BlockIndex
from router.index.cache_view import CacheView
from router.records.record import Outcome
from router.replicas.fleet import Fleet
from router.replicas.ledger import Booking
from router.replicas.replica import Replica, ServedModel
from router.tokens import Tokens, load_prompter

_NUM_REPLICAS: Final = 64
_TOKENS: Final = 100_000
_SHARED_BLOCKS: Final = 12_000 // BLOCK_SIZE
_NEW_BLOCKS: Final = 2_000 // BLOCK_SIZE
_NUM_DEEP: Final = 8
_MODEL: Final = "tiny"


def run(setting: Setting) -> list[Line]:
    """Measure."""
    prompter = load_prompter(str(setting.model_dir), local_files_only=True)
    prepared = next(growing(prompter, "decision", _TOKENS, 0))
    tokens = tokens_of(prompter, orjson.loads(prepared.body))
    decider = Decider(tokens, prepared.keys)
    for number in range(100):
        decider.decide(number)
    taken_us: list[float] = []
    for start in setting.track(range(0, setting.size(5_000, 50), 50), "decisions"):
        taken_us += [decider.decide(start + number) for number in range(50)]
    return [
        distribution(
            f"decision alone, {_NUM_REPLICAS} replicas, {prepared.num_tokens:,} tokens",
            "µs",
            taken_us,
            Budget("p50", 150.0),
        ),
    ]


class Decider:
    """A fleet with caches, and the data path's step from tokens to lease."""

    def __init__(self, tokens: Tokens, keys: Sequence[BlockKey]) -> None:
        self._tokens = tokens
        self._policy = create(DEFAULT_POLICY)
        self._fleet = Fleet()
        self._caches = CacheView(BlockIndex())
        for number in range(_NUM_REPLICAS):
            name = f"r{number + 1}"
            self._fleet.members.add(
                Replica(
                    name=name,
                    url=f"http://{name}",
                    models=(ServedModel(id=_MODEL, root=None, parent=None, max_model_len=None),),
                    num_ranks=1,
                    block_size=BLOCK_SIZE,
                    num_blocks=10_000,
                    version=None,
                    publishes_events=True,
                    cost_class=_MODEL,
                )
            )
            self._fleet.members.probe_ok(name, 0.0)
            candidate = CandidateId(name)
            self._caches.add(candidate, new_stream(self._caches.index, candidate))
            deepest = len(keys) - _SHARED_BLOCKS - _NEW_BLOCKS
            depth = number * deepest // (_NUM_DEEP - 1) if number < _NUM_DEEP else 0
            self._caches.index.store(candidate, keys[: _SHARED_BLOCKS + depth])

    def decide(self, number: int) -> float:
        """Make one decision, untimed take it back; return the time in µs."""
        now_s = 10.0 + number / 100
        fleet, caches, num_tokens = self._fleet, self._caches, self._tokens.num_tokens
        start_s = time.thread_time()
        candidates = fleet.offers.candidates(_MODEL, now_s)
        ids = caches.by_contract([c.id for c in candidates])[CONTRACT]
        keys = self._tokens.keys(CONTRACT)
        reusable = (num_tokens - 1) // BLOCK_SIZE
        last, match, matches = NO_BLOCKS, NOTHING_HELD, {}
        for id_, found in caches.match(keys, ids, limit=reusable).items():
            if found is not last:
                last = found
                match = Holding(
                    found.num_gpu_blocks * BLOCK_SIZE, found.num_cpu_blocks * BLOCK_SIZE
                )
            matches[id_] = match
        snapshot = Snapshot(
            now_s=now_s,
            number=number,
            seed=7,
            request=RequestView(num_tokens=num_tokens),
            replicas=fleet.load.views(candidates, matches, now_s),
        )
        chosen = self._policy.decide(snapshot).candidate
        num_cached = matches[chosen].num_gpu_tokens
        booking = Booking(num_uncached_tokens=num_tokens - num_cached, num_cached_tokens=num_cached)
        lease = fleet.load.admit(chosen, booking, now_s)
        claim = caches.claim(chosen, keys, num_cached // BLOCK_SIZE)
        taken_s = time.thread_time() - start_s
        caches.release(claim, computed=False, now_s=now_s)
        caches.expire_claims(now_s)  # as the router does all the time: they hold the chain
        fleet.load.end(lease, now_s, Outcome.OK)
        return taken_s * 1e6
