"""What the tests of the compose stacks share: the files, the images, a session to drive.

`python -m tests.compose.stacks` starts the emulated stack and keeps it up until Ctrl-C, to look at.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NoReturn

import httpx
import pytest
from msgspec import Struct

from router.tls import system_tls
from tests.compose.model import Project, load
from tests.compose.runner import ROOT, Image, Stack, Substitute, missing_programs

DOCKER = ROOT / "docker"
COMPOSE = DOCKER / "compose.yaml"
COMPOSE_GPU = DOCKER / "compose.gpu.yaml"
FILES = (COMPOSE, COMPOSE_GPU)

REQUIRED = "WARMROUTE_TEST_REQUIRE_SERVERS"
"""Set in CI: there a missing server is a failure, not a reason to skip."""

NOT_HERE = "grafana"
"""The one service that no test starts: Grafana is in none of the package registries."""


class Instructions(Struct, frozen=True, kw_only=True):
    """The instructions of a Dockerfile's last stage, in order, and those of all stages."""

    last: tuple[tuple[str, str], ...]
    all: tuple[tuple[str, str], ...]

    def of(self, name: str) -> list[str]:
        """The last stage's instructions of one kind."""
        return [text for kind, text in self.last if kind == name]


def dockerfile() -> Instructions:
    """Read our Dockerfile; continued lines are joined, comments left out."""
    lines = [
        line
        for line in (DOCKER / "Dockerfile").read_text().splitlines()
        if line.strip() and not line.startswith("#")
    ]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines()
    found = tuple(
        (kind, text) for kind, _, text in (line.strip().partition(" ") for line in joined)
    )
    start = max(i for i, (kind, _) in enumerate(found) if kind == "FROM")
    return Instructions(last=found[start:], all=found)


def images() -> dict[str, Image]:
    """What images bring: ours by its Dockerfile, the others by theirs, as published."""
    ours = dockerfile()
    variables = " ".join(ours.of("ENV"))
    warmroute = Image(
        entrypoint=tuple(json.loads(ours.of("ENTRYPOINT")[-1])),
        command=tuple(json.loads(ours.of("CMD")[-1])),
        environment=dict(re.findall(r"(\w+)=(\S+)", variables)),
    )
    return {
        "warmroute": warmroute,
        "haproxy": Image(),
        "redis": Image(),
        "prom/prometheus": Image(entrypoint=("prometheus",)),
    }


def make_secrets(folder: Path) -> Path:
    """Run secrets.sh as a user would."""
    subprocess.run([DOCKER / "secrets.sh", folder], check=True, capture_output=True)
    return folder


def project(file: Path, secrets: Path, variables: Mapping[str, str] | None = None) -> Project:
    """Read a compose file with these secrets."""
    return load(file, {"SECRETS_DIR": str(secrets), **(variables or {})})


def emulated_stack(folder: Path) -> Stack:
    """Make the stack of compose.yaml, or skip the test if it cannot run here."""
    return runnable(project(COMPOSE, make_secrets(folder / "secrets")), folder, images())


def runnable(
    found: Project,
    folder: Path,
    known: Mapping[str, Image],
    *,
    given: Collection[str] = (),
    substitute: Substitute | None = None,
) -> Stack:
    """Make a stack of all services but Grafana; skip the test if it cannot run here, fail in CI.

    Args:
        given: Programs that `substitute` finds elsewhere than on the PATH.
    """
    missing = [program for program in missing_programs(found, known) if program not in given]
    if missing:
        _not_here(f"needs {', '.join(missing)} on the PATH (Debian's packages of that name)")
    stack = Stack(
        found,
        folder / "stack",
        known,
        services=[name for name in found.services if name != NOT_HERE],
        substitute=substitute,
        environment={"HF_HUB_OFFLINE": "1"},
    )
    if taken := stack.taken_ports():
        _not_here(f"needs ports {taken}, which a server on all addresses of this machine has")
    return stack


def _not_here(why: str) -> NoReturn:
    if os.environ.get(REQUIRED):
        pytest.fail(why)
    pytest.skip(why)


def wait_until(condition: Callable[[], Any], what: str, deadline_s: float = 60.0) -> Any:
    """Poll until the condition holds; return what it gave."""
    end_s = time.monotonic() + deadline_s
    while not (found := condition()):
        assert time.monotonic() < end_s, f"waited in vain: {what}"
        time.sleep(0.1)
    return found


class Session:
    """A conversation that grows by a turn at a time, at any base URL."""

    def __init__(self, model: str, opening: str, *, max_tokens: int = 16) -> None:
        self._model = model
        self._max_tokens = max_tokens
        self.messages: list[dict[str, str]] = [{"role": "user", "content": opening}]

    def body(self) -> dict[str, Any]:
        """Make the next turn's request, streamed."""
        return {
            "model": self._model,
            "messages": self.messages,
            "max_tokens": self._max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def turn(self, url: str, client: httpx.Client) -> Turn:
        """Send the conversation, streamed; append the answer and the next question."""
        with client.stream("POST", f"{url}/v1/chat/completions", json=self.body()) as answer:
            answer_lines = list(answer.iter_lines())
        assert answer.status_code == 200, "\n".join(answer_lines)
        events = [line.removeprefix("data: ") for line in answer_lines if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        chunks = [json.loads(event) for event in events[:-1]]
        said = "".join(
            choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]
        )
        self.messages.append({"role": "assistant", "content": said})
        self.messages.append({"role": "user", "content": "Go on, and say why."})
        usage = next(chunk["usage"] for chunk in reversed(chunks) if chunk.get("usage"))
        return Turn(
            router=answer.headers.get("x-served-by", ""),
            replica=answer.headers["x-warmroute-replica"],
            predicted=_predicted(answer.headers["x-warmroute-cached"]),
            num_prompt_tokens=usage["prompt_tokens"],
            num_cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
        )


class Turn(Struct, frozen=True, kw_only=True):
    """What came back."""

    router: str  # empty without a front
    replica: str
    predicted: dict[str, int]  # gpu, cpu, pool -> tokens
    num_prompt_tokens: int
    num_cached_tokens: int


def _predicted(header: str) -> dict[str, int]:
    return {tier: int(count) for tier, _, count in (p.partition("=") for p in header.split(";"))}


def client() -> httpx.Client:
    """A client that opens a connection for each request, so that the front chooses anew."""
    limits = httpx.Limits(max_keepalive_connections=0)
    return httpx.Client(timeout=60.0, trust_env=False, limits=limits, verify=system_tls())


def wait_for_both(stack: Stack) -> None:
    """Return once the front sends requests to either router: HAProxy asks each once a second."""
    ready = f"{stack.published('front', 8080)}/readyz"
    seen = set()
    with client() as http:

        def both() -> bool:
            seen.add(http.get(ready).headers.get("x-served-by"))
            return {"router-1", "router-2"} <= seen

        wait_until(both, "the front knows both routers")


def main() -> None:
    """Keep the emulated stack up."""
    with (
        tempfile.TemporaryDirectory() as folder,
        emulated_stack(Path(folder)) as stack,
    ):
        stack.up()
        for name, service in stack.project.services.items():
            for port in service.ports if name != NOT_HERE else ():
                print(f"{name:12} {stack.url(name, port.target)}  (published: {port.port})")
        sys.stdout.flush()
        try:
            while True:
                time.sleep(3600)
        except KeyboardInterrupt:
            print("ending")


if __name__ == "__main__":
    main()
