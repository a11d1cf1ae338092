"""Forks engines from a process that has imported vLLM: run by the engines' own interpreter.

    stdin     a JSON object a line: `argv`, `environ`, `cwd`, `log`
    stdout    the number of the process that became that engine, a line each

It ends with its stdin, and its engines with it. `loadtest.engines.fork_client` is the other side.

Denormal numbers count as 0 in engines: attention on the CPU makes them of what is masked, and is
many times slower for it. With a pool, engines stood still for up to 30 s, for this and for what
yield.c says.

What vLLM reads of its environment while it is imported is this process's, not the engine's: none
of what engines here differ in. An engine that has ended stays a zombie as long as this process
runs, so that its number is not given to another.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

NICE = 10  # a tenth of the processor time of what is not, where both want it
SERVER = "vllm.entrypoints.openai.api_server"
# What its other processes import first; other releases of vLLM may have them elsewhere.
ALSO = ("vllm.v1.engine.core", "vllm.v1.worker.cpu_worker", "vllm.v1.worker.cpu_model_runner")


def main() -> None:
    """Read orders until there are no more, and exit; return in every engine's process."""
    answers = os.dup(1)
    os.dup2(2, 1)  # some releases log to stdout
    importlib.import_module(SERVER)
    for name in ALSO:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    with contextlib.suppress(ImportError):  # it looks for the arguments where the environment is
        importlib.import_module("setproctitle").getproctitle()
    importlib.import_module("torch").set_flush_denormal(True)
    gc.freeze()  # or an engine's first collection copies every page
    engines = []
    for line in sys.stdin.buffer:
        pid = os.fork()
        if pid == 0:
            os.close(answers)
            _become(json.loads(line))
            runpy.run_module(SERVER, run_name="__main__", alter_sys=True)
            return
        engines.append(pid)
        os.write(answers, b"%d\n" % pid)
    for pid in engines:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    os._exit(0)  # nothing is to be saved, and nanobind would list what vLLM never frees


def _become(order: dict[str, Any]) -> None:
    """Become the process that was started with this command."""
    os.setsid()
    _step_back()
    null = os.open(os.devnull, os.O_RDONLY)
    log = os.open(order["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(null)
    os.close(log)
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["environ"])
    sys.argv = order["argv"]


def _step_back() -> None:
    """Lower the priority of this process: a router shares its cores with no engine's prefill.

    Linux gives every session its share where it groups them (sched(7), autogroup), and looks at
    single processes where it does not.
    """
    os.nice(NICE)
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(NICE))


if __name__ == "__main__":
    main()
