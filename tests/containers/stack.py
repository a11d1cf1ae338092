"""Drive `docker compose` with the files of docker/ as they are."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any, Self

from tests.compose.stacks import DOCKER, make_secrets
from tests.ports import free_port

ROUTER_PORTS = ("PORT", "ADMIN_PORT_1", "ADMIN_PORT_2", "PROMETHEUS_PORT", "GRAFANA_PORT")


class Containers:
    """The containers of one compose file: `with Containers(...) as stack: stack.up()`.

    Args:
        file: The compose file.
        folder: For secrets and caches; must be empty.
        variables: Added to the free ports and the secrets.
    """

    def __init__(self, file: Path, folder: Path, variables: dict[str, str] | None = None) -> None:
        self._file = file
        self.ports = {name: str(free_port()) for name in ROUTER_PORTS}
        directories = {"HF_CACHE_DIR": folder / "hub", "MODELS_DIR": folder / "models"}
        for directory in directories.values():
            directory.mkdir()
        self._environment = {
            **os.environ,
            **self.ports,
            **{name: str(directory) for name, directory in directories.items()},
            "SECRETS_DIR": str(make_secrets(folder / "secrets")),
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
    def url(self) -> str:
        """The one port of the API."""
        return f"http://127.0.0.1:{self.ports['PORT']}"

    def up(self, *words: str) -> None:
        """Start services; return when all of them are healthy."""
        try:
            self.compose("up", "--detach", "--wait", "--wait-timeout", "120", *words)
        except AssertionError as error:
            logs = self.compose("logs", "--no-color", "--tail", "20")
            raise AssertionError(f"{error}\n{logs}") from None

    def compose(self, *words: str) -> str:
        """Run `docker compose`; return what it printed."""
        return self._run("docker", "compose", "-f", str(self._file), *words)

    def inspect(self, service: str) -> dict[str, Any]:
        """Return what the daemon knows of a service's container."""
        found: dict[str, Any] = json.loads(
            self._run("docker", "inspect", self.compose("ps", "-q", service).strip())
        )[0]
        return found

    def services(self) -> dict[str, str]:
        """Return the health of every container, by service."""
        lines = self.compose("ps", "--all", "--format", "json").splitlines()
        return {found["Service"]: found["Health"] for found in map(json.loads, lines)}

    def _run(self, *words: str) -> str:
        done = subprocess.run(
            words,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{' '.join(words)}: {done.stderr[-4000:]}"
        return done.stdout


COMPOSE_MINIMAL = DOCKER / "compose.minimal.yaml"
