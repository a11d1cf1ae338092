"""Forks of a process that has imported what our commands import, for those that tests start.

A `warmroute serve` takes 1.6 s of processor time until it is ready, a client 2 s to import openai:
nearly all of it imports. Here they are done once; `fork_client.py` stands for the command.

    client    three descriptors (input, output, errors), then a line of JSON:
              `arguments` of the interpreter, `cwd`, `environ`
    server    a line with the fork's number, 0: start a process yourself; then its exit status

What libraries read of the environment while they are imported is this process's: a command that
has another one gets 0. It ends with its stdin.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
from types import ModuleType
from typing import Any

IMPORTED = (
    "loadtest.emulator.cli",
    "openai",
    "router.cli",
    "router.run",
    "scipy.stats",
    "transformers",
)
READ_AT_IMPORT = ("HF_", "LD_", "OMP_", "OPENBLAS_", "PYTHON", "TRANSFORMERS_")
BUT = {  # heeded here; our commands set it themselves; offline nothing is looked for there
    "PYTHONUNBUFFERED",
    "PYTHONDONTWRITEBYTECODE",
    "TRANSFORMERS_VERBOSITY",
    "HF_HOME",
}


def main(listening_fd: int) -> None:
    """Serve until stdin ends; in a fork, run its command."""
    with socket.socket(fileno=listening_fd) as listener:
        order = serve(listener)
    if order is not None:
        run(order["arguments"])


def serve(listener: socket.socket) -> dict[str, Any] | None:
    """Give each client a keeper; return None at the end, and its order in a fork."""
    environ = read_at_import(os.environ)
    is_loaded = False
    while True:
        ready, _, _ = select.select([sys.stdin, listener], [], [])
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if sys.stdin in ready:
            return None
        client, _ = listener.accept()
        if not is_loaded:
            is_loaded = True
            for name in IMPORTED:
                importlib.import_module(name)
            gc.collect()
            gc.freeze()  # or a fork's first collection copies every page
        if os.fork() == 0:
            listener.close()
            return keep(client, environ)
        client.close()


def keep(client: socket.socket, environ: dict[str, str]) -> dict[str, Any] | None:
    """Fork, and tell the client how it ends; return in the fork."""
    os.setsid()  # a signal to those that wait for us is not for forks
    _, fds, _, _ = socket.recv_fds(client, 1, 3)
    with client.makefile("rb") as lines:
        line = lines.readline()
    if not line:  # the client has ended before it said anything
        os._exit(0)
    order: dict[str, Any] = json.loads(line)
    if read_at_import(order["environ"]) != environ:
        client.sendall(b"0\n")
        os._exit(0)
    pid = os.fork()
    if pid == 0:
        client.close()
        os.setsid()
        take_place(order, fds)
        return order
    for fd in (0, 1, 2, *fds):  # a pipe ends when the command has ended
        os.close(fd)
    client.sendall(b"%d\n" % pid)
    pidfd = os.pidfd_open(pid)
    ready, _, _ = select.select([pidfd, client], [], [])
    if pidfd not in ready:  # the client says nothing: it is dead
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(OSError):
        client.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
    os._exit(0)


def take_place(order: dict[str, Any], fds: list[int]) -> None:
    """Have what a process started with this command would have."""
    for target, fd in enumerate(fds):
        os.dup2(fd, target)
        os.close(fd)
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["environ"])
    if "TESTS_FORKED_CHILDREN" in os.environ:
        sys.executable = os.environ["TESTS_FORK_PYTHON"]
    if "PYTHONUNBUFFERED" in os.environ:
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    sys.dont_write_bytecode = "PYTHONDONTWRITEBYTECODE" in os.environ


def run(arguments: list[str]) -> None:
    """Do what the interpreter does with its arguments, but for taking all modules apart at the end.

    That would be 80 ms; threads are waited for and exit functions called as ever.
    """
    status = [1]
    atexit.register(leave, status)
    try:
        match arguments:
            case ["-m", module, *rest]:
                sys.argv, sys.path[0] = [module, *rest], os.getcwd()
                runpy.run_module(module, run_name="__main__", alter_sys=True)
            case ["-c", code, *rest]:
                sys.argv, sys.path[0] = ["-c", *rest], ""
                sys.modules["__main__"] = main_module = ModuleType("__main__")
                exec(compile(code, "<string>", "exec"), vars(main_module))
            case [file, *rest]:
                sys.argv, sys.path[0] = [file, *rest], os.path.dirname(os.path.abspath(file))
                runpy.run_path(file, run_name="__main__")
        status[0] = 0
    except SystemExit as end:
        status[0] = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise
    except KeyboardInterrupt:
        status.clear()  # the interpreter will end as by the signal
        raise


def leave(status: list[int]) -> None:
    """Exit at once with this status, unless it is not known."""
    for file in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            file.flush()
    if status:
        os._exit(status[0] & 0xFF)


def read_at_import(environ: Any) -> dict[str, str]:
    """Select the variables that imports may depend on; a path said twice counts once."""
    found = {k: v for k, v in environ.items() if k.startswith(READ_AT_IMPORT) and k not in BUT}
    path = found.get("PYTHONPATH", "").split(os.pathsep)
    return found | {"PYTHONPATH": os.pathsep.join(sorted(set(path)))}


if __name__ == "__main__":
    main(int(sys.argv[1]))
