"""Token ids handed to real engines: the answers and the caches are those of the text."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from loadtest.agent_text import code
from tests.engines.harness import MAX_MODEL_LEN, Engine, Router, wait_until

TOOL = {
    "type": "function",
    "function": {
        "name": "read_file",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
    },
}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "tools": {"tools": [TOOL], "tool_choice": "auto"},
    "a tool by name": {
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "read_file"}},
    },
    "own template arguments": {"chat_template_kwargs": {"enable_thinking": False}},
    "echo": {"echo": True},
}
TEXT = code(random.Random(12), 3000)


def turns(**fields: Any) -> list[dict[str, Any]]:
    """Write two turns of a conversation."""
    first = [{"role": "user", "content": TEXT}]
    second = [*first, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Why?"}]
    common = {"model": "tiny", "max_tokens": 12, "temperature": 0}
    return [{**common, "messages": messages, **fields} for messages in (first, second)]


def say(answer: dict[str, Any]) -> dict[str, Any]:
    """Remove from an answer what differs between any two."""
    plain = json.loads(json.dumps(answer))
    for name in ("id", "created", "kv_transfer_params"):
        plain.pop(name, None)
    for choice in plain["choices"]:
        for call in choice["message"].get("tool_calls") or ():
            call.pop("id", None)
    return plain


@pytest.fixture(scope="module")
def handing(living_pair: tuple[Engine, Engine], log_dir: Path) -> Iterator[Router]:
    """A router in front of the first replica alone, which it has found to take ids."""
    with Router(living_pair[:1], log_dir, options=("--set", "tokens.hand_over=on")) as router:
        wait_until(lambda: takes(router), 60, "ids handed over")
        yield router


def takes(router: Router) -> bool:
    """Send a long prompt; return whether the router has ever handed one over."""
    router.chat(turns()[0]).raise_for_status()
    return router.metric("warmroute_handed_over_requests_total") > 0


def answer_of(router: Router, body: dict[str, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = router.chat(body).json()
    return answer


def test_answers_and_cached_tokens_are_those_of_the_text(
    handing: Router, replicas: tuple[Engine, Engine]
) -> None:
    """Greedy answers of all kinds agree, with a cold cache and with a warm one."""
    num_handed = 0
    for kind, fields in KINDS.items():
        answers: list[list[dict[str, Any]]] = []
        for ask in (replicas[0].chat, partial(answer_of, handing)):
            replicas[0].reset_prefix_cache()
            wait_until(lambda: handing.metric("warmroute_index_blocks") == 0, 60, "cold caches")
            before = handing.metric("warmroute_handed_over_requests_total")
            answers.append([say(ask(body)) for body in turns(**fields)])
            num_handed += handing.metric("warmroute_handed_over_requests_total") > before

        assert answers[0] == answers[1], kind
        cached = [a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in answers[1]]
        if kind != "echo":  # it asks for the prompt's logprobs, too, which reads no cache
            assert cached[0] == 0 < 2000 < cached[1], kind
    assert num_handed == len(KINDS) - 1, "all but the one that echoes"
    assert handing.metric("warmroute_hand_over_ended_total") == 0
    assert handing.metric("warmroute_token_mismatches_total") == 0


def test_messages_are_handed_over_as_well(handing: Router, replicas: tuple[Engine, Engine]) -> None:
    """Text and usage agree; the replica is asked about this route separately."""
    body = {
        "model": "tiny",
        "max_tokens": 12,
        "temperature": 0,
        "system": "Answer in a word.",
        "messages": turns()[1]["messages"],
    }
    own = httpx.post(f"{replicas[0].url}/v1/messages", json=body, timeout=60).json()
    own = httpx.post(f"{replicas[0].url}/v1/messages", json=body, timeout=60).json()
    before = handing.metric("warmroute_handed_over_requests_total")

    def is_handed_over() -> bool:
        ours = httpx.post(f"{handing.url}/v1/messages", json=body, timeout=60).json()
        assert (ours["content"], ours["usage"]) == (own["content"], own["usage"])
        return handing.metric("warmroute_handed_over_requests_total") > before

    wait_until(is_handed_over, 60, "ids handed over")
    assert is_handed_over()
    assert handing.metric("warmroute_hand_over_ended_total") == 0


def test_streams_are_those_of_the_text(handing: Router, replicas: tuple[Engine, Engine]) -> None:
    """The streams say the same, and agree event by event.

    vLLM makes one event of the tokens that its server was too busy to send one by one.
    """

    def agree() -> bool:
        own, ours = deltas(replicas[0].url), deltas(handing.url)
        assert whole(own) == whole(ours)
        return own == ours and len(own) > 10

    wait_until(agree, 60, "streams of an event a token")


def deltas(url: str) -> list[list[dict[str, Any]]]:
    """Stream the second turn; return what each event adds."""
    body = {**turns()[1], "stream": True, "stream_options": {"include_usage": True}}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).text
    events = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: {")]
    return [[choice["delta"] for choice in event["choices"]] for event in events]


def whole(events: list[list[dict[str, Any]]]) -> str:
    """Put the text of a stream together."""
    return "".join(delta.get("content") or "" for choices in events for delta in choices)


def test_an_id_out_of_the_vocabulary_is_refused_by_name(replicas: tuple[Engine, Engine]) -> None:
    """The refusal comes before any output and names the field, as the router expects."""
    for ids in ([1, 1 << 30], [], [True], "x"):
        body = {**turns()[0], "kv_transfer_params": {"prompt_token_ids": ids}, "stream": True}
        answer = httpx.post(f"{replicas[0].url}/v1/chat/completions", json=body, timeout=60)

        assert answer.status_code == 400
        assert "prompt_token_ids" in answer.text


def test_what_is_too_long_is_refused_as_ever(
    handing: Router, replicas: tuple[Engine, Engine]
) -> None:
    """The refusal names the usual field: such prompts go as text."""
    content = TEXT * (MAX_MODEL_LEN // 2500)
    body = {**turns()[0], "messages": [{"role": "user", "content": content}]}
    own = httpx.post(f"{replicas[0].url}/v1/chat/completions", json=body, timeout=60)
    ours = handing.chat(body)

    assert own.status_code == ours.status_code == 400
    assert own.json()["error"]["param"] == ours.json()["error"]["param"] == "input_tokens"


def test_auto_begins_by_itself(replicas: tuple[Engine, Engine], log_dir: Path) -> None:
    """It begins after ordinary requests, a proof and a probe."""
    with Router(replicas[:1], log_dir, options=("--set", "tokens.prove_ratio=1")) as router:
        for number in range(9):
            body = turns()[0]
            body["messages"] = [{"role": "user", "content": f"{number} {TEXT}"}]
            router.chat(body).raise_for_status()
        wait_until(lambda: takes(router), 60, "ids handed over")

        assert router.metric("warmroute_token_mismatches_total") == 0
