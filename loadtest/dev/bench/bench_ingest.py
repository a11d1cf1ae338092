"""KV events into the index on one core: decode and apply, as a rank's stream does both.

From the payload of a ZeroMQ message (msgpack as vLLM writes it, `token_ids` included) to blocks
in the index; sockets are not in it. The stream has found its contract, as all have after their
first prompt. Half of the blocks are removed again, as in a full cache. Events of 1,000 blocks, one
a message; events of one block, 100 a message (Mooncake's connector) and one a message. Counted in
CPU time: what one core does that has nothing else to do.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Final

from loadtest.dev.bench.conversations import CONTRACT
from loadtest.dev.bench.fake_engine import BLOCK_SIZE
from loadtest.dev.bench.measures import Budget, Line
from loadtest.dev.bench.setting import Setting
from policies.view import CandidateId
from router.index.block_index import BlockIndex
from router.kv_events.stream import RankStream
from router.kv_events.wire import BlockRemoved, BlockStored, EventBatch, KvEvent, WireShape, encode

_CANDIDATE: Final = CandidateId("r1")
_CAPACITY: Final = 1_000_000


def run(setting: Setting) -> list[Line]:
    """Measure."""
    lines: list[Line] = []
    shapes: tuple[WireShape, ...] = ("map", "array")
    for shape in shapes:
        lines.append(_line(setting, shape, 1_000, 1, Budget("value", 1e6, is_floor=True)))
        lines.append(_line(setting, shape, 1, 100, Budget("value", 2e5, is_floor=True)))
        lines.append(_line(setting, shape, 1, 1))
    return lines


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


def messages(
    shape: WireShape, num_blocks: int, num_events: int, *, seed: int, removes: bool = True
) -> Iterator[bytes]:
    """Yield payloads without end: each stores, and with `removes` every other one removes again."""
    rng = random.Random(seed)
    while True:
        stored = [_stored(rng, num_blocks) for _ in range(num_events)]
        yield _payload(shape, stored)
        if removes:
            yield _payload(
                shape, [BlockRemoved(block_hashes=e.block_hashes, medium="GPU") for e in stored]
            )


def _stored(rng: random.Random, num_blocks: int) -> BlockStored:
    return BlockStored(
        block_hashes=[rng.getrandbits(64) for _ in range(num_blocks)],
        parent_block_hash=rng.getrandbits(64),
        token_ids=[rng.randrange(150_000) for _ in range(num_blocks * BLOCK_SIZE)],
        block_size=BLOCK_SIZE,
        medium="GPU",
    )


def _payload(shape: WireShape, events: list[BlockStored] | list[BlockRemoved]) -> bytes:
    all_events: list[KvEvent] = [*events]
    return encode(EventBatch(ts=1.0, events=all_events, dp_rank=0), shape=shape)


def _line(
    setting: Setting, shape: WireShape, num_blocks: int, num_events: int, *budgets: Budget
) -> Line:
    per_message = num_blocks * num_events
    total = setting.size(1_000_000 if per_message >= 100 else 100_000, 2_000)
    num_messages = max(2, total // per_message)
    source = messages(shape, num_blocks, num_events, seed=per_message)
    made = [next(source) for _ in range(min(num_messages, 200 if per_message >= 100 else 10_000))]
    stream = new_stream(BlockIndex())
    what = f"{num_blocks:,}-block events, {num_events} a message, {shape}s"
    sequence = 0
    taken_s = 0.0
    rounds = range(-1, max(1, num_messages // len(made)))  # the first is not counted
    for number in setting.track(rounds, what):
        start_s = time.thread_time()
        for payload in made:
            sequence += 1
            stream.receive(sequence, payload)
        taken_s += time.thread_time() - start_s if number >= 0 else 0.0
    num_messages = sequence - len(made)
    assert stream.counters.num_undecodable == 0
    assert stream.counters.history.num_gaps == 0
    unit = "blocks/s" if num_blocks > 1 else "events/s"
    return Line(
        what=f"event ingest, {what}",
        unit=unit,
        num_samples=num_messages,
        value=num_messages * per_message / taken_s,
        budgets=budgets,
        note="half stored, half removed",
    )
