"""One trace of the router and of a real engine, which exports to the same collector."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.engines.harness import Engine, Router, all_up, wait_until
from tests.observers.tracing.receiver import Received, Receiver, receiving

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
CLIENT_SPAN = "00f067aa0ba902b7"
PATIENCE_S = 60.0
OTHER_TRACE = TRACE_ID[::-1]


@pytest.fixture(scope="module")
def collector() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def router(collector: Receiver, log_dir: Path) -> Iterator[Router]:
    """Run a router before an engine that was started as the documentation says."""
    engine = Engine(
        "traced",
        log_dir,
        options=("--otlp-traces-endpoint", collector.url),
        environ={
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
            "OTEL_SERVICE_NAME": "vllm",
            "OTEL_BSP_SCHEDULE_DELAY": "200",
        },
    )
    options = ("--tracing-endpoint", collector.url)
    with all_up([engine]), Router([engine], log_dir, options=options) as running:
        yield running


def ask(router: Router, text: str, flags: str, trace_id: str = TRACE_ID) -> httpx.Response:
    """Send a streamed chat of a client that traces."""
    reply = httpx.post(
        f"{router.url}/v1/chat/completions",
        json={
            "model": "tiny",
            "messages": [{"role": "user", "content": text}],
            "max_tokens": 4,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
        headers={"traceparent": f"00-{trace_id}-{CLIENT_SPAN}-{flags}"},
        timeout=120,
    )
    reply.raise_for_status()
    return reply


def spans(collector: Receiver, service: str, trace_id: str = TRACE_ID) -> list[Received]:
    """List a service's spans of a trace, without those that an engine writes at its start."""
    return [
        span for span in collector.spans if (span.service, span.trace_id) == (service, trace_id)
    ]


def test_the_engines_span_is_a_child_of_the_try(router: Router, collector: Receiver) -> None:
    """Client, SERVER span, CLIENT span, the engine's `llm_request`: one trace."""
    text = " ".join(f"word{i}" for i in range(200))
    ask(router, text, "00", OTHER_TRACE)  # not sampled: neither the router nor the engine traces it
    ask(router, text, "01")
    wait_until(lambda: len(spans(collector, "warmroute")) == 2, PATIENCE_S, "the router's spans")
    wait_until(lambda: spans(collector, "vllm"), PATIENCE_S, "the engine's span")

    server, client = spans(collector, "warmroute")
    (engine,) = [span for span in spans(collector, "vllm") if span.name == "llm_request"]
    assert (server.kind, server.parent_id) == ("server", CLIENT_SPAN)
    assert (client.kind, client.parent_id) == ("client", server.span_id)
    assert engine.parent_id == client.span_id
    assert client.begun_ns < engine.begun_ns < engine.ended_ns
    usage = "gen_ai.usage."
    assert engine.attributes[usage + "prompt_tokens"] == client.attributes[usage + "input_tokens"]
    assert client.attributes[usage + "cache_read.input_tokens"] > 0
    assert engine.attributes[usage + "completion_tokens"] == 4
    assert client.attributes[usage + "output_tokens"] == 4
    assert server.event_names[-2:] == ["decided", "first_token"]
    assert [span for span in collector.spans if span.trace_id == OTHER_TRACE] == []
