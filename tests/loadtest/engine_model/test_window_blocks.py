"""The emulated cache of a model with sliding windows: a router predicts it, and vLLM does so."""

from __future__ import annotations

import base64
import json
import random
import zlib
from pathlib import Path

import pytest

from loadtest.emulator.block_events import EventWriter
from loadtest.emulator.generation import Generation
from loadtest.emulator.options import EmulatorOptions
from loadtest.engine_model.scheduler import Scheduler
from loadtest.engine_model.window_blocks import WindowBlocks
from policies.view import CandidateId
from router.base.contracts import HashContract
from router.index.block_index import BlockIndex
from router.kv_events.stream import RankStream
from router.kv_events.wire import EventBatch, KvEvent, decode, encode
from tests.engines.hybrid_models import prompt_of
from tests.loadtest.engine_model.requests import generation

R1 = CandidateId("r1")
FIXTURES = Path(__file__).parents[2] / "fixtures" / "kv_groups"
CONTRACT = HashContract(algorithm="xxhash_cbor", block_size=4)


class Replica:
    """An emulated cache with its scheduler, and a router's view of it."""

    def __init__(self, num_blocks: int, *, window: int, num_windows: int = 2) -> None:
        self.blocks = WindowBlocks(num_blocks, 4, window=window, num_windows=num_windows)
        self.scheduler = Scheduler(self.blocks, max_num_batched_tokens=24, max_num_seqs=4)
        self.index = BlockIndex()
        self.stream = RankStream(R1, self.index, block_size=16, capacity_blocks=num_blocks)
        self.stream.opened(has_replay=False)
        self.num_batches = 0

    def events(self) -> list[KvEvent]:
        return EventWriter(self.blocks).events(self.blocks.take_changes())

    def publish(self) -> None:
        events = self.events()
        if events:
            self.stream.receive(self.num_batches, encode(EventBatch(0.0, events, 0)))
            self.num_batches += 1

    def predicted(self, tokens: list[int]) -> int:
        chain = CONTRACT.extend(None, tokens)[0][: (len(tokens) - 1) // 4]
        return self.index.match(chain, [R1])[R1].num_gpu_blocks * 4 if chain else 0

    def add(self, tokens: list[int], num_reply: int = 1) -> Generation:
        request = generation(CONTRACT, tokens, range(num_reply))
        self.scheduler.add(request)
        return request

    def run(self) -> None:
        while (step := self.scheduler.schedule(1.0)) is not None:
            self.scheduler.complete(step, 1.0)
            self.publish()

    def ask(self, tokens: list[int], num_reply: int = 1) -> int:
        request = self.add(tokens, num_reply)
        self.run()
        return request.num_cached_tokens


def draw(name: str, num_tokens: int) -> list[int]:
    return random.Random(name).choices(range(1000), k=num_tokens)


@pytest.mark.parametrize(("window", "num_windows"), [(1, 1), (9, 1), (9, 2), (30, 3)])
def test_every_hit_is_predicted(window: int, num_windows: int) -> None:
    """Random prompts that share stems, evictions among them: predicted is what is hit."""
    replica = Replica(60, window=window, num_windows=num_windows)
    rng = random.Random(f"{window} {num_windows}")
    num_hits = num_removed = 0
    for _ in range(300):
        tokens = draw(rng.choice("abcde"), rng.randrange(1, 45))
        if rng.random() < 0.5:
            tokens += draw(rng.choice("vwxyz"), rng.randrange(1, 12))
        predicted = replica.predicted(tokens)
        assert replica.ask(tokens, rng.randrange(1, 9)) == predicted
        num_hits += predicted > 0
        num_removed = replica.stream.counters.blocks.num_removed

    assert num_hits > 50
    assert num_removed > 300
    assert replica.stream.counters.blocks.num_missing == 0
    assert replica.blocks.num_free_blocks == 59


def test_requests_at_once_lose_no_block() -> None:
    """Chunks, decodes, preemptions and aborts: in the end all blocks are free."""
    replica = Replica(40, window=9)
    rng = random.Random(7)
    for _ in range(40):
        requests = [replica.add(draw(rng.choice("abc"), rng.randrange(1, 40)), 20) for _ in "1234"]
        step = replica.scheduler.schedule(1.0)
        assert step is not None
        replica.scheduler.complete(step, 1.0)
        replica.scheduler.abort(requests[1])
        replica.run()

    assert replica.scheduler.stats.num_preemptions > 0
    assert replica.blocks.num_free_blocks == 39
    assert replica.blocks.reset()
    replica.publish()
    assert replica.index.num_blocks(R1) == 0
    assert replica.ask(draw("a", 30)) == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"sliding_window": 0},
        {"sliding_window": 64, "num_window_groups": 0},
        {"sliding_window": 64, "pool": "http://127.0.0.1:1"},
        {"sliding_window": 64, "eagle": True},
        {"sliding_window": 64, "num_gpu_blocks": 101, "max_model_len": 51 * 16},
    ],
)
def test_options_that_do_not_fit_are_refused(wrong: dict[str, object]) -> None:
    """A cache that could not hold one sequence, or that cannot say what it does."""
    with pytest.raises(ValueError, match=r"sliding_window|max_model_len"):
        EmulatorOptions(**wrong).model_len()  # type: ignore[arg-type]


def test_a_recording_of_vllm_is_repeated() -> None:
    """Asked what a real engine was asked, it reuses the same tokens and tells the same events."""
    recorded = json.loads((FIXTURES / "vllm-0.32.0-windows.json").read_text())
    contract = HashContract(algorithm="sha256", block_size=32)
    blocks = WindowBlocks(72, 32, window=96, num_windows=2)
    scheduler = Scheduler(blocks, max_num_batched_tokens=2048, max_num_seqs=1)
    table = recorded["requests"]
    reused = []
    for request in table:
        made = generation(
            contract,
            prompt_of(request, table),
            request.get("answered", [0]),
            cache_salt=request.get("salt"),
        )
        scheduler.add(made)
        while (step := scheduler.schedule(1.0)) is not None:
            scheduler.complete(step, 1.0)
        reused.append(made.num_cached_tokens)

    expected = [
        event
        for payload in json.loads(zlib.decompress(base64.b64decode(recorded["messages"])))
        for event in decode(bytes.fromhex(payload), with_tokens=True).events
    ]
    assert reused == [request["cached"] for request in table]
    assert EventWriter(blocks).events(blocks.take_changes()) == expected
