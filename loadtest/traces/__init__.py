"""Traces in, workloads out: Mooncake, Bailian, ShareGPT-style conversations, plain messages."""

from loadtest.traces.description import Description, describe
from loadtest.traces.errors import WorkloadError
from loadtest.traces.formats import FORMATS
from loadtest.traces.mooncake import write_trace
from loadtest.traces.reading import read_workload
from loadtest.traces.sessions import sessions_of

__all__ = [
    "FORMATS",
    "Description",
    "WorkloadError",
    "describe",
    "read_workload",
    "sessions_of",
    "write_trace",
]
