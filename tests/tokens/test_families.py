"""Our ids against those recorded from vLLM for generated conversations, family by family."""

from __future__ import annotations

import datetime
import functools
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest

from router.api.openai import ChatRequest, parse_chat
from router.base.errors import TemplateFailed
from router.tokens import NeedsEngine
from router.tokens.media import before_media, without_media
from router.tokens.models import harmony_encoder
from tests.conversations import conversations, grown
from tests.tokens.families import APIS, DATE, FAMILIES, ONLY_PROVEN
from tests.tokens.mistral_models import VERSIONS, suited
from tests.tokens.prove_families import GOLDEN, compare, load

_OF_DEEPSEEK = (
    {"messages": []},
    {"messages": [{"role": "user", "content": "hi"}], "chat_template": "x"},
    {"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": {"self": 1}},
)
_OF_HARMONY = (
    {"messages": [{"role": "assistant", "content": "", "tool_calls": None}]},
    {
        "messages": [
            {
                "role": "assistant",
                "tool_calls": [
                    {
                        "id": "c",
                        "type": "function",
                        "function": {"name": "a<|end|>", "arguments": ""},
                    }
                ],
            }
        ]
    },
)
_UNKNOWN: dict[str, Sequence[dict[str, object]]] = {
    "deepseek-v3.2": _OF_DEEPSEEK,
    "deepseek-v4": _OF_DEEPSEEK,
    "deepseek-v4.1": _OF_DEEPSEEK,
    "gpt-oss": _OF_HARMONY,
}
_loaded = functools.cache(load)


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_ids_are_the_engines(name: str, api: str) -> None:
    """Ids made here are the engine's, and only what it refused is refused."""
    golden = json.loads(GOLDEN.read_text())

    recorded = golden["families"][f"{name} {api}"]
    seen = compare(_loaded(name), name, api, golden["seed"], recorded)

    assert (seen.wrong, seen.wrongly_refused) == ([], [])
    assert seen.num_for_engine <= 3  # images, where the engine leaves them out
    assert seen.num_equal > 0.3 * len(recorded)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_what_is_before_media_is_the_same_whatever_they_are(name: str) -> None:
    """Whatever a message says, later ones, too: the prompt begins with what is made of a mark."""
    prompter = _loaded(name)
    part = {"type": "audio_url", "audio_url": {"url": "http://127.0.0.1/a.wav"}}
    body: dict[str, Any] = {
        "messages": [
            {"role": "user", "content": "Read it. " * 120},
            {"role": "assistant", "content": "It is read."},
            {"role": "user", "content": [part]},
            {"role": "assistant", "content": "Heard."},
            {"role": "user", "content": "And?"},
        ]
    }
    chat = parse_chat({**body, "messages": without_media(body["messages"])})
    before = before_media(prompter.render(chat))
    assert before is not None
    plan = prompter.plan_rendered(chat, before.parts)
    known = prompter.commit(plan, plan.encode()).before_tail().ids()

    # A prompt is cut at special tokens alone, and MiniMax's are none of the tiny tokenizer.
    assert len(known) > 60 or name == "minimax-m2"
    for content in ("Look.", "\n \n", "é", "</s>", "a" * 400):
        body["messages"][2] = {"role": "user", "content": content}
        plan = prompter.plan_chat(parse_chat(body))
        assert prompter.commit(plan, plan.encode()).ids()[: len(known)] == known


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_turns_cost_what_they_add(name: str) -> None:
    """Turn by turn, with what earlier ones left behind, ids are those of a whole encode."""
    prompter = _loaded(name)
    num_known = num_tokens = 0

    for request in _requests(name, 8 if name in VERSIONS else 20):
        try:
            plan = prompter.plan_chat(request)
        except (NeedsEngine, TemplateFailed):
            continue
        tokens = prompter.commit(plan, plan.encode())
        num_known += plan.num_known_tokens
        num_tokens += tokens.num_tokens

        assert prompter.reference.proves(request, tokens)

    assert num_known > 0.2 * num_tokens or _moves_tools(name)


@pytest.mark.parametrize("name", ["deepseek-v3.2", "deepseek-v4", "deepseek-v4.1", "gpt-oss"])
def test_refused_without_a_template(name: str) -> None:
    """Contradictory or empty requests are refused also where no template would refuse them."""
    user = {"role": "user", "content": "hi"}

    with pytest.raises(TemplateFailed):
        _render(name, {"messages": [user], "continue_final_message": True})
    for body in (
        *_UNKNOWN.get(name, ()),
        {"messages": [user], "truncate_prompt_tokens": 1},
    ):
        with pytest.raises(NeedsEngine):
            _render(name, body)


@pytest.mark.parametrize("effort", ["medium", 0, 101, True, "75"])
def test_efforts_that_deepseek_v41_refuses(effort: object) -> None:
    """It takes a few words, or a number, which is shown."""
    user = {"messages": [{"role": "user", "content": "hi"}]}

    shown = _render("deepseek-v4.1", user | {"chat_template_kwargs": {"reasoning_effort": 7}})
    assert "Reasoning Effort: 7 (" in "".join(shown)
    with pytest.raises(TemplateFailed):
        _render("deepseek-v4.1", user | {"chat_template_kwargs": {"reasoning_effort": effort}})


def test_headers_are_remembered_within_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer message's has the instructions and all tools: a thousand of these are much."""
    monkeypatch.setattr(harmony_encoder, "MAX_HEADER_BYTES", 3_000)
    encoder = harmony_encoder.HarmonyEncoder()
    prompts = [
        _render("gpt-oss", {"messages": [{"role": "system", "content": f"{number}" * 900}]})
        for number in (*range(9), 8)
    ]

    for parts in prompts:
        assert encoder.encode(parts) == encoder.encode_whole(parts)
        assert 900 <= sum(map(len, encoder._frames)) == encoder._num_bytes <= 3_000


def test_a_proof_after_midnight() -> None:
    """A prompt of the day before is proven with the date that it has; a wrong one is not."""
    prompter = load("gpt-oss")
    request = parse_chat({"messages": [{"role": "user", "content": "hi"}]})
    plan = prompter.plan_chat(request)
    tokens = prompter.commit(plan, plan.encode())

    prompter.renderer.today = lambda: DATE + datetime.timedelta(days=1)
    assert prompter.reference.proves(request, tokens)

    prompter.renderer.today = lambda: DATE + datetime.timedelta(days=2)
    assert not prompter.reference.proves(request, tokens)


def test_the_page_names_every_family() -> None:
    """docs/guides/models.md lists the families that are tested here, and no others."""
    page = (Path(__file__).parents[2] / "docs/guides/models.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| ")][1:]

    named = {name for row in rows for name in re.findall(r"`([\w.-]+)`", row.split("|")[3])}

    assert named == set(FAMILIES) | set(ONLY_PROVEN)


def _render(name: str, body: dict[str, object]) -> Sequence[Any]:
    return _loaded(name).renderer.render(parse_chat(body))


def _moves_tools(name: str) -> bool:
    """Whether tools and system prompt stand before the last user's message, wherever that is."""
    return name.startswith("mistral") and VERSIONS[name] < 13


def _requests(name: str, count: int) -> Iterator[ChatRequest]:
    for index, conversation in enumerate(conversations(seed=11, count=count)):
        for step in grown(suited(name, conversation, index)):
            yield parse_chat(orjson.loads(orjson.dumps(step.chat())))
