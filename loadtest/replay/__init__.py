"""`warmroute replay`: one workload at one base URL; cli: options and progress, report: figures.

The driver is `loadtest.runner`. Scripts import its names from here.
"""

from loadtest.runner import ReplayOptions, read_run, replay, write_run

__all__ = ["ReplayOptions", "read_run", "replay", "write_run"]
