"""What is not understood here goes to the engine as it came, and its own answer comes back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engines.harness import Engine, Router, all_up
from tests.vision_model import data_url, image_part, make_vision_model, png

Json = dict[str, Any]

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"


def said(*parts: Json, **fields: Any) -> Json:
    return {"messages": [{"role": "user", "content": list(parts)}], "max_tokens": 2, **fields}


def items(*given: Json, **fields: Any) -> Json:
    return {"input": list(given), "max_output_tokens": 2, **fields}


HI: Json = {"type": "text", "text": "Hi"}
USER: Json = {"role": "user", "content": "Hi"}
PICTURE: Json = {"type": "base64", "media_type": "image/png", "data": data_url(png(3, 2))[22:]}
SEARCH: Json = {"type": "web_search_20250305", "name": "web_search"}
ASKED: dict[str, tuple[str, Json]] = {
    "chat, part": (CHAT, said(HI, {"type": "hologram", "hologram": {}})),
    "chat, tool": (CHAT, said(HI, tools=[{"type": "web_search"}])),
    "chat, picture": (CHAT, said(HI, image_part(png(3, 2)))),
    "chat, audio": (CHAT, said(HI, {"type": "audio_url", "audio_url": {"url": "http://[::1]:1"}})),
    "chat, template": (CHAT, {"messages": [USER, {"role": "robot", "content": "x"}]}),
    "messages, block": (MESSAGES, said(HI, {"type": "hologram", "hologram": {}})),
    "messages, server's block": (
        MESSAGES, said({"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}})
    ),
    "messages, tool": (MESSAGES, said(HI, tools=[SEARCH])),
    "messages, picture": (MESSAGES, said(HI, {"type": "image", "source": PICTURE})),
    "messages, template": (MESSAGES, {**said(HI), "messages": [{"role": "robot", "content": "x"}]}),
    "responses, item": (RESPONSES, items(USER, {"type": "hologram"})),
    "responses, encrypted": (
        RESPONSES, items(USER, {"type": "reasoning", "summary": [], "encrypted_content": "x"})
    ),
    "responses, tool": (RESPONSES, items(USER, tools=[{"type": "web_search"}])),
    "responses, tool with grammar": (
        RESPONSES,
        items(
            USER,
            tools=[
                {
                    "type": "custom",
                    "name": "c",
                    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /a/"},
                }
            ],
        ),
    ),
    "responses, gone": (RESPONSES, items(USER, previous_response_id="resp_unheard_of")),
    "responses, picture": (
        RESPONSES,
        items({"role": "user", "content": [
            {"type": "input_image", "image_url": data_url(png(3, 2)), "detail": "auto"}
        ]}),
    ),
    "responses, template": (RESPONSES, items(USER, {"role": "robot", "content": "x"})),
}  # fmt: skip


def both(router: Router, engine: Engine, path: str, body: Json) -> tuple[int, bool]:
    """Ask the engine and the router; return the status of both, and if the words are the same.

    The shape of a refusal is.
    """
    answers = [
        httpx.post(url + path, json={"model": "tiny", **body}, timeout=120)
        for url in (engine.url, router.url)
    ]
    assert answers[0].status_code == answers[1].status_code, [each.text for each in answers]
    if answers[0].status_code == 200:
        return 200, True
    errors = [answer.json()["error"] for answer in answers]
    assert answers[0].json().keys() == answers[1].json().keys()
    assert errors[0].keys() == errors[1].keys()
    return answers[0].status_code, errors[0] == errors[1]


def test_refusals_are_the_engines(router: Router, replicas: tuple[Engine, Engine]) -> None:
    """By every API: the same status and shape as without a router, mostly the same words."""
    assert router.chat({"model": "tiny", **said(HI)}).status_code == 200  # the template is proven
    found = {name: both(router, replicas[0], path, body) for name, (path, body) in ASKED.items()}
    statuses = {name: status for name, (status, _) in found.items()}

    assert statuses["responses, gone"] == 404
    assert statuses["responses, encrypted"] == statuses["messages, tool"] == 400
    assert statuses["responses, tool"] == 200, "vLLM leaves out what it has no rule for"
    assert sum(status == 400 for status in statuses.values()) >= 10, statuses
    ours = {name for name, (_, is_same) in found.items() if not is_same}
    assert ours == {"chat, tool", "chat, template"}, "refused here, as no engine takes them"
    assert router.metric("warmroute_needs_engine_total") > 0
    assert router.metric("warmroute_replica_healthy") == 2


@pytest.fixture(scope="module")
def seeing(log_dir: Path) -> Iterator[tuple[Router, Engine]]:
    """Run a router in front of an engine whose model sees."""
    engine = Engine("r1", log_dir, options=("--model", str(make_vision_model(log_dir / "seeing"))))
    with all_up((engine,)), Router((engine,), log_dir) as router:
        yield router, engine


def test_media_that_no_router_can_read(seeing: tuple[Router, Engine]) -> None:
    """Not to be fetched, broken, of another kind: the engine's refusal. Large: its answer."""
    router, engine = seeing
    urls = {
        "http://127.0.0.1:1/a.png": False,
        "file:///etc/passwd": False,
        "ftp://127.0.0.1/a.png": False,
        "data:image/png;base64,%%%": False,
        "data:image/png;base64,AAAA": False,
        data_url(png(3, 2) + bytes(7 << 20)): True,  # longer than what is hashed here
    }
    for url, is_taken in urls.items():
        body = said(HI, {"type": "image_url", "image_url": {"url": url}})
        status, _ = both(router, engine, CHAT, body)
        assert (status == 200) == is_taken, url[:60]
    assert router.metric("warmroute_refused_total") == 0
    assert router.metric("warmroute_replica_healthy") == 1
