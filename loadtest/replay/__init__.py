"""`warmroute replay`: one workload at one base URL; cli: options and progress, report: figures.

The driver is `loadtest.runner`; what scripts use of it has its names here.
"""

from loadtest.runner import ReplayOptions, read_run, replay, write_run

__all__ = ["ReplayOptions", "read_run", "replay", "write_run"]
