"""Traces in, workloads out: Mooncake, Bailian, ShareGPT-style conversations, plain messages."""

from loadtest.traces.description import Description, describe
from loadtest.traces.errors import WorkloadError
from loadtest.traces.formats import FORMATS
from loadtest.traces.mooncake import write_trace
from loadtest.traces.reading import read_trace, read_workload
from loadtest.traces.request import TraceRequest
from loadtest.traces.sessions import sessions_of
from loadtest.traces.timing import Timing, scaled, spread

__all__ = [
    "FORMATS",
    "Description",
    "Timing",
    "TraceRequest",
    "WorkloadError",
    "describe",
    "read_trace",
    "read_workload",
    "scaled",
    "sessions_of",
    "spread",
    "write_trace",
]
