"""Which routers are compared, and how each is installed and started.

Others run as their documentation says, from the package that their project publishes, with the
policy that knows most about caches; session ids are sent to all.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from msgspec import Struct

_PIP: Final = ("-m", "pip", "install", "-q", "--disable-pip-version-check")

BLOCK_SIZE: Final = 16  # of the emulated and the fake replicas
MODEL: Final = "tiny"


class Place(Struct, frozen=True, kw_only=True):
    """Where a router listens, and the replicas behind it; `events` are their KV event sockets."""

    port: int
    metrics_port: int
    urls: tuple[str, ...]
    events: tuple[str, ...]
    block_size: int = BLOCK_SIZE


class Contestant(Struct, frozen=True, kw_only=True):
    """One router under one policy.

    `package` is what pip installs; None: this source tree. `command` makes the command line
    behind the environment's interpreter. It is ready when `ready_path` answers 200.
    """

    name: str
    package: str | None
    knows: str  # of the caches, and where from
    command: Callable[[Place], Sequence[str]]
    ready_path: str = "/v1/models"

    def python(self, folder: Path) -> Path:
        """Name the interpreter that has it."""
        if self.package is None:
            return Path(sys.executable)
        return folder / self.package / "bin" / "python"

    def install(self, folder: Path) -> None:
        """Install it into an environment of its own below `folder`, unless it is there.

        Raises:
            subprocess.CalledProcessError: pip failed; it said why.
        """
        python = self.python(folder)
        done = python.parent.parent / ".installed"
        if self.package is None or done.exists():
            return
        subprocess.run([sys.executable, "-m", "venv", python.parent.parent], check=True)
        subprocess.run([python, *_PIP, self.package], check=True)
        done.touch()


def _warmroute(place: Place) -> list[str]:
    replicas = [part for url in place.urls for part in ("--replica", url)]
    listen = ["--host", "127.0.0.1", "--port", str(place.port), "--admin-port", "0"]
    return ["-m", "router.cli", "serve", *listen, "--listen-drain-grace-s", "0", *replicas]


def _vllm_router(policy: str, *options: str) -> Callable[[Place], list[str]]:
    def command(place: Place) -> list[str]:
        line = ["-m", "vllm_router.launch_router", "--worker-urls", *place.urls]
        line += ["--host", "127.0.0.1", "--port", str(place.port), "--log-level", "error"]
        line += ["--prometheus-port", str(place.metrics_port), "--policy", policy, *options]
        if policy == "kv_aware":
            for url, events in zip(place.urls, place.events, strict=True):
                line += ["--kv-event-source", f"{url}={events}"]
            line += ["--kv-event-model", MODEL, "--kv-event-block-size", str(place.block_size)]
        return line

    return command


def _sglang(place: Place) -> list[str]:
    line = ["-m", "sglang_router.launch_router", "--worker-urls", *place.urls]
    return [*line, *_smg_options(place)]


def _smg(place: Place) -> list[str]:
    return ["-m", "smg.cli", "launch", "--worker-urls", *place.urls, *_smg_options(place)]


def _smg_options(place: Place) -> list[str]:
    line = ["--host", "127.0.0.1", "--port", str(place.port), "--policy", "cache_aware"]
    line += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(place.metrics_port)]
    return [*line, "--log-level", "warn"]


CONTESTANTS: Final = (
    Contestant(
        name="warmroute `kv_aware`",
        package=None,
        knows="exactly: the engines' events, its own tokens",
        command=_warmroute,
        ready_path="/readyz",
    ),
    Contestant(
        name="vllm-router `sticky_least_loaded`",
        package="vllm-router==0.1.17",
        knows="nothing: a session stays where the load was least when it came",
        command=_vllm_router("sticky_least_loaded"),
    ),
    Contestant(
        name="vllm-router `consistent_hash`",
        package="vllm-router==0.1.17",
        knows="nothing: a hash of the session id",
        command=_vllm_router("consistent_hash"),
    ),
    Contestant(
        name="vllm-router `kv_aware`",
        package="vllm-router==0.1.17",
        knows="exactly: the engines' events; every replica renders every prompt",
        command=_vllm_router("kv_aware"),
    ),
    Contestant(
        name="sglang-router `cache_aware`",
        package="sglang-router==0.3.2",
        knows="a guess: a tree of the texts it has sent",
        command=_sglang,
    ),
    Contestant(
        name="smg `cache_aware`",
        package="smg==1.13.0",
        knows="a guess: a tree of the texts it has sent",
        command=_smg,
    ),
)
