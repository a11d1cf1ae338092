"""Traces in, workloads out: Mooncake's lines, a router's decision records, plain messages."""

from loadtest.traces.description import Description, describe
from loadtest.traces.errors import WorkloadError
from loadtest.traces.mooncake import write_trace
from loadtest.traces.reading import read_workload
from loadtest.traces.sessions import sessions_of

__all__ = [
    "Description",
    "WorkloadError",
    "describe",
    "read_workload",
    "sessions_of",
    "write_trace",
]
