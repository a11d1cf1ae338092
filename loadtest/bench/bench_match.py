"""The match alone: how many leading blocks of a chain each of 64 replicas holds.

A chain of 6,250 blocks (100,000 tokens), and replicas whose prefixes end at k different places.
The first look at a chain is what counts, so every sample asks for another chain: all chains share
their length and where the replicas' prefixes end, but no block. Samples are CPU time.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Final

from loadtest.bench.measures import Line, distribution
from loadtest.bench.setting import Setting
from policies.view import CandidateId
from router.contracts import KEY_BITS, BlockKey
from router.index.block_index import BlockIndex

_NUM_BLOCKS: Final = 6_250
_NUM_REPLICAS: Final = 64


def run(setting: Setting) -> list[Line]:
    """Measure."""
    return [_with_ends(setting, num_ends) for num_ends in (1, 8, 64)]


def _with_ends(setting: Setting, num_ends: int) -> Line:
    rng = random.Random(num_ends)
    ends = [rng.randrange(1, _NUM_BLOCKS) for _ in range(num_ends)]
    ids = [CandidateId(f"r{number + 1}") for number in range(_NUM_REPLICAS)]
    index = BlockIndex()
    chains = []
    for _ in range(setting.size(20, 2)):
        chain = [BlockKey(rng.getrandbits(KEY_BITS)) for _ in range(_NUM_BLOCKS)]
        for number, id_ in enumerate(ids):
            index.store(id_, chain[: ends[number % num_ends]])
        chains.append(chain)
    taken_us: list[float] = []
    for _ in setting.track(range(setting.size(100, 2)), f"match, {num_ends} ends"):
        taken_us += [_match_us(index, chain, ids) for chain in chains]
    return distribution(
        f"match alone, {_NUM_REPLICAS} replicas, {_NUM_BLOCKS:,} blocks, {num_ends} different ends",
        "µs",
        taken_us,
    )


def _match_us(index: BlockIndex, chain: Sequence[BlockKey], ids: Sequence[CandidateId]) -> float:
    start_s = time.thread_time()
    index.match(chain, ids)
    return (time.thread_time() - start_s) * 1e6
