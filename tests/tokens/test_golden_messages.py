"""Our token ids against those recorded from vLLM for `/v1/messages` (record_messages.py)."""

from __future__ import annotations

import json

import orjson
import pytest

from router.api.anthropic import parse_messages
from router.errors import ClientError
from router.tokens import NeedsEngine, Prompter, load_prompter
from tests.tokens.corpus import written
from tests.tokens.messages_corpus import messages_bodies
from tests.tokens.record_golden import GOLDEN
from tests.tokens.record_messages import TEMPLATES
from tests.tokens.vllm_routes import MODEL, fingerprint


def _ours(prompter: Prompter, body: bytes) -> str:
    """Return the fingerprint of our ids, or the reason why only the engine can make them."""
    try:
        plan = prompter.plan_chat(parse_messages(orjson.loads(body)))
    except NeedsEngine as exc:
        return "number" if "number" in str(exc) else "engine"
    except ClientError:
        return "refused"
    return fingerprint(prompter.commit(plan, plan.encode()).ids())


@pytest.mark.parametrize("name", TEMPLATES)
def test_messages_ids_are_the_engines(name: str) -> None:
    """All ids made here are the engine's, it refuses what we refuse, and few are left to it."""
    path = GOLDEN / "messages" / f"{name}.json"
    golden = json.loads(path.read_text())
    recorded: list[str | None] = golden["entries"]
    prompter = load_prompter(str(MODEL), chat_template=TEMPLATES[name])
    bodies = written(messages_bodies, golden["seed"], len(recorded))

    ours = [_ours(prompter, body) for body in bodies]

    wrong = [
        index
        for index, (mine, theirs) in enumerate(zip(ours, recorded, strict=True))
        if mine not in ("number", "engine") and mine != (theirs or "refused")
    ]
    left = [
        index
        for index, (mine, theirs) in enumerate(zip(ours, recorded, strict=True))
        if mine == "engine" and theirs is not None
    ]
    assert wrong == []
    assert len(left) < 0.02 * len(recorded)  # and numbers that JSON decoders read differently
