"""Drive any OpenAI-compatible base URL with a workload: open or closed loop, every turn measured.

options     what can be asked of a replay
schedule    which turn is due when; no clock
prompts     what a turn says; requests: how it is sent
target      what answers at a base URL, asked before anything is sent
driver      `replay`: feeds, sends, measures
run_file    what was measured, as JSON Lines
tally, display, report, cli    what people see
"""

from loadtest.replay.driver import Started, replay
from loadtest.replay.options import ReplayError, ReplayOptions
from loadtest.replay.prompts import Prompts
from loadtest.replay.run_file import RunFileError, RunWriter, read_run, write_run
from loadtest.replay.target import TargetError

__all__ = [
    "Prompts",
    "ReplayError",
    "ReplayOptions",
    "RunFileError",
    "RunWriter",
    "Started",
    "TargetError",
    "read_run",
    "replay",
    "write_run",
]
