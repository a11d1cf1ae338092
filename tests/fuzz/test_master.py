"""Whatever a Mooncake master says: a PoolError, or an answer to what was asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, Self

from hypothesis import strategies as st

from router.errors import PoolError
from router.kv_events.subscriber import Received
from router.pool import master as mooncake
from router.pool.catalog import PoolCatalog
from router.pool.master import MasterApi, MasterEvents
from tests.fuzz.budget import fuzz
from tests.fuzz.mutations import json_bytes, mangled, packed

KEYS = [f"tiny@tp_rank:0@{number:064x}" for number in range(3)]

answers = json_bytes(
    st.just({"success": True, "data": {key: {"ok": True} for key in KEYS}, "error": None})
)
statuses = json_bytes(st.just({"enabled": True}))
pages = mangled(
    st.just(
        b"master_key_count 5\nmaster_allocated_bytes 1e3\nmaster_evicted_key_count NaN\n"
        b"master_total_capacity_bytes -7\nmaster_batch_put_start_items_total 1e999\n"
    )
)
listings = mangled(st.just("\n".join([*KEYS, "@", "a@0x_1", "@" * 40]).encode()))
batches = packed(
    st.just(
        [1, [{"event_type": kind, "object_key": key} for kind in ("stored", "removed")
             for key in KEYS], 0]
    )
)  # fmt: skip


class _Content:
    def __init__(self, body: bytes) -> None:
        self._body = body

    async def iter_any(self) -> AsyncIterator[bytes]:
        yield self._body

    async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        for start in range(0, len(self._body), 7):
            yield self._body[start : start + 7]


class _Session:
    """An HTTP client whose every answer is the same bytes."""

    def __init__(self, body: bytes) -> None:
        self.status = 200
        self.headers: dict[str, str] = {}
        self.content = _Content(body)

    @asynccontextmanager
    async def get(self, *_: Any, **__: Any) -> AsyncIterator[Self]:
        yield self


def asked(body: bytes) -> MasterApi:
    api = MasterApi("http://master")
    api._session = _Session(body)  # type: ignore[assignment]
    return api


@fuzz(answers, statuses, pages, listings)
def test_answers(answer: bytes, status: bytes, page: bytes, listing: bytes) -> None:
    """Figures are counts, and nothing is answered that was not asked."""

    async def run() -> None:
        with suppress(PoolError):
            assert (await asked(answer).places(KEYS[:2], timeout_s=5)).keys() <= set(KEYS[:2])
        with suppress(PoolError):
            await asked(status).publishes_events()
        with suppress(PoolError):
            figures = await asked(page).figures()
            for name in figures.__struct_fields__:
                value = getattr(figures, name)
                assert value is None or 0 <= value <= 2**62
        pool = PoolCatalog()
        pool.begin_listing()
        with suppress(PoolError):
            await asked(listing).list_keys(pool.listed)
        while pool.reconcile(10):
            pass

    asyncio.run(run())


class _Source:
    def __init__(self, payloads: list[bytes]) -> None:
        self._payloads = payloads

    async def receive(self, timeout_s: float) -> Received:
        return Received(list(enumerate(self._payloads)), num_odd=1)


@fuzz(st.lists(batches, max_size=4))
def test_events(payloads: list[bytes]) -> None:
    """Each message is taken, or counted as undecodable and a gap; what is taken does no harm."""
    events = MasterEvents.__new__(MasterEvents)
    events._source, events._next = _Source(payloads), None  # type: ignore[assignment]

    received = asyncio.run(events.receive(0.0))
    pool = PoolCatalog(max_blocks=2)
    for event in received.events:
        if event.object_key is not None:
            pool.object_stored(event.object_key)
            pool.object_removed(event.object_key)

    assert 1 <= received.num_undecodable <= len(payloads) + 1
    assert received.has_gap
    assert all(len(group.blocks) <= 2 for group in pool._groups())


@fuzz(pages)
def test_samples(page: bytes) -> None:
    """A sample is a count or none."""
    value = mooncake._sample(page.decode(errors="replace"), "master_key_count")
    assert value is None or value >= 0
