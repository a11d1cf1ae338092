"""`fork_client.py PYTHON ARGUMENTS…`: what `PYTHON ARGUMENTS…` does, in a fork of the fork server.

This process stands for the fork: it has its input and output, passes signals on, ends as it ends;
killed, it takes the fork with it, some ms later (`tests.forks.kill` kills the fork first). Stopped
(SIGSTOP) it stops alone. Without a server, or if the server wants another environment, it becomes
the command itself.

Run it with `-I -S`: it starts in a fifth of the processor time of `python` as installed.
"""

import contextlib
import json
import os
import signal
import socket
import sys

PASSED_ON = {
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2,
}  # fmt: skip


def main(python: str, arguments: list[str]) -> None:
    """Ask for a fork and end as it ends."""
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)  # until there is a process to send them to
    path = os.environ.get("TESTS_FORK_SERVER")
    is_option = not arguments or (arguments[0] not in ("-m", "-c") and arguments[0][:1] == "-")
    with socket.socket(socket.AF_UNIX) as server:
        if is_option or path is None or not _is_connected(server, path):
            _become(python, arguments)
        order = {"arguments": arguments, "cwd": os.getcwd(), "environ": dict(os.environ)}
        socket.send_fds(server, [b"f"], [0, 1, 2])
        server.sendall(json.dumps(order).encode() + b"\n")
        answers = server.makefile("rb")
        pid = int(answers.readline() or 0)
        if not pid:
            _become(python, arguments)
        with open("/proc/self/comm", "w") as name:  # for those who kill
            name.write(f"fork {pid}")
        for number in PASSED_ON:
            signal.signal(number, lambda number, _: _send(pid, number))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
        status = int(answers.readline() or 1)
    if status >= 0:
        os._exit(status)
    with contextlib.suppress(OSError):  # SIGKILL has its default only
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)


def _is_connected(server: socket.socket, path: str) -> bool:
    try:
        server.connect(path)
    except OSError:
        return False
    return True


def _become(python: str, arguments: list[str]) -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    os.execv(python, [python, *arguments])


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
