"""What the tests of docker/ share: its files, and a session to drive a stack with."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from msgspec import Struct

from router.config.tls import system_tls

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
COMPOSE = DOCKER / "compose.yaml"
COMPOSE_GPU = DOCKER / "compose.gpu.yaml"
COMPOSE_MINIMAL = DOCKER / "compose.minimal.yaml"
ALERTS = DOCKER / "prometheus" / "alerts.yml"

REQUIRED = "WARMROUTE_TEST_REQUIRE_SERVERS"
"""Set in CI: there a missing server is a failure, not a reason to skip."""


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


def dotenv() -> dict[str, str]:
    """Read the variables of docker/.env."""
    text = (DOCKER / ".env").read_text()
    return dict(re.findall(r"^(\w+)=(.*)$", text, flags=re.MULTILINE))


def make_secrets(folder: Path) -> Path:
    """Run secrets.sh as a user would."""
    subprocess.run([DOCKER / "secrets.sh", folder], check=True, capture_output=True)
    return folder


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
