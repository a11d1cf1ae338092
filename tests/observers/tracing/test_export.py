"""A collector that is gone, slow or wrong costs spans, and no request anything."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import pytest

from router import config
from router.assembly import Router
from router.base.errors import ConfigError
from router.config import TracingConfig
from router.metrics import Metrics
from router.observers.tracing import otlp
from router.observers.tracing.otlp import Spans
from tests.faults.stage import Engines, chat, on_stage, words
from tests.observers.tracing.receiver import Receiver, receiving


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the thread look often."""
    monkeypatch.setattr(otlp, "EVERY_S", 0.02)


@pytest.fixture
def collector() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


def test_what_does_not_fit_the_queue_is_dropped_and_counted(
    collector: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(otlp, "MAX_WAITING", 4)
    monkeypatch.setattr(otlp, "_BATCH", 4)
    collector.hangs.clear()
    metrics = Metrics()
    spans = Spans(TracingConfig(endpoint=collector.url), metrics)
    for number in range(11):  # four are sent, four wait
        begun = spans.begin({}, "POST")
        assert begun is not None
        begun.span.end()
        if number == 3:
            assert collector.asked.wait(30)
    collector.hangs.set()
    spans.close()

    assert len(collector.spans) == 8
    text = metrics.render().decode()
    assert 'warmroute_spans_total{result="dropped"} 3.0' in text
    assert 'warmroute_spans_total{result="sent"} 8.0' in text


def test_a_collector_that_hangs_does_not_hold_up_the_end(
    collector: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(otlp, "LAST_S", 0.05)
    collector.hangs.clear()
    spans = Spans(TracingConfig(endpoint=collector.url), Metrics())
    begun = spans.begin({}, "POST")
    assert begun is not None
    begun.span.end()
    begun_s = time.monotonic()
    spans.close()

    assert time.monotonic() - begun_s < 5


async def test_a_collector_that_is_gone_is_logged_once(collector: Receiver) -> None:
    """And once more when it is back. Requests are answered all the time."""
    collector.status = 400
    async with Engines(1) as engines:
        async with on_stage(*engines, tracing__endpoint=collector.url) as stage:
            for number in range(3):
                assert (await stage.ask(chat(words(number)))).status == 200
                lost = 2.0 * (number + 1)
                await stage.until(
                    lambda lost=lost: stage.metric("warmroute_spans_total", result="failed") == lost
                )
            collector.status = 200
            assert (await stage.ask(chat(words(9)))).status == 200
            await stage.until(lambda: stage.metric("warmroute_spans_total", result="sent") == 2)
            log = stage.log

    assert log.count("spans lost") == 2  # as text and as JSON
    assert log.count("spans are sent again") == 2
    assert len(collector.spans) == 2


async def test_a_collector_that_is_slow_delays_no_request(collector: Receiver) -> None:
    collector.hangs.clear()
    async with Engines(1) as engines:
        async with on_stage(*engines, tracing__endpoint=collector.url) as stage:
            for number in range(5):
                assert (await stage.ask(chat(words(number)))).status == 200
            assert stage.metric("warmroute_spans_total") == 0
            collector.hangs.set()
            await stage.until(lambda: stage.metric("warmroute_spans_total", result="sent") == 10)


async def test_a_redirect_is_not_followed() -> None:
    """The collector is where the configuration says, and no other host."""
    with receiving() as elsewhere, receiving() as collector:
        collector.status, collector.location = 307, elsewhere.url
        async with Engines(1) as engines:
            async with on_stage(*engines, tracing__endpoint=collector.url) as stage:
                await stage.ask(chat(words(1)))
                await stage.until(
                    lambda: stage.metric("warmroute_spans_total", result="failed") == 2
                )

        assert elsewhere.num_asked == 0


async def test_the_standard_variables_say_the_rest(
    collector: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20abc")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "router-a")
    endpoint = collector.url.removesuffix("/v1/traces")
    async with Engines(1) as engines, on_stage(*engines, tracing__endpoint=endpoint) as stage:
        await stage.ask(chat(words(1)))

    assert {span.service for span in collector.spans} == {"router-a"}
    headers = {name.lower(): value for name, value in collector.headers[0].items()}
    assert headers["authorization"] == "Bearer abc"
    assert headers["content-encoding"] == "gzip"


def test_without_the_extra_the_router_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    monkeypatch.delitem(sys.modules, "router.observers.tracing.otlp", raising=False)

    with pytest.raises(ConfigError, match=r"pip install 'opentelemetry-exporter-otlp-proto-http"):
        Router(config.load(flags={("tracing", "endpoint"): "http://127.0.0.1:4318"}))


@pytest.mark.parametrize(
    "endpoint", ["collector:4318", "ftp://a/", "http://", "http://a:b@c/v1/traces", "http://[::1"]
)
def test_what_is_no_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"tracing\.endpoint") as refused:
        config.load(flags={("tracing", "endpoint"): endpoint})

    assert refused.value.param == "tracing.endpoint"
