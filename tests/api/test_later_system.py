"""Later system messages as the user's: in the body, and what that saves with a real template."""

from __future__ import annotations

from itertools import takewhile
from operator import eq
from pathlib import Path
from typing import Any

import orjson
import pytest

from loadtest.tiny_model import MODEL_DIR
from router.api.anthropic import parse_messages
from router.api.later_system import later_system_as_user
from router.api.openai import parse_chat
from router.base.errors import TemplateFailed
from router.tokens import Prompter, load_prompter
from tests.faults.models import model_dir
from tests.faults.stage import Engines, Json, on_stage, words

QWEN = Path(__file__).parents[1] / "tokens" / "templates" / "families" / "qwen3.5.jinja"


def roles(body: bytes) -> list[str]:
    return [message["role"] for message in orjson.loads(later_system_as_user(body))["messages"]]


def test_only_the_roles_of_later_system_messages_change() -> None:
    """Leading ones stay, and so does each other byte: spaces, escapes, large numbers."""
    body = (
        b'{ "n": 1e400, "messages" :[{"role":"system","content":"\\u0061"},'
        b'{"role":"user","content":"\\"role\\":\\"system\\""},\n'
        b'{"content": [{"type":"text", "text":"b"}], "role" : "system"},'
        b'{"role":"assistant","content":"\xc3\xa9"},{"role":"system","content":"c"}], "a":1}'
    )
    want = body.replace(b'"role" : "system"', b'"role" : "user"')
    want = want.replace(b'"system","content":"c"', b'"user","content":"c"')

    assert later_system_as_user(body) == want


def test_what_only_a_system_message_may_have_stays_in_one() -> None:
    """Changes of tools, and the header that engines drop."""
    removal = {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "ls"}}
    contents: list[Any] = [[removal], "x-anthropic-billing-header: a=b", "left: 9"]
    later = [{"role": "system", "content": content} for content in contents]
    body = orjson.dumps({"messages": [{"role": "user", "content": "a"}, *later]})

    assert roles(body) == ["user", "system", "system", "user"]


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"[", b'"system"', b"{" * 9000, b'{"messages": "system"}'),
        b'{"messages": [1, "system"]}',
        b'{"messages": [{"role": "system"}, {"role": "user", "content": "system"}]}',
    ],
)
def test_other_bodies_stay(body: bytes) -> None:
    assert later_system_as_user(body) is body


# -- a real template -----------------------------------------------------------------------------


def reminded(num_turns: int) -> list[Json]:
    """A conversation as Claude Code sends it: a countdown in each turn."""
    messages: list[Json] = []
    for turn in range(num_turns):
        countdown = f"<total_tokens>{9 - turn} left</total_tokens>"
        messages += [{"role": "user", "content": words(turn)}]
        messages += [{"role": "system", "content": countdown}]
        messages += [{"role": "assistant", "content": "yes"}]
    return messages[:-1]


@pytest.fixture(scope="module")
def prompter() -> Prompter:
    return load_prompter(str(MODEL_DIR), chat_template=QWEN)


def ids_of(prompter: Prompter, body: bytes) -> list[int]:
    request = parse_messages(orjson.loads(body))
    return prompter.reference.chat_ids(prompter.adapted(request))


def num_shared(first: list[int], second: list[int]) -> int:
    return sum(takewhile(bool, map(eq, first, second)))


def test_the_prefix_then_holds_across_turns(prompter: Prompter) -> None:
    """Qwen's template has all of them in front: of the turn before, nearly nothing is left."""
    system = words(70)
    bodies = [orjson.dumps({"system": system, "messages": reminded(turn)}) for turn in (4, 5)]
    first, second = (ids_of(prompter, body) for body in bodies)
    held, later = (ids_of(prompter, later_system_as_user(body)) for body in bodies)
    opening = len(ids_of(prompter, orjson.dumps({"system": system, "messages": reminded(1)[:1]})))

    assert num_shared(first, second) < opening
    assert num_shared(held, later) >= len(held) - 8  # but for the opening of the answer


def test_chats_that_the_template_refuses_are_answered(prompter: Prompter) -> None:
    body = orjson.dumps({"messages": reminded(2)})

    with pytest.raises(TemplateFailed, match="beginning"):
        prompter.reference.chat_ids(parse_chat(orjson.loads(body)))
    assert prompter.reference.chat_ids(parse_chat(orjson.loads(later_system_as_user(body))))


# -- a router ------------------------------------------------------------------------------------


async def test_the_engine_gets_what_the_router_predicts(tmp_path: Path) -> None:
    """It finds the turn before in its cache, and the router knows."""
    model = model_dir(tmp_path / "model", template=QWEN.read_text())
    settings: Json = {"tokens__models": {"tiny": model}, "forward__later_system_as_user": True}
    async with (
        Engines(1, model_dir=Path(model)) as engines,
        on_stage(*engines, **settings) as stage,
    ):
        for turn in range(1, 5):
            body = {"model": "tiny", "max_tokens": 8, "system": words(70)}
            reply = await stage.ask(body | {"messages": reminded(turn)}, "/v1/messages")
            assert reply.status == 200, reply.json()
            await stage.settled(*engines)
        usage = reply.json()["usage"]
        predictions = (await stage.admin("/admin/state")).json()["replicas"]["predictions"]

    assert usage["cache_read_input_tokens"] > 3 * usage["input_tokens"]  # what is new
    assert predictions["exact"] == sum(predictions.values()) == 4
