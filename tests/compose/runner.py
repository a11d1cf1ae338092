"""Start what a compose file says, as plain processes: no Docker, no root.

Taken from the files as they are: services, entrypoints and commands, environment, dependencies and
their conditions, health checks, mounted files, secrets, stop signals. Exchanged, by rules that know
no service's name:

    in the files                       here
    a service's name before `:PORT`    its own address of 127.0.0.0/8, if they share a network
    0.0.0.0, 127.0.0.1, localhost      the address of the service that says it
    host.docker.internal               the address of the services on the host's network
    the target of a mount              a copy of our file, rewritten likewise; a directory from
                                       elsewhere (weights, caches), as it is; an empty directory
    an image                           its entrypoint, found on the PATH (`Image`)

Ports stay what they are. Not here: users, capabilities, limits, read-only roots, restarts; tests
look at those in the files.
"""

from __future__ import annotations

import os
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from graphlib import TopologicalSorter
from itertools import chain
from pathlib import Path
from typing import Self

from msgspec import Struct

from tests.compose.model import ComposeError, Mount, Project, Service
from tests.forks import ADDRESS, PYTHONPATH, kill, python_command

ROOT = Path(__file__).resolve().parents[2]

READY_S = 120.0  # a start period of less is taken for this: a busy machine is slow
LONGEST_S = 300.0
_POLL_S = 0.1
_OWN = r"\b0\.0\.0\.0\b|\b127\.0\.0\.1\b|\blocalhost\b"


class Image(Struct, frozen=True, kw_only=True):
    """What an image brings that its compose file does not repeat."""

    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    environment: dict[str, str] = {}


Substitute = Callable[[str, list[str]], list[str]]


class Stack:
    """The processes of a project: `with Stack(...) as stack: stack.up()`.

    Args:
        project: What to run.
        folder: For files, directories and logs; must be empty.
        images: By repository, without the tag.
        services: Those wanted; None: all.
        substitute: Last word on a command, as (service, words) -> words.
        environment: Added for all, after the files' own.
    """

    def __init__(
        self,
        project: Project,
        folder: Path,
        images: Mapping[str, Image],
        *,
        services: Sequence[str] | None = None,
        substitute: Substitute | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.project = project
        self.folder = folder
        self._images = images
        self._wanted = set(services if services is not None else project.services)
        self._substitute = substitute
        self._environment = dict(environment or {})
        base = f"127.{random.randrange(1, 255)}.{random.randrange(256)}"
        self.host = f"{base}.1"
        self.addresses = {
            name: self.host if service.on_host else f"{base}.{number}"
            for number, (name, service) in enumerate(project.services.items(), 2)
        }
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        _write_scripts(folder / "bin")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    # -- what tests do ---------------------------------------------------------------------------

    def up(self) -> None:
        """Start everything wanted in the order of the dependencies; return when all are healthy.

        Raises:
            ComposeError: a dependency did not become what was waited for; with the log's end.
        """
        for name in chain.from_iterable(self._levels()):
            for other, condition in self._service(name).depends_on.items():
                self._wait_for(other, condition)
            self.start(name)
        # In that order again: HAProxy takes routers for ready until it has asked them.
        for name in chain.from_iterable(self._levels()):
            if self._service(name).health is not None:
                self.wait_healthy(name)

    def down(self) -> None:
        """End everything, dependents first; those that do not need each other, at the same time."""
        with ThreadPoolExecutor() as threads:
            for names in reversed(self._levels()):
                list(threads.map(self.stop, names))

    def start(self, name: str) -> None:
        """Start one service, without waiting."""
        service = self._service(name)
        words = self.command(name)
        with self._log(name).open("ab") as log:
            self._processes[name] = subprocess.Popen(
                words,
                cwd=self._home(service),
                env=self.environment(name),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def stop(self, name: str) -> None:
        """End it as Docker does: its signal, its time, then SIGKILL."""
        service = self._service(name)
        self._end(name, service.stop_signal, service.stop_grace_s)

    def kill(self, name: str) -> None:
        """Kill it at once."""
        self._end(name, "SIGKILL", 10.0)

    def is_healthy(self, name: str) -> bool:
        """Run the health check of a service once."""
        health = self._service(name).health
        assert health is not None, f"{name} has no health check"
        try:
            done = subprocess.run(
                [self._rewritten(name, word) for word in health.test],
                cwd=self._home(self._service(name)),
                env=self.environment(name),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=max(health.timeout_s, 20.0),
                check=False,
            )
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0

    def wait_healthy(self, name: str) -> None:
        """Ask until it is well."""
        health = self._service(name).health
        assert health is not None, f"{name} has no health check"
        end_s = time.monotonic() + min(max(health.start_period_s, READY_S), LONGEST_S)
        while not self.is_healthy(name):
            if self._processes[name].poll() is not None:
                raise ComposeError(f"{name} has ended:\n{self.log(name)}")
            if time.monotonic() > end_s:
                raise ComposeError(f"{name} is not healthy:\n{self.log(name)}")
            time.sleep(_POLL_S)

    def url(self, name: str, port: int) -> str:
        """Where a port of a service is, published or not."""
        return f"http://{self.addresses[name]}:{port}"

    def published(self, name: str, host_port: int) -> str:
        """Where the port that the host has as `host_port` is."""
        for port in self._service(name).ports:
            if port.port == host_port:
                return self.url(name, port.target)
        raise ComposeError(f"{name} publishes no port {host_port}")

    def log(self, name: str, num_chars: int = 4_000) -> str:
        """What it wrote, the end of it."""
        return self._log(name).read_text(errors="replace")[-num_chars:]

    def taken_ports(self) -> list[int]:
        """List ports of ours that a server on all addresses of this machine has already."""
        taken = set()
        for name in self._wanted:
            service = self._service(name)
            ports = {port.target for port in service.ports}
            for word in service.health.test if service.health is not None else ():
                ports |= {int(port) for port in re.findall(r"://[\w.-]+:(\d+)", word)}
            taken |= {port for port in ports if _is_taken(self.addresses[name], port)}
        return sorted(taken)

    # -- how it is exchanged ---------------------------------------------------------------------

    def command(self, name: str) -> list[str]:
        """The words that start a service."""
        service = self._service(name)
        image = self._image(service)
        entrypoint = image.entrypoint if service.entrypoint is None else service.entrypoint
        own = service.command
        if own is None:  # an entrypoint of its own takes the image's command away
            own = image.command if service.entrypoint is None else ()
        words = [self._rewritten(name, word) for word in (*entrypoint, *own)]
        return self._substitute(name, words) if self._substitute is not None else words

    def environment(self, name: str) -> dict[str, str]:
        """The variables a service is started with; nothing of ours but where programs are."""
        service = self._service(name)
        kept = {k: os.environ[k] for k in ("LD_LIBRARY_PATH", "LANG") if k in os.environ}
        own = {**self._image(service).environment, **service.environment}
        own.pop("PATH", None)
        return {
            **kept,
            "PATH": f"{self.folder / 'bin'}{os.pathsep}{_path()}",
            "HOME": str(self._home(service)),
            **{key: self._rewritten(name, value) for key, value in own.items()},
            **self._environment,
        }

    def mounted(self, name: str, target: str) -> Path:
        """Where what the container has at `target` is."""
        return self._targets[name][target]

    @cached_property
    def _targets(self) -> dict[str, dict[str, Path]]:
        return {
            name: {mount.target: self._local(service, mount) for mount in service.mounts}
            for name, service in self.project.services.items()
        }

    def _local(self, service: Service, mount: Mount) -> Path:
        if mount.volume is not None:
            return self.folder / "volumes" / mount.volume
        if mount.source is not None and _is_foreign(mount.source, self.project.file.parent):
            return mount.source
        return self.folder / "mounts" / service.name / mount.target.strip("/")

    def _rewritten(self, name: str, text: str) -> str:
        return self._pattern(name).sub(lambda found: self._exchanged(name, found[0]), text)

    def _pattern(self, name: str) -> re.Pattern[str]:
        service = self._service(name)
        names = [
            other.name
            for other in self.project.services.values()
            if not other.on_host and not service.on_host and other.networks & service.networks
        ]
        names += service.extra_hosts
        hosts = "|".join(rf"(?<![\w.-]){re.escape(other)}(?=:\d)" for other in sorted(names))
        targets = sorted(self._targets[name], key=len, reverse=True)
        paths = "|".join(rf"(?<![\w/]){re.escape(target)}(?![\w.-])" for target in targets)
        return re.compile("|".join(part for part in (paths, hosts, _OWN) if part))

    def _exchanged(self, name: str, found: str) -> str:
        service = self._service(name)
        if found in self._targets[name]:
            return str(self._targets[name][found])
        if service.extra_hosts.get(found) == "host-gateway":
            return self.host
        return self.addresses.get(found, self.addresses[name])

    # -- processes -------------------------------------------------------------------------------

    def _service(self, name: str) -> Service:
        return self.project.services[name]

    def _image(self, service: Service) -> Image:
        repository = service.image.partition("@")[0].rpartition(":")[0] or service.image
        if repository not in self._images:
            raise ComposeError(f"{service.name}: nothing is known of the image {service.image!r}")
        return self._images[repository]

    def _levels(self) -> list[tuple[str, ...]]:
        """Order what is wanted: all that a service depends on is in the levels before its own."""
        graph = {
            name: [other for other in self._service(name).depends_on if other in self._wanted]
            for name in sorted(self._wanted)
        }
        sorter = TopologicalSorter(graph)
        sorter.prepare()
        levels = []
        while sorter.is_active():
            levels.append(sorter.get_ready())
            sorter.done(*levels[-1])
        return levels

    def _wait_for(self, name: str, condition: str) -> None:
        if name not in self._wanted:
            return
        match condition:
            case "service_started":
                return
            case "service_healthy":
                self.wait_healthy(name)
            case "service_completed_successfully":
                if self._processes[name].wait(READY_S) != 0:
                    raise ComposeError(f"{name} failed:\n{self.log(name)}")
            case _:
                raise ComposeError(f"{name}: condition {condition!r} is not understood here")

    def _home(self, service: Service) -> Path:
        """Make the directory a service runs in, and what is mounted into it."""
        home = self.folder / "homes" / service.name
        if home.exists():
            return home
        home.mkdir(parents=True)
        for mount in service.mounts:
            local = self._targets[service.name][mount.target]
            if mount.content is not None:
                local.parent.mkdir(parents=True, exist_ok=True)
                local.write_text(self._rewritten(service.name, mount.content))
                continue
            if mount.source is None or mount.source == local:
                local.mkdir(parents=True, exist_ok=True)
                continue
            if not mount.source.exists():
                raise ComposeError(f"{service.name}: {mount.source} is not there")
            for file in _files(mount.source):
                copy = local / file.relative_to(mount.source) if file != mount.source else local
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_text(self._rewritten(service.name, file.read_text()))
        return home

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def _end(self, name: str, signal_name: str, grace_s: float) -> None:
        process = self._processes.pop(name, None)
        if process is None:
            return
        with suppress(ProcessLookupError):
            if signal_name == "SIGKILL" and process.poll() is None:
                kill(process)
            else:
                process.send_signal(signal.Signals[signal_name])
        with suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # whatever is left of its group
        process.wait()


def missing_programs(project: Project, images: Mapping[str, Image]) -> list[str]:
    """List the programs that services need and this machine lacks."""
    missing = set()
    for service in project.services.values():
        image = images.get(service.image.rpartition(":")[0])
        if image is None:
            continue
        words = (*(service.entrypoint or image.entrypoint), *(service.command or ()))
        programs = {words[0], *(service.health.test[:1] if service.health else ())}
        programs |= set(re.findall(r"\bexec (\S+)", " ".join(words)))
        missing |= {p for p in programs if shutil.which(p, path=_path()) is None}
    return sorted(missing - {"warmroute", "python"})


def _is_taken(address: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return True
    return False


def _path() -> str:
    """Where programs are: Debian has servers in sbin, which users do not have on their PATH."""
    return os.pathsep.join((os.environ.get("PATH", ""), "/usr/local/sbin", "/usr/sbin", "/sbin"))


def _is_foreign(source: Path, ours: Path) -> bool:
    """Return a directory of the user's; Docker makes it if it is not there."""
    return not source.is_file() and not (source.is_dir() and source.is_relative_to(ours))


def _files(source: Path) -> Iterator[Path]:
    if source.is_dir():
        yield from (path for path in sorted(source.rglob("*")) if path.is_file())
    else:
        yield source


def _write_scripts(folder: Path) -> None:
    """What our own image has: `warmroute`, of this checkout, and its interpreter; by fork."""
    folder.mkdir(parents=True)
    variables = {"PYTHONPATH": PYTHONPATH, "OPENBLAS_NUM_THREADS": "1"}
    if ADDRESS in os.environ:
        variables[ADDRESS] = os.environ[ADDRESS]
    exports = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
    ours = f"{exports} exec {shlex.join(python_command())}"
    for name, line in (("warmroute", f"{ours} -m router.cli"), ("python", f"{ours}")):
        script = folder / name
        script.write_text(f'#!/bin/sh\n{line} "$@"\n')
        script.chmod(0o755)
