"""Whatever an engine answers about itself: values in range, None, or a ValueError."""

from __future__ import annotations

import asyncio
import math
from contextlib import suppress
from functools import cache
from typing import Any
from urllib.parse import urlsplit

from hypothesis import strategies as st
from multidict import CIMultiDict

from router.base.contracts import MAX_BLOCK_SIZE
from router.base.errors import BadRequest, UpstreamError
from router.discovery import engine_pages as engine_metrics
from router.discovery import engine_pages as pages
from router.discovery.engine_api import EngineApi
from tests.discovery.pages import METRICS, MODELS, SOURCES
from tests.fuzz.budget import fuzz
from tests.fuzz.mutations import json_bytes, mangled

SANE = {
    "/v1/models": st.just(MODELS),
    "/version": st.just({"version": "0.32.0"}),
    "/kv_event_sources": st.just(SOURCES),
    "/tokenize": st.just({"count": 2, "tokens": [5, 6], "max_model_len": 1}),
}
JSON = {path: json_bytes(sane) for path, sane in SANE.items()}

lines = st.lists(
    st.sampled_from(
        [
            *METRICS.splitlines(),
            "process_start_time_seconds NaN",
            "process_start_time_seconds 1e999",
            'vllm:num_requests_running{engine="²"} 1e308',
            'vllm:num_requests_running{engine="99999999"} 1',
            'vllm:num_requests_waiting{engine="0"} -3',
            'vllm:num_requests_waiting{engine="' + "9" * 5_000 + '"} 1',
            'vllm:cache_config_info{block_size="0",num_gpu_blocks="' + "9" * 5_000 + '"} 1.0',
            'vllm:cache_config_info{block_size="²",num_gpu_blocks="-1"} 1.0',
            "vllm:cache_config_info{" + "a" * 3_000,
        ]
    ),
    max_size=12,
).map(lambda some: "\n".join(some).encode())
metrics = st.one_of(mangled(lines), st.binary(max_size=100))
headers = st.sampled_from(
    [{}, {"Content-Type": "text/plain; charset=hex"}, {"Content-Encoding": "gzip"}]
    + [{"Content-Type": f"text/plain; charset={name}"} for name in ("idna", "utf-7", "nonsense")]
)


@fuzz(JSON["/v1/models"], JSON["/kv_event_sources"], JSON["/version"], JSON["/tokenize"])
def test_json_answers(models: bytes, sources: bytes, version: bytes, tokens: bytes) -> None:
    """What is read of them is in range."""
    for read, body in ((pages.models, models), (pages.event_sources, sources)):
        try:
            found: Any = read(body)
        except ValueError:
            continue
        assert len(found) <= max(pages.MAX_MODELS, engine_metrics.MAX_RANKS)
        if read is pages.models:
            assert all(m.max_model_len is None or m.max_model_len >= 0 for m in found)
        else:
            assert all(0 <= rank < engine_metrics.MAX_RANKS for rank in found)
    pages.version(version)
    assert len(pages.refusal(models)) <= 500
    try:
        assert all(0 <= token < 2**31 for token in pages.tokens(tokens))
    except ValueError:
        pass


@fuzz(metrics)
def test_metrics_pages(body: bytes) -> None:
    """Counts are none or small, times are finite, ranks are few."""
    page = engine_metrics.EngineMetrics(body)
    info = page.cache_config()
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting"):
        for rank, value in page.by_rank(name).items():
            assert 0 <= rank < engine_metrics.MAX_RANKS
            assert 0 <= value < 2**53
    started_s = page.started_s()
    assert started_s is None or math.isfinite(started_s)
    size = engine_metrics.block_size(info.get("block_size"))
    assert size is None or 0 < size <= MAX_BLOCK_SIZE
    blocks = engine_metrics.count(info.get("num_gpu_blocks"))
    assert blocks is None or 0 <= blocks <= 2**40


class Answered:
    """A response, all of whose body has come."""

    def __init__(self, status: int, headers: dict[str, str]) -> None:
        self.status = status
        self.headers: CIMultiDict[str] = CIMultiDict(headers)
        self.content = self

    def at_eof(self) -> bool:
        return True

    def close(self) -> None:
        pass


class Engine:
    """Answers with bytes; one client asks for all examples, for it takes a while to make."""

    def __init__(self) -> None:
        self.answers: dict[str, bytes] = {}
        self.headers: dict[str, str] = {}
        self.status = 200
        self.api = EngineApi(timeout_s=2)
        self.api._session = self  # type: ignore[assignment]

    async def connect(self, url: str, server: str) -> tuple[None, bool]:
        return None, False

    async def exchange(self, _: None, url: str, *sent: object) -> tuple[Answered, bytes]:
        whole = self.answers.get(urlsplit(url).path, b"")  # nothing decodes it
        return Answered(self.status, self.headers), whole

    async def ask(self) -> None:
        for asked in (
            self.api.facts("r1", "http://r1"),
            self.api.load("r1", "http://r1"),
            self.api.event_publishers("r1", "http://r1"),
            self.api.tokenize("r1", "http://r1", b"{}", timeout_s=2),
        ):
            with suppress(UpstreamError, BadRequest):
                await asked  # type: ignore[misc]


@cache
def engine() -> Engine:
    return Engine()


@fuzz(st.fixed_dictionaries({**JSON, "/metrics": metrics}), headers, st.sampled_from([200, 500]))
def test_a_whole_replica(answers: dict[str, bytes], sent: dict[str, str], status: int) -> None:
    """Discovery, load and tokens end with what they found, or with an UpstreamError."""
    asked = engine()
    asked.answers, asked.headers, asked.status = answers, sent, status

    asyncio.run(asked.ask())
