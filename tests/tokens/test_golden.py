"""Our token ids are those that vLLM made of the corpora (record_golden.py)."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given

from router.api.anthropic import parse_messages
from router.api.openai import parse_chat, parse_completion
from router.api.responses import parse_responses
from router.base.errors import ClientError
from router.tokens import EncodePlan, NeedsEngine, Prompter, load_prompter
from tests.api.samples import bodies
from tests.tokens.corpus import written
from tests.tokens.record_golden import CORPORA, model_with_bos
from tests.tokens.vllm_routes import MODEL, fingerprint

Plan = Callable[[Prompter, Any], EncodePlan]

PLANS: dict[str, Plan] = {
    "chat": lambda prompter, body: prompter.plan_chat(parse_chat(body)),
    "completion": lambda prompter, body: prompter.plan_completion(parse_completion(body)),
    "messages": lambda prompter, body: prompter.plan_chat(parse_messages(body)),
    "responses": lambda prompter, body: prompter.plan_chat(parse_responses(body)),
}
LEFT_TO_THE_ENGINE = {"chat": 0.15, "completion": 0.0, "messages": 0.02, "responses": 0.05}
"""At most so much of the requests that the engine accepts."""


@cache
def _loaded(model: Path, template: Path | None) -> Prompter:
    return load_prompter(str(model), chat_template=template)


def _ours(prompter: Prompter, plan_of: Plan, body: bytes) -> str:
    """Return the fingerprint of our ids, or why there are none."""
    try:
        plan = plan_of(prompter, orjson.loads(body))
    except NeedsEngine as exc:
        return "number" if "number" in str(exc) else "engine"
    except ClientError:
        return "refused"
    return fingerprint(prompter.commit(plan, plan.encode()).ids())


@pytest.mark.parametrize(
    ("corpus", "template"),
    [(name, template) for name, corpus in CORPORA.items() for template in corpus.templates],
)
def test_ids_are_the_engines(corpus: str, template: str, tmp_path: Path) -> None:
    """Ids made here are the engine's, only what it refuses is refused, and little is left to it."""
    asked = CORPORA[corpus]
    golden = json.loads(asked.path(template).read_text())
    recorded: list[str | None] = golden["entries"]
    model = model_with_bos(tmp_path / "model") if asked.has_bos else MODEL
    prompter = _loaded(model, asked.templates[template])

    requests = written(asked.bodies, golden["seed"], len(recorded))
    ours = [_ours(prompter, PLANS[asked.api], body) for body in requests]

    pairs = list(enumerate(zip(ours, recorded, strict=True)))
    unknown = {"engine", "number"}
    assert [
        index
        for index, (mine, theirs) in pairs
        if mine not in unknown and mine != (theirs or "refused")
    ] == []
    num_left = sum(mine == "engine" and theirs is not None for _, (mine, theirs) in pairs)
    num_taken = sum(theirs is not None for theirs in recorded)
    assert num_left <= LEFT_TO_THE_ENGINE[asked.api] * num_taken


@given(bodies)
def test_any_json_has_tokens_or_none(body: dict[str, Any]) -> None:
    """Any body gives tokens, or one of the two errors that the request path expects."""
    prompter = _loaded(MODEL, CORPORA["chat"].templates["dump"])
    try:
        prompter.plan_chat(parse_responses(body))
    except (NeedsEngine, ClientError):
        return
