"""Whatever a Mooncake master says: a PoolError, or an answer to what was asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, Self

from hypothesis import strategies as st

from router.base.errors import PoolError
from router.pool import master as mooncake
from router.pool.catalog import PoolCatalog
from router.pool.master import MasterApi
from tests.fuzz.budget import fuzz
from tests.fuzz.mutations import json_bytes, mangled

KEYS = [f"tiny@tp_rank:0@{number:064x}" for number in range(3)]

answers = json_bytes(
    st.just({"success": True, "data": {key: {"ok": True} for key in KEYS}, "error": None})
)
pages = mangled(
    st.just(
        b"master_key_count 5\nmaster_allocated_bytes 1e3\nmaster_evicted_key_count NaN\n"
        b"master_total_capacity_bytes -7\nmaster_batch_put_start_items_total 1e999\n"
    )
)
listings = mangled(st.just("\n".join([*KEYS, "@", "a@0x_1", "@" * 40]).encode()))


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


@fuzz(answers, pages, listings)
def test_answers(answer: bytes, page: bytes, listing: bytes) -> None:
    """Figures are counts, and nothing is answered that was not asked."""

    async def run() -> None:
        with suppress(PoolError):
            assert (await asked(answer).places(KEYS[:2], timeout_s=5)).keys() <= set(KEYS[:2])
        with suppress(PoolError):
            figures = await asked(page).figures()
            for name in figures.__struct_fields__:
                value = getattr(figures, name)
                assert value is None or 0 <= value <= 2**62
        pool = PoolCatalog()
        pool.begin_listing()
        with suppress(PoolError):
            await asked(listing).list_keys(pool.listed)
        for _ in pool.reconcile(10):
            pass

    asyncio.run(run())


@fuzz(pages)
def test_samples(page: bytes) -> None:
    """A sample is a count or none."""
    value = mooncake.sample(page.decode(errors="replace"), "master_key_count")
    assert value is None or value >= 0
