"""Unchanged clients: the openai package, and everything else the engine serves."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from openai import NotFoundError, OpenAI

from tests.engines.harness import Engine, Router

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Read a file.",
        "parameters": {
            "type": "object",
            "properties": {"done": {"type": "boolean"}},
            "required": ["done"],
            "additionalProperties": False,
        },
    },
}
MESSAGES: Any = [
    {"role": "system", "content": "You are a coding agent."},
    {"role": "user", "content": "Read the file."},
]


@pytest.fixture
def client(router: Router) -> OpenAI:
    return OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0)


def test_openai_client_whole(client: OpenAI) -> None:
    """A plain answer, and what the router says about it in headers."""
    raw = client.chat.completions.with_raw_response.create(
        model="tiny", messages=MESSAGES, max_tokens=8, temperature=0
    )
    answer = raw.parse()

    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8
    assert answer.choices[0].message.content
    assert raw.headers["x-warmroute-replica"] in ("r1", "r2")
    assert raw.headers["x-warmroute-request-id"]


def test_openai_client_streaming(client: OpenAI) -> None:
    """A stream, with usage at its end, says what the whole answer says."""
    whole = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=8, temperature=0
    )
    stream = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=8, temperature=0,
        stream=True, stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)

    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 8


def test_openai_client_tools(client: OpenAI) -> None:
    """A tool is called, its result goes back, whole and as a stream."""
    asked = client.chat.completions.create(
        model="tiny", messages=MESSAGES, tools=[TOOL], max_tokens=64, temperature=0,
        tool_choice={"type": "function", "function": {"name": "read_file"}},
    )  # fmt: skip
    [call] = asked.choices[0].message.tool_calls or []
    answered = [
        *MESSAGES,
        asked.choices[0].message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "import os\n"},
    ]
    stream = client.chat.completions.create(
        model="tiny", messages=answered, tools=[TOOL], max_tokens=8, stream=True
    )

    assert call.function.name == "read_file"
    assert isinstance(json.loads(call.function.arguments), dict)
    assert [chunk.choices[0].finish_reason for chunk in stream][-1] is not None


def test_openai_client_models_and_errors(client: OpenAI) -> None:
    """The model list is the replicas'; an unknown model is the API's own 404."""
    assert [model.id for model in client.models.list()] == ["tiny"]
    with pytest.raises(NotFoundError, match="no-such-model"):
        client.chat.completions.create(model="no-such-model", messages=MESSAGES)


@pytest.mark.parametrize("path", ["/metrics", "/%6detrics", "//load", "/v1/../load"])
def test_what_describes_an_engine_is_not_served(
    router: Router, replicas: tuple[Engine, Engine], path: str
) -> None:
    """The engine has these routes; the router has its own metrics only."""
    through = httpx.get(httpx.URL(router.url, raw_path=path.encode()))

    assert httpx.get(f"{replicas[0].url}/version").status_code == 200
    if path.endswith("etrics"):  # however it is spelled, it is the router's own page
        assert "vllm:" not in through.text
        assert "warmroute_" in through.text
    else:
        assert through.status_code == 404
        assert "forward.routes" in through.json()["error"]["message"]


def test_a_slash_at_the_end_is_no_redirect_to_an_engine(
    router: Router, replicas: tuple[Engine, Engine]
) -> None:
    """As the engine itself would answer it, with its own address."""
    path, body = "/v1/chat/completions/", {"model": "tiny", "messages": MESSAGES, "max_tokens": 1}
    direct = httpx.post(replicas[0].url + path, json=body, timeout=60)
    through = httpx.post(router.url + path, json=body, timeout=60)

    assert direct.status_code == 307
    assert through.status_code == 200


def test_tokenize_passes_through(router: Router, replicas: tuple[Engine, Engine]) -> None:
    """/tokenize through the router is /tokenize."""
    body = {"model": "tiny", "messages": MESSAGES, "tools": [TOOL]}

    through = httpx.post(f"{router.url}/tokenize", json=body, timeout=60).json()

    assert through["tokens"] == replicas[0].tokenize(body)
    assert through["max_model_len"] > 0


def test_the_engines_own_400_comes_through(router: Router) -> None:
    """What the engine refuses is refused with its words and counts against no replica."""
    answer = httpx.post(
        f"{router.url}/v1/chat/completions",
        json={"model": "tiny", "messages": MESSAGES, "temperature": -1},
        timeout=60,
    )

    assert answer.status_code == 400
    assert "temperature" in answer.json()["error"]["message"]
    assert router.metric("warmroute_replica_healthy") == 2
