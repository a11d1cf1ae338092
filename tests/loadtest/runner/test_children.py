"""Processes: ready when they say so, errors with the end of their log, never left behind."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from loadtest.runner.children import ChildDied, running
from loadtest.runner.stack import child_environment

ENV = child_environment(os.environ)
READY = re.compile(r"ready at (\d+)")
WAITS = "import time; print('ready at 7', flush=True); time.sleep(60)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "print('ready at 8', flush=True); time.sleep(60)"
)


def _is_gone(pid: int) -> bool:
    """Return whether no such process runs (a zombie does not)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"


def _await_gone(pid: int) -> bool:
    deadline_s = time.monotonic() + 20.0
    while time.monotonic() < deadline_s:
        if _is_gone(pid):
            return True
        time.sleep(0.02)
    return False


async def test_child_is_ready_when_its_log_says_so_and_gone_after_its_context(
    tmp_path: Path,
) -> None:
    """What it announced can be read; then it ends."""
    async with running("r1", ["-c", WAITS], log=tmp_path / "log", env=ENV) as child:
        await child.wait_announced(READY, 30.0)
        assert child.announced[1] == "7"
        pid = child.pid

    assert _is_gone(pid)


async def test_child_that_dies_at_start_is_reported_with_the_reason(tmp_path: Path) -> None:
    """Status and the end of the log are in the error."""
    argv = ["-c", "print('port taken'); raise SystemExit(3)"]

    async with running("router", argv, log=tmp_path / "log", env=ENV) as child:
        with pytest.raises(ChildDied, match=r"(?s)router ended with status 3.*port taken"):
            await child.wait_announced(READY, 30.0)


async def test_child_that_will_not_end_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM first, SIGKILL after a while."""
    monkeypatch.setattr("loadtest.runner.children.PATIENCE_S", 0.1)

    async with running("r1", ["-c", STUBBORN], log=tmp_path / "log", env=ENV) as child:
        await child.wait_announced(READY, 30.0)

    with pytest.raises(ChildDied, match="SIGKILL"):
        await child.watch()


async def test_cancelled_context_leaves_no_process(tmp_path: Path) -> None:
    """Ctrl-C in the middle of anything ends the children."""
    pids: list[int] = []
    started = asyncio.Event()

    async def hold() -> None:
        async with running("r1", ["-c", WAITS], log=tmp_path / "log", env=ENV) as child:
            pids.append(child.pid)
            started.set()
            await asyncio.get_running_loop().create_future()

    async with asyncio.TaskGroup() as group:
        task = group.create_task(hold())
        await started.wait()
        task.cancel()

    assert _is_gone(pids[0])


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
def test_child_of_a_killed_demo_ends_too(tmp_path: Path) -> None:
    """Killed without warning, the demo leaves nothing behind."""
    script = (
        "import asyncio, os, re, pathlib\n"
        "from loadtest.runner.children import running\n"
        "async def main():\n"
        f"    log = pathlib.Path({str(tmp_path / 'log')!r})\n"
        f"    async with running('r1', ['-c', {WAITS!r}], log=log, env=os.environ) as child:\n"
        f"        await child.wait_announced(re.compile('ready at'), 30.0)\n"
        "        print(child.pid, flush=True)\n"
        "        await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=ENV) as demo:
        assert demo.stdout is not None
        pid = int(demo.stdout.readline())
        demo.send_signal(signal.SIGKILL)

    assert _await_gone(pid)


def test_children_get_this_source_tree_and_no_stray_configuration() -> None:
    """WARMROUTE_ variables of the user's shell do not change the comparison."""
    env = child_environment({"WARMROUTE_POLICY_NAME": "random", "PYTHONPATH": "/x", "HOME": "/h"})

    assert "WARMROUTE_POLICY_NAME" not in env
    assert env["PYTHONPATH"].endswith(f"{os.pathsep}/x")
    assert (Path(env["PYTHONPATH"].split(os.pathsep)[0]) / "loadtest").is_dir()
    assert env["HOME"] == "/h"
