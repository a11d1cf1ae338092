"""Our token ids against those recorded from vLLM for the corpus (record_golden.py)."""

from __future__ import annotations

import json

import orjson
import pytest

from router.api.openai import parse_chat, parse_completion
from router.errors import ClientError
from router.tokens import NeedsEngine, Prompter, load_prompter
from tests.tokens.corpus import chat_bodies, completion_bodies, written
from tests.tokens.record_golden import GOLDEN, TEMPLATES
from tests.tokens.vllm_routes import MODEL, fingerprint


def _entries(name: str) -> tuple[int, list[str | None]]:
    golden = json.loads((GOLDEN / f"{name}.json").read_text())
    return golden["seed"], golden["entries"]


def _ours(prompter: Prompter, written_body: bytes) -> str | None:
    """Return the fingerprint of our ids; None: only the engine can make them or refuse."""
    body = orjson.loads(written_body)
    try:
        if "messages" in body:
            plan = prompter.plan_chat(parse_chat(body))
        else:
            plan = prompter.plan_completion(parse_completion(body))
    except (NeedsEngine, ClientError):
        return None
    return fingerprint(prompter.commit(plan, plan.encode()).ids())


def _is_rejected(prompter: Prompter, body: bytes) -> bool:
    try:
        prompter.plan_chat(parse_chat(orjson.loads(body)))
    except NeedsEngine:
        return False
    except ClientError:
        return True
    return False


@pytest.fixture(scope="module")
def prompters() -> dict[str, Prompter]:
    return {name: load_prompter(str(MODEL), chat_template=path) for name, path in TEMPLATES.items()}


@pytest.mark.parametrize("name", TEMPLATES)
def test_chat_ids_are_the_engines(name: str, prompters: dict[str, Prompter]) -> None:
    """All ids made here are the engine's; few requests are left to the engine."""
    seed, recorded = _entries(name)
    bodies = written(chat_bodies, seed, len(recorded))

    ours = [_ours(prompters[name], body) for body in bodies]

    wrong = [i for i, mine in enumerate(ours) if mine is not None and mine != recorded[i]]
    assert wrong == []
    num_made_by_engine = sum(entry is not None for entry in recorded)
    assert sum(mine is not None for mine in ours) > 0.85 * num_made_by_engine


@pytest.mark.parametrize("name", TEMPLATES)
def test_refused_only_if_the_engine_refuses(name: str, prompters: dict[str, Prompter]) -> None:
    """What we answer with 400, the engine answered with 400."""
    seed, recorded = _entries(name)
    bodies = written(chat_bodies, seed, len(recorded))

    refused = [i for i, body in enumerate(bodies) if _is_rejected(prompters[name], body)]

    assert [i for i in refused if recorded[i] is not None] == []


def test_completion_ids_are_the_engines(prompters: dict[str, Prompter]) -> None:
    """Text and token-id prompts come out as the engine's ids."""
    seed, recorded = _entries("completions")
    bodies = written(completion_bodies, seed, len(recorded))

    ours = [_ours(prompters["model"], body) for body in bodies]

    assert ours == recorded
