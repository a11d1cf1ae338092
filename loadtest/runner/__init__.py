"""Send turns to an OpenAI-compatible API and measure each: for replay, studies and tests.

    options     what can be asked of a run
    schedule    which turn is due when: open and closed loop; no clock
    prompts     the prompt of a turn; requests: how it is sent
    target      what answers at a base URL, asked before anything is sent
    exchange    one request and its streamed answer: bytes in, a result out
    sending     the HTTP client
    driver      `replay`: a workload, every turn known beforehand
    run_file    results as JSON Lines
    display     running figures on a terminal or in a log
    stop        how a signal ends a run
    stack       fresh replicas and a router for a run; children, leash: their processes

`loadtest.replay` is the command, and `loadtest.compare` judges run files.
"""

from loadtest.runner.driver import replay
from loadtest.runner.options import ReplayError, ReplayOptions
from loadtest.runner.prompts import Prompts
from loadtest.runner.run_file import RunFileError, RunWriter, read_run, write_run
from loadtest.runner.target import TargetError

__all__ = [
    "Prompts",
    "ReplayError",
    "ReplayOptions",
    "RunFileError",
    "RunWriter",
    "TargetError",
    "read_run",
    "replay",
    "write_run",
]
