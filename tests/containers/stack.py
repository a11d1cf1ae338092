"""Drive `docker compose` with the files of docker/ as they are."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from tests.compose.stacks import ROOT, dockerfile, dotenv, make_secrets, wait_until
from tests.ports import free_port

PORTS = ("PORT", "ADMIN_PORT_1", "ADMIN_PORT_2", "PROMETHEUS_PORT", "GRAFANA_PORT")


class Containers:
    """The containers of one compose file: `with Containers(...) as stack: stack.up()`.

    Args:
        file: The compose file.
        folder: For secrets and caches; must be empty.
        variables: Added to the free ports and the secrets.
        over: A file that changes the first one, as a second `-f` does.
    """

    def __init__(
        self,
        file: Path,
        folder: Path,
        variables: Mapping[str, str] | None = None,
        over: Path | None = None,
    ) -> None:
        self._files = [file] if over is None else [file, over]
        self._ports = {name: str(free_port()) for name in PORTS}
        directories = {"HF_CACHE_DIR": folder / "hub", "MODELS_DIR": folder / "models"}
        for directory in directories.values():
            directory.mkdir()
        self._secrets = make_secrets(folder / "secrets")
        self._environment = {
            **os.environ,
            **self._ports,
            **{name: str(directory) for name, directory in directories.items()},
            "SECRETS_DIR": str(self._secrets),
            "COMPOSE_PROJECT_NAME": f"warmroute-test-{file.stem.replace('.', '-')}",
            "HF_HUB_OFFLINE": "1",
            **(variables or {}),
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.compose("kill")
        self.compose("down", "--volumes", "--timeout", "1")

    @property
    def front(self) -> str:
        """The one port of the API."""
        return f"http://127.0.0.1:{self._ports['PORT']}"

    @property
    def prometheus(self) -> str:
        return f"http://127.0.0.1:{self._ports['PROMETHEUS_PORT']}"

    @property
    def admins(self) -> dict[str, str]:
        """The admin APIs, by router."""
        ports = (self._ports[f"ADMIN_PORT_{number}"] for number in (1, 2))
        return {f"router-{n}": f"http://127.0.0.1:{port}" for n, port in enumerate(ports, 1)}

    def secret(self, name: str) -> str:
        """Return what secrets.sh made."""
        return (self._secrets / name).read_text()

    def url(self, service: str, port: int) -> str:
        """Return where a service listens, published or not."""
        networks = self.inspect(service)["NetworkSettings"]["Networks"].values()
        address = next(iter(networks))["IPAddress"] or "127.0.0.1"  # empty: the host's network
        return f"http://{address}:{port}"

    def up(self, *words: str) -> None:
        """Start services; return when all of them are healthy."""
        try:
            self.compose("up", "--detach", "--wait", "--wait-timeout", "120", *words)
        except AssertionError as error:
            logs = self.compose("logs", "--no-color", "--tail", "20")
            raise AssertionError(f"{error}\n{logs}") from None

    def compose(self, *words: str) -> str:
        """Run `docker compose`; return what it printed."""
        files = [word for file in self._files for word in ("-f", str(file))]
        return self._run("docker", "compose", *files, *words)

    def inspect(self, service: str) -> dict[str, Any]:
        """Return what the daemon knows of a service's container."""
        found: dict[str, Any] = json.loads(
            self._run("docker", "inspect", self.compose("ps", "-q", service).strip())
        )[0]
        return found

    def kill(self, service: str) -> None:
        """Kill a container at once; Docker does not restart it."""
        self.compose("kill", service)

    def start(self, service: str) -> None:
        """Start a container that was killed, without waiting."""
        self.compose("start", service)

    def wait_healthy(self, service: str) -> None:
        """Return when the health check of a service passes."""
        wait_until(lambda: self.services()[service] == "healthy", f"{service} is healthy", 120.0)

    def services(self) -> dict[str, str]:
        """Return the health of every container, by service."""
        lines = self.compose("ps", "--all", "--format", "json").splitlines()
        return {found["Service"]: found["Health"] for found in map(json.loads, lines)}

    def _run(self, *words: str) -> str:
        return _run(*words, environment=self._environment)


def resolved(file: Path, **variables: str) -> dict[str, Any]:
    """Return what `docker compose config` makes of a file."""
    environment = {**os.environ, "SECRETS_DIR": "/nowhere", **variables}
    words = ("docker", "compose", "-f", str(file), "config", "--format", "json")
    found: dict[str, Any] = json.loads(_run(*words, environment=environment))
    return found


def build_stand_in(target: str) -> str:
    """Build a target of ./Dockerfile; return its image, whose name no real image has."""
    router = dotenv()["ROUTER_IMAGE"]
    python = dockerfile().all[0][1].split()[0]
    image = f"warmroute-test/{target}:1.0.0"
    arguments = ["--build-arg", f"PYTHON={python}", "--build-arg", f"ROUTER={router}"]
    ours = ["-f", "docker/Dockerfile", "-t", router, "."]
    stand_in = ["-f", "tests/containers/Dockerfile", "--target", target, *arguments, "-t", image]
    for words in (ours, [*stand_in, "tests/containers"]):
        _run("docker", "build", "-q", *words)
    return image


def _run(*words: str, environment: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(
        words,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr[-4000:]}"
    return done.stdout
