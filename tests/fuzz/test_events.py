"""Whatever an engine publishes or replays is counted or applied, and later sanity is applied."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Final

import msgspec
from hypothesis import strategies as st

from policies.view import CandidateId
from router.base.addresses import reachable_endpoint
from router.index.block_index import BlockIndex
from router.kv_events.stream import RankStream
from router.kv_events.subscriber import parse_reply
from router.kv_events.wire import AllBlocksCleared, EventBatch, KvEvent, decode, encode
from tests.engine import BLOCK_SIZE, batch, hashes, prompt, removed, stored
from tests.fuzz.budget import fuzz
from tests.fuzz.mutations import mangled, packed, texts, twisted
from tests.fuzz.samples import POISONS

R1: Final = CandidateId("r1")
SANE: Final = 100  # a prompt that no example has

events = st.sampled_from(
    [
        stored(prompt(1)),
        stored(prompt(2)),
        removed(hashes(prompt(1))),
        removed(hashes(prompt(2))[2:]),
        AllBlocksCleared(),
    ]
)


def _array(event: KvEvent) -> list[Any]:
    tree = msgspec.to_builtins(event, builtin_types=(bytes,))
    kind = tree.pop("type")
    return [kind, *tree.values()]


@st.composite
def batches(draw: st.DrawFn) -> list[Any]:
    """A batch as plain values, its events as maps, arrays, or both."""
    chosen = draw(st.lists(events, max_size=3))
    written = [
        msgspec.to_builtins(event, builtin_types=(bytes,)) if draw(st.booleans()) else _array(event)
        for event in chosen
    ]
    return [1.0, written, 0]


payloads = st.one_of(
    packed(batches()),
    mangled(st.lists(events, max_size=3).map(lambda some: encode(EventBatch(1.0, some, 0)))),
    st.sampled_from(sorted(POISONS.values(), key=len)[:7]),
)
frames = st.lists(st.binary(max_size=12), max_size=6)


@fuzz(payloads, st.booleans())
def test_payloads(payload: bytes, with_tokens: bool) -> None:
    """A batch, or a ValueError."""
    try:
        found = decode(payload, with_tokens=with_tokens)
    except ValueError:
        return
    assert isinstance(found.events, list)


@fuzz(frames)
def test_replies(some: list[bytes]) -> None:
    """A message of a sequence that can be asked for, the end, or a ValueError."""
    with suppress(ValueError):
        found = parse_reply(some)
        assert found is None or 0 <= found[0] < 2**63


@fuzz(twisted(texts), st.sampled_from(["http://r1:8000", "http://[::1]:1", "x"]))
def test_endpoints(endpoint: Any, url: str) -> None:
    """One to connect to, or a ValueError."""
    if isinstance(endpoint, str):
        with suppress(ValueError):
            assert reachable_endpoint(endpoint, url)


said = st.tuples(
    st.sampled_from(["live", "replay", "odd"]),
    st.one_of(st.integers(0, 6), st.sampled_from([2**31, 2**63 - 1])),
    payloads,
)


@fuzz(st.lists(said, max_size=8), st.booleans())
def test_streams(talk: list[tuple[str, int, bytes]], has_replay: bool) -> None:
    """Batches in any order, live and replayed: the state is one of three, and the next life works.

    A sane engine comes back: its history is read, and the index is what it says.
    """
    index = BlockIndex()
    stream = RankStream(R1, index, block_size=BLOCK_SIZE, capacity_blocks=100)
    stream.opened(has_replay=has_replay)
    stream.connected()
    for number, (kind, sequence, payload) in enumerate(talk):
        if kind == "live":
            stream.receive(sequence, payload)
        elif kind == "replay" and stream.wanted_replay is not None:
            assert 0 <= stream.begin_replay() < 2**63
            stream.replayed(sequence, payload)
            stream.end_replay(is_complete=number % 2 == 0)
        else:
            stream.tick(float(number))
        assert stream.state in ("exact", "degraded", "blind")
        assert stream.contract.block_size > 0
        assert all(count > 0 for count in index.held(R1)["gpu"].values())

    history = [batch(AllBlocksCleared()), batch(stored(prompt(SANE)))]
    stream.connected()
    stream.resync()
    for _ in range(8):
        if stream.wanted_replay is None:
            break
        start = stream.begin_replay()
        for sequence in range(start, len(history)):
            stream.replayed(sequence, history[sequence])
        stream.end_replay(is_complete=True)
    if not has_replay:
        sequence = (stream.position.sequence if stream.position else 2**62) + 1
        stream.receive(sequence, history[0])
        stream.receive(sequence + 1, history[1])
    chain, _ = stream.contract.extend(None, prompt(SANE))
    is_named = stream.contract.algorithm == "sha256"  # garbage may have taught it another
    assert not is_named or index.match(chain, [R1])[R1].num_gpu_blocks == len(chain)
