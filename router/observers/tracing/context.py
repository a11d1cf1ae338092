"""W3C trace context: the header `traceparent`, and whether a trace is recorded.

Source: www.w3.org/TR/trace-context/, section 3.2 (level 1, version 00).
"""

from __future__ import annotations

import random
import re
from typing import Final

from msgspec import Struct

PARENT: Final = "traceparent"
STATE: Final = "tracestate"

_HEADER: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED: Final = 0x01
_FORBIDDEN: Final = "ff"
_LOW_BITS: Final = (1 << 64) - 1

# No secrets: ids have to differ, and the system's generator takes a call into the kernel each time.
_bits = random.SystemRandom().getrandbits(128)
_random = random.Random(_bits)


class Context(Struct, frozen=True):
    """The span that another one is a child of."""

    trace_id: int
    span_id: int
    is_sampled: bool


def parsed(header: str | None) -> Context | None:
    """Read a `traceparent`; None: it is none."""
    found = _HEADER.fullmatch(header) if header is not None and len(header) <= 512 else None
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == _FORBIDDEN or (version == "00" and more is not None):
        return None
    context = Context(int(trace_id, 16), int(span_id, 16), bool(int(flags, 16) & _SAMPLED))
    return context if context.trace_id and context.span_id else None


def written(trace_id: int, span_id: int, *, is_sampled: bool) -> str:
    """Write a `traceparent`."""
    return f"00-{trace_id:032x}-{span_id:016x}-{is_sampled:02x}"


def new_trace_id() -> int:
    """Return an id for a trace."""
    return _random.getrandbits(128) or 1


def new_span_id() -> int:
    """Return an id for a span."""
    return _random.getrandbits(64) or 1


def bound_of(ratio: float) -> int:
    """Return the bound below which the low half of a trace's id is for a share of all traces.

    As OpenTelemetry's `TraceIdRatioBased`: services with one ratio record the same traces.
    """
    return round(ratio * (_LOW_BITS + 1))


def is_below(trace_id: int, bound: int) -> bool:
    """Return whether a new trace is recorded."""
    return trace_id & _LOW_BITS < bound
