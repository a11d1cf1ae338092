"""A rank's stream that is EXACT, and KV events for it, without sockets."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Final

from loadtest.dev.bench.conversations import CONTRACT
from loadtest.dev.bench.fake_engine import BLOCK_SIZE
from policies.view import CandidateId
from router.index.block_index import BlockIndex
from router.kv_events.stream import RankStream
from router.kv_events.wire import BlockStored, EventBatch, encode

_CANDIDATE: Final = CandidateId("r1")
_CAPACITY: Final = 1_000_000


def new_stream(index: BlockIndex, candidate: CandidateId = _CANDIDATE) -> RankStream:
    """Make a stream that has found its contract and the start of its history: EXACT."""
    stream = RankStream(candidate, index, block_size=BLOCK_SIZE, capacity_blocks=_CAPACITY)
    stream.opened(has_replay=False)
    tokens = list(range(BLOCK_SIZE))
    keys, _ = CONTRACT.extend(None, tokens)
    first = BlockStored(
        block_hashes=list(keys), token_ids=tokens, block_size=BLOCK_SIZE, medium="GPU"
    )
    stream.receive(0, encode(EventBatch(ts=0.0, events=[first])))
    assert stream.state == "exact", stream.reason
    return stream


def messages(num_blocks: int) -> Iterator[bytes]:
    """Yield payloads without end; each stores so many blocks."""
    rng = random.Random(1)
    while True:
        stored = BlockStored(
            block_hashes=[rng.getrandbits(64) for _ in range(num_blocks)],
            parent_block_hash=rng.getrandbits(64),
            token_ids=[rng.randrange(150_000) for _ in range(num_blocks * BLOCK_SIZE)],
            block_size=BLOCK_SIZE,
            medium="GPU",
        )
        yield encode(EventBatch(ts=1.0, events=[stored], dp_rank=0))
