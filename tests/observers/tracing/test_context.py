"""Trace context is read, written and sampled as OpenTelemetry's own library does it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import trace as otel
from opentelemetry.sdk.trace.sampling import Decision, TraceIdRatioBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from router.observers.tracing.context import (
    Context,
    bound_of,
    is_below,
    new_span_id,
    new_trace_id,
    parsed,
    written,
)

TRACE_ID, SPAN_ID = 0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7
HEADER = f"00-{TRACE_ID:032x}-{SPAN_ID:016x}-01"


def read_by_library(header: str) -> Context | None:
    """Read a header with OpenTelemetry's propagator."""
    context = TraceContextTextMapPropagator().extract({"traceparent": header})
    span = otel.get_current_span(context).get_span_context()
    if not span.is_valid:
        return None
    return Context(span.trace_id, span.span_id, span.trace_flags.sampled)


@pytest.mark.parametrize(
    "header",
    [
        HEADER,
        HEADER[:-2] + "00",
        HEADER[:-2] + "03",
        HEADER.upper(),
        HEADER + "-more",
        "01" + HEADER[2:] + "-more",
        "ff" + HEADER[2:],
        HEADER.replace("a3ce", "xyz0"),
        f"00-{0:032x}-{SPAN_ID:016x}-01",
        f"00-{TRACE_ID:032x}-{0:016x}-01",
        HEADER[:-1],
        "",
    ],
)
def test_a_header_means_what_the_library_reads(header: str) -> None:
    assert parsed(header) == read_by_library(header)


@given(st.text(max_size=80))
def test_garbage_is_no_context(header: str) -> None:
    assert parsed(header) is None


def test_what_is_written_is_read_again() -> None:
    for is_sampled in (True, False):
        trace_id, span_id = new_trace_id(), new_span_id()
        header = written(trace_id, span_id, is_sampled=is_sampled)

        assert parsed(header) == read_by_library(header) == Context(trace_id, span_id, is_sampled)


@pytest.mark.parametrize("ratio", [0.0, 0.001, 0.25, 1.0])
def test_a_share_of_traces_is_the_same_as_the_librarys(ratio: float) -> None:
    """Services with one ratio record the same traces."""
    sampler = TraceIdRatioBased(ratio)
    for _ in range(200):
        trace_id = new_trace_id()
        decision = sampler.should_sample(None, trace_id, "").decision

        assert is_below(trace_id, bound_of(ratio)) == (decision is Decision.RECORD_AND_SAMPLE)
