"""A scripted model says what its script says, turn by turn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from loadtest.emulator.emulator import Emulator
from loadtest.emulator.options import EmulatorOptions
from loadtest.emulator.script import Script

STEPS = [{"call": "Bash", "arguments": {"command": "ls"}}, {"text": "Done."}]
TOOLS = [{"type": "function", "function": {"name": "Bash", "parameters": {"type": "object"}}}]
USER = {"role": "user", "content": "list the files"}


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.json"
    path.write_text(json.dumps(STEPS))
    return path


async def test_each_turn_gets_its_step(script: Path) -> None:
    """First the call with its arguments, then the text, and the text again ever after."""
    answers: list[Any] = []
    messages: list[Any] = [USER]
    async with (
        Emulator(EmulatorOptions(script=script, speed=1000.0)) as replica,
        httpx.AsyncClient(base_url=replica.url) as http,
    ):
        for _ in range(3):
            body = {"model": "tiny", "messages": messages, "tools": TOOLS, "max_tokens": 99}
            [choice] = (await http.post("/v1/chat/completions", json=body)).json()["choices"]
            answers.append(choice["message"])
            messages = [*messages, choice["message"], {**USER, "content": "and then?"}]
        body = {"model": "tiny", "messages": [USER], "max_tokens": 5}
        titled = (await http.post("/v1/chat/completions", json=body)).json()

    [called] = answers[0]["tool_calls"]
    assert called["function"]["name"] == "Bash"
    assert json.loads(called["function"]["arguments"]) == {"command": "ls"}
    assert [answer["content"] for answer in answers[1:]] == ["Done.", "Done."]
    assert titled["choices"][0]["message"]["content"] not in ("", "Done.")


@pytest.mark.parametrize(("content", "calls"), [("please list", True), ("look around", False)])
async def test_a_step_may_be_for_one_conversation(
    tmp_path: Path, content: str, calls: bool
) -> None:
    """Others get the last step: a sub-agent does not start a sub-agent."""
    path = tmp_path / "script.json"
    path.write_text(json.dumps([STEPS[0] | {"asked": "list"}, STEPS[1]]))
    messages = [{"role": "system", "content": "list"}, {"role": "user", "content": content}]
    body = {"model": "tiny", "messages": messages, "tools": TOOLS, "max_tokens": 99}
    async with (
        Emulator(EmulatorOptions(script=path, speed=1000.0)) as replica,
        httpx.AsyncClient(base_url=replica.url) as http,
    ):
        [choice] = (await http.post("/v1/chat/completions", json=body)).json()["choices"]

    assert bool(choice["message"].get("tool_calls")) == calls


async def test_a_function_that_is_not_offered_is_named(script: Path) -> None:
    """The error says what the script calls, and what there is."""
    tools = [{"type": "function", "function": {"name": "Read", "parameters": {}}}]
    body = {"model": "tiny", "messages": [USER], "tools": tools}
    async with (
        Emulator(EmulatorOptions(script=script)) as replica,
        httpx.AsyncClient(base_url=replica.url) as http,
    ):
        answer = await http.post("/v1/chat/completions", json=body)

    assert answer.status_code == 400
    assert "'Bash'" in answer.json()["error"]["message"]
    assert "Read" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[", "truncated"),
        ("[]", "must have a step"),
        ('[{"text": "a"}, {}]', "$[1]"),
        ('[{"text": "a", "call": "b"}]', "$[0]"),
        ('[{"say": "a"}]', "say"),
    ],
)
def test_a_script_that_makes_no_sense_is_refused(tmp_path: Path, text: str, words: str) -> None:
    """The file, the step and the field are named."""
    path = tmp_path / "script.json"
    path.write_text(text)

    with pytest.raises(ValueError, match="--script") as caught:
        Script.load(path)

    assert words in str(caught.value)
