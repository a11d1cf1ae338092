"""The fork server of the tests: a fork is to its starter what a process would be."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.forks import PYTHONPATH, python_command
from tests.redis_servers import wait_until


def start(*arguments: str, **environ: str) -> subprocess.Popen[str]:
    """Start a command as tests do."""
    return subprocess.Popen(
        [*python_command(), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONPATH": PYTHONPATH, "HF_HUB_OFFLINE": "1"} | environ,
    )


IS_FORK = "import sys; print('router.run' in sys.modules)"


def test_what_is_imported_is_there() -> None:
    """A command with the server's environment is a fork, another one a process of its own."""
    assert start("-c", IS_FORK).communicate()[0] == "True\n"
    assert start("-c", IS_FORK, MPLBACKEND="agg").communicate()[0] == "False\n"
    assert start("-S", "-c", IS_FORK).communicate()[0] == "False\n"


@pytest.mark.parametrize(
    ("code", "status", "words"),
    [
        ("sys.exit(7)", 7, ""),
        ("sys.exit('why')", 1, "why"),
        ("1 / 0", 1, "ZeroDivisionError"),
        ("os.kill(os.getpid(), 9)", -9, ""),
        ("threading.Timer(0.01, print, ['from a thread']).start()", 0, "from a thread"),
    ],
)
def test_it_ends_as_it_would(code: str, status: int, words: str) -> None:
    """With its status or signal, the words of its error, its threads waited for."""
    process = start("-c", f"import os, sys, threading; {code}")

    output, _ = process.communicate()

    assert process.returncode == status
    assert words in output


def test_killed_it_is_gone() -> None:
    """Who kills the command kills the fork."""
    with start("-c", "import os, time; print(os.getpid(), flush=True); time.sleep(600)") as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())

        process.kill()

    wait_until(lambda: not is_alive(pid), "the fork's end")


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_without_a_server_it_is_a_process() -> None:
    """What a test starts runs, whoever runs the test."""
    process = start("-c", IS_FORK, TESTS_FORK_SERVER="/nowhere")

    assert process.communicate()[0] == "False\n"
    assert python_command()[-1] == sys.executable
